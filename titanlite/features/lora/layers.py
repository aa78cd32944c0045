"""LoRA (arXiv:2106.09685): frozen layers with a trained correction of low rank, `W x + alpha / rank
* B (A x)`.

`apply_lora` replaces layers of a model on meta by the classes below. They hold the same weights
under the same names and add adapters, so the rest of titanlite needs no special case. In a
transformers model it replaces the linear layers inside the repeated layers, and adds parameters to
experts that use transformers' experts interface.

Shapes: R routed rows, E experts, D hidden, I expert width, r rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.text import list_names, split_patterns
from titanlite.config.model import ModelConfig
from titanlite.config.schema import LoRASection
from titanlite.features.transformers.experts import add_correction, use_titanlite_experts
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize.sources import Init, Source, Uniform, Zeros
from titanlite.models.interface import Model
from titanlite.models.layers import Linear, OutputHead
from titanlite.models.moe import Experts
from titanlite.ops import local_tensor


def _is_match(pattern: str, name: str) -> bool:
    """Return True if `pattern` matches the dotted `name` completely or from the start of a segment
    to the end.

    So `q_proj` and `self_attn.q_proj` match `model.layers.0.self_attn.q_proj`, as in PEFT's
    target_modules.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def scaling_of(section: LoRASection) -> float:
    """Return the factor on `B A`: alpha / rank, or alpha / sqrt(rank) (arXiv:2312.03732)."""
    return section.alpha / (section.rank**0.5 if section.use_rslora else section.rank)


def _add_adapter(
    module: Any, prefix: str, weight: torch.Tensor, section: LoRASection, dtype: torch.dtype
) -> dict[str, Source]:
    """Add the adapter of `weight`, (out, in) or (E, out, in), to `module`; return its sources.

    The adapter is `lora_A` (r, in) and `lora_B` (out, r) with this prefix; for experts, both have
    a leading dim E. A is uniform within 1 / sqrt(in), which is PEFT's Kaiming initialization with
    a = sqrt(5). B is zero, so that training starts from W. `dropout` applies to the input of the
    adapter in training mode.
    """
    *experts, out_features, in_features = weight.shape
    shapes = {
        "lora_A": (*experts, section.rank, in_features),
        "lora_B": (*experts, out_features, section.rank),
    }
    for matrix, shape in shapes.items():
        values = torch.empty(shape, dtype=dtype, device=weight.device)
        setattr(module, f"{prefix}{matrix}", nn.Parameter(values))
    module.scaling = scaling_of(section)
    module.dropout = section.dropout
    module.adapter_enabled = True
    bound = in_features**-0.5
    return {
        f"{prefix}lora_A": Init(Uniform(low=-bound, high=bound), may_be_absent=True),
        f"{prefix}lora_B": Init(Zeros(), may_be_absent=True),
    }


