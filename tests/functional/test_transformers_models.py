"""Models that transformers implements, meta first on 4 ranks: loaded, run, saved, trained."""

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_transformers import ALL_MODELS, VOCAB_SIZE, save_tiny, save_tiny_llava
from torch.distributed.fsdp import FSDPModule

from tests.saving import save_hf_model, whole
from titanlite.assemble import assemble
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config import TransformersConfig, load_config
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.distributed.grads import clip_grad_norms, reduce_replicated_grads
from titanlite.distributed.parallelize import parallelize
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import Compute, materialize
from titanlite.materialize.plan import clean_name
from titanlite.materialize.sources import Read
from titanlite.optim.expert_bias import ExpertBiasBalancer
from titanlite.preflight import check


@dataclass
class Case:
    """A model of transformers, saved, with what it computes in one process."""

    folder: Path
    reference: Any
    logits: torch.Tensor


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(14, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def cases(tmp_path_factory, tokens):
    found = {}
    for name in ALL_MODELS:
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


def stored_keys(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.slow
def test_sharded_loading_equals_from_pretrained_bit_for_bit(
    run_ranks,
    cases,
    tokens,
    tmp_path,
):
    """Logits of FSDP4 equal those of one process, every tensor has a source, and what is saved is
    what was loaded.
    """
    jobs = {name: check_folder(case.folder, 4) for name, case in cases.items()}

    def rank_main():
        seen = {}
        for name, case in cases.items():
            model, plan = load(jobs[name], case.folder)
            # The counters' buffers are titanlite's own.
            kinds = {
                type(entry.source)
                for entry in plan.entries
                if not entry.names[0].startswith("counters.")
            }
            kinds |= {
                Read
                for entry in plan.entries
                if entry.info.persistent and not isinstance(entry.source, Read)
            }
            model.eval()
            with torch.no_grad():
                logits = model(tokens)
            expected_buffers = dict(case.reference.named_buffers())
            same_buffers = all(
                buffer.dtype == expected_buffers[key].dtype
                and torch.equal(buffer, expected_buffers[key])
                for key, buffer in model.transformers_model.named_buffers()
            )
            error = (logits - case.logits).abs().max().item()
            seen[name] = (same_buffers, {kind.__name__ for kind in kinds}, error)
            save_hf_model(model, plan, None, tmp_path / name, torch.float32, case.folder)
        return seen

    for seen in run_ranks(4, rank_main, timeout_s=300):
        assert {name: error for name, (_, _, error) in seen.items() if error} == {}
        for name, (same_buffers, kinds, _) in seen.items():
            assert same_buffers, name
            assert kinds <= {Read.__name__, Compute.__name__}, name
    for name, case in cases.items():
        loaded, info = type(case.reference).from_pretrained(
            tmp_path / name, dtype=torch.float32, output_loading_info=True
        )
        assert {key: value for key, value in info.items() if value} == {}, name
        expected = case.reference.state_dict()
        assert [
            key
            for key, value in loaded.state_dict().items()
            if not torch.equal(value, expected[key])
        ] == [], name
        assert stored_keys(tmp_path / name) == stored_keys(case.folder), name
        assert {"config.json", "generation_config.json"} <= {
            path.name for path in (tmp_path / name).iterdir()
        }


# Both compute in float32 (6e-8), in other orders of summation over ranks and experts, through 2
# layers.
BOUND = 1e-5
# Of AdamW. With a smaller one a step takes gradients that are all rounding for as large as the
# others.
EPS = 1e-3
MESHES = {
    "FSDP4": ("qwen3", ["--parallelism.data_parallel_shard_degree=4"]),
    "FSDP4, recomputed": ("gemma3_text", ["--activation_checkpoint.mode=full"]),
    "HSDP2x2": ("phi", ["--parallelism.data_parallel_replicate_degree=2"]),
    "EP2xFSDP2": ("mixtral", ["--parallelism.expert_parallel_degree=2"]),
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
        """Tokens and labels of each document by itself."""
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
    """Losses of a loop without titanlite, every document a forward of its own, and the last step's
    gradients.
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


def plain_load(model, rows):
    """Rows that each layer's experts are given, one document after the other; no padding, no
    titanlite.
    """
    experts = [
        module
        for module in model.modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    ]
    counts = [torch.zeros(module.num_experts, dtype=torch.int64) for module in experts]

    def add(module, args):
        counts[experts.index(module)] += args[1].flatten().bincount(minlength=module.num_experts)

    handles = [module.register_forward_pre_hook(add) for module in experts]
    with torch.no_grad():
        for row in range(4):
            for tokens, _ in rows.documents_of(row):
                model(input_ids=tokens.unsqueeze(0), use_cache=False)
    for handle in handles:
        handle.remove()
    return [count.tolist() for count in counts]


@pytest.mark.slow
def test_training_equals_a_plain_loop_over_single_documents(run_ranks, cases, rows):
    """Losses, gradients and expert load of packed rows on every mesh equal transformers' own,
    document by document.
    """
    jobs = {
        mesh: check_folder(cases[name].folder, 4, *overrides)
        for mesh, (name, overrides) in MESHES.items()
    }

    def rank_main():
        seen, loads = {}, {}
        for mesh, job in jobs.items():
            model, _ = load(job, cases[MESHES[mesh][0]].folder)
            dims = ParallelDims.build(job.degrees, "cpu")
            share = 4 // job.degrees.dp
            mine = slice(dims.dp_rank * share, (dims.dp_rank + 1) * share)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
            losses, gradients, norm = [], {}, 0.0
            balancer = ExpertBiasBalancer(model, 0.0, torch.distributed.all_reduce)
            for step in range(STEPS):
                optimizer.zero_grad()
                sums = model(rows.tokens[mine], rows.labels[mine], None, rows.documents[mine])
                loss = (sums.cross_entropy + sums.aux) / (rows.labels != -100).sum()
                loss.backward()
                balancer.accumulate()
                if step == 0 and (counts := balancer.step(torch.tensor(True))) is not None:
                    loads[mesh] = counts.tolist()
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
        return seen, loads

    seen, all_loads = zip(*run_ranks(4, rank_main, timeout_s=300), strict=True)
    for loads in all_loads:
        assert set(loads) == {
            mesh for mesh, (name, _) in MESHES.items() if jobs[mesh].model_config.num_experts
        }
        for mesh, counts in loads.items():
            assert counts == plain_load(cases[MESHES[mesh][0]].reference, rows), mesh
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
                # After a step of Adam, which goes by signs, a tenfold of its error.
                key: (gradients[key] - value).norm() / torch.maximum(value.norm(), floor)
                for key, value in expected.items()
            }
            assert {
                key: error.item() for key, error in errors.items() if error > 10 * BOUND
            } == {}, mesh


def image_rows():
    """Two rows of an image of 4 x 4 patches (4 tokens) and text, one for each rank; inputs and
    labels.
    """
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 2, 12), generator=generator)
    tokens[:, 1:7] = torch.tensor([12, 10, 10, 10, 10, 13])
    labels[:, :7] = -100
    inputs = {
        "tokens": tokens,
        "pixel_values": torch.randn(2, 16, 96, generator=generator),
        "image_grid_thw": torch.tensor([[[1, 4, 4]]] * 2),
        "mm_token_type_ids": (tokens == 10).to(torch.int64),
    }
    return inputs, labels


@pytest.mark.slow
def test_images_and_text_train_on_two_ranks(run_ranks, cases):
    """Loss and gradients, those of the vision tower too, equal transformers' own over both rows."""
    case = cases["qwen2_5_vl"]
    job = check_folder(case.folder, 2, "--activation_checkpoint.mode=full")
    inputs, labels = image_rows()
    valid = (labels != -100).sum()

    def rank_main():
        model, _ = load(job, case.folder)
        rank = torch.distributed.get_rank()
        mine = {name: value[rank : rank + 1] for name, value in inputs.items()}
        extra = {
            "pixel_values": mine["pixel_values"][0],
            "image_grid_thw": mine["image_grid_thw"][0],
        }
        extra["mm_token_type_ids"] = mine["mm_token_type_ids"]
        loss = model(mine["tokens"], labels[rank : rank + 1], **extra).cross_entropy / valid
        loss.backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        units = {type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule)}
        gradients = {
            clean_name(n): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
        }
        return total.item(), gradients, units

    reference = copy.deepcopy(case.reference).train()
    logits = reference(
        input_ids=inputs["tokens"],
        pixel_values=inputs["pixel_values"].flatten(0, 1),
        image_grid_thw=inputs["image_grid_thw"].flatten(0, 1),
        mm_token_type_ids=inputs["mm_token_type_ids"],
        use_cache=False,
    ).logits
    expected = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        / valid
    )
    expected.backward()
    for loss, gradients, units in run_ranks(2, rank_main):
        assert loss == pytest.approx(expected.item(), rel=BOUND)
        assert units == {
            "FSDPTransformersModel",
            "FSDPQwen2_5_VLDecoderLayer",
            "FSDPQwen2_5_VLVisionBlock",
        }
        for name, param in reference.named_parameters():
            assert (gradients[name] - param.grad).norm() <= BOUND * param.grad.norm().clamp(
                min=1e-3
            ), name


@pytest.mark.slow
def test_trainer_trains_saves_and_resumes(run_ranks, checked, tmp_path):
    """`Trainer` on a model of transformers: a resumed run ends as the uninterrupted one, and
    transformers loads it.
    """
    from transformers import AutoModelForCausalLM

    shared = [
        "--model.implementation=transformers",
        "--training.steps=4",
        "--checkpoint.interval=2",
        "--checkpoint.export_dtype=bfloat16",
        "--moe.expert_bias_update_rate=0",
    ]
    degrees = Degrees(dp_shard=2, ep=2)
    whole = checked(degrees, *shared, f"--job.dump_folder={tmp_path / 'whole'}")
    resumed = checked(degrees, *shared, f"--job.dump_folder={tmp_path / 'resumed'}")

    def train(job):
        trainer = assemble(job)
        trainer.train()
        return type(trainer.model).__name__

    names = run_ranks(2, lambda: train(whole))
    assert names == ["FSDPTransformersModel"] * 2
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "resumed/checkpoint/step-2")
    run_ranks(2, lambda: train(resumed))
    folders = [tmp_path / run / "checkpoint/step-4" for run in ("whole", "resumed")]
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert any(".experts.3.gate_proj.weight" in name for name in first), "the hub's names"
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folders[1], dtype=torch.bfloat16, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}
    assert type(loaded).__name__ == "Qwen3MoeForCausalLM"


@pytest.mark.slow
def test_a_file_of_chats_with_images_trains(run_ranks, tmp_path):
    """From images and a .jsonl file to a model and processor that transformers loads; the loss goes
    down.
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
        *("--training.steps=40", "--training.local_batch_size=2", "--optimizer.lr=1e-2"),
        *(
            "--lr_scheduler.warmup_steps=0",
            "--metrics.log_freq=1",
            "--metrics.enable_tensorboard=false",
        ),
    )

    run_ranks(2, lambda: assemble(job).train())
    points = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    losses = [point["loss/train"] for point in points if "loss/train" in point]
    assert losses[-1] < 0.3 * losses[0]
    length = job.job.training.seq_len
    trained = {
        round(length * (1 - point["data/padding"]), 6)
        for point in points
        if "data/padding" in point
    }
    assert len(trained) == 1 and trained < set(range(1, length)), (
        "rows of equally many tokens, and padding"
    )
    folder = tmp_path / "run/checkpoint/step-40"
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "LlavaProcessor"
