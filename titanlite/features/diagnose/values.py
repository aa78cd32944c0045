"""Search for the origin of a loss or gradient that is NaN or infinite."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from titanlite.base.agree import gather_objects
from titanlite.base.text import list_names
from titanlite.data.dataset import Batch
from titanlite.materialize.layout import encoding_of, local_of
from titanlite.optim.optimizer import Diagnosis

_SHOWN = 3


@dataclass
class _Found:
    """Findings of one rank."""

    stage: int  # of the pipeline
    weights: list[str]  # names of weights with values that are not finite
    # For each micro-batch with an output that is not finite: number of the micro-batch, position of
    # the first such output in the order of the forward, and its module.
    outputs: list[tuple[int, int, str]] = field(default_factory=list)
    # The first micro-batch with gradients that are not finite, and their parameters, each with its
    # position in the model.
    grads: tuple[int, list[tuple[int, str]]] | None = None


def diagnose(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    scaled_loss: Callable[[Batch], torch.Tensor],
    *,
    whole_layers: bool,
    stage: int = 0,
) -> Diagnosis:
    """Compute a step again with the current weights; report the tensors that are not finite, with
    their ranks.

    Gradients are dropped, and no weight changes. The caller must have set all values that depend on
    the step, including random generators.

    Args:
        model: the model with its weights before that step.
        micro_batches: this rank's micro-batches of that step, on the device.
        scaled_loss: returns the loss of a micro-batch, on which backward is called.
        whole_layers: check only the outputs of whole layers, because their insides are compiled.
        stage: this rank's pipeline stage; earlier stages run earlier in the forward.

    Collectives: forward, backward, and one all-gather of small objects; every rank must call.
    """
    params = list(model.named_parameters())
    mine = _Found(stage, [name for name, param in params if not _has_finite_values(param)])
    for number, batch in enumerate(micro_batches):
        with _watched(model, whole_layers) as first:
            loss = scaled_loss(batch)
        if first or not math.isfinite(loss.item()):
            place, name = first[0] if first else (sys.maxsize, "the loss")
            mine.outputs.append((number, place, name))
        loss.backward()
        if mine.grads is None:
            bad = [
                (place, name)
                for place, (name, param) in enumerate(params)
                if param.grad is not None and not _is_finite(param.grad)
            ]
            mine.grads = (number, bad) if bad else None
        model.zero_grad()
    return _describe(gather_objects(mine))


def _describe(gathered: Sequence[_Found]) -> Diagnosis:
    sentences: list[str] = []
    weights = sorted({name for f in gathered for name in f.weights})
    if weights:
        ranks = [rank for rank, f in enumerate(gathered) if f.weights]
        sentences.append(
            f"Weights are not finite: {list_names(weights, most=_SHOWN)}, on ranks "
            f"{list_names(ranks, most=8)}."
        )
    # Attention spreads non-finite values to other ranks: the origin is the first position on any
    # rank.
    outputs = sorted(
        (number, f.stage, place, rank, name)
        for rank, f in enumerate(gathered)
        for number, place, name in f.outputs
    )
    # Later stages received the values from the earliest stage.
    lowest = {number: stage for number, stage, *_ in reversed(outputs)}
    outputs = [found for found in outputs if found[1] == lowest[found[0]]]
    if outputs:
        places = [
            f"{name} (micro-batch {number}, rank {rank})"
            for number, _, _, rank, name in outputs[:_SHOWN]
        ]
        sentences.append(
            f"Computed again, the first output that is not finite is {', '.join(places)}."
        )
    grads = [f.grads for f in gathered if f.grads is not None]
    if grads:
        number = min(number for number, _ in grads)
        closest_to_loss = sorted(
            {param for at, found in grads if at == number for param in found}, reverse=True
        )
        again = "Computed again, g" if not outputs else "G"
        names = list_names((name for _, name in closest_to_loss), most=_SHOWN)
        sentences.append(
            f"{again}radients that are not finite, from micro-batch {number} on: {names}."
        )
    repeats = bool(weights or outputs or grads)
    if not repeats:
        sentences.append("Computed again, the step is finite on all ranks.")
    return Diagnosis(" ".join(sentences), repeats)


def _has_finite_values(param: torch.Tensor) -> bool:
    encoding = encoding_of(param)
    return _is_finite(param) if encoding is None else not encoding.count_not_finite(local_of(param))


def _floating(output: Any) -> Iterator[torch.Tensor]:
    for value in tree_iter(output):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(local_of(tensor).isfinite().all())


@contextmanager
def _watched(model: nn.Module, whole_layers: bool) -> Iterator[list[tuple[int, str]]]:
    """Yield a list that collects the modules with non-finite outputs, in order: the number of
    modules that ended earlier, and the name.
    """
    names: list[tuple[int, str]] = []
    ended = itertools.count()

    def look_at(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            place = next(ended)
            if not all(_is_finite(tensor) for tensor in _floating(output)):
                names.append((place, f"that of {name}" if name else "that of the model"))

        return hook

    layers = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for child in module
    }
    handles = [
        module.register_forward_hook(look_at(name))
        for name, module in model.named_modules()
        if not whole_layers or id(module) in layers
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
