"""DPO through real trainers, on one rank and on four: the loss and every gradient of a direct
implementation.
"""

import copy
import shutil

import pytest
import torch
from files import file_digest, read_lines
from preference_pairs import Document, direct_dpo
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import titanlite.train_step
from tests.functional.conftest import documents_of, take_step, weekly
from tests.saving import whole
from titanlite.assemble import assemble, build_data
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX
from titanlite.features.tools import verify
from titanlite.features.verify import read_certificate
from titanlite.materialize import materialize
from titanlite.materialize.layout import is_remote
from titanlite.materialize.plan import clean_name
from titanlite.models.decoder import build_decoder
from titanlite.models.families import family_of

BOUND = 1e-5  # what the issue asks for
BETA, SMOOTHING = 0.5, 0.2
ROWS = 8
DPO = [
    "--training.seq_len=64",
    f"--dpo.beta={BETA}",
    f"--dpo.label_smoothing={SMOOTHING}",
    "--training.max_norm=0",
    "--moe.expert_bias_update_rate=none",
    "--moe.aux_loss_coeff=0",
    "--metrics.log_freq=1",
]
QWEN3 = ["--model.name=qwen3"]
TRANSFORMERS = ["--model.implementation=transformers"]  # its weights are drawn by the same names


@pytest.fixture
def dpo(pairs):
    return [*pairs, *DPO]


def is_moved(name):
    return name.endswith("_proj.weight") or "_proj" in name.rpartition(".")[2]


