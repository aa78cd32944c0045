"""Fixtures for unit tests of several folders."""

import io
import logging
import resource

import pytest
import torch
import torch.distributed as dist

from titanlite.base.log import logger


@pytest.fixture
def full_disk():
    """`full_disk(n)`: no file of this process may have more than n bytes; `full_disk(None)`: any
    may.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        resource.setrlimit(
            resource.RLIMIT_FSIZE, before if num_bytes is None else (num_bytes, before[1])
        )

    yield limit
    limit(None)


@pytest.fixture
def console():
    """Collect the package's log lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield stream
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def one_rank():
    """Join a process group of this process alone; the device of its rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()
