"""Checkpoints: Hugging Face folders in and out, and the state of a run beside them."""

from titanlite.checkpoint.commit import find_complete_before
from titanlite.checkpoint.train_state import Progress
