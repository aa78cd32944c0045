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

# Read when Triton decorates a kernel. Without a GPU, kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before any parallel region: forked ranks must not inherit a pool of OpenMP threads that are not
# there any more.
torch.set_num_threads(1)

# Processes that tests start leave bytecode for the next ones: half a second less for each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where pytest finds them, it works out and prints the whole difference of what an assertion
# compares, however long.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

# The same examples in every run, none remembered, each with as much time as a busy machine takes.
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


def pytest_configure():
    # torch remembers what makes tensors; if torch.compile is the first to ask, wrongly
    with torch.device("meta"):
        torch.empty(0)


def pytest_collection_finish():
    """What was imported is looked at by the collector no more: not here, and not in forked ranks,
    whose memory stays this process's until they write to it. An eighth of the time of tests with
    ranks.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """In every run and in every order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_environment():
    """Undo what a test does to the environment. The server of ranks serves no process that would
    import otherwise.
    """
    with environment_kept():
        yield


@pytest.fixture(autouse=True)
def own_logger():
    """What a test does to the package's logger is undone after it.

    Handlers write to streams that are closed then. And pytest puts its own handlers on a logger
    that does not propagate, upon which `setup_logger` of the next test would do nothing.
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
    """`run_ranks(world_size, function, *args, timeout_s=300)` -> what `function(*args)` returned on
    each rank.
    """
    return _run_ranks


def _run_ranks(world_size, function, *args, timeout_s=300):
    """Fork `world_size` ranks that join one gloo group, call `function(*args)` on each, and collect
    the results.

    Forking takes milliseconds where a fresh interpreter takes seconds to import torch; closures
    need no pickling, only results do. If a rank raises, the others are killed and its traceback
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

    What a call imports and caches is there for the next one, which takes half the time.
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
        """What `function(*args)` returns on each rank; `args` are pickled. After an error there is
        no other call.
        """
        self.is_usable = False
        for pipe in self.pipes:
            with suppress(OSError):  # it died, and reading says so
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
