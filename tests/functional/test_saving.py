"""A model that cannot be saved is refused before the first step; a failed save leaves the previous
checkpoint.
"""

import shutil

import pytest
import torch.distributed as dist
from files import read_json, write_json

from tests.functional.conftest import take_step
from titanlite.assemble import assemble
from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.checkpoint.hf_model import HFFormat
from titanlite.config.parallelism import Degrees
from titanlite.features.lora.peft_format import PeftFormat

FSDP2 = Degrees(dp_shard=2)
SMALL = ["--model.overrides.num_layers=1", "--training.steps=2", "--checkpoint.interval=1"]


def fail_on(rank, function):
    """Return a `function` that raises on `rank` after all ranks have called it."""

    def failing(*args, **kwargs):
        result = function(*args, **kwargs)
        if dist.get_rank() == rank:
            raise RuntimeError("no memory for it")
        return result

    return failing


@pytest.mark.parametrize("saved_as", [HFFormat, PeftFormat])
def test_save_that_fails_on_one_rank_keeps_the_one_before(
    run_ranks, checked, pretrained, tmp_path, monkeypatch, saved_as
):
    lora = [f"--checkpoint.initial_load_path={pretrained('base', 0.1, *SMALL)}", "--lora.rank=2"]
    overrides = [*lora, "--moe.expert_bias_update_rate=0"] if saved_as is PeftFormat else []
    job = checked(FSDP2, *SMALL, *overrides)

    def rank_main():
        trainer = assemble(job)
        take_step(trainer, 0)
        trainer.save()
        take_step(trainer, 1)
        with monkeypatch.context() as patch, pytest.raises(CheckpointError) as raised:
            patch.setattr(saved_as, "files", fail_on(1, saved_as.files))
            trainer.save()
        assert assemble(job).step == 1
        return str(raised.value)

    said, same = run_ranks(2, rank_main)
    folder = tmp_path / "run/checkpoint"
    assert said == same and said.startswith(
        f"checkpoint: cannot save to {folder / 'step-2'}: RuntimeError: no memory"
    )
    assert "(rank 1)" in said and [path.name for path in folder.iterdir()] == ["step-1"]


@pytest.mark.parametrize("rank", [0, 4])
def test_what_cannot_be_saved_is_refused_on_all_ranks_before_the_first_step(
    run_ranks, checked, pretrained, tmp_path, rank
):
    """The check also applies with LoRA, whose adapters are merged into this model later."""
    base = pretrained("base", 0.1, *SMALL)
    folder = shutil.copytree(base, tmp_path / "base")
    table = read_json(folder / "config.json")
    overrides = [*SMALL, f"--checkpoint.initial_load_path={folder}", f"--lora.rank={rank}"]
    overrides += ["--moe.expert_bias_update_rate=0"] if rank else []
    overrides += [f"--data.tokenizer_path={base}"]
    job = checked(FSDP2, *overrides)
    # The change comes after the launcher's check.
    write_json(folder / "config.json", {**table, "use_cache": "yes"})

    def rank_main():
        with pytest.raises((CheckpointError, ConfigError)) as raised:
            assemble(job)
        return str(raised.value)

    first, second = run_ranks(2, rank_main)
    assert first == second and "use_cache" in first and f"{folder}/config.json" in first
    assert "refuses the config.json to be saved" in first
    assert not (tmp_path / "run/checkpoint").exists()
