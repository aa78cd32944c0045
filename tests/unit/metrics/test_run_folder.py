"""What tells a run from others."""

import re
from dataclasses import replace

import pytest

from titanlite.config import JobConfig
from titanlite.metrics.run_folder import check_same_run, get_identity

SNAPSHOT = "/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123abc"


def test_a_model_of_the_hub_is_known_by_its_id():
    job = JobConfig()
    job = replace(job, checkpoint=replace(job.checkpoint, initial_load_path=SNAPSHOT))
    assert get_identity(job)["checkpoint.initial_load_path"] == "Qwen/Qwen3-8B@0123abc"


@pytest.mark.parametrize(
    ("section", "name", "value", "can_be_forced"),
    [
        ("checkpoint", "initial_load_path", "other", True),
        ("training", "objective", "dpo", True),
        ("data", "path", "other.jsonl", True),
        ("lora", "rank", 8, False),
    ],
)
def test_another_run_is_refused(section, name, value, can_be_forced):
    job = JobConfig()
    before = get_identity(job)
    assert check_same_run(job, 3, before) == []
    setattr(getattr(job, section), name, value)
    shown = "0 -> 8" if value == 8 else f'-> "{value}"'
    forced = (
        r"train more than 3 steps .*=force\.$" if can_be_forced else r"begin with its weights\.$"
    )
    for steps in (1000, 2):
        job.training.steps = steps
        (problem,) = check_same_run(job, 3, before)
        words = rf"holds another run, at step 3: {section}\.{name} .*{shown}.*{forced}"
        assert re.search(words, problem)
    job.training.steps = 1000
    job.checkpoint.resume = "force"
    assert len(check_same_run(job, 3, before)) == (not can_be_forced)
