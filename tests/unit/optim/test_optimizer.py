"""AdamW groups, patterns that freeze parameters and change learning rates, and steps that leave
everything untouched when the gradients are not finite.
"""

from dataclasses import replace

import pytest
import torch
from files import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.base.errors import ConfigError
from titanlite.config.schema import OptimizerSection
from titanlite.features.rounded_adamw.optimizer import build_rounded_adamw
from titanlite.launch.process_group import fake_ranks
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.optim.optimizer import (
    FiniteGuard,
    NonFiniteSteps,
    build_adamw,
    count_parameters,
    freeze_parameters,
    lr_multipliers,
    step_if_finite,
)

IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.RMSNorm(4)
        self.experts = nn.Parameter(torch.ones(2, 3, 4))
        self.experts_bias = nn.Parameter(torch.ones(2, 3))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def build(implementation="fused", **changes):
    model = Model()
    if implementation == "rounded":
        return model, build_rounded_adamw(model, OptimizerSection(**changes), 0)
    return model, build_adamw(model, OptimizerSection(implementation=implementation, **changes))


def set_gradients(model, value=1.0):
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.full_like(param, value)


def test_decay_on_matrices_only():
    model, optimizer = build(weight_decay=0.3, lr=0.01, beta1=0.8, beta2=0.7, eps=1e-5)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {
        id(model.linear.weight): 0.3,
        id(model.linear.bias): 0.0,
        id(model.norm.weight): 0.0,
        id(model.experts): 0.3,
        id(model.experts_bias): 0.0,
    }
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.7), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "lr", "warned"), [("bfloat16", 1e-5, 1), ("bfloat16", 3e-3, 0), ("float32", 1e-5, 0)]
)
def test_small_steps_in_bfloat16_are_warned_of(dtype, lr, warned, caplog):
    build_adamw(Model().to(getattr(torch, dtype)), OptimizerSection(lr=lr))
    assert caplog.text.count("most never will. Set training.dtype") == warned


def test_tied_parameter_is_optimized_once():
    model = Model()
    model.head = nn.Linear(3, 4, bias=False)
    model.head.weight = model.linear.weight
    optimizer = build_adamw(model, OptimizerSection())
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 5


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "rounded"])
def test_not_finite_leaves_weights_and_state(implementation):
    model, optimizer = build(implementation)

    def get_values():
        weights = [param.detach().clone() for param in model.parameters()]
        return weights, [
            value.clone() for state in optimizer.state.values() for value in state.values()
        ]

    for bad in (float("nan"), float("inf"), float("nan")):  # the first step, too
        weights, states = get_values()
        set_gradients(model, bad)
        step_if_finite(optimizer, torch.tensor(False))
        same_weights, same_states = get_values()
        assert all(torch.equal(a, b) for a, b in zip(same_weights, weights, strict=True))
        states = states or [torch.zeros_like(value) for value in same_states]
        assert all(torch.equal(a, b) for a, b in zip(same_states, states, strict=True))
        set_gradients(model, 0.5)
        step_if_finite(optimizer, torch.tensor(True))  # the flag does not stick
        for param, old in zip(model.parameters(), weights, strict=True):
            assert torch.equal(param, old) != param.requires_grad
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


class DTensorOperations(TorchDispatchMode):
    """Which operations are asked of DTensors while this is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            self.names.append(str(func))
            return NotImplemented
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shards_on_two_meshes_are_stepped_where_they_are(implementation):
    """One group has both meshes; the values are torch's own for the same numbers without meshes."""
    with fake_ranks(4):
        dense, sparse = (
            init_device_mesh("cpu", (4,)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"],
        )
        whole = {"dense": (torch.randn(8, 3), dense), "sparse": (torch.randn(6, 2, 3), sparse)}
        model = nn.Module()
        for name, (value, mesh) in whole.items():
            model.register_parameter(
                name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None))
            )
        optimizer = build_adamw(model, OptimizerSection(implementation=implementation, lr=0.1))
        assert len(optimizer.param_groups) == 1
        plain = [nn.Parameter(param.to_local().detach().clone()) for param in model.parameters()]
        flags = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
        reference = torch.optim.AdamW(
            plain, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **flags
        )
        for step in range(3):
            for param, alone in zip(model.parameters(), plain, strict=True):
                alone.grad = torch.randn_like(alone)
                param.grad = DTensor.from_local(
                    alone.grad.clone(), param.device_mesh, param.placements
                )
            with DTensorOperations() as seen:
                step_if_finite(optimizer, torch.tensor(True))
            # new states
            assert set(seen.names) == ({"aten.zeros_like.default"} if step == 0 else set())
            reference.step()
        for param, alone in zip(model.parameters(), plain, strict=True):
            assert torch.equal(param.to_local(), alone)
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[param][name]
                assert isinstance(state, DTensor) and state.placements == param.placements
                assert torch.equal(state.to_local(), reference.state[alone][name])


