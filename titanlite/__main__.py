"""`python -m titanlite COMMAND ...`: the commands that need no launcher."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from titanlite import __version__
from titanlite.base.process import begin_process, lean_imports, leave
from titanlite.base.text import suggest
from titanlite.launch.protocol import end_with_launcher

# The module whose `main` implements each command. It is imported on use, because some commands need
# no torch.
_MODULES = {
    "train": "titanlite.rank",
    "check": "titanlite.features.tools.check",
    "plan": "titanlite.features.estimate.cli",
    "data": "titanlite.features.tools.preview_data",
    "inspect": "titanlite.features.tools.models",
    "verify": "titanlite.features.tools.verify",
    "export": "titanlite.features.tools.export",
    "generate": "titanlite.features.tools.generate",
}
# Packages that every command imports. If one is missing, titanlite was not installed for this
# Python.
_PACKAGES = ("omegaconf", "torch", "numpy", "safetensors", "transformers")
_USAGE = """usage: python -m titanlite COMMAND [arguments]

  train      train on one process: --config FILE [--section.key=value ...] (several: ./run_train.sh)
  check      check a configuration without starting anything: --config FILE --world-size N
  plan       what a run will take, without a GPU: --config FILE
             --world-size N [--gpu NAME] [--sweep] [...]
  data       show what a run would train on: --config FILE [--samples N] [--world-size N]
             [--section.key=value ...]
  inspect    show what is in a checkpoint: MODEL [--checksums] [--all]
  verify     show what a run really trained, of any trainer: FOLDER [--base MODEL] [--json]
  export     write a checkpoint as a plain Hugging Face model: MODEL OUT --dtype bfloat16
             [--merge --base MODEL]
  generate   continue prompts with a model: MODEL [--prompt TEXT] [--max-new-tokens N ...]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        code = _run_command(argv)
        sys.stdout.flush()
    except OSError as error:  # broken pipe, as after `| head`
        if error.filename is not None or error.errno not in (
            errno.EPIPE,
            errno.ENOSPC,
            errno.EIO,
            errno.EDQUOT,
        ):
            raise
        if error.errno != errno.EPIPE:
            print(
                f"titanlite: error: cannot write to standard output: {error.strerror}.",
                file=sys.stderr,
            )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run_command(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name not in _MODULES:
        if name == "--version":
            print(f"titanlite {__version__}")
            return 0
        asked_for_help = name in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        if name and not asked_for_help:
            print(
                f"titanlite: error: there is no command '{name}'.{suggest(name, _MODULES)}",
                file=stream,
            )
        print(_USAGE, file=stream)
        return 0 if asked_for_help else 2
    try:
        with lean_imports():
            command = importlib.import_module(_MODULES[name]).main
        code = command(rest)
        return leave(code, at_once=True) if code and name == "train" else code
    except ModuleNotFoundError as error:
        if (package := error.name) in _PACKAGES:  # a missing part means another version
            print(
                f"titanlite: error: {sys.executable} has no package '{package}'. Activate the "
                "environment that run_train.sh made, `source .venv/bin/activate`, or install: "
                "`pip install -c constraints.txt -e .`",
                file=sys.stderr,
            )
            return 2
        raise


def run() -> NoReturn:
    """Run the command that this process's arguments name, and exit."""
    begin_process(lossy=sys.argv[1:2] == ["train"])
    leave(main())


if __name__ == "__main__":
    end_with_launcher()
    run()
