"""From configuration to objective."""

from pathlib import Path

from titanlite.config import JobConfig
from titanlite.objectives.dpo import DPO
from titanlite.objectives.objective import NextToken, Objective
from titanlite.objectives.reference import AdaptersOff, CachedReference, describe_weights


def build_objective(job: JobConfig) -> Objective:
    """The objective that `training.objective` names; call its `prepare` before it is used."""
    if job.training.objective == "next_token":
        return NextToken()
    section = job.dpo
    adapters_off = section.reference == "adapters_off" or (section.reference == "auto" and job.lora.rank > 0)
    if adapters_off:
        return DPO(section.beta, section.label_smoothing, AdaptersOff())
    dtypes = f"{job.training.dtype}, computed in {job.training.mixed_precision_param}"
    weights = describe_weights(job.checkpoint.initial_load_path, job.training.seed, dtypes)
    reference = CachedReference(Path(job.job.dump_folder) / "reference_log_probs.safetensors", weights)
    return DPO(section.beta, section.label_smoothing, reference)
