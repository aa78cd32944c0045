"""Evaluation by generation, early stopping, the best checkpoint, the model card and the upload, in
real runs.
"""

import math
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from files import read_json

import titanlite.assemble
import titanlite.features.generate.evaluate
import titanlite.rank
from tests.functional.conftest import values_of, weekly
from titanlite.assemble import assemble
from titanlite.base.errors import ConfigError
from titanlite.checkpoint.commit import check_folder, list_steps, read_best
from titanlite.config.parallelism import Degrees


@dataclass(frozen=True)
class Prompt:
    """The fields of a held-out example of titanlite.data."""

    prompt_ids: list[int]
    reference: str
    where: str


# The prompts have different lengths, and there are 9: on 4 data-parallel ranks, one rank has 3 and
# each other rank has 2.
PROMPTS = [
    Prompt(list(range(2 + i, 5 + 3 * i)), f" answer {i}\n", f"rows.jsonl, row {i + 1}")
    for i in range(9)
]
EVALUATION = ["--evaluation.enable=true", "--evaluation.freq=2", "--evaluation.max_new_tokens=4"]
VALIDATION = ["--validation.enable=true", "--validation.freq=1", "--validation.steps=1"]
# The result of the first validation, before the first step. It is better than the later results,
# but does not count.
BEFORE = 0.5
BASE = ["--training.steps=4", "--lr_scheduler.warmup_steps=1", "--checkpoint.interval=0"]


@pytest.fixture(autouse=True)
def prompts(monkeypatch):
    """Replace the prompts before the ranks are forked."""
    monkeypatch.setattr(
        titanlite.features.generate.evaluate, "build_evaluation_prompts", lambda *_: PROMPTS
    )


def train_with_losses(job, losses):
    trainer = assemble(job)
    if losses is not None:
        trainer.validate = lambda: ((BEFORE, *losses)[trainer.step], {})  # type: ignore[method-assign]
    trainer.train()


@pytest.fixture
def train(run_warm, checked):
    """`train(degrees, *overrides)` -> the folder of a run that `Trainer.train` has finished."""

    def run(degrees, *overrides, losses=None):
        job = checked(degrees, *BASE, *overrides)
        run_warm(degrees.world_size, train_with_losses, job, losses)
        return Path(job.job.job.dump_folder)

    return run


# --- evaluation


TRANSFORMERS = ["--model.implementation=transformers", "--moe.expert_bias_update_rate=none"]


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [("TP2xEP2 only", []), weekly("EP2xFSDP2", TRANSFORMERS)],
)
def test_it_takes_place_before_at_intervals_and_at_the_end(train, meshes, mesh, overrides):
    folder = train(meshes[mesh], *EVALUATION, "--training.steps=3", *overrides)
    assert values_of(folder, "eval/exact_match") == {0: 0.0, 2: 0.0, 3: 0.0}
    assert values_of(folder, "eval/ended").keys() == {0, 2, 3}
    examples = values_of(folder, "eval/examples")[3]
    assert [example["reference"] for example in examples] == [" answer 0\n", " answer 1\n"]
    assert examples[0].keys() == {"prompt", "prediction", "reference", "score"}
    card = (folder / "checkpoint/step-3/README.md").read_text()
    assert "| exact_match | 0.0000 | 0.0000 (step 3) | 0.0000 (step 2) |" in card


def test_scores_are_the_same_on_every_mesh_and_counted_once(
    run_ranks, checked, meshes, monkeypatch
):
    """Each prompt has a different score, so that a missing or repeated prompt changes the mean."""
    monkeypatch.setitem(
        titanlite.features.generate.evaluate.SCORERS,
        "exact_match",
        lambda p, r: len(p) + 100.0 * int(r.split()[1]),
    )

    def rank_main(degrees):
        job = checked(degrees, *EVALUATION)
        trainer = assemble(job)
        result = trainer.watch.evaluator.run(trainer.model)
        return (
            result.score,
            result.ended,
            result.num_prompts,
            [example.prediction for example in result.examples],
        )

    (one,) = run_ranks(1, rank_main, Degrees())
    assert one[2] == 9 and 400 <= one[0] < 400 + 4 * 12, "the references alone give 400 on average"
    for found in run_ranks(4, rank_main, meshes["TP2xFSDP2"]):
        assert found == one


def test_training_is_the_same_with_evaluation(train, tmp_path):
    share = "--data.validation_share=0.2"  # by default, unused held-out rows would be trained
    with_it = values_of(
        train(Degrees(), share, *EVALUATION, f"--job.dump_folder={tmp_path / 'a'}"), "loss/train"
    )
    without = values_of(
        train(Degrees(), share, f"--job.dump_folder={tmp_path / 'b'}"), "loss/train"
    )
    assert with_it == without and len(without) == 4


def bad_scorer(prediction, reference):
    """Fail on rows that only one rank scores."""
    number = int(reference.split()[1])
    if number == 3:
        raise KeyError("no such unit")
    if number == 6:
        sys.exit(0)
    return {4: np.float32(0.5), 5: math.nan, 7: 10**400, 8: "1"}.get(number, True)


