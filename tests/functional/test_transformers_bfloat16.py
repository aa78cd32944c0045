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
from titanlite.distributed.parallelize import parallelize
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.models.families.hf_config import transformers_config
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
