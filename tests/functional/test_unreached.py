"""Trained parameters that never get a gradient are found in the first step, logged once, and not
counted as trained.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.functional.conftest import train_steps, weekly
from titanlite.assemble import assemble
from titanlite.distributed.grads import find_unreached
from titanlite.features.record.unreached import describe_unreached

CPU = torch.device("cpu")


class Block(nn.Module):
    """Parameters of all kinds; `chosen` are the experts that tokens choose."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.scorer = nn.Linear(4, 4, bias=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(4, 2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x, chosen):
        x = self.used(x)
        top = self.scorer(x).topk(2, dim=-1).indices  # no gradient passes through indices
        x = x + torch.zeros_like(x).scatter(-1, top, 1.0) + x @ self.lora_a.T @ self.lora_b.T
        for expert in chosen:
            x = x + self.experts[expert](x)
        return x


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.never_called = nn.Linear(4, 4)

    def forward(self, x, chosen):
        for layer in self.layers:
            x = layer(x, chosen)
        return x


UNREACHED = [
    "layers.0.scorer.weight",
    "layers.1.scorer.weight",
    "never_called.weight",
    "never_called.bias",
]


@pytest.mark.parametrize("sharded", [False, True])
def test_only_what_has_no_part_in_the_loss_is_found(run_ranks, sharded):
    """LoRA's A, whose gradient is zero, is not reported; neither is an expert that no token chose,
    or that only tokens of another rank chose.
    """

    def rank_main():
        torch.manual_seed(0)
        model = Toy()
        if sharded:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.layers:
                # FSDP requires the same gradients on all ranks.
                for param in layer.experts.parameters():
                    param.requires_grad_(False)
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        model(torch.randn(3, 4), () if sharded else (dist.get_rank(),)).sum().backward()
        return find_unreached(model, CPU)

    assert run_ranks(2, rank_main) == [UNREACHED, UNREACHED]


def test_the_warning_has_patterns_that_freeze_those_parameters_alone():
    model = Toy()
    names = [*UNREACHED, "layers.1.lora_a"]
    text, count = describe_unreached(model, names)
    assert text.startswith("training: 5 tensors (60 elements) had no gradient in the first step: ")
    assert (
        "layers.*.scorer.weight, never_called.weight, never_called.bias, layers.1.lora_a." in text
    ), "layers.*.lora_a would be all layers"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == trained - 60
    assert (
        f"so {(trained - 60) / 1e6:,.3f} M of {(trained + 4) / 1e6:,.3f} M parameters are trained."
        in text
    )


def test_the_warning_says_why_indexers_have_none():
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({"indexer": nn.Linear(2, 2, bias=False)})})
    text, _ = describe_unreached(model, ["self_attn.indexer.weight"])
    assert text.endswith("never gets one from the language loss: it only chooses keys.")


def unreached_after_a_step(job):
    trainer = assemble(job)
    train_steps(trainer, 1)
    return trainer.parts.stepper.unreached


@pytest.mark.parametrize("mesh", [weekly("HSDP2xTP2xEP2"), "PP2xTP2xEP2"])
def test_native_models_are_reached_on_every_mesh(
    run_warm,
    checked,
    meshes,
    mesh,
):
    """The models have experts that no token chose, and layers that are in other pipeline stages."""
    few = ["--model.overrides.num_experts=32", "--model.overrides.top_k=1", "--training.seq_len=8"]
    job = checked(meshes[mesh], *few, "--checkpoint.enable=false")
    assert run_warm(4, unreached_after_a_step, job) == [[]] * 4


def test_a_stage_without_a_gradient_is_found_on_all_ranks(
    run_ranks,
    checked,
    meshes,
):
    job = checked(meshes["PP2xFSDP2"], "--checkpoint.enable=false")

    def rank_main():
        trainer = assemble(job)
        trainer.model.register_parameter("idle", nn.Parameter(torch.ones(3)))
        train_steps(trainer, 1)
        return trainer.parts.stepper.unreached

    assert run_ranks(4, rank_main) == [["idle"]] * 4
