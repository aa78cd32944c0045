"""Meta tensors that are neither parameters nor buffers: all of them are found, and only they."""

import functools
from collections import deque
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from files import error_of
from torch import nn

from titanlite.base.errors import PlanError
from titanlite.materialize import Init, Normal, Zeros, build_plan, materialize
from titanlite.materialize.sources import Compute


class Slotted:
    __slots__ = ("__hidden", "unset", "value")

    def __init__(self, value):
        self.value = value

    def method(self): ...


class Model(nn.Module):
    """A registered parameter, and one more attribute."""

    def __init__(self, held):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.held = held(self)

    def declare_sources(self):
        return {"weight": Init(Normal())}


def build(held):
    with torch.device("meta"):
        return Model(held)


def refuse(model):
    text = error_of(PlanError, materialize, model, "cpu", [])
    assert all(param.is_meta for param in model.parameters())
    return text


def mask():
    return torch.ones(4, 4).tril()


def closure(value):
    return lambda: value


def cyclic():
    ring = [SimpleNamespace()]
    ring[0].back, ring[0].table = ring, mask()
    return ring


def deep(levels):
    held = [mask()]
    for _ in range(levels):
        held = [held]
    return held


HELD = [
    lambda: {"causal": mask()},
    lambda: MappingProxyType({"a": (0, deque([0, 0, mask()]))}),
    lambda: {mask(): 1},
    lambda: Slotted(mask()).method,
    lambda: functools.partial(dict, mask=mask()),
    lambda: closure(mask()),
    cyclic,
    lambda: [nn.Sequential(nn.Linear(4, 4, bias=False))],
    lambda: deep(3000),
]


def test_a_tensor_inside_another_object_is_refused_with_the_attribute_that_leads_there():
    for make in HELD:
        assert " held: holds a tensor (" in refuse(build(lambda _, make=make: make()))
    with torch.device("meta"):
        model = nn.Sequential(Model(lambda _: {"causal": mask()}))
    text = (
        " 0.held: holds a tensor (4, 4) of torch.float32 on the meta device that is neither a "
        "parameter nor"
    )
    assert text in refuse(model)


def test_a_tensor_of_the_class_or_on_a_parameter_is_refused():
    class Cached(Model):
        cache = {}  # noqa: RUF012 - the fault that is looked for

    with torch.device("meta"):
        model = Cached(lambda _: 0)
        model.cache[4] = mask()
    assert "cache: holds a tensor (4, 4)" in refuse(model)
    model = build(lambda _: 0)
    model.weight.scale = torch.ones(4, device="meta")  # type: ignore[attr-defined]
    assert "weight: holds a tensor (4,)" in refuse(model)


@pytest.mark.parametrize(
    ("held", "remedy"),
    [
        (lambda model: mask(), "Register it as a buffer."),
        (
            lambda model: [nn.Parameter(mask())],
            "Register it, or its module, for example in an nn.ParameterList",
        ),
        (lambda model: [nn.Linear(2, 2, bias=False)], "or nn.ModuleList."),
        (
            lambda model: model.weight[:2],
            "It shares the memory of weight: take the view in forward.",
        ),
    ],
)
def test_the_remedy_fits_the_tensor(held, remedy):
    assert remedy in refuse(build(held))


@pytest.mark.parametrize(
    "held",
    [
        lambda model: [model.weight],
        lambda model: {"own": model.weight, model.weight: "name"},
        lambda model: SimpleNamespace(parent=model),
        lambda model: {"table": torch.ones(2, device="cpu")},
        lambda model: [Compute(mask().clone)],
        lambda model: closure(torch),
    ],
)
def test_references_to_own_tensors_and_modules_are_no_problem(held):
    model = build(held)
    materialize(model, "cpu", [])
    assert not model.weight.is_meta
    if isinstance(model.held, list) and isinstance(model.held[0], torch.Tensor):
        assert model.held[0] is model.weight


class Viewed(nn.Module):
    """Tensors that `register` makes of one another."""

    def __init__(self, register):
        super().__init__()
        register(self)


def _buffer_view(module):
    weight = module.weight = nn.Parameter(torch.empty(4, 4))
    module.register_buffer("top", weight[:2], persistent=False)


def _two_parameters(module):
    module.first = nn.Parameter(torch.empty(6))
    module.second = nn.Parameter(module.first.data.view(2, 3))


@pytest.mark.parametrize(
    ("register", "text"),
    [
        (_buffer_view, "top: shares memory with weight, so both would be written twice."),
        (_two_parameters, "second: shares memory with first, so both would be written twice."),
    ],
)
def test_tensors_that_share_memory_are_refused(register, text):
    with torch.device("meta"):
        model = Viewed(register)
    assert error_of(PlanError, build_plan, model, [{"*": Init(Zeros())}]).startswith(
        f"materialize: {text}"
    )


def test_parts_without_common_elements_are_independent():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            first, second = torch.empty(2, 3).unbind()
            self.first, self.second = nn.Parameter(first), nn.Parameter(second)
            self.register_buffer("positions", torch.arange(5).expand((1, -1)))

    with torch.device("meta"):
        model = Halves()
    sources = {
        "first": Init(Zeros()),
        "second": Init(Normal()),
        "positions": Compute(lambda: torch.arange(5)[None]),
    }
    materialize(model, "cpu", [sources])
    assert model.first.tolist() == [0.0] * 3 and bool((model.second != 0).all())
    assert model.positions.tolist() == [[0, 1, 2, 3, 4]]
