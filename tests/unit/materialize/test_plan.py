"""The plan: one source for every tensor, every problem named, all problems at once, nothing
allocated.
"""

from functools import partial

import pytest
import torch
from files import error_of
from plain_sources import Checkpoint, StateDictReader
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from titanlite.base.errors import PlanError
from titanlite.materialize import (
    Alias,
    Compute,
    Init,
    Keep,
    Ones,
    Zeros,
    build_plan,
    materialize,
)

ZEROS, ONES = Init(Zeros()), Init(Ones())


class Part(nn.Module):
    """A parameter and a buffer, declared by `sources`."""

    def __init__(self, sources=None, device="meta"):
        super().__init__()
        self.w = nn.Parameter(torch.empty(2, 3, device=device))
        self.register_buffer("b", torch.empty(4, device=device))
        self._sources = {"w": ZEROS, "b": ZEROS} if sources is None else sources

    def declare_sources(self):
        return self._sources


class Outer(nn.Module):
    def __init__(self, declared=None, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._declared = declared or {}

    def declare_sources(self):
        return self._declared


def tied(sources):
    model = Outer(
        sources,
        a=nn.Linear(2, 2, bias=False, device="meta"),
        b=nn.Linear(2, 2, bias=False, device="meta"),
    )
    model.b.weight = model.a.weight
    return model


def checkpoint(**values):
    return Checkpoint(
        StateDictReader({name.replace("__", "."): value for name, value in values.items()})
    )


def test_sources_in_order_of_strength():
    model = Outer(x=Part(), y=Part(device="cpu"))
    plan = build_plan(model, [{"x.w": ONES}])
    assert {entry.fqn: entry.source for entry in plan.entries} == {
        "x.w": ONES,
        "x.b": ZEROS,
        "y.w": Keep(),
        "y.b": Keep(),
    }
    assert all(p.is_meta for p in model.x.parameters())


def parts(**options):
    return Outer(x=Part(), y=Part(device="cpu"), **options)


def named(*names):
    """A part that declares these."""
    return Part(dict.fromkeys(names, ZEROS))


def untied():
    model = tied({"a.weight": ONES, "b.weight": Alias("a.weight")})
    model.b.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    return model


def narrow():
    """A part whose module declares float32 and that holds something else."""
    model = Outer(
        x=Part({"w": Init(Zeros(), dtype=torch.float32), "b": Init(Zeros(), dtype=torch.float32)})
    )
    return model.to(torch.bfloat16)


WHOLE = {"w": torch.zeros(2, 3), "b": torch.zeros(4)}
DECLARED_TWICE = "two sources, 'init constant(value=1)' from"


@pytest.mark.parametrize(
    ("model", "sources", "text"),
    [
        (Outer(x=Part({})), [], "x.w: parameter (2, 3) has no source. Declare one"),
        (
            Part(),
            [{"w": ONES}, {"*": ZEROS}],
            f"w: {DECLARED_TWICE} sources and 'init constant()' from sources. Remove",
        ),
        (
            Outer({"x.w": ONES}, x=Part()),
            [],
            f"x.w: {DECLARED_TWICE} Outer and 'init constant()' from Part 'x'.",
        ),
        (
            parts(),
            [{"y.w": ONES}],
            "y.w: two sources, it already has a value on cpu and 'init constant(value=1)'",
        ),
        (
            tied({"a.weight": ONES, "b.weight": ZEROS}),
            [],
            "a.weight: two sources for one tied tensor",
        ),
        (
            Outer(x=named("w", "b", "v")),
            [],
            "x.v: unexpected, Part 'x' has it and the model does not.",
        ),
        (
            Part(),
            [checkpoint(**WHOLE, v=torch.zeros(1))],
            "v: unexpected, checkpoint state dict has it",
        ),
        (
            Part(),
            [checkpoint(w=torch.zeros(2, 3))],
            "b: missing, checkpoint state dict does not have it.",
        ),
        (
            narrow(),
            [],
            "x.w: is torch.bfloat16, but its module declares torch.float32. Keep it out of casts",
        ),
        (untied(), [], "b.weight: declared tied to 'a.weight', but they are two tensors now"),
        (
            tied({"a.weight": ONES, "b.weight": Alias("c.weight")}),
            [],
            "declared tied to 'c.weight', but there is no such",
        ),
        (Part(), [{"w": Alias("b")}], "w"),
    ],
)
def test_no_source_or_two_is_refused_before_allocation(model, sources, text):
    before = [tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]]
    assert text in error_of(PlanError, materialize, model, "cpu", sources)
    assert [tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]] == before


def test_all_problems_are_in_one_error():
    model = Outer(
        {"x.w": ONES, "ghost": ONES}, x=Part(), y=Part({}), z=Part(), k=Part(device="cpu")
    )
    with pytest.raises(PlanError, match="10 problems:") as error:
        materialize(model, "cpu", [{"k.b": ONES, "q": ONES}, checkpoint(z__w=torch.zeros(1))])
    for name in ("ghost", "x.w", "y.w", "y.b", "z.w", "z.b", "x.b", "k.b", "q"):
        assert f"\n  {name}: " in str(error.value)
    assert "k.w" not in str(error.value)


def test_tensors_that_a_checkpoint_need_not_have():
    model = Part({"w": ZEROS, "b": Init(Ones(), may_be_absent=True)})
    model.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
    model._sources["table"] = Compute(lambda: torch.arange(2.0))
    plan = materialize(model, "cpu", [checkpoint(w=torch.full((2, 3), 5.0))])
    assert model.b.tolist() == [1.0] * 4
    assert model.table.tolist() == [0.0, 1.0]
    assert (model.w == 5).all()
    assert str(plan.entries[0].source) == "checkpoint state dict:w"
    model = Part({"w": ZEROS, "b": Init(Ones(), may_be_absent=True)})
    materialize(model, "cpu", [checkpoint(w=torch.zeros(2, 3), b=torch.full((4,), 3.0))])
    assert model.b.tolist() == [3.0] * 4


def test_alias_is_relative_to_the_module_that_declares_it():
    inner = tied({"b.weight": Alias("a.weight")})
    materialize(Outer(inner=inner), "cpu", [{"inner.a.weight": ONES}])
    assert (inner.b.weight == 1).all()


def test_tie_without_a_declaration():
    model = tied({"a.weight": ONES})
    materialize(model, "cpu")
    assert model.b.weight is model.a.weight
    model = tied({"b.weight": ONES})
    materialize(model, "cpu")
    assert (model.a.weight == 1).all()


def test_wrappers_leave_no_trace_in_names():
    def names(model):
        return [entry.fqn for entry in build_plan(model, [{"*": ZEROS}]).entries]

    linear = partial(nn.Linear, 2, 2, device="meta")
    for model in (torch.compile(nn.Sequential(linear())), nn.Sequential(torch.compile(linear()))):
        assert names(model) == ["0.weight", "0.bias"]
    beside = names(Outer(module=linear(), other=linear()))
    assert beside == ["module.weight", "module.bias", "other.weight", "other.bias"], (
        "a layer may be called module"
    )
    for wrap in (torch.compile, checkpoint_wrapper):
        assert [entry.fqn for entry in build_plan(Outer(x=wrap(Part()))).entries] == ["x.w", "x.b"]


def test_an_only_child_called_module_keeps_its_name():
    model = Outer(module=Part())
    model.register_parameter("w", nn.Parameter(torch.empty(5, device="meta")))
    plan = build_plan(model, [{"w": ONES, "module.w": ZEROS}])
    assert [entry.fqn for entry in plan.entries] == ["w", "module.w", "module.b"]
