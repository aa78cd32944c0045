"""Describe a model of transformers on the meta device, with a source for each of its tensors.

transformers draws parameters and computes buffers in constructors, and then per module in
`_init_weights`. A `Recording` notes these calls. A parameter that one call draws gets a recipe; any
other that calls write completely gets a `Replay` of them on the CPU. Buffers are small, so they are
computed. A tensor that no call writes has no source, and the plan fails with its name.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from titanlite.base.errors import ConfigError
from titanlite.base.hf_objects import build_from_config
from titanlite.base.log import logger
from titanlite.base.text import describe_error
from titanlite.config.model import TransformersConfig
from titanlite.features.transformers.model import TransformersModel
from titanlite.features.transformers.recording import (
    UNWRITTEN,
    Call,
    Recording,
    Replay,
    View,
    leaves,
)
from titanlite.materialize import (
    Alias,
    Compute,
    Constant,
    Init,
    Normal,
    Recipe,
    Source,
    TruncatedNormal,
    Uniform,
)
from titanlite.models.families.config_json import load_config_and_class
from titanlite.models.families.keys import MOST_PARAMETERS


def build_transformers(
    config: TransformersConfig, dtype: torch.dtype = torch.float32
) -> TransformersModel:
    """Build the model on the meta device; parameters in `dtype`, buffers in the dtypes of
    `from_pretrained`.

    Raises ConfigError: transformers refuses the configuration.
    """
    from transformers.initialization import no_tie_weights

    hf_config, cls = load_config_and_class(config.hf, config.family)
    recording = Recording()
    try:
        with torch.device("meta"), _quiet(), recording.active(), no_tie_weights():
            model: Any = build_from_config(cls, hf_config, dtype)
            _move_to_meta(model)
            _keep_in_float32(model, dtype)
    except Exception as error:  # noqa: BLE001 - its classes divide by sizes, and multiply them
        text = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"model: transformers cannot build {config.architecture}: {type(error).__name__}: "
            f"{text}"
        ) from None
    if (total := sum(param.numel() for param in model.parameters())) > MOST_PARAMETERS:
        raise ConfigError(
            f"model: {config.architecture} would have {total:.3g} parameters, more than "
            f"{MOST_PARAMETERS:.3g}. Correct the sizes in its config.json."
        )
    sources = find_sources(model, recording)
    model.tie_weights(recompute_mapping=False)
    return TransformersModel(model, config, sources)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which logs remarks on generation settings each time a model is
    built.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Give tensors that `from_pretrained` keeps in float32 that dtype; `_from_config` does not."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    kept = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in plan))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if kept.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32)


@torch.no_grad()
def _move_to_meta(model: Any) -> None:
    """Move what constructors made elsewhere: legacy ones, such as `torch.FloatTensor`, know no
    device context.
    """
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for held in (
        held for module in model.modules() for held in (module._parameters, module._buffers)
    ):
        for name, tensor in held.items():
            if tensor is not None and not tensor.is_meta:
                new, is_param = tensor.to("meta"), isinstance(tensor, torch.nn.Parameter)
                moved.setdefault(
                    tensor, torch.nn.Parameter(new, tensor.requires_grad) if is_param else new
                )
                held[name] = moved[tensor]


def find_sources(model: Any, recording: Recording) -> dict[str, Source]:
    """Return a source for every tensor of the transformers `model` that its own code determines.

    Parameters get layout-invariant `Init` recipes of the distributions that transformers uses, or a
    `Replay`; buffers a `Compute` with the values of `from_pretrained`, bit for bit; ties, from
    `_tied_weights_keys`, an `Alias`.

    Args:
        model: a `PreTrainedModel` on meta, not yet sharded: `_init_weights` looks at class names,
            which sharding changes. Not yet tied either: transformers draws before it ties.
        recording: of its construction.
    """
    failed: dict[nn.Module, str] = {}
    with recording.active(), torch.no_grad():
        for module, initialize in _initializers(model):
            try:
                initialize(module)
            except Exception as error:  # noqa: BLE001 - of any class; one that asks for values
                failed.setdefault(module, f"{describe_error(error)}")
    for module, text in failed.items():
        logger.warning(
            "%s cannot be initialized on the meta device: %s", type(module).__name__, text
        )
    unknown = {tensor for module in failed for tensor in (*module.parameters(), *module.buffers())}
    sources: dict[str, Source] = {}
    for kind, tensors in ((True, model.named_parameters()), (False, model.named_buffers())):
        for name, tensor in tensors:
            if tensor not in unknown and tensor.is_meta:
                source = _source_of(name, recording.trace(tensor), may_draw=kind)
                if source is not None:
                    sources[name] = source
    return sources | {name: Alias(target) for name, target in model.all_tied_weights_keys.items()}


def _source_of(name: str, replay: Replay, *, may_draw: bool) -> Source | None:
    """Return a recipe, a value that ignores the seed, or a replay of the calls; None if they leave
    some unwritten.
    """
    if all(call.name in UNWRITTEN for call in replay.calls):
        return None
    if may_draw and (recipe := _recipe_of(replay)) is not None:
        return Init(recipe)
    if may_draw and not replay.is_small():
        return Init(replay)
    try:
        values = [replay.compute(seed, filling=None if may_draw else seed) for seed in (0, 1)]
    except Exception as error:  # noqa: BLE001 - calls of any kind
        logger.warning("%s: its initialization by transformers cannot be repeated: %s", name, error)
        return None
    if torch.equal(*values):
        return Compute(_value(values[0].clone()), dtype=None if may_draw else values[0].dtype)
    return (
        Init(replay)
        if may_draw and not any(bool(value.isnan().any()) for value in values)
        else None
    )


def _recipe_of(replay: Replay) -> Recipe | None:
    """Return the recipe of one call that draws all of a parameter, and perhaps of a second that
    makes a row zero.
    """
    call, whole = replay.calls[0], replay.view
    written = call.results if call.target is None else call.target
    scaled = _SCALED.get(call.name)
    make = (
        _MADE.get(call.name)
        if call.target is None
        else partial(scaled, whole)
        if scaled
        else _DRAWN.get(call.name)
    )
    if len(replay.calls) > 2 or make is None or written != whole or not whole.is_whole:
        return None
    try:
        recipe = (
            None
            if leaves((call.args[1:], call.kwargs), View)
            else make(*call.args[1:], **call.kwargs)
        )
    except (TypeError, IndexError):  # arguments of another kind, such as `Tensor.uniform_(to=...)`
        return None
    if recipe is None or len(replay.calls) == 1:
        return recipe
    row = _zero_row(whole, replay.calls[1])
    return None if row is None else replace(recipe, zero_row=row)


def _zero_row(whole: View, call: Call) -> int | None:
    """Return the row of a parameter that a call makes zero: an embedding's padding."""
    row = call.target
    value = {"zeros_": 0, "zero_": 0}.get(
        call.name, call.args[1] if call.name in ("fill_", "constant_") else None
    )
    if value != 0 or row is None or row.shape != whole.shape[1:] or row.stride != whole.stride[1:]:
        return None
    return (row.offset - whole.offset) // whole.stride[0]


