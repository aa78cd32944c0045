"""Text to batches: corpus > tokenizer > tokens > dataset > loader; rows of examples > forms > chat > encode > examples.

Importing this package does not import transformers (0.5 to 1 s): only the functions that return a tokenizer do.
"""

from titanlite.data.build import build_data, build_example_dataset, resolve_tokenizer_path
from titanlite.data.corpus import Corpus, build_corpus
from titanlite.data.dataset import IGNORE_INDEX, Batch, PackedDataset, SequenceDataset, TrainDataset
from titanlite.data.loader import TrainLoader
from titanlite.data.tokenizer import build_tokenizer, count_ids, load_tokenizer
from titanlite.data.tokens import TokenizedCorpus, build_tokens
from titanlite.features.generate.prompts import EvaluationPrompt, evaluation_prompts, read_evaluation_prompts
from titanlite.features.sft.dataset import ExampleDataset
from titanlite.features.streams.stream import StreamDataset

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Corpus",
    "EvaluationPrompt",
    "ExampleDataset",
    "PackedDataset",
    "SequenceDataset",
    "StreamDataset",
    "TokenizedCorpus",
    "TrainDataset",
    "TrainLoader",
    "build_corpus",
    "build_data",
    "build_example_dataset",
    "build_tokenizer",
    "build_tokens",
    "count_ids",
    "evaluation_prompts",
    "load_tokenizer",
    "read_evaluation_prompts",
    "resolve_tokenizer_path",
]
