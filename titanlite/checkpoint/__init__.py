"""Checkpoints: Hugging Face folders in and out, and the state of a run beside them."""

from titanlite.checkpoint.commit import find_complete_before, set_aside_from
from titanlite.checkpoint.train_state import Progress, Rewind, find_progress, save_rewinds

__all__ = [
    "Progress",
    "Rewind",
    "find_complete_before",
    "find_progress",
    "save_rewinds",
    "set_aside_from",
]
