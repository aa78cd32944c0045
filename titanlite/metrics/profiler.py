"""Profiler traces of single steps, for chrome://tracing or Perfetto."""

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.base.log import logger
from titanlite.config.schema import JobConfig


class _NoProfiler(AbstractContextManager["_NoProfiler"]):
    """Stands in when profiling is off."""

    def __exit__(self, *exception: object) -> None:
        pass

    def step(self, step: int) -> None:
        """Nothing to record."""


class _Profiler(_NoProfiler):
    """Writes the trace of every `freq`th step into `folder`."""

    def __init__(self, folder: Path, freq: int) -> None:
        self._folder = folder
        self._step = -1  # of the run; the profiler's own counter begins anew in every process
        # Of the second trace on. Each is to have its own step's events, and no others.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        warmup = 1 if freq > 1 else 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
            schedule=schedule(wait=max(freq - 1 - warmup, 0), warmup=warmup, active=1),
            on_trace_ready=self._save,
        )

    def __enter__(self) -> Self:
        self._profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._step = -1
        self._profile.stop()

    def step(self, step: int) -> None:
        self._step = step
        self._profile.step()

    def _save(self, profiler: profile) -> None:
        if self._step < 0:
            return  # ended while it recorded a step that has not ended, or never began
        folder = self._folder / f"step-{self._step}"
        path = folder / f"rank-{dist.get_rank()}.json"
        # As in metrics.jsonl, where a step occurs twice, the later one counts: the run goes on from that one.
        replaced = ", in place of that of an earlier start" if path.exists() else ""
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            _remove_ranks_from(folder, dist.get_world_size())
        profiler.export_chrome_trace(str(path))
        logger.info("profiler: trace of step %d in %s%s", self._step, path, replaced)


def build_profiler(job: JobConfig, dump_folder: Path) -> _NoProfiler:
    """Build a context manager; after every training step call its `step(n)` with the steps that the run has done.

    With `profiling.enable_profiling` it records the last step of every `profile_freq` steps of this process, after one
    warm-up step, and every rank writes `save_traces_folder/step-N/rank-R.json`; N is `n`. A step that is trained again,
    after a resume, replaces its trace, and the log says so.
    """
    if not job.profiling.enable_profiling:
        return _NoProfiler()
    return _Profiler(dump_folder / job.profiling.save_traces_folder, job.profiling.profile_freq)


def _remove_ranks_from(folder: Path, world_size: int) -> None:
    """Traces of ranks that this start does not have would be taken for those of the same step."""
    for path in folder.glob("rank-*.json"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and int(number) >= world_size:
            path.unlink(missing_ok=True)
