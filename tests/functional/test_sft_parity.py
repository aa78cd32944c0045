"""Fine-tuning is compared with the usual loop: a transformers model, document by document, and
torch's AdamW.
"""

import json
import random
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.functional.conftest import NO_PRESET, take_step, weekly
from titanlite.assemble import assemble
from titanlite.base.process import environment_kept
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import IGNORE_INDEX, Batch

ROOT = Path(__file__).parents[2]
STEPS, ROWS, LR, BETAS, DECAY, MAX_NORM = 6, 8, 1e-2, (0.9, 0.95), 0.1, 1.0


@pytest.fixture(scope="module")
def model_and_rows(tmp_path_factory):
    """A tiny random Qwen3-MoE in Hugging Face format, and 400 chats about numbers for its
    tokenizer.
    """
    folder = tmp_path_factory.mktemp("sft")
    with (
        environment_kept()
    ):  # it sets variables, and the server of ranks refuses others than its own
        arithmetic = runpy.run_path(str(ROOT / "scripts" / "arithmetic" / "make_arithmetic.py"))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8}
    config = Qwen3MoeConfig(
        **sizes,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=32,
        initializer_range=0.1,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    arithmetic["make_tokenizer"]().save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = []
    for _ in range(400):
        messages = []
        for _ in range(rng.randint(1, 3)):
            a, b = rng.randint(0, 999), rng.randint(0, 99)
            messages += [
                {"role": "user", "content": f"{a}+{b}"},
                {"role": "assistant", "content": str(a + b)},
            ]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (folder / "chats.jsonl").write_text("".join(rows))
    return folder / "model", folder / "chats.jsonl"


def documents_of(batch):
    """Return (tokens, labels) of every document in `batch` by itself."""
    found = []
    for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
        found += [(tokens[ids == i], labels[ids == i]) for i in range(int(ids.max()) + 1)]
    return found


def reference_losses(model_folder, batches):
    """Return the loss of every step of a plain loop over the documents of `batches`, unpacked."""
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, experts_implementation="eager"
    )
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
    losses = []
    for batch in batches:
        count = (batch.labels != IGNORE_INDEX).sum()
        total = 0.0
        for tokens, labels in documents_of(batch):
            logits = model(input_ids=tokens.unsqueeze(0)).logits[0]
            loss = (
                torch.nn.functional.cross_entropy(
                    logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"
                )
                / count
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize(
    ("mesh", "packing"),
    [
        ("1", "true"),
        weekly("1", "false"),
        ("TP2xEP2", "true"),
    ],
)
def test_steps_are_those_of_a_plain_loop(
    run_ranks,
    checked,
    meshes,
    model_and_rows,
    cache_folder,
    once,
    mesh,
    packing,
):
    model_folder, rows = model_and_rows
    degrees = meshes[mesh]
    job = checked(
        degrees,
        *NO_PRESET,
        f"--checkpoint.initial_load_path={model_folder}",
        "--data.dataset=examples",
        f"--data.path={rows}",
        f"--data.packing={packing}",
        f"--data.cache_folder={cache_folder}",
        "--training.seq_len=96",
        f"--training.steps={STEPS}",
        f"--training.global_batch_size={ROWS}",
        f"--training.max_norm={MAX_NORM}",
        f"--training.local_batch_size={ROWS // 2}",
        f"--optimizer.lr={LR}",
        "--optimizer.eps=1e-8",
        f"--optimizer.weight_decay={DECAY}",
        f"--optimizer.beta2={BETAS[1]}",
        "--lr_scheduler.warmup_steps=0",
        "--lr_scheduler.min_lr_factor=1",
        "--moe.expert_bias_update_rate=none",
    )

    def rank_main():
        trainer = assemble(job)
        return [take_step(trainer, step).loss.item() for step in range(STEPS)]

    def global_batches():
        # One process reads all batches that the ranks read together.
        loader = assemble(replace(job, degrees=Degrees())).parts.loader
        found = []
        for step in range(STEPS):
            parts = loader.micro_batches(step)
            columns = zip(
                *((b.tokens, b.labels, b.positions, b.document_ids) for b in parts), strict=True
            )
            found.append(Batch(*(torch.cat(column) for column in columns)))
        return found

    def plain_losses():
        (batches,) = run_ranks(1, global_batches)
        assert (max(int(batch.document_ids.max()) for batch in batches) > 0) == (packing == "true")
        return reference_losses(model_folder, batches)

    losses = run_ranks(degrees.world_size, rank_main)
    expected = once(packing, plain_losses)
    assert expected[-1] < 0.8 * expected[0]
    for of_rank in losses:
        assert of_rank == pytest.approx(expected, rel=1e-4)
