"""Profiler traces of single steps, for chrome://tracing or Perfetto."""

import warnings
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from titanlite.base.log import logger
from titanlite.config.schema import ProfilingSection


class Profiler:
    """A context manager; after every training step call its `step(n)` with the steps that the run has done.

    With `profiling.enable_profiling` it records the last step of every `profile_freq` steps of this process, after one
    warm-up step, and every rank writes `save_traces_folder/step-N/rank-R.json`; N is `n`. A step that is trained again,
    after a resume, replaces its trace, and the log says so.
    """

    def __init__(self, section: ProfilingSection, dump_folder: Path) -> None:
        self._folder = dump_folder / section.save_traces_folder
        self._step = -1  # of the run; the profiler's own counter begins anew in every process
        self._profile: profile | None = None
        if not section.enable_profiling:
            return
        # Of the second trace on. Each is to have its own step's events, and no others.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        warmup = 1 if section.profile_freq > 1 else 0
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
            schedule=schedule(wait=max(section.profile_freq - 1 - warmup, 0), warmup=warmup, active=1),
            on_trace_ready=self._save,
        )

    def __enter__(self) -> Self:
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._step = -1
        if self._profile is not None:
            self._profile.stop()

    def step(self, step: int) -> None:
        self._step = step
        if self._profile is not None:
            self._profile.step()

    def _save(self, profiler: profile) -> None:
        if self._step < 0:
            return  # ended while it recorded a step that has not ended, or never began
        path = self._folder / f"step-{self._step}" / f"rank-{dist.get_rank()}.json"
        # As in metrics.jsonl, where a step occurs twice, the later one counts: the run goes on from that one.
        replaced = ", in place of that of an earlier start" if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("profiler: trace of step %d in %s%s", self._step, path, replaced)
