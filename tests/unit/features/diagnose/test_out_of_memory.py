"""Errors and snapshots when memory runs out; the parts of torch that need a GPU are faked."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from titanlite.base.errors import TrainingError
from titanlite.config.schema import JobConfig
from titanlite.features.diagnose import process
from titanlite.features.diagnose.process import start_memory_history


@pytest.fixture
def job(tmp_path):
    job = JobConfig()
    job.job.dump_folder = str(tmp_path / "run")
    job.training.local_batch_size = 4
    return job


@pytest.fixture
def cuda(monkeypatch):
    """A GPU whose calls are noted."""
    calls = []

    def dump(path):
        calls.append(("dump", path))
        Path(path).write_bytes(b"snapshot")

    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **options: calls.append(("record", options)),
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**29, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 70 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 78 * 2**30)
    return calls


@contextmanager
def explain_out_of_memory(job):
    """As a rank does with what ends it."""
    try:
        yield
    except Exception as error:
        if (found := process.explain_out_of_memory(job, error)) is None:
            raise
        raise found from error


@contextmanager
def explain(job, match):
    """Inside, memory runs out, with such an error as the result."""
    with pytest.raises(TrainingError, match=match) as raised, explain_out_of_memory(job):
        yield raised


def test_snapshot_and_message_of_a_gpu_out_of_memory(job, cuda, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    job.profiling.enable_memory_snapshot = True
    start_memory_history(job, torch.device("cuda", 3))
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation ..."
    )
    with pytest.raises(TrainingError) as raised, explain_out_of_memory(job):
        raise error
    path = Path(job.job.dump_folder) / "memory" / "rank3.pickle"
    assert [call[0] for call in cuda] == ["record", "dump"] and path.read_bytes() == b"snapshot"
    message = str(raised.value)
    assert message.startswith("memory: rank 3 ran out of memory of the GPU (CUDA out of memory.")
    assert "70.00 GiB were allocated and 78.00 GiB reserved, of 80.00 GiB; 512.00 MiB" in message
    assert "Lower training.local_batch_size" in message and f"in {path}; open it" in message


def test_host_memory_is_named_with_the_line_that_asked_for_it(job):
    from titanlite.ops import swiglu

    huge = torch.empty(1, device="meta").expand(2**40, 2**20)
    with explain(job, r"ran out of memory of the host.*DefaultCPUAllocator"):
        torch.empty(2**60, dtype=torch.uint8)
    with explain(job, r"ran out of memory of the host in \w+, titanlite/ops/elementwise\.py:\d+\."):
        swiglu(_Greedy(), huge)  # type: ignore[arg-type]


class _Greedy:
    """Asks for all memory as soon as anybody looks at it."""

    def __getattr__(self, name):
        raise MemoryError
