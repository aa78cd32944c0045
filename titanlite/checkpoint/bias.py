"""The router's selection bias in a checkpoint: what is said if it is absent, or has lost its
digits.

With zeros in its place a model trains without an error, and sends tokens to other experts.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.base.agree import get_rank, on_first_rank
from titanlite.base.log import logger, warn_once
from titanlite.base.text import list_names
from titanlite.checkpoint.folder import Stored, shown
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.materialize import ReadRequest, Unfit

# Last parts of its name: in classes of transformers, and in the native decoder.
_LEAVES = ("e_score_correction_bias", "expert_bias")
_NUMBER = re.compile(r"\.(\d+)\.")


def is_bias(name: str) -> bool:
    """Return True if `name` ends as a selection bias does."""
    return name.rpartition(".")[2] in _LEAVES


def _fold(names: Sequence[str]) -> str:
    """Return the patterns of `names`, such as `model.layers.*.mlp.gate.expert_bias (layers 3,
    4)`.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        number = _NUMBER.search(name)
        groups.setdefault(_NUMBER.sub(".*.", name), []).append(number[1] if number else "")
    return shown(
        "; ".join(f"{pattern} (layers {list_names(layers)})" for pattern, layers in groups.items())
    )


def judge_absent_biases(
    where: str, absent: Sequence[str], total: int, *, allowed: bool
) -> list[tuple[str, Unfit]]:
    """Return why a checkpoint is refused that lacks `absent` of the model's `total` biases; warn if
    it is `allowed`.
    """
    if not absent:
        return []
    lacks = f"{where} lacks {len(absent)} of {total} expert biases"
    if allowed:
        warn_once(f"{lacks}, which begin with zeros: {_fold(absent)}")
        return []
    remedy = (
        "Copy the checkpoint again, or begin with zeros: checkpoint.allow_missing_expert_bias = "
        "true."
    )
    return [
        (
            _fold(absent),
            Unfit(f"missing, {lacks}, without which routers choose other experts. {remedy}"),
        )
    ]


class _Collapse(NamedTuple):
    """Few values for many experts: their number, and the range that they are in."""

    distinct: int
    experts: int
    low: float
    high: float


def warn_of_collapsed_bias(folder: Path, stored: Stored) -> None:
    """Warn on rank 0 of biases that were rounded to two bytes until experts share their values.

    Raises CheckpointError: on all ranks; they cannot be read. Collective, if there are any: every
    rank must call.
    """
    biases = [
        t
        for t in stored.tensors.values()
        if is_bias(t.key) and t.dtype in (torch.bfloat16, torch.float16)
    ]

    def find() -> dict[str, _Collapse]:
        pieces = {tensor.key: whole(tensor.key, tensor.shape) for tensor in biases}
        placed = {t.key: (t.shape, [Placed(t, pieces[t.key].region)]) for t in biases}
        values = {t.key: torch.empty(t.shape, dtype=t.dtype) for t in biases}
        requests = [ReadRequest(key, pieces[key].region, value) for key, value in values.items()]
        SafetensorsReader(str(folder), placed, stored.file_bytes).read_quietly(requests)
        found = {key: _find_collapse(value) for key, value in values.items()}
        return {key: collapse for key, collapse in found.items() if collapse is not None}

    found = on_first_rank(find) if biases else {}
    if found and get_rank() == 0:
        worst = min(found.values())
        dtype = str(biases[0].dtype).removeprefix("torch.")
        logger.warning(
            "checkpoint %s: %d of %d expert biases were rounded until experts share their values: "
            "only %d distinct values of %d experts between %g and %g in %s (%s). Routers choose "
            "other experts than before the rounding. Take a checkpoint that has them in float32.",
            *(
                folder,
                len(found),
                len(biases),
                worst.distinct,
                worst.experts,
                worst.low,
                worst.high,
                dtype,
            ),
            _fold(list(found)),
        )


def _find_collapse(values: torch.Tensor) -> _Collapse | None:
    """Return what is left of the bias (E,), in two bytes, if at most half of the experts have a
    value of their own.

    Between the smallest and the largest the dtype must also have few values: a bias that training
    moves in equal steps has few at first, too, with many between them.
    """
    bits = values.flatten().view(torch.int16).int()
    # consecutive numbers of the values that the dtype has
    steps = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    distinct, experts = len(steps.unique()), len(steps)
    if not values.any() or 2 * distinct > experts or int(steps.max() - steps.min()) > 2 * experts:
        return None
    return _Collapse(distinct, experts, float(values.min()), float(values.max()))
