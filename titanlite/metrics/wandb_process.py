"""The process beside rank 0 that calls wandb. It knows nothing of titanlite, and is started by `wandb.py`.

On standard input come JSON lines: `{"config": ...}`, `{"point": {"step": ..., ...}}` and, if the rank is not killed
before, `{"exit_code": ...}` as the last one. What wandb is told by its environment variables is not touched.
"""

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import Any

_DEFAULTS = {
    "WANDB_SHOW_INFO": "false",  # nor does it ask for a key on a terminal then
    "WANDB_CONSOLE": "off",
    "WANDB_INIT_TIMEOUT": "30",
    # The command has paths, the address of a git remote may have a token.
    "WANDB__DISABLE_META": "true",
    "WANDB_DISABLE_GIT": "true",
}
# The rank is gone by then, and what is not uploaded yet is on disk.
_FINISH_S = 60.0


def main() -> None:
    """Read until the rank closes the pipe or is gone; then give wandb a minute."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what W&B's "Stop run" sends
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    worker = threading.Thread(target=_work, args=(messages,), daemon=True)
    worker.start()
    for line in sys.stdin.buffer:  # at once, whatever wandb waits for: the pipe must not fill up
        if line.endswith(b"\n"):  # not torn
            messages.put(json.loads(line))
    messages.put({"exit_code": 1})
    worker.join(_FINISH_S)
    if worker.is_alive():
        _say(f"not all is uploaded after {_FINISH_S:g} s. `wandb sync` of the newest folder in {_folder()} does it.")
    os._exit(0)


def _work(messages: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        environment = _DEFAULTS | os.environ
        os.environ.update(environment)
        wandb, first = importlib.import_module("wandb"), messages.get()
        try:
            run = wandb.init(config=first["config"])
        except Exception as error:  # narrowed below
            if environment.get("WANDB_MODE") == "offline":
                raise
            _say(f"recording offline, because {_first_line(error)}.")  # no network, no key, no such project, ...
            _record_offline(first, messages, environment | {"WANDB_MODE": "offline"})
            return
        if run.settings.mode == "offline":
            _say(f"`wandb sync {os.path.dirname(run.dir)}` uploads what is recorded there.")
        elif run.url:
            _say(run.url)
        run.define_metric("*", step_metric="step")
        while "exit_code" not in (message := messages.get()):
            if "config" in message:
                run.config.update(message["config"], allow_val_change=True)
            else:
                run.log(message["point"])
        run.finish(exit_code=message["exit_code"])
    except Exception as error:  # noqa: BLE001  whatever it is, it is not the run's trouble
        _say(f"no more points, because {_first_line(error)}. metrics.jsonl has them all.")


def _record_offline(
    message: dict[str, Any], messages: "queue.SimpleQueue[dict[str, Any]]", environment: dict[str, str]
) -> None:
    """Hand `message` and those that follow to a process like this; here, wandb still waits for its servers."""
    process = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, env=environment, text=True)
    assert process.stdin is not None
    with process.stdin as pipe:
        while True:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
            if "exit_code" in message:
                break
            message = messages.get()
    process.wait()


def _folder() -> str:
    return os.path.join(os.environ.get("WANDB_DIR", "."), "wandb")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _say(text: str) -> None:
    sys.stderr.write(f"titanlite: W&B: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
