"""Profiler traces of single steps, for chrome://tracing or Perfetto."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.config.schema import JobConfig
from titanlite.logger import logger


class _NoProfiler:
    """Stands in when profiling is off."""

    def __enter__(self) -> "_NoProfiler":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def step(self) -> None:
        """Nothing to record."""


def build_profiler(job: JobConfig, dump_folder: Path) -> Any:
    """A context manager with `step()`, to be called after every training step.

    With `profiling.enable_profiling` it records the last step of every `profile_freq` steps, after one warm-up step,
    and every rank writes `save_traces_folder/step-N/rank-R.json`.
    """
    if not job.profiling.enable_profiling:
        return _NoProfiler()
    folder = dump_folder / job.profiling.save_traces_folder
    freq = job.profiling.profile_freq

    def save(profiler: profile) -> None:
        path = folder / f"step-{profiler.step_num}" / f"rank-{dist.get_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("profiler: trace of step %d in %s", profiler.step_num, path)

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    warmup = 1 if freq > 1 else 0
    return profile(
        activities=activities,
        schedule=schedule(wait=max(freq - 1 - warmup, 0), warmup=warmup, active=1),
        on_trace_ready=save,
    )
