"""What tells a run from others, and which settings must be alike on all machines of a run."""

import re
from dataclasses import replace

import pytest

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.config.settings import get_value
from titanlite.metrics import run_folder
from titanlite.metrics.run_folder import check_same_run, check_same_settings, get_identity

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


def test_paths_may_differ_and_other_settings_may_not(monkeypatch):
    def of_first_rank(find):
        return {key: get_value(JobConfig(), key) for key in find()}

    monkeypatch.setattr(run_folder, "on_first_rank", of_first_rank)
    job = JobConfig()
    job = replace(job, lora=replace(job.lora, init_from="/cache/of/this/machine/adapters"))
    job = replace(job, evaluation=replace(job.evaluation, path="/cache/of/this/machine/examples"))
    job = replace(
        job, checkpoint=replace(job.checkpoint, initial_load_path="/cache/of/this/machine/model")
    )
    check_same_settings(job)
    with pytest.raises(
        ConfigError, match=r"configuration: training\.steps = 7 on .*, 1000 on rank 0"
    ):
        check_same_settings(replace(job, training=replace(job.training, steps=7)))
