import builtins
import io
import os
from pathlib import Path

import pytest
import torch
from files import assert_refused, at_most, write_json
from safetensors.torch import save_file

from titanlite.checkpoint import folder as folder_module
from titanlite.checkpoint.folder import (
    INDEX_FILE,
    SINGLE_FILE,
    read_headers,
    read_model_headers,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _save(path, *keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: torch.full((2, 3), float(i)) for i, key in enumerate(keys)}, path, {"format": "pt"}
    )


def _save_index(folder, weight_map, **others):
    write_json(
        folder / INDEX_FILE, {"metadata": {"total_size": 72}, "weight_map": weight_map, **others}
    )


def _refusal(folder, *words):
    return assert_refused(read_model_headers, folder, *words)


@pytest.fixture
def sharded(tmp_path):
    """Save a valid model in two files: a and b in the first, c in the second."""
    folder = tmp_path / "model"
    _save(folder / FIRST, "a", "b")
    _save(folder / SECOND, "c")
    _save_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


# ---- valid folders ----


def test_links_into_a_cache_of_blobs(tmp_path):
    # huggingface_hub stores files like this: the blobs' names have no suffix, and the blobs are
    # outside the folder.
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    _save(tmp_path / "blobs" / "aa11", "a", "b")
    _save(tmp_path / "blobs" / "bb22", "c")
    _save_index(tmp_path / "blobs", {"a": FIRST, "b": FIRST, "c": SECOND})
    for name, blob in {FIRST: "aa11", SECOND: "bb22", INDEX_FILE: INDEX_FILE}.items():
        (folder / name).symlink_to(Path("../../blobs") / blob)
    stored = read_model_headers(folder)
    assert {key: tensor.file for key, tensor in stored.items()} == {
        "a": folder / FIRST,
        "b": folder / FIRST,
        "c": folder / SECOND,
    }
    single = tmp_path / "single"
    single.mkdir()
    (single / SINGLE_FILE).symlink_to("../blobs/bb22")
    assert list(read_model_headers(single)) == ["c"]
    (tmp_path / "link").symlink_to("single")
    assert list(read_model_headers(tmp_path / "link")) == ["c"]


def test_other_files_are_not_looked_at(sharded, monkeypatch):
    (sharded / "consolidated.safetensors").write_bytes(b"other")
    (sharded / "pytorch_model.bin").write_bytes(b"other")
    _save(sharded / "titanlite" / "expert_bias.safetensors", "d")
    monkeypatch.chdir(sharded)
    assert read_model_headers(Path(".")).keys() == {"a", "b", "c"}
    _save(sharded / SINGLE_FILE, "d")
    assert read_model_headers(sharded).keys() == {"d"}, "a single file comes before the index"


def test_names_of_files_may_be_unusual(tmp_path):
    names = ["a b.safetensors", "-x.safetensors", "..safetensors", "\u00e9.safetensors"]
    for i, name in enumerate(names):
        _save(tmp_path / name, f"key.{i}")
    _save_index(tmp_path, {f"key.{i}": name for i, name in enumerate(names)})
    assert {tensor.file.name for tensor in read_model_headers(tmp_path).values()} == set(names)


# ---- no model ----


