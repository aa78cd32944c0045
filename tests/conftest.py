"""Fixtures for all tests; `run_ranks` runs a function on several gloo ranks."""

import gc
import logging
import os
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait

import pytest
import torch
import torch.distributed as dist
from cluster import Forked
from hypothesis import settings

from titanlite.base.process import environment_kept

# Triton reads this variable when it decorates a kernel. On machines that have no GPU, kernels run
# in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# This call comes before any parallel region: otherwise forked ranks would inherit a pool of OpenMP
# threads that do not exist in them.
torch.set_num_threads(1)

# Processes that tests start then leave bytecode for later processes, which saves half a second for
# each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# If one of these is set, pytest computes and prints the whole difference of the compared values,
# however long it is.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

# Every run has the same examples, stores none, and gives each one as much time as a busy machine
# needs.
settings.register_profile("titanlite", deadline=None, derandomize=True)
settings.load_profile("titanlite")


FAST_CASES = 3  # of each test under --fast


def pytest_addoption(parser):
    text = (
        f"of each test at most {FAST_CASES} cases, spread over its parameters, and none that is "
        "marked slow"
    )
    parser.addoption("--fast", action="store_true", help=text)
    parser.addoption(
        "--full", action="store_true", help="also cases that no other run needs: for a weekly run"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    kept = {
        item
        for item in items
        if config.getoption("--full") or item.get_closest_marker("full") is None
    }
    if config.getoption("--fast"):
        cases = {}
        for item in items:
            if item in kept and item.get_closest_marker("slow") is None:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {
            group[i * (len(group) - 1) // (FAST_CASES - 1)]
            for group in cases.values()
            for i in range(FAST_CASES)
        }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_make_parametrize_id(val):
    """Name a case by its value, a table by what it says or by its row; workers must agree."""
    if callable(val) or isinstance(val, str | set):
        return None  # pytest's own name
    if isinstance(val, dict):
        val = val.get("says") or val.get("row") or val
    text = ascii(str(getattr(val, "name", val))[:60])[1:-1]
    return None if " at 0x" in text else text


def pytest_configure():
    # torch stores its tensor constructors at the first request; if torch.compile makes that
    # request, the list is wrong.
    with torch.device("meta"):
        torch.empty(0)


def pytest_collection_finish():
    """Exclude imported objects from garbage collection, here and in forked ranks, whose memory is
    shared with this process until they write to it. This saves an eighth of the time of tests with
    ranks.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Seed torch, so that the run and the order of the tests do not change random numbers."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_environment():
    """Undo a test's changes to the environment. The server of ranks refuses processes whose imports
    would differ.
    """
    with environment_kept():
        yield


@pytest.fixture(autouse=True)
def own_logger():
    """Undo a test's changes to the package's logger.

    A test's handlers write to streams that are closed afterwards. In addition, pytest puts its own
    handlers on a logger that does not propagate, and then `setup_logger` of the next test would do
    nothing.
    """
    logger = logging.getLogger("titanlite")
    before = (list(logger.handlers), logger.level, logger.propagate, logger.disabled)
    yield
    for handler in set(logger.handlers) - set(before[0]):
        handler.close()
    logger.handlers[:], logger.propagate, logger.disabled = before[0], before[2], before[3]
    logger.setLevel(before[1])


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(world_size, function, *args, timeout_s=300)` -> the result of `function(*args)` on
    each rank.
    """
    return _run_ranks


def _run_ranks(world_size, function, *args, timeout_s=300):
    """Fork `world_size` ranks that join one gloo group, call `function(*args)` on each, and collect
    the results.

    A fork takes milliseconds, but a fresh interpreter takes seconds to import torch. Closures need
    no pickling; only results do. If a rank raises, the other ranks are killed, and its traceback
    becomes this test's failure.
    """
    ranks = Ranks(world_size, partial(function, *args))
    try:
        return ranks.call(timeout_s=timeout_s)
    finally:
        ranks.end()


class Ranks(Forked):
    """Forked processes of one gloo group in which `function` can be called again and again, until
    one raises.

    Imports and caches of a call stay for the next one, which then takes half the time.
    """

    def __init__(self, world_size, function):
        def main(pipe):
            while True:
                result = function(*pipe.recv())
                dist.barrier()
                pipe.send(("result", result))

        super().__init__(world_size, main)
        self.is_usable = True

    def call(self, *args, timeout_s=300):
        """Return the result of `function(*args)` on each rank; `args` are pickled. After an error
        the ranks accept no more calls.
        """
        self.is_usable = False
        for pipe in self.pipes:
            with suppress(OSError):  # the rank died, and reading reports this
                pipe.send(args)
        results = {}
        world_size, deadline = len(self.pipes), time.monotonic() + timeout_s
        while len(results) < world_size:
            pending = [self.pipes[rank] for rank in range(world_size) if rank not in results]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                missing = sorted(set(range(world_size)) - results.keys())
                raise AssertionError(f"ranks {missing} did not finish within {timeout_s} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    kind, payload = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise AssertionError(f"rank {rank} died without an exception") from None
                if kind == "error":
                    raise AssertionError(f"rank {rank} raised:\n{payload}")
                results[rank] = payload
        self.is_usable = True
        return [results[rank] for rank in range(world_size)]
