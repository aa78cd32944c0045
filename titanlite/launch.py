"""Start the ranks with torchrun's launcher, and report a failed run in one line instead of two tracebacks.

`python -m titanlite.launch [torchrun options] -m titanlite.train ...` takes torchrun's arguments as they are.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args, run

from titanlite.errors import NOTICE_FOLDER


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; the exit code is that of the rank that failed first, 128 + N if signal N ended it."""
    # The launcher logs each rank that it ends after a failure or a signal; the lines below say it once.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="titanlite-") as folder:
            os.environ[NOTICE_FOLDER] = folder
            run(parse_args(list(sys.argv[1:] if argv is None else argv)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"titanlite: rank {rank} {_how(failure)}; all ranks were stopped.", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as stopped:
        print(f"titanlite: stopped by {stopped.sigval.name}, with all ranks.", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"ended with exit code {failure.exitcode}"
    hint = " (often: out of memory)" if failure.exitcode == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-failure.exitcode).name}{hint}"


if __name__ == "__main__":
    sys.exit(main())
