"""Evaluation by generation: continue prompts greedily and compare with reference answers.

Prompts are split over the data-parallel ranks for generation, and over all ranks for scoring.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from titanlite.base.agree import together
from titanlite.base.errors import ConfigError, DataError, raise_problems
from titanlite.base.extension import load_extension
from titanlite.base.text import describe_error
from titanlite.config import JobConfig
from titanlite.config.assets import assets_folder
from titanlite.config.data import DataSection
from titanlite.data.dataset import TrainDataset, get_sources
from titanlite.data.tokenizer import count_ids
from titanlite.features.generate.generate import generate, get_end_of_turn_ids, get_eos_token_ids
from titanlite.features.sft.chat import ANSWER, END
from titanlite.features.sft.dataset import ExampleDataset
from titanlite.features.sft.examples import Examples, build_examples
from titanlite.features.streams.stream import StreamDataset
from titanlite.metrics.point import EvaluationResult, Example
from titanlite.run import Run

Scorer = Callable[[str, str], float]
_EXAMPLES = 2


class EvaluationPrompt(NamedTuple):
    """A prompt, its reference answer, and the row that they come from."""

    prompt_ids: list[int]  # what the model gets at inference, generation prompt included
    reference: str  # decoded without special tokens: compare with a generation decoded that way
    where: str  # file and row


def evaluation_prompts(dataset: TrainDataset, tokenizer: Any) -> list[EvaluationPrompt]:
    """Return the held-out examples, each with its prompt up to the last answer; a preference pair
    gives its chosen answer.

    All ranks return the same, without collectives. Prompt and reference are tokens of the training
    data. So a template's additions to an answer (Qwen3: an empty `<think>` block) are part of the
    reference, because a trained model generates them too. Examples are never shortened, even if
    `data.too_long` cuts them for training.

    Raises:
        DataError: the held-out rows are plain text, which has no answers, or no rows are held out.
    """
    parts = [source.dataset for source in get_sources(dataset)]
    held_out = [
        part.held_out
        for part in parts
        if isinstance(part, ExampleDataset | StreamDataset) and part.held_out
    ]
    if not held_out:
        raise DataError(
            "data: streaming holds no rows out. Set data.validation_path or evaluation.path."
        )
    found = [_prompts(part.examples, part.selected.tolist(), tokenizer) for part in held_out]
    if not any(found):
        raise _no_answers("held-out", held_out[0].examples)
    return list(chain.from_iterable(found))


def read_evaluation_prompts(
    data: DataSection, path: str, split: str, tokenizer: Any
) -> list[EvaluationPrompt]:
    """Read the prompts of all rows at `path`, which may be everything that `data.path` may be;
    `split` is the split of a hub dataset.

    Columns, conversion and rendering of rows follow `data`, as in training, but the rows may have a
    different format. All rows must be usable.

    Raises:
        DataError: there are no rows, a row cannot be used, or the rows are plain text, which has no
            answers.
    """
    try:
        settings = replace(
            data,
            path=path,
            split=split,
            pattern="",
            format="auto",
            bad_rows="error",
            train_on="assistant",
        )
        examples = build_examples(settings, tokenizer)
        found = _prompts(examples, range(len(examples.places)), tokenizer)
        if not found:
            raise _no_answers(path, examples)
        return found
    except DataError as error:
        raise DataError(f"evaluation.path: {error}") from None


def _prompts(examples: Examples, which: Iterable[int], tokenizer: Any) -> list[EvaluationPrompt]:
    found = []
    for example in which:
        place = next(iter(examples.get_documents(example)))
        tokens = examples.tokens[place]
        is_answer = (tokens["flags"] & ANSWER) != 0
        if not is_answer.any():
            continue
        stop = int(np.flatnonzero(is_answer)[-1]) + 1
        # An answer may directly follow the end token of the previous answer.
        ends = (tokens["flags"] & END) != 0
        before = np.flatnonzero(~is_answer[: stop - 1] | (ends[: stop - 1] & ~ends[1:stop]))
        start = int(before[-1]) + 1 if len(before) else 0
        ids = tokens["id"].tolist()
        reference = tokenizer.decode(ids[start:stop], skip_special_tokens=True)
        where = examples.describe_place(example)
        found.append(EvaluationPrompt(ids[:start], str(reference), where))
    return found


def _no_answers(what: str, examples: Examples) -> DataError:
    return DataError(
        f"data: the {what} examples ({examples.form}) have no answers to compare with. "
        "Evaluate by generation on messages or prompt and completion only."
    )


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if the texts are equal except for white space at the ends, else 0."""
    return float(prediction.strip() == reference.strip())


def contains(prediction: str, reference: str) -> float:
    """Return 1 if the prediction contains the reference, stripped of white space at its ends, else
    0.
    """
    return float(reference.strip() in prediction)


SCORERS: dict[str, Scorer] = {"exact_match": exact_match, "contains": contains}


def get_scorer(name: str) -> tuple[str, Scorer]:
    """Return the name of the score and its function for `evaluation.scorer`; raises as
    `load_extension`.
    """
    if name in SCORERS:
        return name, SCORERS[name]
    return name.partition(":")[2], load_extension(
        "evaluation.scorer", name, ["prediction, reference"]
    )