def test_a_scorer_that_fails_ends_all_ranks_with_one_error(
    run_ranks, config_file, monkeypatch, tmp_path
):
    arguments = ["--config", str(config_file), f"--job.dump_folder={tmp_path}", *BASE, *EVALUATION]
    monkeypatch.setattr(
        titanlite.features.generate.evaluate, "get_scorer", lambda name: ("bad", bad_scorer)
    )

    def rank_main():
        with redirect_stderr(StringIO()) as errors:
            code = titanlite.rank.main(arguments)
        return code, errors.getvalue()

    ((code, text),) = set(run_ranks(4, rank_main))
    assert code == 2, text
    message = text[text.index("titanlite: error: ") :]
    assert message.startswith("titanlite: error: evaluation: ")
    where = "row {}: evaluation.scorer 'exact_match' "
    for row, problem in (
        (4, "raised KeyError: 'no such unit'."),
        (6, "returned nan, not a finite number. (rank 1)"),
        (7, "raised SystemExit: 0. (rank 2)"),
        (8, "raised OverflowError: int too large to convert to float. (rank 3)"),
        (9, "returned '1', not a finite number. (rank 0)"),
    ):
        assert f"rows.jsonl, {where.format(row)}{problem}" in message


# --- early stopping


def test_early_stopping_ends_the_run_and_a_resume_does_not_go_on(train):
    losses = [3.0, 2.0, 2.1, 2.2, 2.3, 2.4, 1.0, 1.0, 1.0]
    arguments = [
        *VALIDATION,
        *EVALUATION,
        "--training.steps=9",
        "--validation.early_stopping_patience=3",
    ]
    folder = train(Degrees(), *arguments, losses=losses)
    assert values_of(folder, "loss/validation") == dict(enumerate([BEFORE, *losses[:5]]))
    assert list_steps(folder / "checkpoint") == [5]
    assert values_of(folder, "eval/exact_match").keys() == {0, 2, 4, 5}, (
        "and it ends with an evaluation"
    )
    train(Degrees(), *arguments, losses=losses)
    assert len(values_of(folder, "loss/train")) == 5, "the patience is used up"
    train(Degrees(), *arguments, "--validation.early_stopping_patience=4", losses=losses)
    assert values_of(folder, "loss/train").keys() == set(range(1, 7)), (
        "one more is allowed, and it is no better"
    )


# --- the best checkpoint


@pytest.mark.parametrize("mode", [weekly("disabled"), "async"])
def test_the_best_checkpoint_stays_beside_the_latest(train, mode):
    losses = [3.0, 2.0, 2.5, 2.6, 1.5, 1.9]
    arguments = [
        *VALIDATION,
        "--checkpoint.save_best=validation",
        "--checkpoint.keep_latest_k=1",
        "--checkpoint.interval=3",
        f"--checkpoint.async_mode={mode}",
    ]
    folder = train(Degrees(dp_shard=2), *arguments, losses=losses) / "checkpoint"
    assert list_steps(folder) == [2, 4] and read_best(folder) == 2
    assert check_folder(folder / "best", checksums=True) == []
    assert (folder / "best/config.json").exists(), "the link is a model folder"
    # The resumed run knows the best result so far, so 2.6 does not count. Once a later step is
    # better, the old best is removed.
    train(Degrees(dp_shard=2), *arguments, "--training.steps=6", losses=losses)
    assert list_steps(folder) == [5, 6] and read_best(folder) == 5
    state = read_json(folder / "step-6/titanlite/train_state.json")["results"]["validation"]
    assert (state["best"], state["best_step"], state["last"]) == (1.5, 5, 1.9)
    assert (
        "| validation loss | 0.5000 | 1.9000 (step 6) | 1.5000 (step 5) |"
        in (folder / "step-6/README.md").read_text()
    )


# --- the upload


@pytest.mark.parametrize("save_best", [False, True])
def test_upload_of_the_final_or_the_best_model(run_ranks, checked, monkeypatch, save_best):
    sent = []
    monkeypatch.setattr(
        titanlite.assemble, "push_to_hub", lambda folder, name: sent.append((folder, name))
    )
    losses = [3.0, 2.0, 2.5, 2.6]
    best = [*VALIDATION, "--checkpoint.save_best=validation"] if save_best else []
    job = checked(Degrees(dp_shard=2), *BASE, *best, "--checkpoint.push_to_hub=me/model")

    def rank_main():
        train_with_losses(job, losses)
        return sent

    first, second = run_ranks(2, rank_main)
    step = 2 if save_best else 4
    assert [(folder.name, name) for folder, name in first] == [(f"step-{step}", "me/model")]
    assert second == [], "one rank uploads"


# --- refusals


def test_scorers():
    get_scorer = titanlite.features.generate.evaluate.get_scorer
    scorers = {name: get_scorer(name)[1] for name in ("exact_match", "contains")}
    assert [
        scorers["exact_match"](*pair) for pair in ((" 42\n", "42"), ("42.", "42"), ("", ""))
    ] == [1.0, 0.0, 1.0]
    assert [
        scorers["contains"](*pair) for pair in (("It is 42.", " 42 "), ("It is 24.", "42"))
    ] == [1.0, 0.0]
    name, function = get_scorer("math:pow")
    assert name == "pow" and function is math.pow
    with pytest.raises(ConfigError, match="math has no 'bleu'"):
        get_scorer("math:bleu")
