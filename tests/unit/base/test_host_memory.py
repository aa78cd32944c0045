"""Memory that a CPU rank has freed."""

import sys

import pytest
from processes import run_python

FAULTS_OF_NEW_TENSORS = """
import resource, torch
from titanlite.base.process import keep_freed_memory

def faults(keep):
    if keep:
        keep_freed_memory()
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        small, large = torch.ones(1 << 20), torch.ones(12 << 20)  # 4 and 48 MiB
        del small, large
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[1:])  # an object of Python's may lie in the way once

print(faults(keep=False), faults(keep=True))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only glibc gives memory back so eagerly"
)
def test_freed_memory_is_used_again_without_page_faults():
    done = run_python(FAULTS_OF_NEW_TENSORS, check=True)
    default, kept = map(int, done.stdout.split())
    if default <= 100:
        pytest.skip(f"this kernel makes or counts {default} page faults for 13,312 pages")
    assert kept < 100
