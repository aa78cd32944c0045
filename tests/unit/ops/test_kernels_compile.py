"""Every kernel in every configuration compiles for real GPUs, without one: scripts/compile_kernels.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "compile_kernels.py"


@pytest.mark.parametrize(
    "arch", [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_compile_with_tensor_cores_and_without_spills(arch):
    pytest.importorskip("triton.backends.nvidia", reason="needs triton with its NVIDIA backend")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--arch", str(arch)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sm_{arch}" in done.stdout
    assert done.stdout.rstrip().endswith("kernels, 0 failed")
