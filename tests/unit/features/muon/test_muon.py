"""Muon on one process against a float64 loop and torch's own, its parameters, and matrices that lie
in pieces.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from titanlite.config.schema import OptimizerSection
from titanlite.features.muon import Muon, build_muon, muon_matrices
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.optim.optimizer import LocalAdamW, step_if_finite

SHAPES = {
    "wide": (8, 20),
    "tall": (20, 8),
    "square": (9, 9),
    "experts": (3, 6, 10),
    "stacked": (2, 12, 5),
    "in_turn": (16, 5),
}
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.9
WIDTHS = {"stacked": (6, 6), "in_turn": (2, 3, 3)}


def orthogonalized(x):
    """The iteration of the authors, one matrix at a time, in float64."""
    x = x.double() / (x.double().norm() + 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def expected_steps(start, grads):
    param, buffer = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for grad in grads:
        buffer = MOMENTUM * buffer + grad.double()
        step = orthogonalized(grad.double() + MOMENTUM * buffer)
        step = step if step.shape == param.shape else step.T
        param = param - LR * DECAY * param - LR * 0.2 * max(param.shape) ** 0.5 * step
    return param


def make():
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    vector = nn.Parameter(torch.randn(7))
    adamw = LocalAdamW([{"params": [vector], "weight_decay": 0.0}], OptimizerSection(lr=LR))
    groups = [{"params": list(params.values()), "lr": LR, "weight_decay": DECAY}]
    widths = {p: WIDTHS.get(name, (p.shape[-2],)) for name, p in params.items()}
    return params, vector, Muon(groups, adamw, momentum=MOMENTUM, widths=widths)


def set_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)


def test_a_missing_gradient_changes_nothing():
    params, _, optimizer = make()
    set_gradients(optimizer, 0)
    params["square"].grad, before = None, params["square"].detach().clone()
    step_if_finite(optimizer, torch.tensor(True))
    assert (
        params["square"] not in optimizer.state
        and "momentum_buffer" in optimizer.state[params["wide"]]
    )
    assert torch.equal(params["square"], before)


def test_steps_are_those_of_a_float64_loop():
    params, vector, optimizer = make()
    starts = {name: param.detach().clone() for name, param in params.items()}
    before, grads = vector.detach().clone(), []
    for step in range(4):
        set_gradients(optimizer, step)
        grads.append({name: param.grad.clone() for name, param in params.items()})
        step_if_finite(optimizer, torch.tensor(True))
    for name, param in params.items():
        widths = WIDTHS.get(name, (param.shape[-2],))

        def split(tensor, widths=widths):
            stack = tensor.reshape(-1, *tensor.shape[-2:]).unflatten(1, (-1, sum(widths)))
            return [part.flatten(0, 1) for each in stack for part in each.split(widths, 1)]

        history = [split(of_step[name]) for of_step in grads]
        for i, start in enumerate(split(starts[name])):
            wanted = expected_steps(start, [of_step[i] for of_step in history])
            torch.testing.assert_close(split(param.detach())[i].double(), wanted, rtol=0, atol=1e-6)
    assert (vector.detach() != before).all(), "AdamW moves the rest"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_text"])
def test_matrices_of_layers_are_muons(family):
    model = build_decoder(replace(families()[family].presets["debug"], attention_bias=True))
    materialize(model, torch.device("cpu"), [], seed=0)
    section = OptimizerSection(name="Muon", weight_decay=0.1, lr_multipliers="*.down_proj*=0.5")
    matrices = muon_matrices(model)
    for name, param in model.named_parameters():
        wanted = ".layers." in name and param.dim() >= 2 and "conv1d" not in name
        assert (param in matrices) == wanted, name
        if wanted:
            fused = {
                "experts.gate_up_proj": (32, 32),
                "in_proj_qkvz.weight": (8, 8, 24, 24),
                "in_proj_ba.weight": (2, 2),
                "in_proj_qkv.weight": (8, 8, 24),
                "in_proj_z.weight": (24,),
                "in_proj_b.weight": (2,),
                "in_proj_a.weight": (2,),
            } | ({"q_proj.weight": (16, 16)} if "next" in family or "3_5" in family else {})
            found = [each for end, each in fused.items() if name.endswith(end)]
            assert [matrices[param]] == (found or [(param.shape[-2],)]), name
    optimizer = build_muon(model, section)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    assert group_of.keys() == set(model.parameters())
    for name, param in model.named_parameters():
        group = group_of[param]
        assert group["state_names"] == (
            ("momentum_buffer",) if param in matrices else ("step", "exp_avg", "exp_avg_sq")
        )
        assert group["weight_decay"] == (0.1 if param.dim() >= 2 else 0.0), name
        assert group["lr"] == section.lr * (0.5 if "down_proj" in name else 1.0), name
