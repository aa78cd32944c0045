"""Checkpoints: Hugging Face folders in and out, and the state of a run beside them."""

from titanlite.checkpoint.commit import find_complete_before, set_aside_from
from titanlite.checkpoint.description import describe_versions
from titanlite.checkpoint.hf_model import save_hf_model
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.pretrained import HFCheckpoint, hf_checkpoint
from titanlite.checkpoint.space import check_space
from titanlite.checkpoint.train_state import Progress, Rewind, find_progress, save_rewinds
from titanlite.features.tools.hub import push_to_hub

__all__ = [
    "Checkpointer",
    "HFCheckpoint",
    "Progress",
    "Rewind",
    "check_space",
    "describe_versions",
    "find_complete_before",
    "find_progress",
    "hf_checkpoint",
    "push_to_hub",
    "save_hf_model",
    "save_rewinds",
    "set_aside_from",
]
