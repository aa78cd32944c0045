"""What an export says of the files that it copies."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from tiny_transformers import save_tiny

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import commit
from titanlite.features.tools.export import export_checkpoint, export_merged


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
