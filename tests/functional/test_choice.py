"""Settings that are chosen for GPUs train as the defaults on CPU ranks do. The GPUs are only
described; the ranks use gloo.
"""

from dataclasses import replace

import pytest

from tests.functional.conftest import train_steps
from titanlite import assemble
from titanlite.config.parallelism import CHOSEN, Degrees
from titanlite.config.settings import get_value
from titanlite.features.choice import at_start
from titanlite.features.choice.hardware import get_hardware

H100 = get_hardware("h100")
FULL = replace(H100, name="a full GPU", memory_bytes=H100.reserved_bytes + 1)
OPEN = [f"--{key}={'auto' if key.endswith('mode') else 0}" for key in CHOSEN]


@pytest.fixture
def train(run_ranks, checked, monkeypatch):
    """`train(hardware, world size, steps, *overrides)`: (losses, settings) of each rank."""

    def run(hardware, world_size, steps, *overrides):
        job = checked(Degrees(dp_shard=world_size), *OPEN, *overrides)
        monkeypatch.setattr(at_start, "find_hardware", lambda device: hardware)

        def rank_main():
            trainer = assemble.assemble(job)
            if steps is None:
                trainer.train()
            losses = train_steps(trainer, steps or 0).losses
            run = trainer.parts.run.job
            return losses, {key: get_value(run, key) for key in CHOSEN}

        return run_ranks(world_size, rank_main)

    return run


def test_every_choice_trains_the_same(train):
    found = {}
    for name, hardware in (("cpu", None), ("fast", H100), ("full", FULL)):
        ranks = train(hardware, 2, 2)
        assert all(settings == ranks[0][1] for _, settings in ranks), "the same on all ranks"
        found[name] = ranks[0]
    assert found["cpu"][1] == CHOSEN
    assert found["fast"][1]["training.local_batch_size"] == 4
    assert found["full"][1]["activation_checkpoint.mode"] == "full"
    for name in ("fast", "full"):
        assert found[name][0] == pytest.approx(found["cpu"][0], rel=1e-5)


def test_a_resume_keeps_the_choice_and_other_ranks_choose_anew(train):
    before = train(FULL, 2, None, "--training.steps=2")[0][1]
    kept = train(H100, 2, None, "--training.steps=3")[0][1]
    anew = train(H100, 4, None, "--training.steps=4")[0][1]
    assert before == kept and before["activation_checkpoint.mode"] == "full"
    assert anew["activation_checkpoint.mode"] == "none" and anew["training.local_batch_size"] == 2
