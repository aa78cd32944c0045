"""Timer of the consecutive phases of a step.

On the CPU a phase is timed with `perf_counter`. On CUDA, events are recorded on the compute stream
and read after the GPU has passed them; nothing synchronizes. Only a profiler trace shows how long a
phase waits for other ranks.
"""

import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch

# A reading of the clock, or a CUDA event.
_Mark = Any
_STEP = "step"


class _Span(NamedTuple):
    name: str
    start: _Mark
    end: _Mark


class StepTimer:
    """Seconds of each phase, summed until they are read. A change of phase costs one clock reading,
    or one CUDA event.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        # in the order in which the host ended them; the device may not have reached them yet
        self._passed: deque[_Span] = deque()
        self._phase: str | None = None
        self._since: _Mark = None
        self._step_since: _Mark = None
        self._slowest_s = 0.0

    def start(self, phase: str | None) -> None:
        """End the current phase and begin `phase`; None begins time outside of any phase, such as a
        validation.

        A step is the time between two calls with None.
        """
        now = self._mark()
        if self._phase is not None:
            self._passed.append(_Span(self._phase, self._since, now))
            if phase is None:
                self._passed.append(_Span(_STEP, self._step_since, now))
        elif phase is not None:
            self._step_since = now
        self._phase = phase
        self._since = now
        self._collect(wait=False)

    def _mark(self) -> _Mark:
        """Mark this point in time, on the current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, without the running phase.

        On CUDA it waits for the events; if the caller has synchronized, they have passed already.
        """
        self._collect(wait=True)
        seconds = self._seconds
        self._seconds = defaultdict(float)
        return dict(seconds)

    def read_slowest(self) -> float:
        """Return the seconds of the longest step since the last call; 0 if no step has ended."""
        self._collect(wait=True)
        slowest_s = self._slowest_s
        self._slowest_s = 0.0
        return slowest_s

    def _collect(self, *, wait: bool) -> None:
        """Add up the spans that the device has passed, so that events are not kept for a whole log
        interval.
        """
        while self._passed and (wait or not self._is_cuda or self._passed[0].end.query()):
            name, start, end = self._passed.popleft()
            if self._is_cuda:
                end.synchronize()
                seconds = start.elapsed_time(end) / 1e3
            else:
                seconds = end - start
            if name == _STEP:
                self._slowest_s = max(self._slowest_s, seconds)
            else:
                self._seconds[name] += seconds
