"""Trained parameters that never get a gradient: found in the first step, said once, and not counted
as trained.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.functional.conftest import train_steps, train_to_the_end
from titanlite.assemble import assemble
from titanlite.config import load_config
from titanlite.distributed.grads import find_unreached
from titanlite.features.record.unreached import describe_unreached
from titanlite.preflight import check

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import sweep_transformers

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
    """Not LoRA's A, whose gradient is zero, nor an expert that no token chose, nor one chosen on
    another rank.
    """

    def rank_main():
        torch.manual_seed(0)
        model = Toy()
        if sharded:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.layers:
                # FSDP wants the same gradients on all ranks
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
        "layers.*.scorer.weight (2 tensors, 32 elements), never_called.weight (1 tensor, 16 "
        "elements)" in text
    )
    assert "layers.1.lora_a (1 tensor, 8 elements)." in text, "with * it would be all layers"
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == trained - 60
    assert (
        f"so {(trained - 60) / 1e6:,.3f} M of {(trained + 4) / 1e6:,.3f} M parameters are trained."
        in text
    )


def unreached_after_a_step(job):
    trainer = assemble(job)
    train_steps(trainer, 1)
    return trainer.parts.stepper.unreached


@pytest.mark.parametrize("mesh", ["FSDP4", "HSDP2xTP2xEP2", "CP2xEP2", "PP2xTP2xEP2"])
def test_native_models_are_reached_on_every_mesh(
    run_warm,
    checked,
    meshes,
    mesh,
):
    """With experts that no token chose, and layers that other pipeline stages hold."""
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


def configure(name, folder, config_file):
    """Write a tiny config.json of type `name`; return a job's file, and sizes of what transformers
    never reaches.
    """
    import transformers

    with sweep_transformers.quiet():
        config = sweep_transformers.shrink(transformers.CONFIG_MAPPING[name], name)
        config.vocab_size = 310
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    ids = torch.arange(3, 35).unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    without = {
        n: p.numel() for n, p in model.named_parameters() if p.requires_grad and p.grad is None
    }
    settings = config_file.read_text()
    file = folder / "job.toml"
    file.write_text(
        f'[model]\nhf_assets_path = "{folder}"\n{settings[settings.index("[training]") :]}'
    )
    return file, without


def warnings_in(folder):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(event["step"], event["text"]) for event in events if event["kind"] == "unreached"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_indexers_are_named_once_and_are_not_counted_as_trained(
    run_ranks, config_file, tmp_path, name
):
    file, without = configure(name, tmp_path, config_file)
    assert without and all(".indexer." in name for name in without)
    folder = tmp_path / "run"
    shared = [
        "--config",
        str(file),
        "--moe.expert_bias_update_rate=none",
        "--checkpoint.interval=2",
    ]
    job = check(load_config([*shared, f"--job.dump_folder={folder}", "--training.steps=4"]), 2)
    run_ranks(2, lambda: train_to_the_end(job))
    ((step, warning),) = warnings_in(folder)
    lost = sum(without.values())
    assert step == 1 and f"{len(without)} tensors ({lost:,} elements) had no gradient" in warning
    assert "layers.*.self_attn.indexer." in warning
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["parameters"] - facts["trained"] == lost
    tensors = load_file(folder / "checkpoint/step-4/model.safetensors")
    if name != "glm_moe_dsa":
        return

    resumed, frozen = tmp_path / "resumed", tmp_path / "frozen"
    for other in (resumed, frozen):
        shutil.copytree(folder / "checkpoint/step-2", other / "checkpoint/step-2")
    again = check(load_config([*shared, f"--job.dump_folder={resumed}", "--training.steps=4"]), 1)
    run_ranks(1, lambda: train_to_the_end(again))
    found = load_file(resumed / "checkpoint/step-4/model.safetensors")
    assert all(torch.allclose(found[key], tensors[key], atol=1e-6) for key in tensors)
    freeze = "--optimizer.freeze=*.indexer.*"
    quiet = check(
        load_config([*shared, f"--job.dump_folder={frozen}", "--training.steps=4", freeze]), 2
    )
    run_ranks(2, lambda: train_to_the_end(quiet))
    assert warnings_in(frozen) == [] and len(warnings_in(resumed)) == 1
    assert json.loads((frozen / "environment.json").read_text())["trained"] == facts["trained"]
    found = load_file(frozen / "checkpoint/step-4/model.safetensors")
    assert [key for key in tensors if not torch.equal(found[key], tensors[key])] == []
