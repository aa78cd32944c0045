"""Nothing that was trained is lost: what cannot be saved is known before the first step, and parts that fail leave the
rest."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from files import folder_digests, write_manifest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from titanlite.assemble import assemble
from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.base.log import logger
from titanlite.checkpoint import manager
from titanlite.checkpoint.folder import ADAPTER_FILE, how_to_finish
from titanlite.checkpoint.hf_model import HFFormat
from titanlite.config.parallelism import Degrees
from titanlite.features.lora.peft_format import PeftFormat
from titanlite.features.tools import export as export_checkpoint
from titanlite.models.interface import is_adapter
from titanlite.preflight import Checked

FSDP2 = Degrees(dp_shard=2)
SMALL = ["--model.overrides.num_layers=1", "--training.steps=2", "--checkpoint.interval=1"]


@pytest.fixture
def train_broken(run_ranks, gather_full, monkeypatch):
    """`train_broken(checked, format)`: train where its `files` fails on rank 1; what each rank said, its weights."""

    def train(job: Checked, saved_as: type[HFFormat]) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
        def rank_main() -> tuple[list[str], dict[str, torch.Tensor]]:
            said: list[str] = []
            monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
            monkeypatch.setattr(saved_as, "files", fail_on(1, saved_as.files))
            trainer = assemble(job)
            trainer.train()
            return [text for text in said if "was saved without" in text], gather_full(trainer.model)

        return run_ranks(2, rank_main)

    return train


def fail_on(rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises on `rank` after all ranks have gone through it."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if dist.get_rank() == rank:
            raise RuntimeError("no memory for it")
        return result

    return failing


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_cannot_be_laid_out_keeps_its_state_and_is_finished_by_export(
    run_ranks, train_broken, checked, gather_full, tmp_path, mode, dtype
):
    job = checked(FSDP2, *SMALL, f"--checkpoint.async_mode={mode}", f"--checkpoint.export_dtype={dtype}")
    folder = tmp_path / "run/checkpoint/step-2"
    (said, weights), (of_second, _) = train_broken(job, HFFormat)
    assert of_second == [] and said[-1] == (
        f"checkpoint: {folder} was saved without the model's own form (RuntimeError: no memory for it (rank 1)). "
        "All weights are kept, and a resume reads them. "
        f"Finish the model with: python -m titanlite export {folder} OUT."
    )
    assert not list(folder.glob("*.safetensors")) and (folder / "config.json").is_file()

    def resumed() -> dict[str, torch.Tensor]:
        trainer = assemble(job)
        assert trainer.step == 2 and trainer.stepper.optimizer.state
        return gather_full(trainer.model)

    again = run_ranks(2, resumed)[0]
    changed = [name for name, value in weights.items() if not torch.equal(again[name], value)]
    assert all(name.endswith("tokens_per_expert") for name in changed), changed  # of a step, and not saved
    assert export_checkpoint.main([str(folder), str(tmp_path / "out"), "--dtype=float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    exported = model.state_dict()
    assert all(torch.equal(exported[name], weights[name]) for name, _ in model.named_parameters())


def test_adapters_that_cannot_be_laid_out_are_saved_anew_by_the_same_command(
    run_ranks, train_broken, checked, pretrained, gather_full, tmp_path, capsys
):
    overrides = [*SMALL, f"--checkpoint.initial_load_path={pretrained('base', 0.1, *SMALL)}", "--lora.rank=2"]
    job = checked(FSDP2, *overrides, "--moe.expert_bias_update_rate=0")
    folder = tmp_path / "run/checkpoint/step-2"
    (said, weights), _ = train_broken(job, PeftFormat)
    assert said[-1] == (
        f"checkpoint: {folder} was saved without adapter_model.safetensors (RuntimeError: no memory for it (rank "
        f"1)). All adapters are kept, and a resume reads them. Run the same command again: it saves {folder} again."
    )
    assert not (folder / ADAPTER_FILE).exists() and (folder / "adapter_config.json").is_file()
    for options in ([], ["--merge"]):
        assert export_checkpoint.main([*options, str(folder), str(tmp_path / "out")]) == 2
        assert "could not be saved. Finish it: run the command that trained it once more" in capsys.readouterr().err

    def resumed() -> dict[str, torch.Tensor]:
        trainer = assemble(job)
        assert trainer.step == 2 and trainer.stepper.optimizer.state
        trainer.train()
        return gather_full(trainer.model)

    again = run_ranks(2, resumed)[0]
    adapters = {name for name in weights if is_adapter(name)}
    assert all(torch.equal(again[name], weights[name]) for name in adapters)
    stored = load_file(folder / ADAPTER_FILE)
    key = "model.layers.0.self_attn.q_proj.lora_B"
    assert len(stored) == len(adapters) and torch.equal(stored[f"base_model.model.{key}.weight"], weights[key])
    assert not how_to_finish(folder)
    assert export_checkpoint.main(["--merge", str(folder), str(tmp_path / "out"), "--dtype=float32"]) == 0


def test_every_other_part_that_fails_leaves_the_rest(run_ranks, checked, tmp_path, monkeypatch):
    """And what a run cannot resume from is passed over."""
    job = checked(FSDP2, *SMALL, "--checkpoint.keep_latest_k=0")

    def rank_main() -> int:
        trainer = assemble(job)
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "render_card", fail_on(0, trainer.render_card))
            trainer.stepper.train_step(trainer.loader.micro_batches(0))
            trainer.save()
        with monkeypatch.context() as patch:
            patch.setattr(manager, "state_files", fail_on(1, manager.state_files))
            trainer.stepper.train_step(trainer.loader.micro_batches(1))
            trainer.save()
        return assemble(job).step

    assert run_ranks(2, rank_main) == [1, 1]
    folder = tmp_path / "run/checkpoint"
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2.damaged"]
    assert not (folder / "step-1/README.md").exists()
    for step in ("step-1", "step-2.damaged"):
        assert AutoModelForCausalLM.from_pretrained(folder / step).config.model_type == "qwen3_moe"


def test_a_folder_without_a_model_is_passed_over_though_its_checksums_are_right(run_ranks, checked, tmp_path):
    job = checked(FSDP2, *SMALL, "--checkpoint.keep_latest_k=0")
    folder = tmp_path / "run/checkpoint"

    def save() -> None:
        assemble(job).train()

    run_ranks(2, save)
    (folder / "step-2/model.safetensors").unlink()
    (folder / "step-2/titanlite/manifest.json").unlink()
    write_manifest(folder / "step-2")
    before = folder_digests(folder / "step-1")

    def resume() -> int:
        return assemble(job).step

    assert run_ranks(2, resume) == [1, 1]
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2.damaged"]
    assert folder_digests(folder / "step-1") == before


@pytest.mark.parametrize(("rank", "own"), [(0, True), (4, True), (0, False)])
def test_what_cannot_be_saved_is_refused_on_all_ranks_before_the_first_step(
    run_ranks, checked, pretrained, tmp_path, rank, own
):
    """With LoRA too, whose adapters are merged into it later; and the tokenizer of the folder is not blamed."""
    base = pretrained("base", 0.1, *SMALL)
    folder = shutil.copytree(base, tmp_path / "base")
    table = json.loads((folder / "config.json").read_text())
    overrides = [*SMALL, f"--checkpoint.initial_load_path={folder}", f"--lora.rank={rank}"]
    overrides += ["--moe.expert_bias_update_rate=0"] if rank else []
    overrides += [f"--data.tokenizer_path={base if own else folder}"]
    job = checked(FSDP2, *overrides)
    (folder / "config.json").write_text(json.dumps({**table, "use_cache": "yes"}))  # after what the launcher checks

    def rank_main() -> str:
        with pytest.raises((CheckpointError, ConfigError)) as raised:
            assemble(job)
        return str(raised.value)

    first, second = run_ranks(2, rank_main)
    assert first == second and "use_cache" in first and f"{folder}/config.json" in first and "tokenizer" not in first
    assert ("refuses the config.json to be saved" in first) == own
    assert not (tmp_path / "run/checkpoint").exists()
