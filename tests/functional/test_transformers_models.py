"""Models that transformers implements, meta first on 4 ranks: loaded, run, saved, trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_transformers import ALL_MODELS, VOCAB_SIZE, save_tiny

from titanlite.checkpoint import save_hf_model
from titanlite.checkpoint.pretrained import weights_of
from titanlite.config import TransformersConfig, load_config
from titanlite.distributed import ParallelDims, parallelize
from titanlite.materialize import Compute, Plan, materialize
from titanlite.materialize.sources import Read
from titanlite.models.transformers_model import TransformersModel, build_transformers
from titanlite.preflight import Checked, check


@dataclass
class Case:
    """A model of transformers, saved, with what it computes in one process."""

    folder: Path
    reference: Any
    logits: torch.Tensor


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(14, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, tokens: torch.Tensor) -> dict[str, Case]:
    found = {}
    for name in ALL_MODELS:
        folder = tmp_path_factory.mktemp(name)
        reference = save_tiny(name, folder)
        with torch.no_grad():
            found[name] = Case(folder, reference, reference(input_ids=tokens).logits)
    return found


def check_folder(folder: Path, world_size: int, *overrides: str) -> Checked:
    config = folder / "job.toml"
    config.write_text(f'checkpoint.initial_load_path = "{folder}"\nmodel.implementation = "transformers"\n')
    return check(load_config(["--config", str(config), "--training.seq_len=16", *overrides]), world_size)


def load(job: Checked, folder: Path) -> tuple[TransformersModel, Plan]:
    assert isinstance(job.model_config, TransformersConfig)
    model = build_transformers(job.model_config)
    parallelize(model, job.job, ParallelDims.build(job.degrees, "cpu"), "cpu")
    return model, materialize(model, "cpu", [weights_of(folder, model)])


def stored_keys(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.slow
def test_sharded_loading_equals_from_pretrained_bit_for_bit(
    run_ranks: Callable[..., list[Any]], cases: dict[str, Case], tokens: torch.Tensor, tmp_path: Path
) -> None:
    """Logits of FSDP4 equal those of one process, every tensor has a source, and what is saved is what was loaded."""
    jobs = {name: check_folder(case.folder, 4) for name, case in cases.items()}

    def rank_main() -> dict[str, tuple[bool, set[str], float]]:
        seen = {}
        for name, case in cases.items():
            model, plan = load(jobs[name], case.folder)
            kinds = {type(entry.source) for entry in plan.entries}
            kinds |= {Read for entry in plan.entries if entry.info.persistent and not isinstance(entry.source, Read)}
            model.eval()
            with torch.no_grad():
                logits = model(tokens)
            expected_buffers = dict(case.reference.named_buffers())
            same_buffers = all(
                buffer.dtype == expected_buffers[key].dtype and torch.equal(buffer, expected_buffers[key])
                for key, buffer in model.transformers_model.named_buffers()
            )
            error = (logits - case.logits).abs().max().item()
            seen[name] = (same_buffers, {kind.__name__ for kind in kinds}, error)
            save_hf_model(model, plan, None, tmp_path / name, torch.float32, case.folder)
        return seen

    for seen in run_ranks(4, rank_main, timeout_s=300):
        assert {name: error for name, (_, _, error) in seen.items() if error} == {}
        for name, (same_buffers, kinds, _) in seen.items():
            assert same_buffers, name
            assert kinds <= {Read.__name__, Compute.__name__}, name
    for name, case in cases.items():
        loaded, info = type(case.reference).from_pretrained(
            tmp_path / name, dtype=torch.float32, output_loading_info=True
        )
        assert {key: value for key, value in info.items() if value} == {}, name
        expected = case.reference.state_dict()
        assert [key for key, value in loaded.state_dict().items() if not torch.equal(value, expected[key])] == [], name
        assert stored_keys(tmp_path / name) == stored_keys(case.folder), name
        assert {"config.json", "generation_config.json"} <= {path.name for path in (tmp_path / name).iterdir()}
