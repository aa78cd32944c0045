"""Processes of titanlite forked from one that has imported everything: a start costs milliseconds,
not seconds.

`RankServer` runs it, and makes stand-ins for Python: `python -m titanlite...`, and a file of
`scripts/`, hands its arguments, folder, environment and standard streams over a socket, and ends as
the forked process does. That process goes when the stand-in is killed, or whoever started it.
torchrun starts ranks by the same stand-in (PYTHON_EXEC). Everything else is Python itself, and so
is what the fork would see with other eyes: another copy of titanlite, or another value of a
variable that is read when torch, transformers or Python are imported. This file is a script, too:
`python rank_server.py SOCKET STAND_IN`.
"""

import array
import atexit
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from cluster import Launched

ROOT = Path(__file__).parents[1]
# environment variable: where processes leave their pids and find what they shall do wrong
FOLDER = "TEST_FOLDER"
# environment variable: a copy of the checkout, for which the server's titanlite may stand
COPY = "TEST_COPY"
# Variables that are read while something is imported, by their beginnings; of these, some are read
# later.
READ_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
)
READ_AT_IMPORT += ("TORCH_", "PYTORCH_", "CUDA_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_")
READ_LATER = ("PYTHON_EXEC", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
# from the launcher to ranks
READ_LATER += ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
# read at imports, too: all served processes have the value of run_train.sh for several machines
READ_LATER += ("TORCH_CPP_LOG_LEVEL",)
NAMESPACE = "/proc/self/ns/net"
STUB = """#!{python} -IS
import array, ctypes, json, os, signal, socket, sys
unbuffered = sys.argv[1:2] == ["-u"]  # as torchrun starts ranks
arguments = sys.argv[2:] if unbuffered else sys.argv[1:]
def is_served():
    trees = ({root!r}, os.environ.get({copy!r}, {root!r}))
    file = os.path.abspath("".join(arguments[:1]))
    is_script = file.endswith(".py") and any(file.startswith(tree + "/scripts/") for tree in trees)
    if not is_script and (arguments[:1] != ["-m"] or "".join(arguments[1:2]).partition(".")[0] != "titanlite"):
        return False
    read = {{k: v for k, v in os.environ.items() if k.startswith({read_at_import!r}) and k not in {read_later!r}}}
    places = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(":"), {root!r}]
    place = next(place for place in places if place and os.path.exists(place + "/titanlite/__init__.py"))
    return read == {environment!r} and place in trees
if not is_served():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a rank's own `end_with_launcher` is about the server
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
if unbuffered:
    os.environ["PYTHONUNBUFFERED"] = "1"
request = json.dumps([arguments, dict(os.environ), os.getcwd(), os.umask(0)]).encode()
fds = array.array("i", [0, 1, 2, os.open({namespace!r}, os.O_RDONLY)])
link.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
link.sendall(request)
pid = int.from_bytes(link.recv(4), "big")
if not pid:
    os._exit(1)  # the server is gone
def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, forward)
answer = link.recv(4)
code = int.from_bytes(answer, "big", signed=True) if answer else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""  # noqa: E501


class Served(Launched):
    """A launcher that the server has forked, with its ranks; each process leaves its pid."""

    def __init__(self, command, folder, **options):
        super().__init__(command, **options)
        self.folder = folder

    def pid(self, name):
        """Return the process "launcher" or "rank-N"; a new start's ranks take a moment."""
        path = self.folder / f"{name}.pid"
        self.wait_for(
            name, lambda: path.exists() and Path("/proc", path.read_text() or "-").exists()
        )
        return int(path.read_text())


class RankServer:
    """Starts the server; `folder` is for its socket and the stand-ins."""

    def __init__(self, folder):
        self.address, self._bin = str(folder / "socket"), folder / "bin"
        self._bin.mkdir(parents=True)
        self._variables = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        environment = self.environment()
        read = {
            k: v
            for k, v in environment.items()
            if k.startswith(READ_AT_IMPORT) and k not in READ_LATER
        }
        self.python = str(self._bin / "python3")
        text = STUB.format(
            python=sys.executable,
            address=self.address,
            root=str(ROOT),
            copy=COPY,
            read_at_import=READ_AT_IMPORT,
            read_later=READ_LATER,
            environment=read,
            namespace=NAMESPACE,
        )
        for name in ("python", "python3"):
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)
        command = [sys.executable, str(Path(__file__)), self.address, self.python]
        environment |= {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT)

    def environment(self, **more):
        """Variables for a process that the server shall start, or for a script whose `python3` it
        shall be.
        """
        left_out = (
            "PYTHONPATH",
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "TRITON_INTERPRET",
        )
        inherited = {
            k: v for k, v in os.environ.items() if k not in left_out and not k.startswith("PYTEST_")
        }
        path = os.pathsep.join(
            [str(self._bin), str(Path(sys.executable).parent), inherited.get("PATH", "")]
        )
        return {**inherited, "PATH": path, **self._variables, **more}

    def wait_until_it_serves(self):
        deadline = time.monotonic() + 300
        while not Path(self.address).exists():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                "the server does not start"
            )
            time.sleep(0.05)

    def launch(self, *arguments, folder):
        """Start `python -m titanlite.launch ARGUMENTS`.

        `folder` gets `launcher.pid` and a file `rank-N.pid` for each running rank. All processes
        run the code in its `misbehave.py`, and if a file `nan-N` appears, the next forward of rank
        N returns NaN, once.
        """
        self.wait_until_it_serves()
        environment = self.environment(**{"PYTHONUNBUFFERED": "1", FOLDER: str(folder)})
        command = [self.python, "-m", "titanlite.launch", *arguments]
        return Served(command, folder, env=environment)

    def close(self):
        """End the server and all processes that it has forked."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


# --- the server itself


def _receive(link, fds):
    """What a stand-in asks for; appends its standard streams and its network namespace to `fds`.

    Raises:
        ConnectionError: it was killed meanwhile.
    """
    received = array.array("i")
    size, ancillary, _, _ = link.recvmsg(4, socket.CMSG_LEN(4 * received.itemsize))
    for _, _, data in ancillary:
        received.frombytes(data[: len(data) - len(data) % received.itemsize])
    fds += received
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += (part := link.recv(1 << 16))
        if not part:
            raise ConnectionError("the stand-in is gone")
    if len(fds) < 4:
        raise ConnectionError("the stand-in is gone")
    return tuple(json.loads(data))


def _become(request, fds, python):
    """In the fork: all that a new process has of its parent, and no trace of the server's."""
    arguments, environment, cwd, umask = request
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    if os.fstat(fds[3]).st_ino != os.stat(NAMESPACE).st_ino and ctypes.CDLL(
        None, use_errno=True
    ).setns(fds[3], 0):
        raise OSError(ctypes.get_errno(), "setns")
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[:2] == ["-m", "titanlite.launch"]:
        os.environ["PYTHON_EXEC"] = python
    os.chdir(cwd)
    os.umask(umask)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        mode = "w" if number else "r"
        like = {"encoding": old.encoding, "errors": old.errors}
        stream = open(number, mode, closefd=False, **like)  # noqa: SIM115
        at_once = number > 0 and bool(environment.get("PYTHONUNBUFFERED"))
        by_line = at_once or number == 2 or stream.isatty()
        stream.reconfigure(line_buffering=by_line, write_through=at_once)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = python
    is_script = arguments[0] != "-m"
    sys.path[0] = str(Path(arguments[0]).absolute().parent) if is_script else cwd
    sys.argv = arguments if is_script else ["-m", *arguments[2:]]
    tempfile.tempdir = None  # the server's own
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


