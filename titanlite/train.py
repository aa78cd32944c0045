"""Entry point of a rank: `torchrun ... -m titanlite.train --config FILE [--section.key=value ...]`."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from titanlite import stop
from titanlite.config import load_config
from titanlite.errors import NOTICE_FOLDER, TitanliteError
from titanlite.logger import setup_logger
from titanlite.preflight import check
from titanlite.trainer import Trainer

_LAUNCHER_WAIT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code: 0, or 2 after a `TitanliteError`.

    A run that was asked to stop ends with 0 too, if it could save.
    """
    setup_logger()
    code = 0
    try:
        stop.install()
        checked = check(load_config(sys.argv[1:] if argv is None else argv), int(os.environ.get("WORLD_SIZE", "1")))
        trainer = Trainer(checked.job, checked.model_config, checked.degrees)
        trainer.train()
        if trainer.stopping and not checked.job.checkpoint.enable:
            code = 128 + signal.SIGTERM  # what was trained is lost
    except TitanliteError as error:
        _say_once(f"titanlite: error: {error}")
        code = 2
    except RuntimeError as error:
        if NOTICE_FOLDER in os.environ and _is_lost_peer(error):
            # Another rank is gone, and the launcher says which. It ends this one before a traceback of the collective
            # that was waiting would bury that line.
            time.sleep(_LAUNCHER_WAIT_S)
            if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
                _end_without_machine(error)
        raise
    # Not after other exceptions: with collectives in flight it would wait for their timeout before the traceback shows.
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def _end_without_machine(error: RuntimeError) -> NoReturn:
    """No rank of this machine was to blame: say once that another machine is gone, and let the launcher start anew."""
    _say_once(
        f"titanlite: error: a rank on another machine has ended or cannot be reached any more: {str(error).strip()} "
        "The output of that machine says why. With MAX_RESTARTS the run goes on from its newest checkpoint."
    )
    os._exit(1)  # ending in order would wait for collectives in which that rank is missing


def _is_lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _say_once(message: str) -> None:
    """Print `message` on the first rank of this machine that has it; the others have nothing to add.

    The launcher's notice folder is where the ranks agree; without one, every rank prints.
    """
    folder = os.environ.get(NOTICE_FOLDER)
    if folder is not None:
        digest = hashlib.sha256(message.encode()).hexdigest()
        try:
            os.close(os.open(Path(folder, digest), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        except OSError:
            pass  # better said twice than not at all
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
