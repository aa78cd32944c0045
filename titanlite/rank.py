"""Entry point of a rank: `torchrun ... -m titanlite.rank --config FILE [--section.key=value
...]`.
"""

import hashlib
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from titanlite.base.log import logger, setup_logger
from titanlite.base.process import (
    begin_process,
    lean_imports,
    leave,
    read_variable,
    read_world_size,
    set_defaults,
)
from titanlite.launch import protocol


def set_gpu_defaults() -> None:
    """Set environment variables that torch and CUDA read at their start, unless the user has set
    them.
    """
    # With expert parallelism, tensor sizes change in every step, which would fragment the GPU's
    # memory.
    if read_variable("PYTORCH_CUDA_ALLOC_CONF") is None:
        set_defaults({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    # Collectives of several mesh axes overlap; with the default of 8 queues, some would share a
    # queue.
    set_defaults({"CUDA_DEVICE_MAX_CONNECTIONS": "32"})


if __name__ == "__main__":
    protocol.end_with_launcher()
    begin_process(lossy=True)
    set_gpu_defaults()

with lean_imports():
    import torch.distributed as dist

    from titanlite.assemble import assemble, close, explain
    from titanlite.base.agree import is_lost_peer
    from titanlite.base.errors import NOTICE_FOLDER
    from titanlite.base.events import record_event
    from titanlite.config import load_config
    from titanlite.launch.process_group import end_distributed
    from titanlite.preflight import check

_LAUNCHER_WAIT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code. It is 0 after training, or if the
    run was asked to stop and saved; 2 or 3 for a `TitanliteError`; else 1.

    Collective: every rank must call.
    """
    setup_logger()
    code = 0
    job = None
    try:
        protocol.catch_signals()
        protocol.start_heartbeat()
        job = load_config(sys.argv[1:] if argv is None else argv)
        checked = check(job, read_world_size())
        job = checked.job
        if job.job.description:
            logger.info("job: %s", job.job.description)
        trainer = assemble(checked)
        trainer.train()
        if trainer.stopping and not job.checkpoint.enable:
            code = 128 + signal.SIGTERM  # the progress since the last checkpoint is lost
    except Exception as error:  # noqa: BLE001 - `_fail` raises or reports it
        refusal = explain(error, job)
        if refusal is None:
            _fail(error)
        # The first rank of this machine that has this error prints it. Ranks agree on that through
        # their launcher; without a launcher, all of them print it.
        if protocol.claim(hashlib.sha256(str(refusal).encode()).hexdigest()):
            print(f"titanlite: error: {refusal}", file=sys.stderr, flush=True)
        _record_error(str(refusal))
        code = refusal.exit_code
    # Do not do this after an error: it would wait until the collectives of other ranks time out.
    if code == 0 and dist.is_initialized():
        end_distributed()
    close(code)
    return code


def _fail(error: Exception) -> NoReturn:
    """End this rank. Only the first rank that fails prints a traceback, because the others fail for
    the same cause.
    """
    lost_peer = is_lost_peer(error)
    _record_error(
        "lost another rank; the console says why"
        if lost_peer
        else f"{type(error).__name__}: {error}"
    )
    if read_variable(NOTICE_FOLDER) is None:
        close(1)
        raise error
    if lost_peer:
        # Another rank ended or hangs. The launcher names it and ends this rank, before the
        # traceback of a waiting collective can bury that line.
        protocol.note_lost_peer(error)
        close(1)
        time.sleep(_LAUNCHER_WAIT_S)
    if protocol.claim("traceback"):
        beat = protocol.current_beat()
        where = f"in step {beat.step} ({beat.phase})" if beat.step else f"while {beat.phase}"
        text = "".join(traceback.format_exception(error))
        print(
            f"titanlite: rank {beat.rank} failed {where}:\n{text}",
            file=sys.stderr,
            end="",
            flush=True,
        )
    close(1)
    leave(1, at_once=True)


def _record_error(text: str) -> None:
    """Record the error in the run's events. Rank 0 writes; errors of other ranks appear only on the
    console.
    """
    record_event("error", text.partition(". ")[0], protocol.steps_done())


if __name__ == "__main__":
    exit_code = main()
    leave(exit_code, at_once=exit_code != 0)
