"""The plan: one source for every tensor, every problem named, all problems at once, nothing allocated."""

import pytest
import torch
from plain_sources import Checkpoint, StateDictReader, TorchDefaults
from torch import nn

from titanlite.base.errors import PlanError
from titanlite.materialize import Alias, Compute, Init, Keep, Normal, Ones, Zeros, build_plan, materialize

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
    model = Outer(sources, a=nn.Linear(2, 2, bias=False, device="meta"), b=nn.Linear(2, 2, bias=False, device="meta"))
    model.b.weight = model.a.weight
    return model


def refuse(model, *sources) -> str:
    with pytest.raises(PlanError) as error:
        materialize(model, "cpu", sources)
    still = [t for t in [*model.parameters(), *model.buffers()] if t.is_meta]
    assert still, "nothing may be allocated when the plan has problems"
    return str(error.value)


def checkpoint(**values):
    return Checkpoint(StateDictReader({name.replace("__", "."): value for name, value in values.items()}))


def test_sources_in_order_of_strength():
    model = Outer(x=Part(), y=Part(device="cpu"))
    plan = build_plan(model, [{"x.w": ONES}])
    assert {entry.fqn: entry.source for entry in plan.entries} == {
        "x.w": ONES,
        "x.b": ZEROS,
        "y.w": Keep(),
        "y.b": Keep(),
    }
    assert plan.local_bytes == 2 * (6 + 4) * 4
    assert all(p.is_meta for p in model.x.parameters())


def test_forgotten_parameter_and_buffer_are_both_named():
    text = refuse(Outer(x=Part({})))
    assert text.startswith("materialize: 2 problems:")
    assert "x.w: parameter (2, 3) of Part has no source. Declare one" in text
    assert "x.b: buffer (4,) of Part has no source" in text


def test_two_claims():
    text = refuse(Part(), {"w": ONES}, {"*": ZEROS})
    assert "w: two sources, 'init constant(value=1)' from sources and 'init constant()' from sources. Remove" in text


def test_two_checkpoints():
    first = Checkpoint(StateDictReader({"w": torch.zeros(2, 3), "b": torch.zeros(4)}, "A"))
    second = Checkpoint(StateDictReader({"w": torch.zeros(2, 3)}, "B"))
    text = refuse(Part(), first, second)
    assert text == (
        "materialize: w: two sources, 'checkpoint A:w' from checkpoint A and 'checkpoint B:w' from checkpoint B. "
        "Remove one."
    )


def test_two_declarations():
    text = refuse(Outer({"x.w": ONES}, x=Part()))
    assert "x.w: two sources, 'init constant(value=1)' from Outer and 'init constant()' from Part 'x'." in text


def test_claim_on_a_tensor_with_a_value():
    model = Outer(x=Part(), y=Part(device="cpu"))
    text = refuse(model, {"y.w": ONES})
    assert "y.w: two sources, it already has a value on cpu and 'init constant(value=1)' claims it. Build it on" in text


def test_two_declarations_of_a_tied_tensor():
    text = refuse(tied({"a.weight": ONES, "b.weight": ZEROS}))
    assert text.startswith(
        "materialize: a.weight: two sources for one tied tensor, 'init constant(value=1)' for a.weight"
    )
    assert "and 'init constant()' for b.weight. Declare Alias for all names but one." in text


def test_unknown_names():
    assert "x.v: unexpected, Part 'x' has it and the model does not." in refuse(
        Outer(x=Part({"w": ZEROS, "b": ZEROS, "v": ZEROS}))
    )
    assert "v: unexpected, Part has it" in refuse(Part({"w": ZEROS, "b": ZEROS, "v": ZEROS}))
    assert "q.*: unexpected, sources has it and the model does not." in refuse(Part(), {"q.*": ZEROS})
    assert "nope: unexpected, checkpoint state dict has it" in refuse(
        Part(), checkpoint(w=torch.zeros(2, 3), b=torch.zeros(4), nope=torch.zeros(1))
    )


def test_missing_names():
    text = refuse(Part(), checkpoint(w=torch.zeros(2, 3)))
    assert text == "materialize: b: missing, checkpoint state dict does not have it."


def test_may_be_absent_and_non_persistent_need_not_be_in_a_checkpoint():
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


def test_wrong_shape():
    text = refuse(Part(), checkpoint(w=torch.zeros(3, 2), b=torch.zeros(4)))
    assert text == "materialize: w: state dict has (3, 2), the model expects (2, 3)."


def test_parameter_of_a_wrong_dtype():
    model = Part({"w": Init(Zeros(), dtype=torch.float32), "b": ZEROS}).to(torch.bfloat16)
    assert "w: is torch.bfloat16, but its module declares torch.float32. Keep it out of casts" in refuse(model)


def test_kept_buffer_of_a_wrong_dtype():
    model = Outer(x=Part({"w": ZEROS, "b": Init(Zeros(), dtype=torch.float32)}))
    model.x.b = torch.zeros(4, dtype=torch.bfloat16)
    assert "x.b: is torch.bfloat16, but its module declares torch.float32." in refuse(model)