def test_no_model(tmp_path):
    neither = f"has neither {SINGLE_FILE} nor {INDEX_FILE}"
    _refusal(tmp_path, neither)
    _save(tmp_path / "other.safetensors", "a")
    _refusal(tmp_path, neither)
    give = f"is not a folder. Give a folder with {SINGLE_FILE} or {INDEX_FILE}"
    _refusal(tmp_path / "nowhere", give)
    _refusal(tmp_path / "other.safetensors", give)
    _refusal(tmp_path / ("x" * 300))
    # The download was interrupted, or the cache lacks its blobs.
    (tmp_path / SINGLE_FILE).symlink_to("../blobs/aa11")
    assert "neither" not in _refusal(tmp_path, SINGLE_FILE)
    (tmp_path / SINGLE_FILE).unlink()
    (tmp_path / SINGLE_FILE).mkdir()
    _refusal(tmp_path, f"{tmp_path / SINGLE_FILE}: cannot be read: it is a folder")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a\n\x1b[31m.pth"])
def test_pickle_files_are_refused_and_never_opened(tmp_path, name, monkeypatch):
    os.mkfifo(tmp_path / name)  # opening it would block
    opened = []

    def forbid(path, *_, **__):
        opened.append(str(path))
        raise AssertionError(f"opened {path}")

    with monkeypatch.context() as patch, at_most(10):
        for module in (builtins, io, os):
            patch.setattr(module, "open", forbid)
        text = _refusal(
            tmp_path,
            "Pickle files can run code",
            "convert the model with transformers' save_pretrained",
        )
    assert not opened and name.encode("unicode_escape").decode() in text


# ---- the index itself ----


# The content of the file (None: a folder), and the reported problem.
NO_OBJECT = {
    "empty": (b"", "is not valid JSON: "),
    "control characters": (b'{"\n\x1b": 1}', "is not valid JSON: "),
    "deep": (b"[" * 100_000, "is not valid JSON: "),
    "list": (b"[]", "is not a JSON object"),
    "folder": (None, "it is a folder"),
}


@pytest.mark.parametrize(("content", "says"), NO_OBJECT.values(), ids=NO_OBJECT)
def test_files_without_a_json_object_are_refused(tmp_path, content, says):
    path = tmp_path / INDEX_FILE
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with at_most(5):
        text = _refusal(tmp_path, INDEX_FILE, says)
    assert len(text) < 500 + len(str(tmp_path))


def test_index_without_weight_map(tmp_path):
    for table in [{}, *({"weight_map": x} for x in ({}, [], None, "a", [["a", FIRST]]))]:
        write_json(tmp_path / INDEX_FILE, table)
        _refusal(tmp_path, f"{INDEX_FILE} has no weight_map")


OUTSIDE = [
    "../x.safetensors",
    "{root}/x.safetensors",
    "sub/x.safetensors",
    "x.safetensors/",
    "",
    "pytorch_model.bin",
    "x\0.safetensors",
    "\ud800.safetensors",
    None,
    {"file": FIRST},
]


def test_index_names_no_file_of_the_folder(sharded, tmp_path, monkeypatch):
    # The files exist and are valid.
    for place in (tmp_path.parent, tmp_path, sharded, sharded / "sub"):
        _save(place / "x.safetensors", "model.d.weight")
    monkeypatch.setattr(folder_module, "read_header", lambda path: pytest.fail(f"read {path}"))
    names = [
        name.replace("{root}", str(tmp_path)) if isinstance(name, str) else name for name in OUTSIDE
    ]
    for name in names:
        _save_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, "model.d.weight": name})
        words = (
            "maps model.d.weight to ",
            "which is not the name of a safetensors file in this folder",
        )
        _refusal(sharded, INDEX_FILE, *words)
    hostile = "k\n\x1b[31m\u202e\ud800"
    _save_index(
        sharded, {"a": FIRST, hostile: "../x", **{f"d.{i}": name for i, name in enumerate(names)}}
    )
    _refusal(sharded, f"{len(names) + 1} problems:", r"maps k\n\x1b[31m\u202e\ud800 to '../x'")


# ---- index and files ----


def test_not_more_problems_than_one_reads(sharded):
    _save_index(sharded, {f"layers.{i}.weight": f"{i}.safetensors" for i in range(1100)})
    lines = _refusal(sharded).splitlines()
    assert lines[0].endswith(": 1100 problems:")
    assert len(lines) == 1002
    assert lines[-1] == "  and 100 more."


# ---- read_headers ----


def test_read_headers_collects_problems(tmp_path):
    assert read_headers([], "checkpoint x") == {}
    for i, keys in enumerate([("a", "b"), ("b", "c"), ("b",)]):
        _save(tmp_path / f"{i}.safetensors", *keys)
    (tmp_path / "3.safetensors").write_bytes(b"")
    words = [
        ": 4 problems:",
        "b: is in 0.safetensors and in 1.safetensors.",
        "b: is in 1.safetensors and in 2.safe",
    ]
    words += [f"{tmp_path / '3.safetensors'}: is cut off, damaged"]
    words += [f"{tmp_path / '4.safetensors'}: there is no such file"]
    paths = [tmp_path / f"{i}.safetensors" for i in range(5)]
    assert_refused(lambda folder: read_headers(paths, f"checkpoint {folder}"), tmp_path, *words)
