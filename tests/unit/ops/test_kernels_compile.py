"""The kernels compile for real GPUs, without one: scripts/compile_kernels.py. The most used ones
each day, and every one in every configuration once a week.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("archs", "names"), [("90", "bf16"), pytest.param("80,90,100", "", marks=pytest.mark.full)]
)
def test_kernels_compile_with_tensor_cores_and_without_spills(archs, names):
    pytest.importorskip("triton.backends.nvidia", reason="needs triton with its NVIDIA backend")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--arch", archs, "-k", names]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"sm_{arch}" in done.stdout for arch in archs.split(","))
    assert done.stdout.rstrip().endswith("kernels, 0 failed")
