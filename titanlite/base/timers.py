"""Timers of a step: consecutive phases, and the collectives inside them.

On the CPU a phase is timed with `perf_counter`, and every collective blocks its caller. On CUDA events are recorded and
read once they have passed; nothing synchronizes. How long the compute stream waits for FSDP's collectives, on other
streams, only a profiler trace shows: their duration is kept apart.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

COMMUNICATION = "communication"
"""Waiting for collectives that the compute stream, or the CPU, stands still for."""
FSDP_COLLECTIVES = "fsdp_collectives"
"""Duration of FSDP's collectives on CUDA, overlapped with computation or not."""

# A reading of the clock, or an event of CUDA.
_Mark = Any
_STEP = "step"


class _Span(NamedTuple):
    name: str
    inside: str | None  # phase that this time is taken out of
    start: _Mark
    end: _Mark


class StepTimer:
    """Seconds per phase, added up until they are read. Costs one clock reading, or one event, per change of phase."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._passed: deque[_Span] = deque()  # in the order of their ends on the host; the device is behind
        self._phase: str | None = None
        self._since: _Mark = None
        self._in_collective = False
        self._step_since: _Mark = None
        self._slowest_s = 0.0

    def start(self, phase: str | None) -> None:
        """End the current phase and begin `phase`; None: time that belongs to no phase, such as a validation.

        The time between two calls with None is a step.
        """
        now = self.mark()
        if self._phase is not None:
            self.add(self._phase, self._since, now)
            if phase is None:
                self.add(_STEP, self._step_since, now)
        elif phase is not None:
            self._step_since = now
        self._phase, self._since = phase, now
        self._collect(wait=False)

    def mark(self) -> _Mark:
        """Mark this point in time, on the current stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, start: _Mark, end: _Mark, inside: str | None = None) -> None:
        """Count the time between two marks for `name`, and take it out of the phase `inside`."""
        if self._is_cuda:
            self._passed.append(_Span(name, inside, start, end))
        else:
            self._count(name, inside, end - start)

    def add_collective(self, start: _Mark, end: _Mark, *, on_own_stream: bool = False) -> None:
        """Count a collective of the current phase; see `collective`. Outside of phases nothing is counted."""
        if self._phase is None:
            return
        if on_own_stream and self._is_cuda:
            self.add(FSDP_COLLECTIVES, start, end)
        else:
            self.add(COMMUNICATION, start, end, self._phase)

    @contextmanager
    def collective(self, *, on_own_stream: bool = False) -> Iterator[None]:
        """Count the body as communication; a collective inside of another one counts once."""
        if self._in_collective or self._phase is None:
            yield
            return
        self._in_collective = True
        start = self.mark()
        try:
            yield
        finally:
            self._in_collective = False
        self.add_collective(start, self.mark(), on_own_stream=on_own_stream)

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last call, without those of the running phase, and of collectives.

        Phases exclude `COMMUNICATION`, so that all of them add up to the time that passed; `FSDP_COLLECTIVES` is no
        part of that sum. On CUDA it waits for the events, which have passed already where the caller synchronized.
        """
        self._collect(wait=True)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return dict(seconds)

    def read_slowest(self) -> float:
        """Seconds of the longest step since the last call, its collectives included; 0 if none has ended."""
        self._collect(wait=True)
        slowest_s, self._slowest_s = self._slowest_s, 0.0
        return slowest_s

    def _collect(self, *, wait: bool) -> None:
        """Add up the spans that the device has passed: events are not kept for a whole log interval."""
        while self._passed and (wait or self._passed[0].end.query()):
            span = self._passed.popleft()
            span.end.synchronize()
            self._count(span.name, span.inside, span.start.elapsed_time(span.end) / 1e3)

    def _count(self, name: str, inside: str | None, seconds: float) -> None:
        if name == _STEP:
            self._slowest_s = max(self._slowest_s, seconds)
            return
        self._seconds[name] += seconds
        if inside is not None:
            self._seconds[inside] -= seconds


_active: list[StepTimer] = []


def activate(timer: StepTimer) -> None:
    """Make `collective` count for `timer` in the whole process: collectives have no reference to a trainer."""
    _active[:] = [timer]


def get_active() -> StepTimer | None:
    """Return the timer that collectives count for, if any."""
    return _active[0] if _active else None


def collective(*, on_own_stream: bool = False) -> AbstractContextManager[None]:
    """Count the body as communication of the active timer, if there is one."""
    return _active[0].collective(on_own_stream=on_own_stream) if _active else nullcontext()