# ---- patterns


def build_debug(family="qwen3_moe", **changes):
    return build_decoder(replace(families()[family].presets["debug"], **changes))


def frozen(model):
    return {name for name, param in model.named_parameters() if not param.requires_grad}


def test_freeze_by_pattern():
    model = build_debug(num_layers=2)
    freeze_parameters(model, OptimizerSection(freeze=" model.embed_tokens*, *.mlp.gate.* "))
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert frozen(model) == {"model.embed_tokens.weight"} | routers
    total, trained = count_parameters(model)
    assert total - trained == sum(model.get_parameter(name).numel() for name in frozen(model))


@pytest.mark.parametrize("pattern", ["lm_head.weight", "model.embed_tokens.*"])
def test_tied_parameter_is_frozen_under_each_name(pattern):
    model = build_debug("qwen3", tie_word_embeddings=True)
    freeze_parameters(model, OptimizerSection(freeze=pattern))
    assert frozen(model) == {"model.embed_tokens.weight"}


def test_bad_patterns_are_one_error():
    text = error_of(
        ConfigError,
        freeze_parameters,
        build_debug(),
        OptimizerSection(freeze="embed_tokens, *.gate.weigth"),
    )
    assert text.startswith("optimizer.freeze: 2 problems:")
    assert (
        "'embed_tokens' matches no parameter" in text
        and "'*.gate.weigth' matches no parameter" in text
    )


def test_learning_rates_by_pattern():
    model = build_debug(num_layers=2)
    section = OptimizerSection(
        lr=0.1, lr_multipliers="*.experts.*=0.5, lm_head*=2, *.1.mlp.experts.down*=3"
    )
    freeze_parameters(model, OptimizerSection(freeze="model.layers.0.mlp.experts.down_proj"))
    optimizer = build_adamw(model, section)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"lm_head.weight": 0.2, "model.layers.1.mlp.experts.down_proj": 0.1 * 3}
    for name, param in model.named_parameters():
        if name == "model.layers.0.mlp.experts.down_proj":
            assert id(param) not in rate
            continue
        wanted = expected.get(name, 0.05 if "experts" in name else 0.1)
        assert rate[id(param)] == pytest.approx(wanted), name


def test_bad_multipliers_are_one_error():
    model = build_debug()
    freeze_parameters(model, OptimizerSection(freeze="lm_head*"))
    text = error_of(
        ConfigError, lr_multipliers, model, OptimizerSection(lr_multipliers="head*=2, lm_head*=3")
    )
    assert (
        "'head*' matches no parameter" in text
        and "'lm_head*' matches frozen parameters only" in text
        and "'head*' matches frozen" not in text
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lm_head*", "'lm_head*' is not pattern=factor"),
        ("a=nan", "'a=nan' is not"),
        ("a=1, a=2", "'a' is there twice"),
        ("a=1,,b=2", "nothing between two commas"),
    ],
)
def test_multipliers_that_are_none(text, words):
    assert words in error_of(
        ConfigError, lr_multipliers, build_debug(), OptimizerSection(lr_multipliers=text)
    )


# ---- which steps are applied, decided without a look from the host


def admit(guard, finite):
    """`finite`: one character per step from 1 on, '.' for finite, 'x' for not."""
    return [bool(guard.admit(step, torch.tensor(c == "."))) for step, c in enumerate(finite, 1)]


@pytest.mark.parametrize(
    ("limit", "steps", "applied", "found"),
    [
        (1, ".x..", [1, 0, 0, 0], NonFiniteSteps(2, 2, 1, 1, True)),
        (2, ".x.x", [1, 0, 1, 0], NonFiniteSteps(2, 4, 1, 2, False)),
        (2, ".x..", [1, 0, 1, 1], NonFiniteSteps(2, -1, 0, 1, False)),
        (2, ".x.xx...", [1, 0, 1, 0, 0, 0, 0, 0], NonFiniteSteps(2, 4, 2, 3, True)),
        (3, "xx.xxx.", [0, 0, 1, 0, 0, 0, 0], NonFiniteSteps(1, 4, 3, 5, True)),
    ],
)
def test_steps_in_a_row(limit, steps, applied, found):
    guard = FiniteGuard(torch.device("cpu"), limit)
    assert admit(guard, steps) == list(map(bool, applied))
    assert guard.look() == found
    assert guard.look() is None, "said once"


def test_a_run_of_bad_steps_goes_on_over_a_look():
    guard = FiniteGuard(torch.device("cpu"), 2)
    guard.admit(1, torch.tensor(False))
    assert guard.look() == NonFiniteSteps(1, 1, 1, 1, False)
    guard.admit(2, torch.tensor(False))
    assert guard.look() == NonFiniteSteps(2, 1, 2, 2, True)
    guard.admit(3, torch.tensor(False))
    assert guard.look() is None, "no step counts after the limit"
