"""Checkpoints: a trained model is a Hugging Face folder."""

from titanlite.checkpoint.export import save_hf_model

__all__ = ["save_hf_model"]
