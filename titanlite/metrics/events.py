"""`events.jsonl`: what happened to a run beside its steps, such as resumes, saves and skipped steps, one line each."""

import json
import time
from pathlib import Path

from titanlite.base.agree import get_rank
from titanlite.base.files import AppendedFile
from titanlite.base.log import logger

FILE_NAME = "events.jsonl"
_state: dict[str, AppendedFile] = {}


def open_events(dump_folder: Path | None) -> None:
    """Let `record_event` write into `dump_folder`, which exists; None: nowhere. A resumed run appends."""
    _state.clear()
    if dump_folder is not None:
        _state["file"] = AppendedFile(dump_folder / FILE_NAME)


def record_event(kind: str, text: str, step: int) -> None:
    """Append one event on rank 0; other ranks, and a process without an open run, write nothing.

    A line is `{"time": Unix seconds, "step": step, "kind": kind, "text": text}`. A file that cannot be written is a
    warning, for an event often goes before a worse error, which must not be replaced; the next event brings it along.

    Args:
        kind: one word for events alike: "start", "resume", "restart", "save", "skip", "stop", "end",
            "error", ...
        text: one sentence for people.
        step: optimizer steps done at that time.
    """
    file = _state.get("file")
    if get_rank() or file is None:
        return
    event = {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text}
    try:
        file.append((json.dumps(event) + "\n").encode("ascii"))
    except OSError as error:
        logger.warning("metrics: cannot write %s: %s. The event was: %s", file.path, error.strerror or error, text)