class LoRALinear(Linear):
    """A frozen `Linear` with an adapter.

    With tensor parallelism a layer that splits its output splits B, and a layer that splits its
    input splits A. The other matrix is replicated, and its gradient is a partial sum, as for every
    replicated parameter.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scaling: float
    dropout: float
    adapter_enabled: bool

    def __init__(self, base: nn.Linear, section: LoRASection, dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(base, name))
        # A transformers model declares the sources of its layers itself.
        base_sources = base.declare_sources() if isinstance(base, Linear) else {}
        self._sources = base_sources | _add_adapter(self, "", base.weight, section, dtype)

    def split_parameters(self, dim: int) -> list[nn.Parameter]:
        return [*super().split_parameters(dim), self.lora_B if dim == 0 else self.lora_A]

    def declare_sources(self) -> dict[str, Source]:
        return self._sources

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.adapter_enabled:
            return y
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        down = F.linear(x, local_tensor(self.lora_A).to(x.dtype))
        return y + F.linear(down, local_tensor(self.lora_B).to(x.dtype)) * self.scaling


class LoRAExperts(Experts):
    """Frozen `Experts` with adapters.

    Separate grouped GEMMs compute the experts instead of the fused operator, because the adapters
    of the first projection act before its SwiGLU.
    """

    adapter_enabled: bool
    adapted: frozenset[str]

    def __init__(self, base: Experts, config: ModelConfig) -> None:
        super().__init__(config)
        for name, param in base.named_parameters(recurse=False):
            self.register_parameter(name, param)
        self.adapter_sources: dict[str, Source] = {}

    def declare_sources(self) -> dict[str, Source]:
        return super().declare_sources() | self.adapter_sources

    @property
    def is_fused(self) -> bool:
        # `super().is_fused` would be shorter, but torch 2.11 cannot trace it.
        return self.multiply is None and not self.is_biased and not self.adapter_enabled

    def project(self, name: str, x: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
        y = super().project(name, x, offsets_E)
        return add_correction(self, name, x, y, offsets_E)


def apply_lora(model: Model, section: LoRASection, dtype: torch.dtype) -> None:
    """Freeze `model` and add adapters of `dtype` to the layers that `section.targets` names, in
    place. Call this before sharding.

    No-op if `section.rank` is 0. Raises ConfigError, on all ranks: a pattern matches no layer that
    can have an adapter.
    """
    if not section.rank:
        return
    for param in model.parameters():
        param.requires_grad_(False)
    possible = adaptable(model)
    chosen = sorted(possible[name] for name in _choose(model, section, possible))
    root = root_of(model)
    with torch.device("meta"):
        for name, weight in chosen:
            if weight:
                _adapt_expert_weight(model, name, weight, section, dtype)
            else:
                linear = cast(nn.Linear, root.get_submodule(name))
                root.set_submodule(name, LoRALinear(linear, section, dtype))
    if isinstance(model, TransformersModel) and any(weight for _, weight in chosen):
        use_titanlite_experts(model.transformers_model)


def _adapt_expert_weight(
    model: Model, name: str, weight: str, section: LoRASection, dtype: torch.dtype
) -> None:
    """Add an adapter for one of the stacked weights of the experts `name`."""
    root = root_of(model)
    experts: Any = root.get_submodule(name)
    if isinstance(experts, Experts) and not isinstance(experts, LoRAExperts):
        experts = LoRAExperts(experts, model.config)
        root.set_submodule(name, experts)
    values = getattr(experts, weight)
    values = values.mT if getattr(experts, "is_transposed", False) else values
    sources = _add_adapter(experts, weight.removesuffix("proj"), values, section, dtype)
    experts.adapted = getattr(experts, "adapted", frozenset()) | {weight}
    if isinstance(experts, LoRAExperts):
        experts.adapter_sources |= sources
    else:  # the class of transformers stays; titanlite's forward for it uses the adapters
        sources = {f"{name}.{leaf}": source for leaf, source in sources.items()}
        cast(TransformersModel, model).sources |= sources


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules with adapters, `LoRALinear` or experts, by name."""
    return {
        name: module
        for name, module in root_of(model).named_modules()
        if hasattr(module, "adapter_enabled")
    }


def root_of(model: nn.Module) -> nn.Module:
    """Return the module to which the names of layers are relative."""
    return model.transformers_model if isinstance(model, TransformersModel) else model


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Make `model` compute bit for bit as the frozen base model while the context is open."""
    modules = [module for module in adapted_modules(model).values() if module.adapter_enabled]
    for module in modules:
        module.adapter_enabled = False
    try:
        yield
    finally:
        for module in modules:
            module.adapter_enabled = True


def adaptable(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Return the layers and weights that can have an adapter, by name, as (module, weight): linear
    layers except the output head, with "" as weight, and the experts' weights.
    """
    found: dict[str, tuple[str, str]] = {}
    layers: set[nn.Module] = set()
    fused: dict[str, nn.Module] = {}
    if isinstance(model, TransformersModel):
        layers = {module for layer in model.decoder_layers() for module in layer.modules()}
        fused = model.expert_modules
    for name, module in root_of(model).named_modules():
        own = isinstance(module, Linear) and not isinstance(module, OutputHead)
        if own or (module in layers and type(module) is nn.Linear):  # no subclass
            found[name] = name, ""
        elif isinstance(module, Experts) or name in fused:
            first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
            found |= {f"{name}.{weight}": (name, weight) for weight in (first, "down_proj")}
    return found


def _choose(
    model: nn.Module, section: LoRASection, possible: Mapping[str, tuple[str, str]]
) -> set[str]:
    """Return the names in `possible` that `lora.targets` names; all of them if it is empty."""
    patterns = split_patterns("lora.targets", section.targets)
    chosen = set() if patterns else set(possible)
    problems = []
    for pattern in patterns:
        matched = {
            name
            for name, (module, _) in possible.items()
            if _is_match(pattern, name) or _is_match(pattern, module)
        }
        if not matched:
            names = (name for name, _ in root_of(model).named_modules())
            other = next((name for name in names if fnmatchcase(name, f"*{pattern}")), "")
            found = (
                f"matches {other}, which cannot have an adapter" if other else "matches no layer"
            )
            layers = dict.fromkeys(name.rpartition(".")[2] for name in possible)
            problems.append(f"'{pattern}' {found}. Layers that can: {list_names(layers)}.")
        chosen |= matched
    raise_problems(ConfigError, "lora.targets", problems)
    return chosen
