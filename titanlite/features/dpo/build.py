"""From configuration to the objective of preference pairs."""

from pathlib import Path

from titanlite.base.errors import DataError
from titanlite.config import JobConfig
from titanlite.features.dpo.objective import DPO
from titanlite.features.dpo.reference import AdaptersOff, CachedReference, describe_weights


def build_dpo(job: JobConfig, form: str) -> DPO | None:
    """Build the objective for rows of `form` if `training.objective` is "dpo"; None if not.

    Raises:
        DataError: pairs would be trained token by token, both sides alike, or there are no pairs to compare.
    """
    if form == "preference" and job.training.objective == "next_token":
        raise DataError(
            "data: the rows are preference pairs; next-token training would imitate both sides. Set training.objective "
            '= "dpo".'
        )
    if form != "preference" and job.training.objective == "dpo":
        raise DataError(
            f"data: training.objective = \"dpo\" needs preference pairs, but the rows are of form '{form}'. Set "
            'data.dataset = "examples" and data.path to rows with prompt, chosen and rejected; streams say so '
            'themselves, with data.format = "preference".'
        )
    if job.training.objective != "dpo":
        return None
    section = job.dpo
    # Adapters that were trained before belong to the model that training begins with.
    fresh_adapters = job.lora.rank > 0 and not job.lora.init_from
    adapters_off = section.reference == "adapters_off" or (section.reference == "auto" and fresh_adapters)
    if adapters_off:
        return DPO(section.beta, section.label_smoothing, AdaptersOff())
    dtypes = f"{job.training.dtype}, computed in {job.training.mixed_precision_param}"
    weights = describe_weights(job.checkpoint.initial_load_path, job.training.seed, dtypes)
    if job.lora.init_from:
        weights += f" with {describe_weights(job.lora.init_from, job.training.seed, dtypes)}"
    reference = CachedReference(Path(job.job.dump_folder) / "reference_log_probs.safetensors", weights)
    return DPO(section.beta, section.label_smoothing, reference)