class Evaluator:
    """Evaluation of a model on one set of prompts, at any step; made by `build_evaluator`."""

    def __init__(
        self,
        run: Run,
        dataset: TrainDataset,
        tokenizer: Any,
    ) -> None:
        job = run.job
        model_config = run.model_config
        prompts = build_evaluation_prompts(job, dataset, tokenizer)
        self._section = job.evaluation
        self._tokenizer = tokenizer
        self._run = run
        self.name, self._scorer = get_scorer(self._section.scorer)
        count = min(self._section.samples or len(prompts), len(prompts))
        # Prompts are spread over the whole set, because rows are often sorted by kind or
        # difficulty.
        self._prompts = [prompts[i * len(prompts) // count] for i in range(count)]
        longest = model_config.max_position_embeddings  # None: no limit
        raise_problems(
            DataError,
            "evaluation",
            [
                f"{p.where}: the prompt has {len(p.prompt_ids)} tokens, which with "
                f"evaluation.max_new_tokens = {self._section.max_new_tokens} is more than "
                f"max_position_embeddings ({longest}). Lower max_new_tokens, or leave the row out."
                for p in self._prompts
                if longest is not None
                and len(p.prompt_ids) + self._section.max_new_tokens > longest
            ],
        )
        self._vocab_size = min(count_ids(tokenizer), model_config.vocab_size)
        ends = get_end_of_turn_ids(tokenizer, dataset)
        self._eos_token_ids = sorted(
            {*get_eos_token_ids(tokenizer, assets_folder(job.model, job.checkpoint)), *ends}
        )

    def is_due(self, step: int, last: bool) -> bool:
        return step == 0 or step % self._section.freq == 0 or last

    def run(self, model: nn.Module) -> EvaluationResult:
        """Generate and score.

        Raises:
            DataError, on all ranks: the scorer raised an error, or did not return a finite number.

        Collectives: see `generate`; also one gather and one all-reduce. Every rank must call.
        """
        began = time.perf_counter()
        continuations = generate(
            model,
            [prompt.prompt_ids for prompt in self._prompts],
            max_new_tokens=self._section.max_new_tokens,
            device=self._run.device,
            dims=self._run.dims,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            batch_size=self._section.batch_size,
        )
        texts: list[str] = [
            self._tokenizer.decode(c.tokens, skip_special_tokens=True) for c in continuations
        ]
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        scores = torch.zeros(len(texts), dtype=torch.float64)
        problems = []
        for i in range(rank, len(texts), world_size):
            try:
                scores[i] = self._score(texts[i], self._prompts[i])
            except DataError as error:
                problems.append(str(error))
        with together():
            raise_problems(DataError, "evaluation", problems)
        dist.all_reduce(scores)  # on the host
        shown = zip(self._prompts, texts, scores.tolist(), strict=True)
        examples = [
            Example(self._tokenizer.decode(prompt.prompt_ids), text, prompt.reference, score)
            for prompt, text, score in list(shown)[:_EXAMPLES]
        ]
        ended = sum(c.ended for c in continuations) / len(texts)
        seconds = time.perf_counter() - began
        return EvaluationResult(
            self.name, scores.mean().item(), ended, len(texts), seconds, examples
        )

    def _score(self, prediction: str, prompt: EvaluationPrompt) -> float:
        where = f"{prompt.where}: evaluation.scorer '{self._section.scorer}'"
        try:
            score = self._scorer(prediction, prompt.reference)
            if isinstance(score, SupportsFloat) and math.isfinite(value := float(score)):
                return value
        except BaseException as error:  # noqa: BLE001  the user's function may raise anything; sys.exit, too
            raise DataError(f"{where} raised {describe_error(error)}.") from None
        raise DataError(f"{where} returned {score!r}, not a finite number.")


def build_evaluation_prompts(
    job: JobConfig, dataset: TrainDataset, tokenizer: Any
) -> Sequence[EvaluationPrompt]:
    """Return the prompts of `evaluation.path` or of the held-out rows of `dataset`. ConfigError:
    there are none.
    """
    section = job.evaluation
    if section.path:
        return read_evaluation_prompts(job.data, section.path, section.split, tokenizer)
    if job.data.dataset == "examples":
        return evaluation_prompts(dataset, tokenizer)
    raise ConfigError(
        "evaluation.enable = true needs examples with answers, but data.dataset = "
        f'"{job.data.dataset}" is plain text. '
        "Set evaluation.path, or evaluation.enable = false."
    )


def build_evaluator(run: Run, dataset: TrainDataset, tokenizer: Any) -> Evaluator | None:
    """Return the evaluator that `[evaluation]` describes, or None if it is not enabled.

    Raises:
        ConfigError, on all ranks: there are no prompts with answers, or the scorer cannot be
            imported.
        DataError, on all ranks: prompts cannot be read, or are too long for `max_new_tokens` more
            tokens.

    Collectives: one gather of small objects; every rank must call.
    """
    if not run.job.evaluation.enable:
        return None
    with together():  # each rank reads the prompts and imports the scorer
        return Evaluator(run, dataset, tokenizer)