def _run(arguments):
    """Run it as `python -m MODULE` or `python FILE` does."""
    if arguments[0] != "-m":
        runpy.run_path(arguments[0], run_name="__main__")
        return
    module, rank = arguments[1], os.environ.get("RANK")
    if FOLDER in os.environ:
        folder = Path(os.environ[FOLDER])
        name = "launcher" if module == "titanlite.launch" else f"rank-{rank}"
        (folder / f"{name}.pid").write_text(str(os.getpid()))
        if rank is not None:
            _let_nan_in(folder / f"nan-{rank}")
        if (folder / "misbehave.py").exists():
            exec(
                (folder / "misbehave.py").read_text(), {"rank": rank if rank is None else int(rank)}
            )
    for name in (module, f"{module}.__main__"):  # a new process has it once, as `__main__`
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _child(request, fds, python):
    """Return the exit code of the requested process, after all its work is done."""
    code = 1
    try:
        _become(request, fds, python)
        code = 0
        _run(request[0])
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  waits for threads that are no daemons
    atexit._run_exitfuncs()
    return code if isinstance(code, int) else int(code is not None)


def _let_nan_in(path):
    """If this file appears, make the next forward of this rank return NaN, once."""
    from titanlite.train_step import TrainStep

    original = TrainStep.train_step

    def train_step(trainer, batches):
        if path.exists():
            path.unlink()

            def hook(module, arguments, output):
                handle.remove()
                return output * float("nan")

            handle = trainer.model.get_submodule("model.norm").register_forward_hook(hook)
        return original(trainer, batches)

    TrainStep.train_step = train_step  # type: ignore[method-assign]


def _import_everything():
    """All that a command may import; afterwards there is this thread alone, or a fork would lack
    the others.

    Raises:
        RuntimeError: there are more.
    """
    import numpy.ma  # noqa: F401 - a step does
    import torch
    import torch.utils.tensorboard
    from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast  # noqa: F401

    import titanlite.__main__ as commands

    for module in commands._MODULES.values():
        __import__(module)
    torch.set_num_threads(1)
    GenerationConfig.from_model_config(AutoConfig.for_model("qwen3_moe"))
    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"{len(threads)} threads after the imports: {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # otherwise each fork copies the memory of the modules when it collects garbage


def _serve(address, python, parent):
    _import_everything()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(32)
    os.rename(address + ".new", address)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    children = {}
    stopping = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    while not stopping and os.getppid() == parent:  # tests that are killed do not end their server
        for key, _ in selector.select(0.02):
            if key.fileobj is listener:
                link, _ = listener.accept()
                fds = []
                try:
                    request = _receive(link, fds)
                except ConnectionError:
                    link.close()
                    for fd in fds:
                        os.close(fd)
                    continue
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        selector.close()
                        for each in (listener, link, *children.values()):
                            each.close()
                        code = _child(request, fds, python)
                        sys.stdout.flush()
                        sys.stderr.flush()
                    finally:
                        os._exit(code)
                for fd in fds:
                    os.close(fd)
                # Its stub has ended; reading from the link reports this, too.
                with suppress(ConnectionError):
                    link.sendall(pid.to_bytes(4, "big"))
                children[pid] = link
                selector.register(link, selectors.EVENT_READ, pid)
            else:  # its stub has ended
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
                pass  # its stub has ended
            link.close()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # a second faster than torch's own end


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], os.getppid())
