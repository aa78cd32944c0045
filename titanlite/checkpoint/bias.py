"""The router's selection bias in a checkpoint: the errors and warnings if it is absent, or was
rounded too far. With zeros in its place a model trains without an error, but routers choose
different experts.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.log import logger, warn_once
from titanlite.base.text import fold_names
from titanlite.checkpoint.folder import Stored, shown
from titanlite.checkpoint.reader import read_whole
from titanlite.materialize import InvalidClaim

# The last part of the bias's name: in transformers' classes, and in the native decoder.
_LEAVES = ("e_score_correction_bias", "expert_bias")


def is_bias(name: str) -> bool:
    """Return True if the last part of `name` is the name of a selection bias."""
    return name.rpartition(".")[2] in _LEAVES


def judge_absent_biases(
    where: str, absent: Sequence[str], total: int, *, allowed: bool
) -> list[tuple[str, InvalidClaim]]:
    """Return an error for a checkpoint in which `absent` of the model's `total` biases are missing;
    if that is `allowed`, only warn.
    """
    if not absent:
        return []
    missing = f"{where} does not have {len(absent)} of {total} expert biases"
    if allowed:
        warn_once(f"{missing}, which begin with zeros: {fold_names(absent)}")
        return []
    remedy = (
        "Copy the checkpoint again, or begin with zeros: checkpoint.allow_missing_expert_bias = "
        "true."
    )
    return [
        (
            fold_names(absent),
            InvalidClaim(
                f"missing, {missing}; with zeros instead, routers would choose different experts. "
                f"{remedy}"
            ),
        )
    ]


def warn_of_collapsed_bias(folder: Path, stored: Stored) -> None:
    """Warn on rank 0 of biases that have lost so many bits by rounding to two bytes that experts
    share values.

    Raises CheckpointError, on all ranks: the biases cannot be read. Collective, if there are any:
    every rank must call.
    """
    biases = [
        t for t in stored.values() if is_bias(t.key) and t.dtype in (torch.bfloat16, torch.float16)
    ]

    def find() -> list[str]:
        values = read_whole(str(folder), biases)
        return [key for key, value in values.items() if _has_collapsed(value)]

    found = on_first_rank(find) if biases else []
    if found and get_rank() == 0:
        logger.warning(
            "checkpoint %s: %d of %d expert biases were rounded to two bytes until experts share "
            "their values: %s. Routers choose different experts than before the rounding. Take "
            "a checkpoint that has them in float32.",
            folder,
            len(found),
            len(biases),
            shown(fold_names(found)),
        )


def _has_collapsed(values: torch.Tensor) -> bool:
    """Return True if the bias (E,) has at most E / 2 distinct values, close together in its dtype.

    "Close": the dtype has at most 2 E values between the smallest and the largest. A bias that
    training has moved in a few equal steps has few distinct values too, but they are farther apart.
    """
    bits = values.flatten().view(torch.int16).int()
    # consecutive integers for consecutive values of the dtype
    steps = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    experts = len(steps)
    is_spread = int(steps.max() - steps.min()) > 2 * experts
    return bool(values.any()) and 2 * len(steps.unique()) <= experts and not is_spread
