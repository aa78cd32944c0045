"""Native models: one config-driven decoder (`decoder.py`, `moe.py`) and one file per family
(`families/`).

Kept free of imports: `titanlite.models.families` serves the preflight check, which must not wait
for torch.
"""
