"""Launchers and ranks forked from one process that has imported everything: a restart costs milliseconds, not seconds.

`RankServer` runs it; torchrun starts `stub` where it would start Python (PYTHON_EXEC). A stub hands its arguments,
environment and outputs over a socket, ends as the forked process does, and takes it along when it is killed itself, or
when the launcher is that started it.
This file is a script, too: `python rank_server.py SOCKET FOLDER`.
"""

import array
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PIDS = "TEST_PIDS"  # environment variable
STUB = """#!{python} -IS
import array, ctypes, json, os, signal, socket, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a rank's own `end_with_launcher` would be about the server
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
link.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
link.sendall(request)
pid = int.from_bytes(link.recv(4), "big")
if not pid:
    os._exit(1)  # the server is gone
def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
signal.signal(signal.SIGTERM, forward)
answer = link.recv(4)
code = int.from_bytes(answer, "big", signed=True) if answer else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Launched:
    """A launcher with its ranks, and what they have written so far to the one output that they share."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._lines.extend(lines)

    @property
    def out(self) -> str:
        return "".join(self._lines)

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            code = self.process.poll()
            assert code is None, f"ended with {code} instead of {what}:\n{self.out[-6000:]}"
            assert time.monotonic() < end, f"no {what} within {timeout_s} s:\n{self.out[-6000:]}"
            time.sleep(0.02)

    def end(self, timeout_s: float) -> int:
        """The exit code, once it and all of its ranks have ended by themselves."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s:\n{self.out[-6000:]}") from None
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), f"ended with {code}, but a rank is left:\n{self.out[-6000:]}"
        return code


class RankServer:
    """Starts the server; `launch` runs `titanlite.launch` in a fork, whose ranks are forks, too.

    Args:
        folder: a file `rank-N.pid` for each running rank, and what the drill leaves for ranks to find.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder / "socket")
        self.stub = folder / "stub"
        self.stub.write_text(STUB.format(python=sys.executable, address=self.address))
        self.stub.chmod(0o755)
        root = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(Path(__file__)), self.address, str(folder)]
        self.process = subprocess.Popen(command, env=environment, cwd=root)

    def launch(self, *arguments: str, pids: Path | None = None) -> Launched:
        """`python -m titanlite.launch ARGUMENTS`, with its output and that of its ranks in one pipe.

        `pids` is a folder for `launcher.pid` and those of the ranks, should several be launched; temporary folders
        are in the folder around it.
        """
        deadline = time.monotonic() + 120
        while not Path(self.address).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        process = subprocess.Popen(
            [str(self.stub), "-m", "titanlite.launch", *arguments],
            env={
                **os.environ,
                "PYTHON_EXEC": str(self.stub),
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
                PIDS: str(pids or self.folder),
                **({"TMPDIR": str(pids.parent)} if pids else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Launched(process)

    def rank_pid(self, rank: int, pids: Path | None = None) -> int:
        """Of a rank that lives; between two starts there is none for a moment."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                pid = int(((pids or self.folder) / f"rank-{rank}.pid").read_text())
                os.kill(pid, 0)
                return pid
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} does not start")

    def close(self) -> None:
        """End the server, and with it all that it has forked."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


# --- the server itself


def _receive(link: socket.socket, fds: list[int]) -> tuple[list[str], dict[str, str]]:
    """What a stub asks for; appends its outputs to `fds`.

    Raises:
        ConnectionError: the stub was killed meanwhile.
    """
    outputs = array.array("i")
    size, ancillary, _, _ = link.recvmsg(4, socket.CMSG_LEN(2 * outputs.itemsize))
    for _, _, data in ancillary:
        outputs.frombytes(data[: len(data) - len(data) % outputs.itemsize])
    fds += outputs
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += (received := link.recv(1 << 16))
        if not received:
            raise ConnectionError("the stub is gone")
    if len(fds) < 2:
        raise ConnectionError("the stub is gone")
    arguments, environment = json.loads(data)
    return arguments, environment


def _child(arguments: list[str], environment: dict[str, str], fds: list[int], folder: Path) -> int:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the server's own
    module, rest = arguments[arguments.index("-m") + 1], arguments[arguments.index("-m") + 2 :]
    pids = Path(os.environ[PIDS])
    if module == "titanlite.launch":
        import titanlite.launch.__main__ as launcher

        (pids / "launcher.pid").write_text(str(os.getpid()))
        return launcher.main(rest)
    import titanlite.train

    (pids / f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    _let_nan_in(folder)
    if (folder / "misbehave.py").exists():  # what a test wants to happen in ranks
        exec((folder / "misbehave.py").read_text(), {"rank": int(os.environ["RANK"])})
    return titanlite.train.main(rest)


def _let_nan_in(folder: Path) -> None:
    """Where the file `nan-RANK` appears, the next forward of that rank gives NaN, once."""
    from titanlite.train_step import TrainStep

    original, path = TrainStep.train_step, folder / f"nan-{os.environ['RANK']}"

    def train_step(trainer: Any, batches: Any) -> Any:
        if path.exists():
            path.unlink()

            def hook(module: Any, arguments: Any, output: Any) -> Any:
                handle.remove()
                return output * float("nan")

            handle = trainer.model.get_submodule("model.norm").register_forward_hook(hook)
        return original(trainer, batches)

    TrainStep.train_step = train_step  # type: ignore[method-assign]


def _serve(address: str, folder: Path, parent: int) -> None:
    import torch
    import torch._dynamo  # FSDP imports it in every rank otherwise
    from transformers import AutoConfig, GenerationConfig

    import titanlite.launch
    import titanlite.train  # noqa: F401

    torch.set_num_threads(1)
    GenerationConfig.from_model_config(AutoConfig.for_model("qwen3_moe"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(32)
    os.rename(address + ".new", address)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    while not stopping and os.getppid() == parent:  # tests that are killed do not end their server
        for key, _ in selector.select(0.02):
            if key.fileobj is listener:
                link, _ = listener.accept()
                fds: list[int] = []
                try:
                    arguments, environment = _receive(link, fds)
                except ConnectionError:
                    link.close()
                    for fd in fds:
                        os.close(fd)
                    continue
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        code = _child(arguments, environment, fds, folder)
                    except SystemExit as end:
                        code = int(end.code or 0)
                    finally:
                        sys.stdout.flush()
                        sys.stderr.flush()
                        os._exit(code)
                for fd in fds:
                    os.close(fd)
                with suppress(ConnectionError):  # its stub is gone; reading from the link says so, too
                    link.sendall(pid.to_bytes(4, "big"))
                children[pid] = link
                selector.register(link, selectors.EVENT_READ, pid)
            else:  # its stub is gone
                selector.unregister(key.fileobj)
                if key.data in children:
                    os.kill(key.data, signal.SIGKILL)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            link = children.pop(pid)
            try:
                selector.unregister(link)
                link.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            except (KeyError, OSError):
                pass  # its stub is gone
            link.close()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # a second less than torch's own end


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), os.getppid())
