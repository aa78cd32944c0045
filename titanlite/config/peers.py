"""Names in other trainers, and what they are here: of settings, for the message about an unknown key, and of dtypes."""

import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES, CHOICES = (
    {name: here for here, names in _TABLES[kind].items() for name in names.split()} for kind in ("settings", "values")
)
VALUES = _TABLES["sections"]
# Values that are others here, by setting: as in PEFT.
SAME = {("lora.targets", "all-linear"): ""}


def spell_dtype(text: str) -> str:
    """`bfloat16` for `bf16` or `torch.bfloat16`, and so on; other texts in small letters."""
    name = text.lower().removeprefix("torch.")
    return {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name, name)
