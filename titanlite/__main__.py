"""`python -m titanlite COMMAND ...`: the tools that need no launcher."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from titanlite.base.log import open_console
from titanlite.base.process import check_limits, lean_imports, leave
from titanlite.launch.notices import end_with_launcher

_Command = Callable[[Sequence[str]], int]
# What the commands import first: without one of them, this Python is not the one that titanlite was installed for.
_PACKAGES = ("omegaconf", "torch", "numpy", "safetensors", "transformers")
_USAGE = """usage: python -m titanlite COMMAND [arguments]

  train      train on one process: --config FILE [--section.key=value ...] (several: ./run_train.sh)
  check      check a configuration without starting anything: --config FILE --world-size N
  plan       what a run will take, without a GPU: --config FILE --world-size N [--gpu NAME] [--sweep] [...]
  data       show what a run would train on: --config FILE [--samples N] [--world-size N] [--section.key=value ...]
  inspect    show what is in a checkpoint: DIR [--checksums] [--all] [--config FILE --world-size N ...]
  export     write a checkpoint as a plain Hugging Face model: DIR OUT --dtype bfloat16 [--merge --base MODEL]
  generate   continue prompts with a model: --model DIR --prompt TEXT [--chat] [--max-new-tokens N ...]
  report     write an HTML page on a run: RUN [--output FILE] [--compare RUN2 ...]
  config     write docs/config.md from the schema (--check: only compare)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        code = _run_command(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
            raise
        print(f"titanlite: error: cannot write to standard output: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run_command(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    name, rest = (given[0], given[1:]) if given else ("", [])
    load = _commands().get(name) if name else None
    if load is None:
        asked_for_help = name in ("-h", "--help")
        stream = sys.stdout if asked_for_help else sys.stderr
        if name and not asked_for_help:
            print(f"titanlite: error: there is no command '{name}'.", file=stream)
        print(_USAGE, file=stream)
        return 0 if asked_for_help else 2
    try:
        with lean_imports():
            command = load()
        return command(rest)
    except ModuleNotFoundError as error:
        if error.name in _PACKAGES:
            print(
                f"titanlite: error: {sys.executable} has no package '{error.name}'. Activate the environment that "
                "run_train.sh made, `source .venv/bin/activate`, or install: `pip install -c constraints.txt -e .`",
                file=sys.stderr,
            )
            return 2
        raise


def run() -> NoReturn:
    """Run the command of this process's arguments, and end it."""
    open_console(goes_on=sys.argv[1:2] == ["train"])
    check_limits()
    leave(main())


def _commands() -> dict[str, Callable[[], _Command]]:
    """What imports each command: some need no torch, and shall not wait for it."""

    def train() -> _Command:
        from titanlite.train import main

        def run(argv: Sequence[str]) -> int:
            code = main(argv)
            return leave(code, at_once=True) if code else code

        return run

    def check() -> _Command:
        from titanlite.preflight import main

        return partial(main, weights=False)

    def config() -> _Command:
        from titanlite.config.docs import main

        return main

    def data() -> _Command:
        from titanlite.features.tools.preview_data import main

        return main

    def plan() -> _Command:
        from titanlite.features.estimate.cli import main

        return main

    def inspect() -> _Command:
        from titanlite.features.tools.inspect import main

        return main

    def export() -> _Command:
        from titanlite.features.tools.export import main

        return main

    def generate() -> _Command:
        from titanlite.features.tools.generate import main

        return main

    def report() -> _Command:
        from titanlite.features.report import main

        return main

    return {
        "train": train,
        "check": check,
        "config": config,
        "plan": plan,
        "data": data,
        "inspect": inspect,
        "export": export,
        "generate": generate,
        "report": report,
    }


if __name__ == "__main__":
    end_with_launcher()
    run()
