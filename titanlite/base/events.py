"""The events of a run: one line for each, in events.jsonl in the run's folder."""

import json
import time
from pathlib import Path

from titanlite.base.agree import get_rank
from titanlite.base.files import AppendedFile
from titanlite.base.log import logger

EVENTS_FILE = "events.jsonl"
_state: dict[str, AppendedFile] = {}


def open_events(dump_folder: Path | None) -> None:
    """Make `record_event` write into `dump_folder`, which exists; None: write nothing. A resumed
    run appends.
    """
    _state.clear()
    if dump_folder is not None:
        _state["file"] = AppendedFile(dump_folder / EVENTS_FILE)


def record_event(kind: str, text: str, step: int) -> None:
    """Append one event on rank 0; other ranks, and processes without an open run, write nothing.

    `kind` is the kind of event in one word ("start", "save", "skip", "error", ...), and `text` is a
    sentence for the user. If the file cannot be written, there is only a warning, because an event
    often precedes a worse error. The next event writes both.
    """
    file = _state.get("file")
    if get_rank() or file is None:
        return
    event = {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text}
    try:
        file.append((json.dumps(event) + "\n").encode("ascii"))
    except OSError as error:
        why = error.strerror or error
        logger.warning(f"metrics: cannot write {file.path}: {why}. The event was: {text}")
