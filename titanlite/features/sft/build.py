"""From configuration to examples."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titanlite.base.errors import DataError
from titanlite.base.files import read_regular
from titanlite.base.log import logger
from titanlite.config.data import DataSection
from titanlite.config.patterns import parse_object
from titanlite.config.schema import JobConfig
from titanlite.data.build import resolve_tokenizer_path
from titanlite.data.corpus import describe_left_out
from titanlite.data.tokenizer import load_tokenizer
from titanlite.features.sft.chat_template import set_arguments
from titanlite.features.sft.dataset import ExampleDataset, ExampleSet, fit_examples, hold_out
from titanlite.features.sft.examples import build_examples
from titanlite.features.sft.report import describe, get_warnings
from titanlite.features.sft.rows import open_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_TEMPLATE_BYTES = 16 << 20


def build_sft(job: JobConfig) -> tuple["PreTrainedTokenizerFast", ExampleDataset]:
    """Build the tokenizer and the dataset of `data.dataset` = "examples"."""
    return build_example_dataset(resolve_tokenizer_path(job), job.training.seq_len)


def build_example_dataset(
    data: DataSection, seq_len: int, where: str = "data", tokenizer: "PreTrainedTokenizerFast | None" = None
) -> tuple["PreTrainedTokenizerFast", ExampleDataset]:
    """Load the tokenizer, with `data.chat_template` if that is set, and the examples of `data.path`, ready for batches.

    `where` is the section that they are from, for the log. The tokenizer is loaded unless it is given.

    Raises:
        DataError: there is no tokenizer or template, a row is bad, or an example too long, and the settings say so.
    """
    tokenizer = load_example_tokenizer(data) if tokenizer is None else tokenizer
    rows = open_rows(data)
    examples = build_examples(data, rows, tokenizer)
    train = fit_examples(examples, seq_len, data.too_long)
    if data.validation_path:
        held_out = build_held_out(replace(data, format=examples.header.form), seq_len, tokenizer)
        sources = (train, held_out)
    else:
        sources = (train,)
        train, held_out = hold_out(train, data.validation_share)
    dataset = ExampleDataset(train, held_out, sources, seq_len, get_padding(tokenizer), packing=data.packing)
    logger.info("%s: %s%s", where, describe(dataset), describe_left_out(data, rows.names))
    for warning in get_warnings(dataset):
        logger.warning("%s: %s", where, warning)
    return tokenizer, dataset


def build_held_out(data: DataSection, seq_len: int, tokenizer: "PreTrainedTokenizerFast") -> ExampleSet:
    """Return the examples of `data.validation_path`."""
    rows = open_rows(replace(data, path=data.validation_path, split=data.validation_split))
    return fit_examples(build_examples(data, rows, tokenizer), seq_len, data.too_long)


def load_example_tokenizer(data: DataSection) -> "PreTrainedTokenizerFast":
    """Return the tokenizer with its chat template."""
    if not data.tokenizer_path:
        raise DataError(
            "data: rows of examples need a tokenizer, and there is no tokenizer.json at model.path. Set model.path to "
            "the model to fine-tune, or data.tokenizer_path to a folder with a tokenizer."
        )
    tokenizer = load_tokenizer(data.tokenizer_path)
    if data.chat_template:
        tokenizer.chat_template = _read_template(data.chat_template)
    if arguments := parse_object("data.chat_template_kwargs", data.chat_template_kwargs):
        if not tokenizer.chat_template:
            raise DataError("data.chat_template_kwargs: the tokenizer has no chat template. Set data.chat_template.")
        tokenizer.chat_template = set_arguments(tokenizer.chat_template, arguments)
    return tokenizer


def get_padding(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the token that fills rows."""
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return cast(int, padding)


def _read_template(path: str) -> str:
    try:
        return read_regular(Path(path).expanduser(), _MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template: cannot read {path}: {error}. Set it to a Jinja file in UTF-8.") from None
