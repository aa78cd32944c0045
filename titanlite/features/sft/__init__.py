"""Supervised fine-tuning: rows of examples, chat templates, packing."""
