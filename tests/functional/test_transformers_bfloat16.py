"""Models of transformers under mixed precision: float32 parameters, bfloat16 arithmetic."""

import pytest
import sweep_training
import sweep_transformers
import torch
from files import read_json
from tiny_transformers import VOCAB_SIZE, save_tiny

from tests.saving import whole
from titanlite.assemble import build_on_meta
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import JobConfig, load_config
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.materialize.plan import clean_name
from titanlite.models.families.config_json import transformers_config
from titanlite.optim.optimizer import build_adamw
from titanlite.preflight import check
from titanlite.run import Run

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 5])
MODELS = ("gemma3_text", "phi", "gpt_oss", "deepseek_v3", "qwen2_5_vl")


@pytest.mark.slow
def test_models_train_in_bfloat16(run_ranks, tmp_path):
    """The loss equals the float32 loss to bfloat16's 8 bits, and gradients are float32, whether or
    not experts are split.
    """
    config = tmp_path / "job.toml"
    config.write_text(
        'model.name = "qwen3_moe"\nmodel.flavor = "debug"\n[training]\nseq_len = 16\n'
        'mixed_precision_param = "bfloat16"\n'
    )
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 1, 12), generator=generator)
    expected = {}
    for name in MODELS:
        reference = save_tiny(name, tmp_path / name)
        with torch.no_grad():
            logits = [
                reference(input_ids=part).logits[0] for part in (tokens[:, :7], tokens[:, 7:])
            ]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels[0], reduction="sum")
        expected[name] = loss.item()

    def rank_main():
        seen = {}
        for name in MODELS:
            hf = transformers_config(read_json(tmp_path / name / "config.json"), "test")
            ep = 2 if hf.num_experts else 1
            checked = check(
                load_config(
                    ["--config", str(config), f"--parallelism.expert_parallel_degree={ep}"]
                ),
                2,
            )
            model = build_transformers(hf)
            parallelize(model, checked.job, ParallelDims.build(checked.degrees, "cpu"), "cpu")
            materialize(model, "cpu", [weights_of(tmp_path / name, model)])
            loss = model(tokens, labels, None, DOCUMENTS).cross_entropy
            loss.backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            finite = all(bool(grad.to_local().isfinite().all()) for grad in grads)
            seen[name] = (loss.item(), {grad.dtype for grad in grads}, finite)
        return seen

    for seen in run_ranks(2, rank_main, timeout_s=300):
        for name, (loss, dtypes, finite) in seen.items():
            assert loss == pytest.approx(expected[name], rel=0.02), name
            assert dtypes == {torch.float32}, name
            assert finite, name


# The float32 parameters belong to a router, to layers and a head themselves, and to a module with a
# Linear.
KEPT = ("deepseek_v3", "flint", "hy_v4", "kimi_linear")


def test_bfloat16_with_parameters_kept_in_float32(run_ranks, tmp_path):
    """Dtypes and loss equal the results of `from_pretrained`, wherever the class keeps float32; all
    parameters are trained.
    """
    with sweep_transformers.quiet():
        cases = {case.model_type: case for case in sweep_transformers.cases(KEPT)}
        expected = {}
        batch = sweep_training.rows_of(packed=False)
        for name, case in cases.items():
            case.folder = tmp_path / name
            case.folder.mkdir()
            assert case.config.family == name and case.saved
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
