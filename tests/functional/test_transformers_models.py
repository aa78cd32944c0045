"""Models that transformers implements, on 4 ranks and built on meta: they are loaded, run, saved
and trained.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from files import read_lines
from tiny_transformers import VOCAB_SIZE, save_tiny, save_tiny_llava

from tests.saving import whole
from titanlite.assemble import assemble
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import TransformersConfig, load_config
from titanlite.distributed import ParallelDims
from titanlite.distributed.grads import clip_grad_norms, reduce_replicated_grads
from titanlite.distributed.parallelize import parallelize
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.materialize.plan import clean_name
from titanlite.preflight import check


@dataclass
class Case:
    """A saved model of transformers, with its results in one process."""

    folder: Path
    reference: Any
    logits: torch.Tensor


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(14, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def cases(tmp_path_factory, tokens):
    found = {}
    for name, _ in MESHES.values():
        folder = tmp_path_factory.mktemp(name)
        reference = save_tiny(name, folder)
        with torch.no_grad():
            found[name] = Case(folder, reference, reference(input_ids=tokens).logits)
    return found


def check_folder(folder, world_size, *overrides):
    config = folder / "job.toml"
    config.write_text(
        f'checkpoint.initial_load_path = "{folder}"\nmodel.implementation = "transformers"\n'
    )
    return check(
        load_config(["--config", str(config), "--training.seq_len=16", *overrides]), world_size
    )


def load(job, folder):
    assert isinstance(job.model_config, TransformersConfig)
    model = build_transformers(job.model_config)
    parallelize(model, job.job, ParallelDims.build(job.degrees, "cpu"), "cpu")
    return model, materialize(model, "cpu", [weights_of(folder, model)])


# Both compute in float32 (6e-8) through 2 layers, but sum over ranks and experts in different
# orders.
BOUND = 1e-5
# AdamW's eps. If it were smaller, gradients that are only rounding errors would cause steps as
# large as real gradients do.
EPS = 1e-3
MESHES = {
    "FSDP4, recomputed": ("gemma3_text", ["--activation_checkpoint.mode=full"]),
    "HSDP2x2": ("phi", ["--parallelism.data_parallel_replicate_degree=2"]),
    "EP4, recomputed": (
        "deepseek_v3",
        ["--parallelism.expert_parallel_degree=4", "--activation_checkpoint.mode=full"],
    ),
    "HSDP2xEP2": (
        "glm4_moe",
        [
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.expert_parallel_degree=2",
        ],
    ),
}
DOCUMENTS = [[0] * 7 + [1] * 5, [0] * 3 + [1] * 6 + [-1] * 3, [0] * 12, [0] * 1 + [1] * 11]
STEPS = 2


@dataclass(frozen=True)
class Rows:
    """A global batch: 4 rows of packed documents, one for each rank."""

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor

    def documents_of(self, row):
        """Return tokens and labels of each document by itself."""
        ids = self.documents[row]
        return [
            (self.tokens[row, ids == i], self.labels[row, ids == i])
            for i in ids.unique().tolist()
            if i >= 0
        ]


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 4, 12), generator=generator)
    documents = torch.tensor(DOCUMENTS)
    labels[documents < 0] = -100
    labels[0, 3] = -100
    return Rows(tokens, labels, documents)


def plain_steps(model, rows, steps=STEPS):
    """Return the losses of a loop without titanlite, which has one forward per document, and the
    last step's gradients.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    valid, losses = (rows.labels != -100).sum(), []
    for _ in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for row in range(4):
            for tokens, labels in rows.documents_of(row):
                logits = model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0]
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / valid
                loss.backward()
                total += loss.detach()
        losses.append(total.item())
        gradients = {
            name: param.grad.clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        optimizer.step()
    return losses, gradients


@pytest.mark.slow
def test_training_equals_a_plain_loop_over_single_documents(run_ranks, cases, rows):
    """Losses and gradients of packed rows on every mesh equal transformers' own,
    document by document.
    """
    jobs = {
        mesh: check_folder(cases[name].folder, 4, *overrides)
        for mesh, (name, overrides) in MESHES.items()
    }

    def rank_main():
        seen = {}
        for mesh, job in jobs.items():
            model, _ = load(job, cases[MESHES[mesh][0]].folder)
            dims = ParallelDims.build(job.degrees, "cpu")
            share = 4 // job.degrees.dp
            mine = slice(dims.dp_rank * share, (dims.dp_rank + 1) * share)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
            losses, gradients, norm = [], {}, 0.0
            for _ in range(STEPS):
                optimizer.zero_grad()
                sums = model(rows.tokens[mine], rows.labels[mine], None, rows.documents[mine])
                loss = (sums.cross_entropy + sums.aux) / (rows.labels != -100).sum()
                loss.backward()
                total = loss.detach().clone()
                torch.distributed.all_reduce(total)
                losses.append(total.item())
                reduce_replicated_grads(model.parameters(), dims)
                norm = clip_grad_norms({"": list(model.parameters())}, 0.0)[0].item()
                gradients = {
                    clean_name(key): whole(param.grad)
                    for key, param in model.named_parameters()
                    if param.grad is not None
                }
                optimizer.step()
            seen[mesh] = (losses, norm, gradients if dims.dp_rank == 0 else {})
        return seen

    seen = run_ranks(4, rank_main, timeout_s=300)
    expectations = {
        name: plain_steps(copy.deepcopy(cases[name].reference).train(), rows)
        for name, _ in MESHES.values()
    }
    for mesh, (name, _) in MESHES.items():
        expected_losses, expected = expectations[name]
        expected_norm = (
            torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        )
        for losses, norm, gradients in (ranks[mesh] for ranks in seen):
            assert losses == pytest.approx(expected_losses, rel=BOUND), mesh
            assert norm == pytest.approx(expected_norm, rel=BOUND), mesh
            if not gradients:  # the same as on other ranks
                continue
            assert gradients.keys() == expected.keys(), mesh
            floor = 1e-3 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
            errors = {
                # Adam's first step depends on signs, so after it the errors may be ten times as
                # large.
                key: (gradients[key] - value).norm() / torch.maximum(value.norm(), floor)
                for key, value in expected.items()
            }
            assert {
                key: error.item() for key, error in errors.items() if error > 10 * BOUND
            } == {}, mesh


@pytest.mark.slow
def test_a_file_of_chats_with_images_trains(run_ranks, tmp_path):
    """From images and a .jsonl file the run makes a model and processor that transformers loads;
    the loss falls.
    """
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    save_tiny_llava(tmp_path / "llava")
    chats = []
    for i, color in enumerate(["red", "blue"] * 4):
        Image.new("RGB", (9 + i, 12), color).save(tmp_path / f"{i}.png")
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "what is this"}]
        answer = {"role": "assistant", "content": color}
        chats.append(json.dumps({"messages": [{"role": "user", "content": content}, answer]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    job = check_folder(
        tmp_path / "llava",
        2,
        "--data.dataset=images",
        f"--data.path={tmp_path / 'chats.jsonl'}",
        f"--job.dump_folder={tmp_path / 'run'}",
        "--training.steps=12",
        "--training.local_batch_size=2",
        "--optimizer.lr=2e-2",
        "--lr_scheduler.warmup_steps=0",
        "--metrics.log_freq=1",
        "--metrics.enable_tensorboard=false",
    )

    run_ranks(2, lambda: assemble(job).train())
    points = read_lines(tmp_path / "run/metrics.jsonl")
    losses = [point["loss/train"] for point in points if "loss/train" in point]
    assert losses[-1] < 0.5 * losses[0]
    length = job.job.training.seq_len
    trained = {
        round(length * (1 - point["data/padding"]), 6)
        for point in points
        if "data/padding" in point
    }
    assert len(trained) == 1 and trained < set(range(1, length)), (
        "rows of equally many tokens, and padding"
    )
    folder = tmp_path / "run/checkpoint/step-12"
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "LlavaProcessor"
