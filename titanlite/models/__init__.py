"""Native models: one config-driven decoder (`decoder.py`, `moe.py`) and one file per family
(`families/`).

This file imports nothing: the preflight check uses `titanlite.models.families`, and must not wait
for the import of torch.
"""
