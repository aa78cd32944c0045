import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from unit.data.templates import CHATML, SPECIAL_TOKENS

from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import PackedDataset
from titanlite.data.tokens import TokenizedCorpus

EOS = 0


def _make_text(rng):
    words = [
        "def",
        "return",
        "x",
        "yy",
        "self.",
        "(a, b)",
        "    ",
        "\n",
        "\t",
        "12345",
        "\u00e9t\u00e9",
        "\u4e16\u754c",
    ]
    return " ".join(rng.choice(words) for _ in range(rng.randint(20, 200))) + "\n"


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """A folder of 40 small text files, two of them in a subfolder."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "sub").mkdir()
    rng = random.Random(0)
    for i in range(40):
        path = folder / ("sub" if i % 20 == 7 else "") / f"{i:02d}.txt"
        path.write_text(_make_text(rng), encoding="utf-8")
    return folder


@pytest.fixture
def data(text_folder, tmp_path):
    """A [data] section over `text_folder` with an empty cache."""
    cache_folder = str(tmp_path / "cache")
    return DataSection(
        dataset="text", path=str(text_folder), bpe_vocab_size=300, cache_folder=cache_folder
    )


@pytest.fixture
def make_dataset():
    """A dataset of random tokens: id 0 ends a document, every 7th token on average."""

    def make(num_tokens=2001, seq_len=10):
        tokens = np.random.default_rng(1).integers(1, 50, num_tokens).astype(np.uint16)
        tokens[np.random.default_rng(2).random(num_tokens) < 1 / 7] = EOS
        return PackedDataset(TokenizedCorpus(tokens, EOS, 50, int((tokens == EOS).sum())), seq_len)

    return make


@pytest.fixture(scope="session")
def _chat_tokenizer_json():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["what is the answer to the question\n\n", "user assistant system two and two"], trainer
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer.to_str()


@pytest.fixture
def make_tokenizer(_chat_tokenizer_json):
    """`make_tokenizer(template, eos)`: a small byte-level tokenizer with the special tokens of
    `templates`.
    """

    def make(template=CHATML, eos="<|endoftext|>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_chat_tokenizer_json),
            bos_token="<s>",
            eos_token=eos,
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def make_job(tmp_path, make_tokenizer):
    """`make_job(rows, template, **settings)`: a job over rows written to rows.jsonl, with a cache
    of its own.
    """

    def make(rows, template=CHATML, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text(
            rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        )
        make_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
        job = JobConfig(data=DataSection(dataset="examples", path=str(path)))
        job.validation.enable = True  # then some rows are held out
        job.data.tokenizer_path = str(tmp_path / "tokenizer")
        job.data.cache_folder = str(tmp_path / "cache")
        for name, value in settings.items():
            setattr(job.training if name == "seq_len" else job.data, name, value)
        return job

    return make
