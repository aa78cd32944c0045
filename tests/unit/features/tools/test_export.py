"""What an export says of the files that it copies."""

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from tiny_transformers import VOCAB_SIZE, save_tiny
from tokenizers import Tokenizer, models

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import commit
from titanlite.features.tools.export import export_checkpoint, export_merged


@pytest.mark.parametrize(("more", "warns"), [(0, False), (3, True)])
@pytest.mark.parametrize("added", [False, True])
def test_a_tokenizer_larger_than_the_embedding_is_a_warning(
    tmp_path: Path, caplog, more: int, warns: bool, added: bool
):
    save_tiny("llama", tmp_path / "in")
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE + (0 if added else more))}, "t0"))
    tokenizer.add_tokens([f"t{i}" for i in range(VOCAB_SIZE + more)])
    tokenizer.save(str(tmp_path / "in" / "tokenizer.json"))
    export_checkpoint(tmp_path / "in", tmp_path / "out", torch.float32)
    said = [text for text in caplog.messages if text.startswith("export: the tokenizer in ")]
    assert len(said) == warns
    assert not warns or f"has {VOCAB_SIZE + 3} tokens, but the embedding {VOCAB_SIZE} rows" in said[0]
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == VOCAB_SIZE


def test_a_tokenizer_that_cannot_be_read_is_copied_with_a_warning(tmp_path: Path, caplog):
    save_tiny("llama", tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text("{")
    export_checkpoint(tmp_path / "in", tmp_path / "out", torch.float32)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{" and "tokenizer.json cannot be read" in caplog.text


def test_what_an_export_left_that_was_killed_is_removed_by_the_next_to_the_same_folder(tmp_path: Path):
    """And nothing else: a live one holds a lock on its folder."""
    save_tiny("llama", tmp_path / "in")
    dead, live, other = (
        tmp_path / f".{name}.{commit._machine()}~{token}.tmp"
        for name, token in (("out", "0123abcd"), ("out", "12345678"), ("out.b", "0123abcd"))
    )
    for left in (dead, live, other):
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"part")
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    export_checkpoint(tmp_path / "in", tmp_path / "out", torch.float32)
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", live.name, other.name}


def test_merging_needs_adapters(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a whole model, without adapters to merge\. Leave --merge out\."):
        export_merged(tmp_path, tmp_path / "out", torch.bfloat16)
