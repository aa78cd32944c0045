"""One logger for the package. Rank 0 speaks; other ranks speak only from WARNING up, with their rank in front."""

import logging
import os
import sys

logger = logging.getLogger("titanlite")


class _RankFormatter(logging.Formatter):
    """`12:30:01 text` on rank 0, `12:30:01 [rank 3] WARNING text` elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        rank = int(os.environ.get("RANK", "0"))
        parts = [self.formatTime(record, "%H:%M:%S")]
        if rank:
            parts.append(f"[rank {rank}]")
        if record.levelno >= logging.WARNING:
            parts.append(record.levelname)
        return " ".join([*parts, record.getMessage()])


def setup_logger() -> None:
    """Send the package's log lines to standard output; call once per process, later calls change nothing."""
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    logger.propagate = False
