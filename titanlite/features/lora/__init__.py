"""LoRA adapters (arXiv:2106.09685): layers, files in PEFT's format, merging, and quantized frozen
weights.
"""
