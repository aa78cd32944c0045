"""Processes that `rank_server.py` forks are as fresh as those that Python starts."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_to_end
from rank_server import COPY, FOLDER, RankServer, rank_pid

ROOT = Path(__file__).parents[2]
# What a process finds at its start. It runs before the module, which then says that there is no such command.
LOOK = f"""
import gc, json, logging, os, random, signal, sys, threading
import numpy, torch
found = {{
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "path": sys.path[0],
    "umask": os.umask(0o22),
    "environment": dict(os.environ),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "torch threads": torch.get_num_threads(),
    "signals": [str(signal.getsignal(number)) for number in (15, 2, 1, 17)],
    "files": sorted(os.readlink(f"/proc/self/fd/{{fd}}").partition(":")[0] for fd in (0, 1, 2)),
    "others": [f for f in map(os.path.realpath, map("/proc/self/fd/{{}}".format, range(3, 40))) if "socket" in f],
    "stdin": sys.stdin.read(),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
    "handlers": [str(h) for name in (None, "titanlite") for h in logging.getLogger(name).handlers],
    "levels": [logging.getLogger(name).level for name in (None, "titanlite")],
    "gc": gc.isenabled(),
    "random": [random.random(), float(numpy.random.random()), torch.initial_seed()],
}}
found["environment"].pop("{FOLDER}", None)
with open(os.environ.get("LOOK_AT", ""), "w") as file:
    json.dump(found, file)
"""


@pytest.fixture
def look(server: RankServer, tmp_path: Path):
    """`look(name, served, *arguments, **variables)` -> what a process finds at its start, and how it ended."""

    def run(name: str, served: bool, *arguments: str, **variables: str) -> tuple[dict, subprocess.CompletedProcess]:
        server.wait_until_it_serves()
        folder = tmp_path / name
        folder.mkdir()
        (folder / "misbehave.py").write_text(LOOK)
        env = server.environment(LOOK_AT=str(tmp_path / "look"), COLUMNS="77", **variables)
        if served:
            command = [server.python, "-m", "titanlite", *arguments]
            env[FOLDER] = str(folder)
        else:
            code = f"import titanlite.__main__\n{LOOK}\nsys.exit(titanlite.__main__.main())"
            command, env["PYTHONPATH"] = [sys.executable, "-c", code, *arguments], str(ROOT)
        done = subprocess.run(
            command, cwd=tmp_path, env=env, input="a line\n", capture_output=True, text=True, timeout=120, umask=0o27
        )
        return json.loads((tmp_path / "look").read_text()), done

    return run


def test_a_served_process_finds_what_a_started_one_finds(look):
    (one, served), (other, again) = look("a", True, "chek"), look("b", True, "chek")
    true, started = look("c", False, "chek")
    assert served.returncode == again.returncode == started.returncode == 2
    assert served.stderr == started.stderr and "there is no command 'chek'. Did you mean 'check'?" in served.stderr
    assert served.stdout == started.stdout == ""
    pairs = zip(one.pop("random"), other.pop("random"), strict=True)
    assert all(drawn != again for drawn, again in pairs), "forks do not draw the same numbers"
    del true["random"], true["environment"]["PYTHONPATH"]
    assert one.pop("path") == one["cwd"] and true.pop("path") == "", "as Python has it for -m and -c"
    assert one == true and one["threads"] == [1, 1] and one["others"] == []


def test_what_the_fork_would_see_with_other_eyes_is_started(server: RankServer, tmp_path: Path):
    """Another value of a variable that is read at imports, another titanlite, or other Python code."""
    server.wait_until_it_serves()
    copy = tmp_path / "copy"
    (copy / "titanlite").mkdir(parents=True)
    (copy / "titanlite/__init__.py").touch()
    (copy / "titanlite/__main__.py").write_text("print('a copy')")

    def say(*arguments: str, **variables: str) -> str:
        env = server.environment(**variables)
        return run_to_end([server.python, *arguments], cwd=tmp_path, env=env, timeout_s=60).stdout.strip()

    version = say("-m", "titanlite", "--version", PYTHONPATH=str(ROOT))
    assert version.startswith("titanlite ")
    assert say("-m", "titanlite", PYTHONPATH=str(copy)) == "a copy"
    assert say("-m", "titanlite", "--version", PYTHONPATH=str(copy), **{COPY: str(copy)}) == version
    imported = "import sys; print('torch' in sys.modules, sys.flags.dev_mode)"
    assert say("-c", imported) == "False False"
    assert say("-X", "dev", "-c", imported) == "False True"
    folder = tmp_path / "folder"
    folder.mkdir()
    for threads, served in (("1", True), ("2", False)):
        say("-m", "titanlite", "--version", OMP_NUM_THREADS=threads, PYTHONPATH=str(ROOT), **{FOLDER: str(folder)})
        assert [path.unlink() for path in folder.iterdir()] == [None] * served


def test_exit_codes_and_signals_pass_through_and_nothing_is_left(server: RankServer, tmp_path: Path):
    server.wait_until_it_serves()
    endings = {"import sys; sys.exit(7)": 7, "import os; os.kill(os.getpid(), 9)": -9, "1 / 0": 1}
    endings |= {"import atexit; atexit.register(print, 'bye')": 0, "import signal; signal.pause()": -signal.SIGTERM}
    for number, (code, expected) in enumerate(endings.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "misbehave.py").write_text(code)
        env = server.environment(RANK="0", **{FOLDER: str(folder)})
        command = [server.python, "-m", "titanlite", "--version"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if "pause" in code:
            rank_pid(folder, 0)
            process.terminate()
        out, err = process.communicate(timeout=60)
        assert process.returncode == expected, (code, out, err)
        assert ("ZeroDivisionError" in err) == (code == "1 / 0")
        assert out.endswith("bye\n") == ("bye" in code)
        assert not Path("/proc", (folder / "rank-0.pid").read_text()).exists()