def _value(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    def give() -> torch.Tensor:
        return value

    give.__name__ = "as transformers does"  # for the plan
    return give


def _initializers(model: Any) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Yield every module once, with `_init_weights` of the nearest model around it, children first
    as transformers.
    """
    from transformers import PreTrainedModel

    seen: set[nn.Module] = set()

    def walk(module: nn.Module, initialize: Any) -> Iterator[tuple[nn.Module, Any]]:
        for child in module.children():
            yield from walk(
                child, child._init_weights if isinstance(child, PreTrainedModel) else initialize
            )
        if module not in seen:
            seen.add(module)
            yield module, initialize

    yield from walk(model, model._init_weights)


# --- recipes


def _truncated(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Recipe | None:
    # torch cuts at the values a and b, the recipe at multiples of std.
    if std <= 0 or abs((mean - a) - (b - mean)) > 1e-12:
        return None
    if b - mean > 8 * std:  # cuts off nothing
        return Normal(mean=mean, std=std)
    return TruncatedNormal(mean=mean, std=std, bound=(b - mean) / std)


def _fans(view: View) -> dict[str, int]:
    inner = math.prod(view.shape[2:])
    return {"fan_in": view.shape[1] * inner, "fan_out": view.shape[0] * inner}


def _uniform(std: float) -> Recipe:
    return Uniform(low=-math.sqrt(3.0) * std, high=math.sqrt(3.0) * std)


def _xavier(
    kind: Callable[..., Recipe], view: View, gain: float = 1.0, generator: Any = None
) -> Recipe:
    return kind(std=gain * math.sqrt(2.0 / sum(_fans(view).values())))


def _kaiming(
    kind: Any,
    view: View,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: Any = None,
) -> Recipe:
    return kind(std=nn.init.calculate_gain(nonlinearity, a) / math.sqrt(_fans(view)[mode]))


def _lecun(view: View) -> Recipe | None:
    # transformers makes up for a cut at two standard deviations, and then cuts at the values -2 and
    # 2.
    return _truncated(std=math.sqrt(1.0 / _fans(view)["fan_in"]) / 0.87962566103423978)


def _constant(value: float) -> Callable[..., Recipe]:
    return lambda *args, **kwargs: Constant(value=value)


# Recipes by the name of a function that writes to a parameter, and of one that makes it. What else
# draws is replayed.
_DRAWN: dict[str, Callable[..., Recipe | None]] = {
    "normal_": lambda mean=0.0, std=1.0, generator=None: Normal(mean=mean, std=std),
    "uniform_": lambda a=0.0, b=1.0, generator=None: Uniform(low=a, high=b),
    "constant_": lambda val: Constant(value=float(val)),
    "fill_": lambda value: Constant(value=float(value)),
    "zeros_": _constant(0.0),
    "zero_": _constant(0.0),
    "ones_": _constant(1.0),
    "trunc_normal_": _truncated,
}
# Those whose deviation follows from the shape.
_SCALED: dict[str, Callable[..., Recipe | None]] = {
    "xavier_uniform_": partial(_xavier, _uniform),
    "xavier_normal_": partial(_xavier, Normal),
    "kaiming_uniform_": partial(_kaiming, _uniform),
    "kaiming_normal_": partial(_kaiming, Normal),
    "lecun_normal_": _lecun,
    "default_flax_embed_init_": lambda view: Normal(std=math.sqrt(1.0 / _fans(view)["fan_in"])),
}
_MADE = {"zeros": _constant(0.0), "ones": _constant(1.0)}