def test_all_problems_in_one_error():
    model = Outer({"x.w": ONES, "ghost": ONES}, x=Part(), y=Part({}), z=Part(), k=Part(device="cpu"))
    text = refuse(model, {"k.b": ONES, "q": ONES}, checkpoint(z__w=torch.zeros(1)))
    for part in (
        "ghost: unexpected, Outer has it",
        "x.w: two sources",
        "y.w: parameter (2, 3) of Part has no source",
        "y.b: buffer (4,) of Part has no source",
        "z.w: state dict has (1,), the model expects (2, 3)",
        "z.b: missing, checkpoint state dict does not have it",
        "x.b: missing",
        "k.b: two sources, it already has a value",
        "q: unexpected",
    ):
        assert part in text
    assert "k.w" not in text


def test_declared_tie_that_is_no_tie():
    model = tied({"a.weight": ONES, "b.weight": Alias("a.weight")})
    assert [entry.names for entry in build_plan(model).entries] == [("a.weight", "b.weight")]
    model.b.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    text = refuse(model)
    assert "b.weight: declared tied to 'a.weight', but they are two tensors now" in text
    model = tied({"a.weight": ONES, "b.weight": Alias("c.weight")})
    assert "b.weight: declared tied to 'c.weight', but there is no such tensor." in refuse(model)


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


def test_checkpoint_with_a_tied_tensor_once_or_under_each_name():
    values = {"a.weight": torch.full((2, 2), 3.0), "b.weight": torch.full((2, 2), 3.0)}
    for names in (["a.weight"], ["b.weight"], ["a.weight", "b.weight"]):
        model = tied({})
        materialize(model, "cpu", [Checkpoint(StateDictReader({name: values[name] for name in names}))])
        assert model.b.weight is model.a.weight
        assert (model.a.weight == 3).all()


def test_wrappers_leave_no_trace_in_names():
    model = torch.compile(nn.Sequential(nn.Linear(2, 2, device="meta")))
    assert [entry.fqn for entry in build_plan(model, [TorchDefaults()]).entries] == ["0.weight", "0.bias"]
    model = nn.Sequential(torch.compile(nn.Linear(2, 2, device="meta")))
    assert [entry.fqn for entry in build_plan(model, [TorchDefaults()]).entries] == ["0.weight", "0.bias"]


def test_a_layer_called_module_beside_others_keeps_its_name():
    model = Outer(module=nn.Linear(2, 2, device="meta"), other=nn.Linear(2, 2, device="meta"))
    names = [entry.fqn for entry in build_plan(model, [TorchDefaults()]).entries]
    assert names == ["module.weight", "module.bias", "other.weight", "other.bias"]


def test_an_only_child_called_module_keeps_its_name():
    model = Outer(module=Part())
    model.register_parameter("w", nn.Parameter(torch.empty(5, device="meta")))
    plan = build_plan(model, [{"w": ONES, "module.w": ZEROS}])
    assert [entry.fqn for entry in plan.entries] == ["w", "module.w", "module.b"]


def test_table():
    model = Outer({"t": Compute(lambda: torch.zeros(1))}, x=Part(), k=Part(device="cpu"))
    model.register_buffer("t", torch.empty(1, device="meta"))
    model.register_parameter("again", model.x.w)
    lines = str(build_plan(model, [{"again": Init(Normal(std=0.5))}])).splitlines()
    assert lines[0].split() == ["tensor", "global", "shape", "dtype", "on", "this", "rank", "source"]
    table = {line.split("  ")[0]: line for line in lines[1:]}
    assert set(table) == {"again", "x.w", "x.b", "k.w", "k.b", "t"}
    assert table["again"].split() == ["again", "(2,", "3)", "float32", "[0:2,", "0:3]", "init", "normal(std=0.5)"]
    assert table["x.w"].endswith("alias of again")
    assert table["x.b"].endswith("init constant()")
    assert table["k.w"].endswith("keep")
    assert table["t"].endswith("compute <lambda>")
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("wrap", ["compile", "checkpoint_wrapper"])
def test_wrapped_module_declares_once(wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    part = (torch.compile if wrap == "compile" else checkpoint_wrapper)(Part())
    assert [entry.fqn for entry in build_plan(Outer(x=part)).entries] == ["x.w", "x.b"]


def test_two_claims_on_a_tied_tensor():
    with pytest.raises(PlanError, match="two sources"):
        build_plan(tied({}), [{"a.weight": ONES}, {"b.weight": ZEROS}])


def test_wrong_shape_under_the_second_name_of_a_tied_tensor():
    values = {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(3, 3)}
    with pytest.raises(PlanError, match=r"b\.weight"):
        build_plan(tied({}), [Checkpoint(StateDictReader(values))])


def test_two_patterns_of_one_mapping():
    with pytest.raises(PlanError, match="two sources"):
        build_plan(Part(), [{"*": ZEROS, "w": ONES}])


@pytest.mark.parametrize("source", [Keep(), Alias("b")], ids=str)
def test_claim_that_cannot_give_a_value(source):
    with pytest.raises(PlanError, match="w"):
        build_plan(Part(), [{"w": source}])
