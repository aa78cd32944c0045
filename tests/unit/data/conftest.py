import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titanlite.config.schema import DataSection
from titanlite.data import PackedDataset, TokenizedCorpus

EOS = 0


def _make_text(rng: random.Random) -> str:
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
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 small text files, two of them in a subfolder."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "sub").mkdir()
    rng = random.Random(0)
    for i in range(40):
        path = folder / ("sub" if i % 20 == 7 else "") / f"{i:02d}.txt"
        path.write_text(_make_text(rng), encoding="utf-8")
    return folder


@pytest.fixture
def data(text_folder: Path, tmp_path: Path) -> DataSection:
    """A [data] section over `text_folder` with an empty cache."""
    cache_folder = str(tmp_path / "cache")
    return DataSection(dataset="text", path=str(text_folder), bpe_vocab_size=300, cache_folder=cache_folder)


@pytest.fixture
def make_dataset() -> Callable[..., PackedDataset]:
    """A dataset of random tokens: id 0 ends a document, every 7th token on average."""

    def make(num_tokens: int = 2001, seq_len: int = 10) -> PackedDataset:
        tokens = np.random.default_rng(1).integers(1, 50, num_tokens).astype(np.uint16)
        tokens[np.random.default_rng(2).random(num_tokens) < 1 / 7] = EOS
        return PackedDataset(TokenizedCorpus(tokens, EOS, 50, int((tokens == EOS).sum())), seq_len)

    return make
