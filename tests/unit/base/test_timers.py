"""The step timer, on the CPU and with fake CUDA events."""

import itertools
import time

import pytest
import torch

from titanlite.base.timers import StepTimer


@pytest.fixture
def clock(monkeypatch):
    """`perf_counter` that moves on by one second per reading."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))


def test_phases_add_up_to_the_time_that_passed(clock):
    timer = StepTimer(torch.device("cpu"))
    timer.start("data")  # at 0
    timer.start("forward")  # at 1
    timer.start("optimizer")  # at 2
    timer.start(None)  # at 3; what follows belongs to no phase
    timer.start("data")  # at 4
    timer.start(None)  # at 5
    assert timer.read() == {"data": 2.0, "forward": 1.0, "optimizer": 1.0}
    assert timer.read() == {}


class FakeEvent:
    """Stands at a time of the device, which has passed it once `device_s` has got there."""

    device_s = 0.0
    stream_s = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time_s = FakeEvent.stream_s

    def query(self):
        return FakeEvent.device_s >= self.time_s

    def synchronize(self):
        FakeEvent.device_s = max(FakeEvent.device_s, self.time_s)

    def elapsed_time(self, end):
        assert self.query() and end.query(), "an event that has not passed has no time"
        return (end.time_s - self.time_s) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.device_s = FakeEvent.stream_s = 0.0
    return FakeEvent


def test_on_cuda_times_are_those_of_the_stream_and_nothing_waits_before_the_values_are_read(cuda):
    timer = StepTimer(torch.device("cuda"))
    timer.start("forward")
    cuda.stream_s = 1.0
    timer.start("backward")
    assert cuda.device_s == 0.0, "the host runs ahead of the device"
    cuda.stream_s = 3.5
    timer.start(None)
    assert timer.read() == {"forward": 1.0, "backward": 2.5}
    assert cuda.device_s == 3.5


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
