"""Fixtures that the tests of features share with those of data and models."""

from unit.data.conftest import (
    _chat_tokenizer_json,
    data,
    make_dataset,
    make_job,
    make_tokenizer,
    text_folder,
)
from unit.models.conftest import tiny

__all__ = [
    "_chat_tokenizer_json",
    "data",
    "make_dataset",
    "make_job",
    "make_tokenizer",
    "text_folder",
    "tiny",
]
