"""Start the ranks with torchrun's launcher, and report a failed run in one line instead of two
tracebacks.

At the first SIGTERM or SIGINT the ranks finish their step, save and end; a second signal ends them
at once. With `--max-restarts=N`, ranks that died or hang are restarted and resume, except after
errors that would occur again.

`python -m titanlite.launch [torchrun options] -m titanlite.rank ...` takes torchrun's arguments
unchanged.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from titanlite.base.process import begin_process, lean_imports, leave

if __name__ == "__main__":
    begin_process(lossy=True)

with lean_imports():
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import api as rendezvous_api
    from torch.distributed.launcher import api
    from torch.distributed.run import parse_args, run

    from titanlite.base.errors import NEVER_RESTARTED, NOTICE_FOLDER, RENDEZVOUS
    from titanlite.launch.guard import Agent, Guard, describe_resume
    from titanlite.launch.protocol import (
        STOP_SIGNALS,
        TORCH_LOGS,
        read_beats,
        request_stop,
        say,
        shared_folder,
    )
    from titanlite.launch.rendezvous import (
        RENDEZVOUS_ERRORS,
        STORE_FILE,
        describe_failure,
        find_free_port,
        prepare_rendezvous,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; return the exit code of the rank that failed first, 128 + N if signal N ended
    it, else 0.

    The exit code is 1 if the machines of the run did not meet or lost each other.
    """
    # torchrun logs each rank that it ends after a failure or a signal; the lines below report it
    # once.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each logger has its own level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # torchrun would end the ranks at the first signal; SIGTERM and SIGINT are left to the handler
    # below.
    options = parse_args(
        ["--signals-to-handle=SIGHUP,SIGQUIT", *(sys.argv[1:] if argv is None else argv)]
    )
    guard: Guard | None = None
    resume = ""
    try:
        with shared_folder() as folder:
            os.environ[NOTICE_FOLDER] = folder
            # without it, torchrun creates a new folder in /tmp at each start
            options.log_dir = options.log_dir or str(Path(folder, TORCH_LOGS))
            # Each start of the ranks gets its own store. torch 2.13 would pass on the keys of the
            # previous start, with addresses of ended ranks; and ranks of a machine that had rank 0
            # would get an older store.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            # torch would choose a port that any connection may take in the seconds before rank 0
            # opens it.
            rendezvous_api.get_free_port = find_free_port  # type: ignore[attr-defined]
            guard = Guard(folder)
            api.LocalElasticAgent = partial(Agent, guard, folder)  # type: ignore[misc]  what `run` makes its agent with
            for number in STOP_SIGNALS:
                signal.signal(number, partial(_stop, folder))
            for name in (STORE_FILE, RENDEZVOUS):  # inherited, if a run started this one
                os.environ.pop(name, None)
            try:
                run(prepare_rendezvous(options))
            finally:
                resume = describe_resume(folder)
    except ChildFailedError:
        if guard is None or (failure := guard.failure) is None:
            raise
        text = "" if failure.said else f"{failure.text}; all ranks were stopped."
        text += "" if failure.code in NEVER_RESTARTED else resume
        if text:
            say(text.strip())
        return failure.code
    except SignalException as stopped:
        say(f"stopped by {stopped.sigval.name}, with all ranks.{resume}")
        return 128 + stopped.sigval
    except RENDEZVOUS_ERRORS as error:
        say(f"error: {describe_failure(error, options)}{resume}")
        return 1
    return 0


def _stop(folder: str, number: int, frame: FrameType | None) -> None:
    """Ask the ranks to stop at the first signal; end them at the second, or if no rank has begun to
    train.
    """
    name = signal.Signals(number)
    trains = any(beat.trains for beat in read_beats(folder).values())
    if not request_stop(folder) or not trains:
        request_stop(folder)
        raise SignalException(name.name, sigval=name)
    text = (
        f"titanlite: {name.name}: finishing this step and saving; send it again to end at once.\n"
    )
    # The terminal's current line may show a progress bar.
    sys.stderr.write("\n" * sys.stderr.isatty() + text)


if __name__ == "__main__":
    leave(main())