def move(model):
    """Move the weights away from the reference, in the same way on every mesh."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the reference's forward left some layers gathered
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_moved(name):
                (param.to_local() if isinstance(param, DTensor) else param).mul_(3.0)


def expected_step(job):
    """Compute loss, metrics and gradients of the first step with transformers, one document at a
    time.
    """
    config = job.model_config
    ours = build_decoder(config)
    materialize(ours, "cpu", seed=job.job.training.seed)
    hf_config = AutoConfig.for_model(config.family, **family_of(config).to_hf(config))
    hf_config._experts_implementation = "eager"
    initial = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", dtype=torch.float32
    )
    state = {
        name: value for name, value in ours.state_dict().items() if not name.endswith("expert_bias")
    }
    initial.load_state_dict(state, strict=True)
    policy = copy.deepcopy(initial)
    move(policy)
    documents = [
        Document(tokens.tolist(), int((labels != IGNORE_INDEX).nonzero()[0]) + 1)
        for tokens, labels in documents_of(build_data(job.job, 0, 1)[1], 0)
    ]
    pairs = list(zip(documents[::2], documents[1::2], strict=True))
    assert len(pairs) > ROWS, "rows have several pairs"
    loss, metrics = direct_dpo(policy, initial, pairs, BETA, SMOOTHING)
    loss.backward()
    return loss.item(), metrics, {name: param.grad for name, param in policy.named_parameters()}


@pytest.mark.parametrize(
    ("mesh", "family"),
    [
        ("1", QWEN3),
        weekly("TP2xFSDP2", QWEN3),
        weekly("TP2xEP2", []),
        ("CP2", []),
        ("PP2", []),
        ("EP2", TRANSFORMERS),
    ],
)
def test_loss_and_gradients_equal_the_formula(run_ranks, checked, meshes, dpo, mesh, family):
    degrees = meshes[mesh]
    local = ROWS // degrees.dp // 2  # two micro-batches
    job = checked(
        degrees, *dpo, *family, f"--training.local_batch_size={local}", "--training.steps=2"
    )
    gradients = {}
    step = titanlite.train_step.step_if_finite

    def rank_main():
        trainer = assemble(job)
        move(trainer.model)

        def look(optimizer, finite):
            for name, param in trainer.model.named_parameters():
                if is_remote(param):
                    continue
                assert param.grad is not None, name
                gradients[clean_name(name)] = whole(param.grad)
            step(optimizer, finite)

        titanlite.train_step.step_if_finite = look
        result = take_step(trainer, 0)
        metrics = dict(
            zip(trainer.parts.stepper.objective.metric_names, result.metrics.tolist(), strict=True)
        )
        return (
            result.loss.item(),
            metrics,
            gradients if torch.distributed.get_rank() % degrees.stage_size == 0 else {},
        )

    native = checked(
        degrees, *dpo, *(family if family is not TRANSFORMERS else []), "--training.steps=2"
    )
    loss, metrics, wanted = expected_step(native)
    assert abs(metrics["rewards/margin"]) > 1e-3, "policy and reference are too near"
    ranks = run_ranks(degrees.world_size, rank_main)
    for found_loss, found_metrics, _ in ranks:
        assert found_loss == pytest.approx(loss, rel=BOUND)
        for name, value in metrics.items():
            assert found_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    found = {name: gradient for _, _, of_stage in ranks for name, gradient in of_stage.items()}
    floor = 1e-3 * torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        error = (gradient - wanted[name]).norm() / torch.maximum(wanted[name].norm(), floor)
        assert error <= BOUND, f"{name}: {error:.1e}"


def test_resumed_run_has_the_same_reference(train_into, meshes, dpo, tmp_path):
    """The reference is the initial model, which is built again, and not the resumed model."""
    overrides = [
        *dpo,
        *QWEN3,
        "--training.local_batch_size=4",
        "--training.steps=4",
        "--checkpoint.interval=2",
        "--validation.enable=true",
        "--validation.freq=2",
        "--optimizer.lr=1e-2",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_into(whole, meshes["FSDP2"], *overrides)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint/step-4")
    train_into(resumed, meshes["FSDP2"], *overrides)
    name = "checkpoint/step-4/model.safetensors"
    assert file_digest(whole / name) == file_digest(resumed / name)
    one, other = (read_certificate(folder / "checkpoint/step-4") for folder in (whole, resumed))
    assert one == other and one["run"]["training.objective"] == "dpo"
    assert verify.main([str(resumed)]) == 0
    assert file_digest(whole / name) != file_digest(whole / "checkpoint/step-2/model.safetensors")
    text = (whole / "metrics.jsonl").read_text()
    assert all(word in text for word in ("rewards/accuracy", "rewards/margin", "loss/validation"))


def test_stages_of_a_pipeline_have_the_reference_of_one_process(
    train_into, pretrained, dpo, tmp_path
):
    """Each training forward contains a reference forward, which has adapters off and no gradients,
    and goes through the stages too.
    """
    base = pretrained("base", 0.1, "--model.overrides.num_layers=4")
    lora = [
        "--lora.rank=4",
        "--lora.alpha=8",
        "--optimizer.lr=1e-2",
        f"--model.path={base}",
        "--model.init=auto",
    ]
    validation = ["--validation.enable=true", "--validation.freq=1", "--checkpoint.enable=false"]
    found = []
    for degrees in (Degrees(), Degrees(pp=2)):
        folder = tmp_path / str(degrees.pp)
        sizes = [
            "--model.overrides.num_layers=4",
            "--training.local_batch_size=2",
            "--training.steps=2",
        ]
        train_into(folder, degrees, *dpo, *lora, *validation, *sizes)
        found.append(read_lines(folder / "metrics.jsonl"))
    one, many = found
    assert len(one) == len(many) and {"loss/validation", "rewards/margin"} <= {
        name for point in many for name in point
    }
    for point, other in zip(one, many, strict=True):
        for name in point.keys() & {
            "loss/train",
            "loss/validation",
            "rewards/margin",
            "rewards/accuracy",
            "grad_norm",
        }:
            assert other[name] == pytest.approx(point[name], rel=1e-4, abs=1e-6), (
                name,
                point["step"],
            )
    assert any(abs(point.get("rewards/margin", 0.0)) > 1e-3 for point in many), (
        "policy and reference are too near"
    )
