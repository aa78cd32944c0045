"""Checkpoints: Hugging Face folders that are read and written, and the training state inside
them.
"""

from titanlite.checkpoint.train_state import Progress
