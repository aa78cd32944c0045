"""`data --step N` shows exactly what a run trained on: resumed with another batch size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import titanlite.features.tools.preview_step
import titanlite.train
import titanlite.trainer
from titanlite.__main__ import main
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import Batch
from titanlite.features.tools.shown import ShownDocument
from titanlite.ops import IGNORE_INDEX
from titanlite.preflight import Checked
from titanlite.train_step import StepResult
from titanlite.trainer import Trainer

RANKS = 2
Rows = list[tuple[list[int], list[int]]]  # tokens and labels of each sequence
BEFORE, AFTER = ["--training.steps=4"], ["--training.steps=22", "--training.global_batch_size=4"]
COMMON = ["--checkpoint.interval=3", "--checkpoint.keep_latest_k=2", "--metrics.log_freq=4"]


@pytest.fixture
def train(
    run_ranks: Callable[..., list[Any]], checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[list[tuple[int, Rows]]]]:
    """`train(*overrides)` -> per rank, (step, what it trained on) in the order in which that was done."""
    monkeypatch.setattr(titanlite.trainer, "_SAMPLE_TOKENS", 1)
    original = Trainer.train_step
    done: list[tuple[int, Rows]] = []

    def train_step(trainer: Trainer, batches: list[Batch]) -> StepResult:
        result = original(trainer, batches)
        rows = [row for batch in batches for row in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True)]
        done.append((trainer.step, rows))
        return result

    def run(*overrides: str) -> list[list[tuple[int, Rows]]]:
        def rank_main() -> list[tuple[int, Rows]]:
            titanlite.train.train(job)
            return done

        job = checked(Degrees(dp_shard=RANKS), *COMMON, *overrides)
        return run_ranks(RANKS, rank_main)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    return run


@pytest.fixture
def shown(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Rows]:
    """`shown(step, *arguments)` -> the sequences that the command shows, put together from their documents."""
    found: list[list[ShownDocument]] = []
    original = titanlite.features.tools.preview_step.get_shown_documents

    def get_shown_documents(dataset: Any, index: int) -> list[ShownDocument]:
        found.append(original(dataset, index))
        return found[-1]

    def show(step: int, *arguments: str) -> Rows:
        found.clear()
        argv = ["--config", str(config_file), f"--job.dump_folder={tmp_path / 'run'}", "--step", str(step)]
        assert main(["data", *argv, *COMMON, *arguments]) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert out.count("\nsequence ") == len(found)
        for document in (document for documents in found for document in documents):
            counts = f"{document.num_tokens} tokens, {document.num_trained} trained"
            assert f": {document.place}, {counts}\n" in out
        return [_join(documents) for documents in found]

    monkeypatch.setattr(titanlite.features.tools.preview_step, "get_shown_documents", get_shown_documents)
    return show


def _join(documents: list[ShownDocument]) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    labels: list[int] = []
    for document in documents:
        ids, flags = [*document.ids, 0][1:], [*document.trained, False][1:]
        following = [id if trained else IGNORE_INDEX for id, trained in zip(ids, flags, strict=True)]
        tokens += document.ids[: document.num_tokens]
        labels += following[: document.num_tokens]
    return tokens, labels


def test_shown_is_what_was_trained_on(train: Any, shown: Any, tmp_path: Path) -> None:
    first = train(*BEFORE)
    second = train(*AFTER)
    steps = [step for step, _ in second[0]]
    assert steps == [*range(5, 23)]
    done = [dict(before) | dict(after) for before, after in zip(first, second, strict=True)]
    assert len(done[0][4]) == 4 and len(done[0][5]) == 2, "half the batch size after the resume"
    for step in (1, 4, 5, 12, 13, 16, 17, 22):
        for rank in range(RANKS):
            assert shown(step, *AFTER, f"--rank={rank}") == done[rank][step], (step, rank)
    whole = shown(13, *AFTER)
    assert sorted(whole) == sorted(row for rank in done for row in rank[13])
    assert torch.tensor([row for row, _ in whole]).shape == (4, 32)
    # The other settings of before: what is shown of a step is what it had, whatever the next steps would take.
    assert shown(13, *BEFORE, "--rank=1") == done[1][13]
