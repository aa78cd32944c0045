"""Held-out examples as prompts, with the answers to compare with."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from titanlite.data.chat import ANSWER
from titanlite.data.example_dataset import ExampleDataset
from titanlite.data.stream import StreamDataset
from titanlite.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
    dataset: ExampleDataset | StreamDataset, tokenizer: "PreTrainedTokenizerFast", max_prompts: int | None = None
) -> list[EvaluationPrompt]:
    """The held-out examples, each as the prompt up to its last answer; of preference pairs, the chosen side.

    The first `max_prompts` of them, the same on every rank; no collectives. Prompt and reference are the tokens of the
    training data, so what a template adds to an answer (Qwen3: empty thoughts) is part of the reference, as it is part
    of what a trained model generates. Examples are taken in full, also where `data.too_long` cuts them for training.

    Raises:
        DataError: the held-out rows are plain text, which has no answers; a stream has no held-out rows.
    """
    held_out = dataset.held_out
    if held_out is None:
        raise DataError("data: streaming holds no rows out. Set data.validation_path.")
    examples = held_out.examples
    found = []
    for example in held_out.selected[:max_prompts].tolist():
        place = next(iter(examples.get_documents(example)))
        is_answer = (examples.flags[place] & ANSWER) != 0
        if not is_answer.any():
            continue
        stop = int(np.flatnonzero(is_answer)[-1]) + 1
        before = np.flatnonzero(~is_answer[:stop])
        start = int(before[-1]) + 1 if len(before) else 0
        ids = examples.tokens[place]
        reference = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=True)
        found.append(EvaluationPrompt(ids[:start].tolist(), str(reference), examples.describe_place(example)))
    if not found:
        raise DataError(
            f"data: the held-out examples ({examples.header.form}) have no answers to compare with. Evaluate by "
            "generation on messages or prompt and completion only."
        )
    return found
