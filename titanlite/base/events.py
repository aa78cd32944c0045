"""The events of a run: one line each in events.jsonl in its folder."""

import json
import time
from pathlib import Path

from titanlite.base.agree import get_rank
from titanlite.base.files import AppendedFile
from titanlite.base.log import logger

EVENTS_FILE = "events.jsonl"
_state: dict[str, AppendedFile] = {}


def open_events(dump_folder: Path | None) -> None:
    """Make `record_event` write into `dump_folder`, which exists; None: nowhere. A resumed run
    appends.
    """
    _state.clear()
    if dump_folder is not None:
        _state["file"] = AppendedFile(dump_folder / EVENTS_FILE)


def record_event(kind: str, text: str, step: int) -> None:
    """Append one event on rank 0; other ranks, and a process without an open run, write nothing.

    `kind` is a word for events alike ("start", "save", "skip", "error", ...), `text` a sentence for
    people. A file that cannot be written is a warning, because an event often precedes a worse
    error.
    """
    file = _state.get("file")
    if get_rank() or file is None:
        return
    event = {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text}
    try:
        file.append((json.dumps(event) + "\n").encode("ascii"))
    except OSError as error:
        logger.warning(
            "metrics: cannot write %s: %s. The event was: %s",
            file.path,
            error.strerror or error,
            text,
        )
