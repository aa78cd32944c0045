"""How a program imports, with the collector off, and how it ends."""

import os
import subprocess
import sys

import pytest
from processes import run_python

from titanlite.base.process import count_threads

# Rank 0 ends while its group's thread holds the last reference to a tensor. The sum, one call into
# C, makes that thread wait for the interpreter exactly until Python would begin to tear itself
# down.
RANK = """
import atexit, functools, os, sys, time
from titanlite.base.process import lean_imports, leave

rank, folder, code = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
atexit.register(functools.partial(sum, range(50_000_000)))
with lean_imports():
    import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
group = dist.new_group()  # as a mesh holds one
dist.barrier(group)
tensor = torch.ones(4)
if rank == 1:
    time.sleep(0.2)
    dist.all_reduce(tensor, group=group)
    time.sleep(2)
    os._exit(0)
dist.all_reduce(tensor, group=group, async_op=True)
del tensor
atexit.register(print, "handled")
(leave if code else sys.exit)(code)
"""


def test_control_c_before_training_ends_a_process_without_a_traceback():
    script = (
        "import os, signal; from titanlite.base.process import begin_process; "
        "begin_process(lossy=True); "
    )
    script += "os.kill(os.getpid(), signal.SIGINT); import torch"
    done = run_python(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["titanlite.rank", "titanlite.__main__"])
def test_entry_points_import_without_the_collector_and_leave_it_on(module):
    """Importing titanlite.rank takes 5 collections of everything otherwise."""
    script = f"""
import contextlib, gc, {module} as entry
if "{module}" == "titanlite.__main__":
    with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
        entry.main(["inspect", "--help"])
print("torch" in __import__("sys").modules, gc.isenabled(), gc.get_stats()[2]["collections"])
"""
    assert run_python(script, check=True).stdout.split() == ["True", "True", "0"]


def test_a_rank_ends_with_its_own_code_while_the_thread_of_a_group_drops_a_tensor(tmp_path):
    with subprocess.Popen([sys.executable, "-c", RANK, "1", str(tmp_path), "0"]):
        done = run_python(RANK, "0", str(tmp_path), "7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "handled\n", "")


def test_a_recorded_process_is_torn_down():
    script = """
import os
from titanlite.base.process import lean_imports, leave

class Last:
    def __del__(self, write=os.write): write(1, b"torn down")

with lean_imports():
    os.last = Last()  # this module's own names are kept by the exception that ends it
leave(5)
"""
    done = run_python(script, env={**os.environ, "NSYS_PROFILING_SESSION_ID": "1"})
    assert (done.returncode, done.stdout) == (5, "torn down")


@pytest.mark.parametrize(("code", "at_once"), [(0, False), (3, True)])
def test_exit_handlers_run_unless_the_end_is_at_once(code, at_once):
    """After an error a handler may wait for a rank that is gone. What was printed is out in any
    case.
    """
    script = f"""
import atexit
from titanlite.base.process import lean_imports, leave

with lean_imports():
    atexit.register(print, "handled")
print("printed")
leave({code}, at_once={at_once})
"""
    done = run_python(script)
    assert (done.returncode, done.stdout.split()) == (
        code,
        ["printed"] if at_once else ["printed", "handled"],
    )


def _under(limits, command):
    command = f"{limits} && exec {sys.executable} {command}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_limit_on_open_files_is_raised_as_far_as_it_may_be():
    code = (
        "import resource; from titanlite.base.process import *; allow_many_files(); "
        "print(resource.getrlimit(7)[0])"
    )
    assert _under("ulimit -n 900; ulimit -Sn 60", f"-c '{code}'").stdout == "900\n"


def test_a_full_disk_or_a_reader_that_is_gone_is_no_traceback():
    for redirect, code, says in (("> /dev/full", 1, "No space left on device"), ("| true", 0, "")):
        done = _under("sleep 0", f"-m titanlite --help {redirect}")
        assert done.returncode == code and "Traceback" not in done.stderr and says in done.stderr


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(2, 1, 2), (64, 8, 8), (64, 1, 16), (4, 8, 1)]
)
def test_threads_of_a_rank(cores, ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert count_threads() == expected
