"""Which settings must be alike on all machines of a run."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.config.settings import get_value
from titanlite.metrics.run_folder import check_same_settings


def test_paths_may_differ_and_other_settings_may_not(monkeypatch):
    first = []

    def broadcast(found, src):
        found[0] = {key: get_value(first[0], key) for key in found[0]}

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    first.append(JobConfig())
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
