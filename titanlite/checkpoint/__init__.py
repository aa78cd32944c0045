"""Checkpoints: Hugging Face folders in and out, with the state of a run in them."""

from titanlite.checkpoint.train_state import Progress
