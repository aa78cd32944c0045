"""Held-out examples as prompts, with the answers to compare with."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titanlite.base.errors import DataError
from titanlite.config.data import DataSection, get_fields
from titanlite.data.dataset import TrainDataset, get_sources
from titanlite.features.sft.chat import ANSWER, END
from titanlite.features.sft.dataset import ExampleDataset
from titanlite.features.streams.stream import StreamDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from titanlite.features.sft.examples import TokenizedExamples


class EvaluationPrompt(NamedTuple):
    """A prompt, its reference answer, and the row that they come from.

    Attributes:
        prompt_ids: what the model gets at inference, generation prompt included.
        reference: the answer as text, decoded without special tokens: compare with a generation decoded that way.
        where: file and line, or row.
    """

    prompt_ids: list[int]
    reference: str
    where: str


def evaluation_prompts(
    dataset: TrainDataset, tokenizer: "PreTrainedTokenizerFast", max_prompts: int | None = None
) -> list[EvaluationPrompt]:
    """Return the held-out examples, each as the prompt up to its last answer; of preference pairs, the chosen side.

    The first `max_prompts` of each source, the same on every rank; no collectives. Prompt and reference are the tokens
    of the training data, so what a template adds to an answer (Qwen3: empty thoughts) is part of the reference, as it
    is part of what a trained model generates. Examples are taken in full, also where `data.too_long` cuts them for
    training.

    Raises:
        DataError: the held-out rows are plain text, which has no answers; nothing is held out.
    """
    parts = [source.dataset for source in get_sources(dataset)]
    held_out = [part.held_out for part in parts if isinstance(part, ExampleDataset | StreamDataset) and part.held_out]
    if not held_out:
        raise DataError("data: streaming holds no rows out. Set data.validation_path or evaluation.path.")
    found = [_prompts(part.examples, part.selected[:max_prompts].tolist(), tokenizer) for part in held_out]
    if not any(found):
        raise _no_answers("held-out", held_out[0].examples)
    return list(chain.from_iterable(found))


def read_evaluation_prompts(
    data: DataSection, path: str, split: str, tokenizer: "PreTrainedTokenizerFast"
) -> list[EvaluationPrompt]:
    """As `evaluation_prompts`, of all rows at `path`: what `data.path` may be; `split` is that of a dataset of the hub.

    Rows are converted and rendered as `data` says for training, but may be of another form; all of them must be usable.

    Raises:
        DataError: there are no rows, a row cannot be used, or they are plain text, which has no answers.
    """
    from titanlite.features.sft.examples import build_examples
    from titanlite.features.sft.rows import RenamedRows, build_rows

    try:
        rows, fields = build_rows(path, subset=data.subset, split=split, converter=data.converter), get_fields(data)
        settings = replace(data, format="auto", bad_rows="error", train_on="assistant")
        first = next(iter(rows)).content
        if isinstance(first, dict) and all(column in first for column in fields.values()):
            rows = RenamedRows(rows, fields)
        else:
            rows = RenamedRows(rows, {})
            settings = replace(settings, fields="", text_field=DataSection.text_field)
        examples = build_examples(settings, rows, tokenizer)
        count = (len(examples.offsets) - 1) // examples.header.documents_per_example
        found = _prompts(examples, range(count), tokenizer)
        if not found:
            raise _no_answers(path, examples)
        return found
    except DataError as error:
        raise DataError(f"evaluation.path: {error}") from None


def _prompts(
    examples: "TokenizedExamples", which: Iterable[int], tokenizer: "PreTrainedTokenizerFast"
) -> list[EvaluationPrompt]:
    found = []
    for example in which:
        place = next(iter(examples.get_documents(example)))
        is_answer = (examples.flags[place] & ANSWER) != 0
        if not is_answer.any():
            continue
        stop = int(np.flatnonzero(is_answer)[-1]) + 1
        # An answer may follow another one directly, behind the token that ends it.
        ends = (examples.flags[place] & END) != 0
        before = np.flatnonzero(~is_answer[: stop - 1] | (ends[: stop - 1] & ~ends[1:stop]))
        start = int(before[-1]) + 1 if len(before) else 0
        ids = examples.tokens[place]
        reference = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=True)
        found.append(EvaluationPrompt(ids[:start].tolist(), str(reference), examples.describe_place(example)))
    return found


def _no_answers(what: str, examples: "TokenizedExamples") -> DataError:
    return DataError(
        f"data: the {what} examples ({examples.header.form}) have no answers to compare with. Evaluate by generation "
        "on messages or prompt and completion only."
    )
