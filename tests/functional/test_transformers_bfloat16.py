"""Models of transformers under mixed precision: float32 parameters, bfloat16 arithmetic."""

import pytest
import sweep_training
import sweep_transformers
import torch

from tests.saving import whole
from titanlite.assemble import build_on_meta
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX
from titanlite.distributed import ParallelDims
from titanlite.materialize import materialize
from titanlite.materialize.plan import clean_name
from titanlite.optim.optimizer import build_adamw
from titanlite.run import Run

MODELS = ("gemma3_text", "phi", "gpt_oss", "deepseek_v3", "qwen2_5_vl")


@pytest.mark.slow
def test_models_train_in_bfloat16(run_ranks, tmp_path):
    """The losses equal the float32 losses to bfloat16's 8 bits, and gradients are float32, whether
    or not experts are split.
    """
    with sweep_transformers.quiet():
        cases = sweep_transformers.save_cases(MODELS, tmp_path)

        def rank_main():
            seen = {}
            for name, case in cases.items():
                degrees = Degrees(dp_shard=2, ep=2 if case.config.num_experts else 1)
                found = sweep_training.our_steps(
                    case.config, case.saved, degrees, precision="bfloat16"
                )
                found.model = found.plan = None
                seen[name] = found
            return seen

        for name, found in run_ranks(2, rank_main, timeout_s=300)[0].items():
            expected = sweep_training.their_steps(cases[name], found.batch)
            assert found.losses == pytest.approx(expected.losses, rel=0.02), name
            assert found.losses != pytest.approx(expected.losses, rel=1e-6), "nothing was rounded"
            assert found.gradients.keys() == expected.gradients.keys()
            for gradient in found.gradients.values():
                assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name


# The float32 parameters belong to a router, to layers and a head themselves, and to a module with a
# Linear.
KEPT = ("deepseek_v3", "flint", "hy_v4", "kimi_linear")


def test_bfloat16_with_parameters_kept_in_float32(run_ranks, tmp_path):
    """Dtypes and loss equal the results of `from_pretrained`, wherever the class keeps float32; all
    parameters are trained.
    """
    with sweep_transformers.quiet():
        cases = sweep_transformers.save_cases(KEPT, tmp_path)
        expected = {}
        batch = sweep_training.rows_of(packed=False)
        for name, case in cases.items():
            reference = case.cls.from_pretrained(case.saved, dtype=torch.bfloat16).train()
            with torch.no_grad():
                logits = torch.cat(
                    [reference(input_ids=row).logits for row in batch.tokens.split(1)]
                )
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), batch.labels.flatten()
            )
            expected[name] = (
                loss.item(),
                {key: param.dtype for key, param in reference.named_parameters()},
            )
        job = JobConfig()
        job.training.dtype = "bfloat16"

        def rank_main():
            seen = {}
            for name, case in cases.items():
                dims = ParallelDims.build(Degrees(dp_shard=2), "cpu")
                model = build_on_meta(Run(job, case.config, dims, torch.device("cpu")))
                materialize(model, "cpu", [weights_of(case.saved, model)])
                model.find_facts(torch.device("cpu"))  # failed probes leave all sharded
                optimizer = build_adamw(model, job.optimizer)
                params = {clean_name(key): param for key, param in model.named_parameters()}
                before = {key: param.detach().clone() for key, param in params.items()}
                loss = model(
                    batch.tokens, batch.labels, batch.positions, batch.document_ids
                ).cross_entropy
                loss.backward()
                optimizer.step()
                wide = [
                    key
                    for key, param in params.items()
                    if param.dtype == torch.float32 and param.grad is not None
                ]
                still = [key for key in wide if torch.equal(whole(params[key]), whole(before[key]))]
                mean = loss.item() / int((batch.labels != IGNORE_INDEX).sum())
                seen[name] = mean, {key: param.dtype for key, param in params.items()}, still
            return seen

        for seen in run_ranks(2, rank_main, timeout_s=200):
            for name, (loss, dtypes, still) in seen.items():
                # rows are summed in another order
                assert loss == pytest.approx(expected[name][0], rel=1e-6), name
                assert dtypes == expected[name][1], name
                assert not still, name
