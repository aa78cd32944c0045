"""Every kernel in every configuration compiles for real GPUs, without one:
scripts/compile_kernels.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize("archs", ["90", pytest.param("80,100", marks=pytest.mark.full)])
def test_kernels_compile_with_tensor_cores_and_without_spills(archs):
    pytest.importorskip("triton.backends.nvidia", reason="needs triton with its NVIDIA backend")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--arch", archs]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"sm_{arch}" in done.stdout for arch in archs.split(","))
    assert done.stdout.rstrip().endswith("kernels, 0 failed")
