"""What the tests themselves rely on: an end for every process and for every comparison."""

import os
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from processes import run_to_end

from tests.conftest import pytest_collection_modifyitems


def test_a_command_whose_child_keeps_its_output_open_is_ended_with_it(tmp_path):
    script = f"(setsid sleep 1000 & echo $! >{tmp_path}/pid; echo said; sleep 1000)"
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"did not end within 1 s:\nsaid\n"):
        run_to_end(["bash", "-c", script], cwd=tmp_path, env=os.environ, timeout_s=1)
    assert time.monotonic() - began < 30
    pid = (tmp_path / "pid").read_text().strip()
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - began < 30
        time.sleep(0.02)


def test_outputs_and_exit_code(tmp_path):
    script = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr); sys.exit(3)"
    arguments = {"cwd": tmp_path, "env": os.environ, "timeout_s": 60}
    apart = run_to_end([sys.executable, "-c", script], **arguments)
    assert (apart.returncode, apart.stdout, apart.stderr) == (3, "out\n", "err\n")
    joined = run_to_end([sys.executable, "-c", script], **arguments, join_outputs=True)
    assert (joined.stdout, joined.stderr) == ("out\nerr\n", "")


def test_what_ci_says_about_long_differences_has_an_end(tmp_path):
    """With CI in the environment pytest alone needs a minute for 20 KB."""
    test = tmp_path / "test_bytes.py"
    test.write_text("import os\ndef test():\n    assert os.urandom(300_000) == os.urandom(300_000)\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(test)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": f"{root / 'tests'}:{root}"}
    done = run_to_end(command, cwd=tmp_path, env=environment, timeout_s=60)
    assert done.returncode == 1 and "At index 0 diff" in done.stdout, done.stdout + done.stderr
    assert len(done.stdout) < 5000


def test_a_test_that_hangs_fails_with_its_stack(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\n")
    (tmp_path / "test_hang.py").write_text("import time\ndef test():\n    time.sleep(100)\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = run_to_end(command, cwd=tmp_path, env=os.environ, timeout_s=60)
    assert done.returncode == 1 and "Failed: Timeout (>1.0s) from pytest-timeout" in done.stdout, done.stdout


@pytest.mark.parametrize("fast", [True, False])
def test_under_fast_a_test_keeps_three_cases_and_one_that_is_slow_none(fast):
    names = ["a.py::one", *(f"a.py::many[{i}::{i}[]]" for i in range(9)), "b.py::two[x]", "b.py::two[y]", "b.py::slow"]
    items = [
        Mock(nodeid=name, **{"get_closest_marker.return_value": True if "slow" in name else None}) for name in names
    ]
    config = Mock(**{"getoption.return_value": fast})
    pytest_collection_modifyitems(config, items)
    few = [*names[:2], names[5], *names[9:12]]
    assert [item.nodeid for item in items] == (few if fast else names)
