"""The validation loss counts every held-out sequence once, whatever the mesh, the batch size and
the packing.
"""

import pytest
import torch
from files import write_lines

from tests.functional.conftest import path_of, weekly
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import get_sources
from titanlite.materialize.layout import is_remote
from titanlite.ops import local_tensor

BOUND = 1e-6  # both sum the same float32 losses in different orders
VALIDATION = ["--validation.enable=true"]
TRANSFORMERS = ["--model.implementation=transformers", "--moe.expert_bias_update_rate=none"]


def build(job):
    """Build a trainer whose weights differ from the initial ones; otherwise DPO's loss would be the
    same for all pairs.
    """
    trainer = assemble(job)
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            if "_proj" in name and not is_remote(param):
                local_tensor(param).mul_(3.0)
    return trainer


def loss_on_this_rank(job):
    return build(job).validate()[0]


def loss_one_by_one(job):
    """Return the mean loss over all held-out sequences, each in its own forward."""
    trainer = build(job)
    trainer.model.eval()
    objective = trainer.parts.stepper.objective
    loss = units = 0.0
    with torch.no_grad():
        for _, share, dataset in get_sources(trainer.parts.loader.dataset):
            held_out = dataset.get_validation_indices(0, dataset.num_validation_sequences)
            weight = share / len(held_out)
            for index in held_out:
                batch = dataset.batch([index])
                loss += weight * objective(trainer.model, batch).loss.item()
                units += weight * int(objective.count(batch))
    return loss / units


@pytest.fixture
def validate(run_warm, checked):
    """`validate(degrees, *overrides)`: the loss, which must be equal on all ranks."""

    def run(degrees, *overrides):
        job = checked(degrees, *VALIDATION, *overrides)
        losses = run_warm(degrees.world_size, loss_on_this_rank, job)
        assert len(set(losses)) == 1
        return losses[0]

    return run


@pytest.fixture
def one_by_one(run_ranks, checked):
    """`one_by_one(*overrides)`: `loss_one_by_one` in one process; sources are weighted by their
    shares.
    """

    def run(*overrides):
        job = checked(Degrees(), *VALIDATION, *overrides)
        return run_ranks(1, loss_one_by_one, job)[0]

    return run


MESHES = [
    ("1", ["--training.local_batch_size=3"]),
    # The held-out rows do not fill all ranks' batches in the last round.
    ("FSDP4", ["--training.local_batch_size=5"]),
    ("CP2", ["--training.local_batch_size=4"]),
    ("PP2", ["--training.local_batch_size=2"]),
]
ANY_BATCH = "--training.global_batch_size=-1"


@pytest.mark.parametrize("kind", ["decoder", "transformers"])
def test_text(validate, one_by_one, meshes, kind):
    model = [] if kind == "decoder" else TRANSFORMERS
    expected = one_by_one(*model)
    for mesh, overrides in MESHES if kind == "decoder" else MESHES[1:2]:
        found = validate(meshes[mesh], *model, ANY_BATCH, *overrides)
        assert found == pytest.approx(expected, rel=BOUND), mesh


@pytest.mark.parametrize("packing", ["true", weekly("false")])
def test_chats(validate, one_by_one, meshes, examples, packing):
    expected = one_by_one(*examples, "--data.packing=false")
    for mesh, size in (("FSDP2", 1), ("CP2", 5)):
        found = validate(
            meshes[mesh],
            *examples,
            f"--data.packing={packing}",
            ANY_BATCH,
            f"--training.local_batch_size={size}",
        )
        assert found == pytest.approx(expected, rel=BOUND)


def test_pairs_count_once(validate, one_by_one, meshes, pairs):
    """Padding does not count as a pair."""
    data = [*pairs, "--data.packing=false"]
    data += ["--dpo.label_smoothing=0.1", "--data.validation_share=0.17"]
    expected = one_by_one(*data)
    found = validate(meshes["PP2"], *data, ANY_BATCH, "--training.local_batch_size=2")
    assert found == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("mixed", [True, False])
def test_streams_and_mixtures(validate, one_by_one, examples, tmp_path, mixed):
    """The sources have different sizes and lengths, and no size is a multiple of the rows that 2
    ranks take at once.
    """
    for name, count in (("more", 50), ("held_out", 13)):
        rows = [
            {"prompt": f"{name} {i}", "completion": " one and two" * (1 + i % 5)}
            for i in range(count)
        ]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    stream = [
        f"path={tmp_path}/more.jsonl",
        "streaming=true",
        f"validation_path={tmp_path}/held_out.jsonl",
    ]
    data = [*examples, f"--data.packing={str(mixed).lower()}"]
    if mixed:
        data += [
            "--data.path=",
            f"--data.sources.chats.path={path_of(examples)}",
            "--data.sources.chats.weight=2",
        ]
        data += [
            "--data.sources.more.weight=3",
            *(f"--data.sources.more.{setting}" for setting in stream),
        ]
        data.append("--data.sources.chats.validation_share=0.2")
    else:
        data += [f"--data.{setting}" for setting in stream]
    expected = one_by_one(*data)
    for degrees, size in ((Degrees(dp_shard=2), 4), (Degrees(tp=2), 5)):
        found = validate(degrees, *data, ANY_BATCH, f"--training.local_batch_size={size}")
        assert found == pytest.approx(expected, rel=BOUND)
