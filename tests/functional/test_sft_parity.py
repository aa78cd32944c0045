"""Fine-tuning is compared with the usual loop: a transformers model, document by document, and
torch's AdamW.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.functional.conftest import NO_PRESET, documents_of, take_step, weekly
from titanlite.assemble import assemble, build_data
from titanlite.data.dataset import IGNORE_INDEX

STEPS, ROWS, LR, BETAS, DECAY, MAX_NORM = 6, 8, 1e-2, (0.9, 0.95), 0.1, 1.0


def reference_losses(model_folder, steps):
    """Return the loss of every step of a plain loop over the documents of each of `steps`,
    unpacked.
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, experts_implementation="eager"
    )
    matrices = [param for param in model.parameters() if param.dim() >= 2]
    vectors = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8)
    losses = []
    for documents in steps:
        count = sum((labels != IGNORE_INDEX).sum() for _, labels in documents)
        total = 0.0
        for tokens, labels in documents:
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
    pretrained,
    examples,
    once,
    mesh,
    packing,
):
    model_folder = pretrained("base", 0.1)
    degrees = meshes[mesh]
    job = checked(
        degrees,
        *NO_PRESET,
        *examples,
        f"--checkpoint.initial_load_path={model_folder}",
        "--model.init=auto",
        f"--data.packing={packing}",
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

    def plain_losses():
        _, loader = build_data(job.job, 0, 1)  # all batches that the ranks read together
        steps = [documents_of(loader, step) for step in range(STEPS)]
        assert (len(steps[0]) > ROWS) == (packing == "true")
        return reference_losses(model_folder, steps)

    losses = run_ranks(degrees.world_size, rank_main)
    expected = once(packing, plain_losses)
    assert expected[-1] < 0.8 * expected[0]
    for of_rank in losses:
        assert of_rank == pytest.approx(expected, rel=1e-4)
