"""Dataset of examples from the configuration, and a report of the rows that were skipped, cut or
dropped.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from titanlite.base.errors import DataError
from titanlite.base.files import read_regular
from titanlite.base.log import logger
from titanlite.base.text import parse_object
from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data.loader import resolve_tokenizer_path
from titanlite.data.tokenizer import HFTokenizer, load_tokenizer
from titanlite.features.sft.chat import DROPPED, NO_END, SPELLED
from titanlite.features.sft.chat_template import set_arguments
from titanlite.features.sft.dataset import (
    ExampleDataset,
    ExampleSet,
    fit_examples,
    hold_out,
)
from titanlite.features.sft.examples import build_examples, describe_counts, sum_counts
from titanlite.features.sft.forms import Form
from titanlite.features.sft.unread import describe_unread


def build_sft(job: JobConfig) -> tuple[HFTokenizer, ExampleDataset]:
    """Build the tokenizer and the dataset of `data.dataset` = "examples"."""
    return build_example_dataset(resolve_tokenizer_path(job), job.training.seq_len)


def build_example_dataset(
    data: DataSection,
    seq_len: int,
    where: str = "data",
    tokenizer: HFTokenizer | None = None,
) -> tuple[HFTokenizer, ExampleDataset]:
    """Load the tokenizer, unless it is given, and the examples of `data.path`; `where` is the
    section's name, for the log.

    Raises:
        DataError: there is no tokenizer or template; or a row is invalid or an example too long,
            and the settings do not allow that.
    """
    tokenizer = load_example_tokenizer(data) if tokenizer is None else tokenizer
    train = fit_examples(build_examples(data, tokenizer), seq_len, data.too_long)
    if data.validation_path:
        form = cast(Form, train.examples.form)
        held_out = build_held_out(replace(data, format=form), seq_len, tokenizer)
        sources = (train, held_out)
    else:
        sources = (train,)
        train, held_out = hold_out(train, data.validation_share)
    dataset = ExampleDataset(
        train, held_out, sources, seq_len, get_padding(tokenizer), packing=data.packing
    )
    logger.info("%s: %s", where, describe(dataset))
    for warning in get_warnings(dataset):
        logger.warning("%s: %s", where, warning)
    return tokenizer, dataset


def build_held_out(data: DataSection, seq_len: int, tokenizer: HFTokenizer) -> ExampleSet:
    """Return the examples of `data.validation_path`."""
    data = replace(data, path=data.validation_path, split=data.validation_split)
    return fit_examples(build_examples(data, tokenizer), seq_len, data.too_long)


def load_example_tokenizer(data: DataSection) -> HFTokenizer:
    """Return the tokenizer with its chat template."""
    if not data.tokenizer_path:
        raise DataError(
            "data: rows of examples, and data.sources, need a tokenizer, and there is no "
            "tokenizer.json at model.path. Set model.path to the model to fine-tune, or "
            "data.tokenizer_path to a folder with a tokenizer."
        )
    tokenizer = load_tokenizer(data.tokenizer_path)
    if data.chat_template:
        tokenizer.chat_template = _read_template(data.chat_template)
    if arguments := parse_object("data.chat_template_kwargs", data.chat_template_kwargs):
        if not tokenizer.chat_template:
            raise DataError(
                "data.chat_template_kwargs: the tokenizer has no chat template. Set "
                "data.chat_template."
            )
        tokenizer.chat_template = set_arguments(tokenizer.chat_template, arguments)
    return tokenizer


def get_padding(tokenizer: HFTokenizer) -> int:
    """Return the token that fills up rows."""
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return cast(int, padding)


def _read_template(path: str) -> str:
    try:
        return read_regular(Path(path).expanduser()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template: cannot read {path}: {error}. Set it to a Jinja file in UTF-8."
        ) from None


def describe(dataset: ExampleDataset) -> str:
    """Return one line for the log of a run."""
    train = dataset.train
    kind = "pairs" if dataset.form == "preference" else "examples"
    num_split = sum(source.num_split for source in dataset.sources)  # documents
    split = f", {num_split} longer documents split" if num_split else ""
    share = train.num_trained / train.num_tokens  # without padding
    unread = describe_unread(sum_counts(source.examples.counts for source in dataset.sources))
    left_out = sum_counts(source.left_out for source in dataset.sources)
    return (
        f"{len(train.selected)} {kind} to train on ({dataset.form}), "
        f"{len(dataset.held_out.selected)} held out{split}; {train.num_tokens} tokens, {share:.1%} "
        f"trained; {dataset.num_train_sequences} sequences of {dataset.seq_len}, "
        f"{dataset.packing_efficiency:.1%} full; left out: "
        f"{describe_counts(left_out)}{f'; {unread}' if unread else ''}"
    )


def get_warnings(dataset: ExampleDataset) -> list[str]:
    """Return warnings about chats that are probably unintended, with their file."""
    return [
        f"{source.examples.names[0]}: {text}"
        for source in dataset.sources
        for text in get_chat_warnings(source.examples.counts)
    ]


def get_chat_warnings(counts: Mapping[str, int]) -> list[str]:
    """Return warnings about `Examples.counts` that are not errors, but probably unintended."""
    remedies = {
        NO_END: "the model will not learn to stop. Use a chat template that closes the assistant's "
        "turn with a token.",
        SPELLED: "they are trained as plain text. Give chats as messages, or as prompt and "
        "completion, and each document as a row.",
    }
    found = [
        f"{count} {what}: {remedies[what]}" for what, count in counts.items() if what in remedies
    ]
    dropped = [f"{count} {what}" for what, count in counts.items() if what.startswith(DROPPED)]
    return found + [f"{text}. Use a chat template that shows them." for text in dropped]
