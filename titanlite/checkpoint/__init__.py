"""Checkpoints: Hugging Face folders in and out, and the state of a run beside them."""

from titanlite.checkpoint.hf_model import save_hf_model
from titanlite.checkpoint.hub import push_to_hub
from titanlite.checkpoint.manager import Checkpointer, describe_versions
from titanlite.checkpoint.pretrained import HFCheckpoint, hf_checkpoint
from titanlite.checkpoint.train_state import Progress

__all__ = [
    "Checkpointer",
    "HFCheckpoint",
    "Progress",
    "describe_versions",
    "hf_checkpoint",
    "push_to_hub",
    "save_hf_model",
]
