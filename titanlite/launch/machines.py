"""What a run of several machines needs: settings and a folder that are alike, and patience while each prepares data."""

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from titanlite.base.agree import failing_together, new_host_group, raise_together
from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.config.settings import get_sections_of, get_value

# These may lie elsewhere on each machine, with the same in them: a model of the hub is in each machine's cache. Whether
# the run's folder is the same, `check_shared_folder` finds out.
_MAY_DIFFER = {
    *("job.dump_folder", "model.path", "model.hf_assets_path", "checkpoint.initial_load_path", "lora.init_from"),
    *("data.path", "data.validation_path", "data.tokenizer_path", "data.cache_folder", "data.chat_template"),
    "evaluation.path",
}
# A network file system may show a new file to other machines only when its cache of the folder has expired.
_VISIBLE_WITHIN_S = 30.0
_PAUSE_S = 0.1
_PREPARING = timedelta(days=1)


def check_same_settings(job: JobConfig) -> None:
    """Check that all ranks have the same settings: otherwise they would wait in different collectives.

    Raises ConfigError: on all ranks; names the settings and the ranks. Collective: every rank must call.
    """
    keys = [setting.key for settings in get_sections_of(job).values() for setting in settings]
    mine = {key: get_value(job, key) for key in keys if re.sub(r"\.sources\.\w+", "", key) not in _MAY_DIFFER}
    first = [mine]
    dist.broadcast_object_list(first, src=0)
    problems = [
        f"{key} = {mine.get(key)!r} on {socket.gethostname()}, {first[0].get(key)!r} on rank 0. Start every machine "
        "with the same files and arguments."
        for key in {**mine, **first[0]}
        if mine.get(key) != first[0].get(key)
    ]
    raise_together(ConfigError, "configuration", problems)


def check_shared_folder(folder: Path) -> None:
    """Check that all ranks see the same `folder` and can write there: each writes its part of every checkpoint.

    Rank 0 puts a file there for a moment. On one machine there is nothing to check.

    Raises ConfigError: on all ranks; names the ranks that do not. Collective: every rank must call.
    """
    if not _are_several():
        return
    found = [f".machines-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(found, src=0)
    token = folder / found[0]
    problems = []
    if dist.get_rank() == 0:
        token.touch()
    if not _appears(token):
        problems.append(
            f"{folder.absolute()} on {socket.gethostname()} is not the folder that rank 0 has: a file that rank 0 has "
            "written is not there. Put the folder on a file system that all machines share."
        )
    elif not os.access(folder, os.W_OK):
        problems.append(
            f"{folder.absolute()} cannot be written to on {socket.gethostname()}, and each rank writes its part of a "
            "checkpoint. Mount it for writing there, with the same user."
        )
    try:
        raise_together(ConfigError, "job.dump_folder", problems)
    finally:
        if dist.get_rank() == 0:
            token.unlink(missing_ok=True)


@contextmanager
def waiting_for_machines() -> Iterator[None]:
    """Give each machine its own time for what is inside: at the end all wait for the last, whatever `comm` says.

    One may have the data in its cache where another, that took the place of a lost one, has hours of work to do.

    Raises TitanliteError: on all ranks; that of the first rank that raises one inside. Collectives: one gather at the
    end, with several machines over a group made for it; every rank must call, and the body must have none.
    """
    group = new_host_group(_PREPARING) if _are_several() else None
    with failing_together(group):
        yield
    if group is not None:
        dist.destroy_process_group(group)


def _are_several() -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) != dist.get_world_size()


def _appears(path: Path) -> bool:
    end = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        with suppress(OSError):  # rank 0 has made the folder just now
            if path.name in os.listdir(path.parent):  # asks the server, where a look-up may be answered from a cache
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
