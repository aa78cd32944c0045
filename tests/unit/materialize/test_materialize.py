"""Allocate, fill and verify on modules of any kind: identity, attributes, kept values, poison,
dtypes, sources.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from files import error_of
from plain_sources import Checkpoint, StateDictReader
from tensors import bits
from torch import nn

from titanlite.base.errors import PlanError, VerifyError
from titanlite.materialize import (
    Compute,
    Init,
    Normal,
    Ones,
    Recipe,
    Zeros,
    allocate,
    build_plan,
    execute,
    fill,
    materialize,
    verify,
)

CPU = torch.device("cpu")
ZEROS, ONES, RANDOM = Init(Zeros()), Init(Ones()), [{"*": Init(Normal())}]


class Holder(nn.Module):
    """Buffers by name, each computed by a function."""

    def __init__(self, **functions):
        super().__init__()
        self._functions = functions
        for name, function in functions.items():
            self.register_buffer(name, torch.empty_like(function(), device="meta"))

    def declare_sources(self):
        return {name: Compute(function) for name, function in self._functions.items()}


def meta_linear(**options):
    return nn.Linear(3, 4, device="meta", **options)


def compute(model, value):
    """Give `model` a parameter `p` on meta, and materialize it with `value`."""
    param = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
    model.register_parameter("p", param)
    materialize(model, "cpu", [{"p": Compute(lambda: value)}])


def test_tensors_that_were_never_on_meta_keep_bits_and_memory():
    model = nn.Sequential(meta_linear(), nn.Linear(4, 2))
    values = torch.tensor([1.0, -0.0, 1e-40, float("-inf")])
    model.register_buffer("bias_table", values)
    model.register_buffer("flags", torch.tensor([True, False]), persistent=False)
    kept = {
        name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta
    }
    assert set(kept) == {"1.weight", "1.bias", "bias_table", "flags"}
    bits = {name: (t.data_ptr(), t.detach().clone()) for name, t in kept.items()}
    materialize(model, "cpu", [{"0.*": Init(Normal())}])
    now = dict([*model.named_parameters(), *model.named_buffers()])
    for name, (pointer, value) in bits.items():
        assert now[name] is kept[name]
        assert now[name].data_ptr() == pointer
        assert torch.equal(now[name].detach().view(torch.uint8), value.view(torch.uint8))


def test_a_second_time_does_nothing():
    model = Holder(a=lambda: torch.arange(3.0))
    materialize(model, "cpu")
    model.a.fill_(7.0)
    pointer = model.a.data_ptr()
    materialize(model, "cpu")
    assert model.a.tolist() == [7.0] * 3
    assert model.a.data_ptr() == pointer


def test_allocate_poisons_everything_that_was_on_meta():
    model = Holder(
        a=lambda: torch.zeros(3),
        i=lambda: torch.zeros(2, dtype=torch.int32),
        z=lambda: torch.zeros(()),
    )
    model.register_buffer("kept", torch.ones(2))
    plan = build_plan(model)
    allocate(plan, CPU)
    assert model.a.isnan().all()
    assert model.z.isnan()
    assert model.i.tolist() == [torch.iinfo(torch.int32).min] * 2
    assert model.kept.tolist() == [1.0, 1.0]
    fill(plan, 0)
    verify(plan)


class Forgetful(Recipe):
    """Fills nothing."""

    def fill(self, *_): ...


def test_tensors_that_are_not_filled_are_named():
    model = nn.Sequential(meta_linear())
    model.register_buffer("steps", torch.empty(2, dtype=torch.int64, device="meta"))
    text = error_of(
        VerifyError,
        materialize,
        model,
        "cpu",
        [{"0.weight": Init(Forgetful()), "0.bias": ZEROS, "steps": Init(Forgetful())}],
    )
    assert "0.weight: not filled, or NaN, in 12 of 12 elements." in text and "0.bias" not in text
    assert f"steps: not filled (all its elements are {torch.iinfo(torch.int64).min})." in text


def test_infinite_parameters_are_refused_infinite_buffers_not():
    model = Holder(mask=lambda: torch.full((2,), float("-inf")))
    materialize(model, "cpu")
    assert model.mask.isneginf().all()
    reader = StateDictReader({"weight": torch.full((4, 3), float("inf"))})
    with pytest.raises(
        VerifyError, match=r"weight: has infinite elements\. It was read from checkpoint"
    ):
        materialize(meta_linear(bias=False), "cpu", [Checkpoint(reader)])


def test_verify_names_what_changed_after_the_plan():
    model = nn.Sequential(meta_linear(bias=False), meta_linear(bias=False), meta_linear(bias=False))
    model[1].weight = model[0].weight
    plan = build_plan(model, [{"*": ONES}])
    with pytest.raises(
        VerifyError, match=r"2 problems:\n  0.weight: still on the meta device.\n  2.weight: still"
    ):
        verify(plan)
    allocate(plan, CPU)
    fill(plan, 0)
    model[1].weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(
        VerifyError, match=r"1.weight: is no longer the tensor that was planned as 0.weight"
    ):
        verify(plan)


def test_verify_names_a_wrong_dtype():
    model = Holder(inv_freq=lambda: torch.ones(2))
    plan = materialize(model, "cpu")
    model.inv_freq.data = model.inv_freq.data.bfloat16()
    with pytest.raises(VerifyError, match=r"inv_freq: is torch.bfloat16, expected torch.float32"):
        verify(plan)


def test_declared_dtype_heals_a_cast_of_the_whole_model():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2))
            self.register_buffer("inv_freq", torch.empty(3), persistent=False)
            self.register_buffer("expert_bias", torch.empty(3))

        def declare_sources(self):
            return {
                "scale": ONES,
                "inv_freq": Compute(lambda: torch.tensor([1.0, 0.1, 0.001]), dtype=torch.float32),
                "expert_bias": Init(Zeros(), dtype=torch.float32, may_be_absent=True),
            }

    for sources in (
        [],
        [Checkpoint(StateDictReader({"scale": torch.ones(2), "expert_bias": torch.zeros(3)}))],
    ):
        with torch.device("meta"):
            model = Rotary()
        model.to(torch.bfloat16)
        materialize(model, "cpu", sources)
        assert model.scale.dtype == torch.bfloat16
        assert model.inv_freq.dtype == model.expert_bias.dtype == torch.float32
        assert torch.equal(model.inv_freq, torch.tensor([1.0, 0.1, 0.001]))


def test_errors_of_computed_sources_are_not_swallowed():
    model = Holder(a=lambda: torch.zeros(3))
    model._functions["a"] = lambda: torch.zeros(4)
    with pytest.raises(
        PlanError, match=r"a: compute <lambda> gave shape \(4,\), the model expects \(3,\)"
    ):
        materialize(model, "cpu")
    model = Holder(a=lambda: torch.zeros(1))
    model._functions["a"] = lambda: torch.zeros(1)[5]
    with pytest.raises(IndexError):
        materialize(model, "cpu")


FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8]
INTEGERS = [
    torch.bool,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_parameters_and_buffers_of_all_dtypes(dtype):
    for shape in [(3,), (), (2, 0)]:
        value = torch.tensor([1.0, 0.5, 2.0])[: math.prod(shape)].view(shape).to(dtype)
        model = Holder(b=lambda value=value: value)
        compute(model, value)
        assert model.b.dtype == model.p.dtype == dtype
        assert torch.equal(bits(model.b), bits(value)) and torch.equal(bits(model.p), bits(value))
        digest = execute.bit_digest(value)
        assert digest == execute.bit_digest(model.p)
        if value.numel():
            bits(model.p)[:1] ^= 1
            assert digest != execute.bit_digest(model.p)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_nan_and_infinity_of_all_dtypes_are_found(dtype):
    weight = torch.ones(4, 3).to(dtype)
    values = [
        (weight.clone(), "not filled, or NaN, in 2 of 12 elements."),
        (weight.clone(), "has infinite elements."),
    ]
    values[0][0][:2, 0] = float("nan")
    if dtype in (
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ):
        values.pop()  # they have no infinity
    else:
        values[1][0][1, 1] = float("inf")
    for value, text in values:
        assert error_of(VerifyError, compute, nn.Module(), value) == f"materialize: p: {text}"


def test_a_layout_that_cannot_be_filled_is_refused():
    model = nn.Module()
    model.register_buffer("table", torch.eye(3).to_sparse().to("meta"))
    assert error_of(PlanError, materialize, model, "cpu", [{"table": ZEROS}]).startswith(
        "materialize: table: a buffer with layout torch.sparse_coo on the meta device cannot be"
    )


def test_global_random_state_and_default_dtype_do_not_matter():
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(len(results))
        state = torch.get_rng_state()
        model = nn.Linear(3, 4, device="meta", dtype=torch.float32)
        torch.set_default_dtype(dtype)
        try:
            materialize(model, "cpu", RANDOM)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(model.weight)
    assert torch.equal(*results)


def test_a_transposed_tensor_is_contiguous_afterwards():
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.empty(3, 4, device="meta").T))
    value = torch.arange(12.0).view(4, 3)
    materialize(model, "cpu", [{"w": Compute(lambda: value)}])
    assert torch.equal(model.w, value) and model.w.is_contiguous()


def test_works_inside_a_meta_context():
    with torch.device("meta"):
        model = nn.Linear(3, 4)
        materialize(model, "cpu", RANDOM)
    assert model.weight.device == CPU


@pytest.mark.parametrize("kept", [False, True])
def test_buffer_that_holds_the_smallest_integer(kept):
    model = Holder(mask=lambda: torch.tensor([0, 1], dtype=torch.uint8))
    if kept:
        model.mask = torch.tensor([0, 1], dtype=torch.uint8)
    materialize(model, "cpu")
    assert model.mask.tolist() == [0, 1]


def test_hooks_and_the_class_of_a_parameter_stay():
    class Tagged(nn.Parameter):
        pass

    model, calls = meta_linear(bias=False), []
    model.weight = Tagged(model.weight.data)
    model.weight.register_hook(lambda *_: calls.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda *_: calls.append("after"))
    materialize(model, "cpu", RANDOM)
    model(torch.ones(1, 3)).sum().backward()
    assert type(model.weight) is Tagged and calls == ["hook", "after"]


def test_ranks_wait_for_slow_readers_in_the_group_that_is_given(
    monkeypatch,
):
    """The default group ends after `comm.timeout_seconds`, which a rank on a cold disk may need
    more than.
    """
    groups = []

    def together(group):
        groups.append(group)
        return nullcontext()

    monkeypatch.setattr(execute, "together", together)
    weight = torch.randn(3, 2)
    with torch.device("meta"):
        model = nn.Linear(2, 3, bias=False)
    waiting = object()
    plan = materialize(
        model, "cpu", [Checkpoint(StateDictReader({"weight": weight}))], waiting=waiting
    )
    assert groups == [waiting] and plan.waiting is waiting and torch.equal(model.weight, weight)
