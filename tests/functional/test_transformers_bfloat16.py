"""Models of transformers under mixed precision: float32 parameters, bfloat16 arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import ALL_MODELS, VOCAB_SIZE, save_tiny

from titanlite.checkpoint.model_source import weights_of
from titanlite.config import load_config
from titanlite.distributed import ParallelDims
from titanlite.distributed.grads import clip_grad_norms
from titanlite.distributed.parallelize import parallelize
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.models.families.hf_config import transformers_config
from titanlite.optim.optimizer import build_optimizer
from titanlite.preflight import check

DOCUMENTS = torch.tensor([[0] * 7 + [1] * 5])


@pytest.mark.slow
def test_every_model_trains_in_bfloat16(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """The loss is that of float32 to bfloat16's 8 bits, and gradients arrive in float32, experts split or not."""
    config = tmp_path / "job.toml"
    config.write_text(
        'model.name = "qwen3_moe"\nmodel.flavor = "debug"\n[training]\nseq_len = 16\n'
        'mixed_precision_param = "bfloat16"\n'
    )
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 1, 12), generator=generator)
    expected = {}
    for name in ALL_MODELS:
        reference = save_tiny(name, tmp_path / name)
        with torch.no_grad():
            logits = [reference(input_ids=part).logits[0] for part in (tokens[:, :7], tokens[:, 7:])]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), labels[0], reduction="sum")
        expected[name] = loss.item()

    def rank_main() -> dict[str, tuple[float, set[torch.dtype], bool]]:
        seen = {}
        for name in ALL_MODELS:
            hf = transformers_config(json.loads((tmp_path / name / "config.json").read_text()), "test")
            ep = 2 if hf.num_experts else 1
            checked = check(load_config(["--config", str(config), f"--parallelism.expert_parallel_degree={ep}"]), 2)
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


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_parameters_in_bfloat16_beside_routers_in_float32(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As transformers keeps them from 5.24 on. Of one dtype they are FSDP units; a step trains both."""
    reference = save_tiny(name, tmp_path / name)
    for cls in type(reference).__mro__:
        if "_keep_in_fp32_modules_strict" in vars(cls) and cls.__module__.endswith(f"modeling_{name}"):
            monkeypatch.setattr(cls, "_keep_in_fp32_modules_strict", ["e_score_correction_bias", "gate.weight"])
    config = tmp_path / "job.toml"
    config.write_text(
        'model.name = "qwen3_moe"\nmodel.flavor = "debug"\ntraining.seq_len = 16\ntraining.dtype = "bfloat16"\n'
    )
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 1, 12), generator=torch.Generator().manual_seed(3))

    def rank_main() -> tuple[dict[str, bool], float]:
        hf = transformers_config(json.loads((tmp_path / name / "config.json").read_text()), "test")
        checked = check(load_config(["--config", str(config)]), 2)
        model = build_transformers(hf, torch.bfloat16)
        parallelize(model, checked.job, ParallelDims.build(checked.degrees, "cpu"), "cpu")
        materialize(model, "cpu", [weights_of(tmp_path / name, model)])
        optimizer = build_optimizer(model, checked.job.optimizer)
        before = {key: param.detach().clone() for key, param in model.named_parameters()}
        model(tokens, labels, None, DOCUMENTS).cross_entropy.backward()
        norm, _ = clip_grad_norms({"all": model.parameters()}, 1.0)
        optimizer.step()
        params = dict(model.named_parameters())
        dtypes = {key: param.dtype == torch.float32 for key, param in params.items()}
        for key in ("gate.weight", "o_proj.weight"):  # norms of 1.0 do not move by 3e-4 in bfloat16
            moved = [name for name in params if name.endswith(key)]
            assert moved and not any(torch.equal(params[n].full_tensor(), before[n].full_tensor()) for n in moved)
        return dtypes, float(norm)

    for dtypes, norm in run_ranks(2, rank_main):
        assert [key for key, wide in dtypes.items() if wide] == ["_transformers_model.model.layers.1.mlp.gate.weight"]
        assert norm > 0
