"""The step timer, on the CPU and with fake CUDA events."""

import itertools
import time

import pytest
import torch

from titanlite.base import timers
from titanlite.base.timers import StepTimer


@pytest.fixture(autouse=True)
def inactive(monkeypatch):
    monkeypatch.setattr(timers, "_active", [])


@pytest.fixture
def clock(monkeypatch):
    """`perf_counter` that moves on by one second per reading."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


def test_phases_and_communication_add_up_to_the_time_that_passed(clock):
    timer = StepTimer(torch.device("cpu"))
    timer.start("data")  # at 0
    timer.start("forward")  # at 1
    with timer.collective():  # 2 to 3
        pass
    timer.start("optimizer")  # at 4
    timer.start(None)  # at 5; what follows belongs to no phase
    timer.start("data")  # at 6
    timer.start(None)  # at 7
    assert timer.read() == {"data": 2.0, "forward": 2.0, "communication": 1.0, "optimizer": 1.0}
    assert timer.read() == {}


def test_the_slowest_step_without_what_lies_between_steps(clock):
    timer = StepTimer(torch.device("cpu"))
    assert timer.read_slowest() == 0.0
    for phases in (["data", "forward"], ["data", "forward", "other"], ["data"]):
        for phase in phases:
            timer.start(phase)  # one second each
        timer.start(None)
        for _ in range(9):
            timer.mark()  # a validation
        timer.start(None)
    assert timer.read_slowest() == 3.0
    timer.start("data")
    with timer.collective():  # is part of the step, and makes it a second longer
        pass
    assert timer.read_slowest() == 0.0, "it has not ended"
    timer.start(None)
    assert timer.read_slowest() == 3.0
    assert timer.read()["data"] == 3.0 + 2.0


def test_a_collective_inside_of_another_counts_once(clock):
    timer = StepTimer(torch.device("cpu"))
    timers.activate(timer)
    timer.start("forward")
    with timers.collective(), timers.collective():
        pass
    timer.start(None)
    assert timer.read() == {"forward": 2.0, "communication": 1.0}


def test_an_error_in_a_collective_leaves_the_timer_usable(clock):
    timer = StepTimer(torch.device("cpu"))
    timer.start("forward")
    with pytest.raises(RuntimeError, match="gone"), timer.collective():
        raise RuntimeError("gone")
    with timer.collective():
        pass
    timer.start(None)
    assert timer.read() == {"forward": 3.0, "communication": 1.0}


def test_collectives_of_no_phase_are_not_counted(clock):
    """An evaluation has more of them than steps have, and nobody reads its times."""
    timer = StepTimer(torch.device("cpu"))
    with timer.collective():
        timer.add_collective(0.0, 5.0, on_own_stream=True)
    timer.start("forward")  # at 0
    timer.start(None)
    with timer.collective():
        pass
    assert timer.read() == {"forward": 1.0}


def test_without_an_active_timer_nothing_is_measured():
    with timers.collective():
        pass
    assert timers.get_active() is None


class FakeEvent:
    """Stands at a time of the device, which has passed it once `device_s` has got there."""

    device_s = 0.0
    stream_s = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time_s = FakeEvent.stream_s

    def query(self) -> bool:
        return FakeEvent.device_s >= self.time_s

    def synchronize(self) -> None:
        FakeEvent.device_s = max(FakeEvent.device_s, self.time_s)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query(), "an event that has not passed has no time"
        return (end.time_s - self.time_s) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.device_s = FakeEvent.stream_s = 0.0
    return FakeEvent


def test_on_cuda_times_are_those_of_the_streams_and_nothing_waits_before_the_values_are_read(cuda):
    timer = StepTimer(torch.device("cuda"))
    timer.start("forward")
    cuda.stream_s = 1.0
    with timer.collective():  # on the compute stream
        cuda.stream_s = 1.5
    with timer.collective(on_own_stream=True):  # hidden behind computation, or not: that is not known
        cuda.stream_s = 3.5
    timer.start("backward")
    assert cuda.device_s == 0.0, "the host runs ahead of the device"
    cuda.stream_s = 6.0
    timer.start(None)
    assert timer.read() == {"forward": 3.0, "communication": 0.5, "fsdp_collectives": 2.0, "backward": 2.5}
    assert cuda.device_s == 6.0


def test_on_cuda_the_slowest_step_is_that_of_the_device_and_is_waited_for_when_it_is_read(cuda):
    timer = StepTimer(torch.device("cuda"))
    for seconds in (1.0, 4.0, 2.0):
        timer.start("forward")
        cuda.stream_s += seconds / 2
        timer.start("backward")
        cuda.stream_s += seconds / 2
        timer.start(None)
        cuda.stream_s += 10.0  # a validation
    assert cuda.device_s == 0.0, "nothing has waited"
    assert timer.read_slowest() == 4.0 and cuda.device_s == 27.0
    assert timer.read() == {"forward": 3.5, "backward": 3.5}
    for _ in range(100):
        timer.start("forward")
        cuda.stream_s += 1.0
        timer.start(None)
        cuda.device_s = cuda.stream_s - 0.5
        assert len(timer._passed) <= 4  # two spans a step, and those of the step before


def test_on_cuda_events_are_dropped_once_they_have_passed(cuda):
    timer = StepTimer(torch.device("cuda"))
    for step in range(1000):
        timer.start("forward")
        cuda.stream_s += 1.0
        cuda.device_s = cuda.stream_s - 2.0
        assert len(timer._passed) <= 3, step
    timer.start(None)
    assert timer.read() == {"forward": 1000.0}


def test_overhead_of_a_phase_and_of_a_collective_is_a_few_microseconds():
    """A step has some hundreds of them: with 20 us each, 300 of them are under 1 % of a step of 600 ms."""
    timer = StepTimer(torch.device("cpu"))
    timers.activate(timer)
    best = float("inf")
    for _ in range(5):  # the machine may be busy
        began = time.process_time()
        for _ in range(1000):
            timer.start("forward")
            with timers.collective():
                pass
        best = min(best, (time.process_time() - began) / 1000)
    assert best < 40e-6
