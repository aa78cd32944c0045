import builtins
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from files import assert_printable, at_most
from safetensors.torch import save_file

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import folder as folder_module
from titanlite.checkpoint.folder import (
    INDEX_FILE,
    SINGLE_FILE,
    read_header,
    read_headers,
    read_json,
    read_model_headers,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _save(path: Path, *keys: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: torch.full((2, 3), float(i)) for i, key in enumerate(keys)}, path, {"format": "pt"})


def _save_index(folder: Path, weight_map: object, **others: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 72}, "weight_map": weight_map, **others}))


def _refusal(folder: Path) -> str:
    """What `read_model_headers` says against `folder`; always names it and is fit to be printed."""
    with pytest.raises(CheckpointError) as caught:
        read_model_headers(folder)
    return assert_printable(str(caught.value), folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound model in two files: a and b in the first, c in the second."""
    folder = tmp_path / "model"
    _save(folder / FIRST, "a", "b")
    _save(folder / SECOND, "c")
    _save_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


# ---- folders that are as they should be ----


def test_single_file(tmp_path: Path) -> None:
    _save(tmp_path / SINGLE_FILE, "a", "b")
    stored = read_model_headers(tmp_path)
    assert stored.tensors == read_header(tmp_path / SINGLE_FILE)
    assert stored.file_bytes == {tmp_path / SINGLE_FILE: (tmp_path / SINGLE_FILE).stat().st_size}


def test_sharded(sharded: Path) -> None:
    stored = read_model_headers(sharded)
    assert {key: tensor.file.name for key, tensor in stored.tensors.items()} == {"a": FIRST, "b": FIRST, "c": SECOND}
    assert stored.tensors == read_header(sharded / FIRST) | read_header(sharded / SECOND)
    assert stored.file_bytes == {sharded / name: (sharded / name).stat().st_size for name in (FIRST, SECOND)}


def test_links_into_a_cache_of_blobs(tmp_path: Path) -> None:
    # As huggingface_hub stores them: the blobs' names have no suffix and are outside the folder.
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    _save(tmp_path / "blobs" / "aa11", "a", "b")
    _save(tmp_path / "blobs" / "bb22", "c")
    _save_index(tmp_path / "blobs", {"a": FIRST, "b": FIRST, "c": SECOND})
    for name, blob in {FIRST: "aa11", SECOND: "bb22", INDEX_FILE: INDEX_FILE}.items():
        (folder / name).symlink_to(Path("../../blobs") / blob)
    stored = read_model_headers(folder)
    assert {key: tensor.file for key, tensor in stored.tensors.items()} == {
        "a": folder / FIRST,
        "b": folder / FIRST,
        "c": folder / SECOND,
    }
    single = tmp_path / "single"
    single.mkdir()
    (single / SINGLE_FILE).symlink_to("../blobs/bb22")
    assert list(read_model_headers(single).tensors) == ["c"]
    (tmp_path / "link").symlink_to("single")
    assert list(read_model_headers(tmp_path / "link").tensors) == ["c"]


def test_relative_folder(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sharded)
    assert read_model_headers(Path(".")).tensors.keys() == {"a", "b", "c"}


def test_files_that_are_not_the_model_are_not_looked_at(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"other")
    (sharded / "pytorch_model.bin").write_bytes(b"other")
    _save(sharded / "titanlite" / "expert_bias.safetensors", "d")
    assert read_model_headers(sharded).tensors.keys() == {"a", "b", "c"}


def test_single_file_comes_before_the_index(sharded: Path) -> None:
    _save(sharded / SINGLE_FILE, "d")
    assert read_model_headers(sharded).tensors.keys() == {"d"}


def test_names_of_files_may_be_unusual(tmp_path: Path) -> None:
    names = ["a b.safetensors", "-x.safetensors", "..safetensors", "\u00e9.safetensors", "...safetensors"]
    for i, name in enumerate(names):
        _save(tmp_path / name, f"key.{i}")
    _save_index(tmp_path, {f"key.{i}": name for i, name in enumerate(names)})
    assert {tensor.file.name for tensor in read_model_headers(tmp_path).tensors.values()} == set(names)


# ---- no model ----


def test_no_folder(tmp_path: Path) -> None:
    assert "is no folder" in _refusal(tmp_path / "nowhere")
    _save(tmp_path / SINGLE_FILE, "a")
    text = _refusal(tmp_path / SINGLE_FILE)
    assert "is no folder" in text
    assert f"Give a folder with {SINGLE_FILE} or {INDEX_FILE}" in text


def test_folder_name_that_the_system_refuses(tmp_path: Path) -> None:
    _refusal(tmp_path / ("x" * 300))


def test_folder_that_may_not_be_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The superuser may read everything, so the refusal is played.
    def refuse(path: str | Path, *_: object, **__: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        _refusal(sharded)


def test_empty_folder(tmp_path: Path) -> None:
    text = _refusal(tmp_path)
    assert f"has neither {SINGLE_FILE} nor {INDEX_FILE}" in text
    _save(tmp_path / "other.safetensors", "a")
    assert _refusal(tmp_path) == text


def test_link_to_nothing_is_named(tmp_path: Path) -> None:
    # An interrupted download, or a cache that was copied without its blobs.
    (tmp_path / SINGLE_FILE).symlink_to("../blobs/aa11")
    text = _refusal(tmp_path)
    assert "neither" not in text
    assert SINGLE_FILE in text


def test_model_file_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).mkdir()
    assert f"{tmp_path / SINGLE_FILE}: cannot be read: it is a folder" in _refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt", "m.ckpt", "m.pkl"],
)
def test_pickle_files_are_refused_and_never_opened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / name)  # whoever opens it waits
    opened: list[str] = []

    def forbid(path: Any, *_: object, **__: object) -> Any:
        opened.append(str(path))
        raise AssertionError(f"opened {path}")

    with monkeypatch.context() as patch, at_most(10):
        for module in (builtins, io, os):
            patch.setattr(module, "open", forbid)
        text = _refusal(tmp_path)
    assert not opened
    assert name in text
    assert "Pickle files can run code" in text
    assert "convert the model with transformers' save_pretrained" in text


def test_pickle_file_that_says_it_is_safetensors(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    # protocol 0: calls os.system when it is read
    (tmp_path / SINGLE_FILE).write_bytes(b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    assert str(tmp_path / SINGLE_FILE) in _refusal(tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / SINGLE_FILE)
    assert str(tmp_path / SINGLE_FILE) in _refusal(tmp_path)
    assert not ran.exists()


def test_hostile_name_of_a_pickle_file_is_shown_escaped(tmp_path: Path) -> None:
    (tmp_path / "a\n\x1b[31m.bin").touch()
    assert r"a\n\x1b[31m.bin" in _refusal(tmp_path)


# ---- the index itself ----


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"no",
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"weight_map": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "cut off", "text", "not UTF-8", "byte order mark", "deep lists", "deep objects", "digits"],
)
def test_index_is_not_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX_FILE).write_bytes(text)
    assert re.search(f"{re.escape(INDEX_FILE)} (is not valid JSON|has no weight_map)", _refusal(tmp_path))


@pytest.mark.parametrize("text", ["[]", "1", "null", '"weight_map"', "true"])
def test_index_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    assert f"{INDEX_FILE} is not a JSON object" in _refusal(tmp_path)


@pytest.mark.parametrize(
    "table", [{}, {"metadata": {}}, *({"weight_map": x} for x in ({}, [], None, 1, "a", [["a", FIRST]]))]
)
def test_index_without_weight_map(tmp_path: Path, table: dict[str, Any]) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(table))
    assert f"{INDEX_FILE} has no weight_map" in _refusal(tmp_path)


def test_index_is_no_file(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).mkdir()
    assert f"cannot read {INDEX_FILE}: it is a folder" in _refusal(tmp_path)


def test_index_is_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / INDEX_FILE)
    with at_most(1):
        assert INDEX_FILE in _refusal(tmp_path)


OUTSIDE = {
    "parent": "../x.safetensors",
    "parent of parent": "../../x.safetensors",
    "absolute": "{root}/x.safetensors",
    "below": "sub/x.safetensors",
    "this folder": "./x.safetensors",
    "twice around": "sub/../x.safetensors",
    "two slashes": "sub//x.safetensors",
    "trailing slash": "x.safetensors/",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "backslash": "..\\x.safetensors",
    "drive": "C:\\x.safetensors",
    "no safetensors": "pytorch_model.bin",
    "suffix in capitals": "x.SAFETENSORS",
    "space behind": "x.safetensors ",
    "newline": "x\n.safetensors",
    "newline behind": "x.safetensors\n",
    "nul": "x\0.safetensors",
    "nul behind": "x.bin\0.safetensors",
    "escape": "\x1b[31mx.safetensors",
    "bidi": "\u202ex.safetensors",
    "surrogate": "\ud800.safetensors",
    "null": None,
    "number": 1,
    "true": True,
    "list": [FIRST],
    "object": {"file": FIRST},
}


@pytest.mark.parametrize("name", OUTSIDE.values(), ids=OUTSIDE)
def test_index_names_no_file_of_the_folder(
    sharded: Path, tmp_path: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(name, str):
        name = name.replace("{root}", str(tmp_path))
    for place in (tmp_path.parent, tmp_path, sharded, sharded / "sub"):  # the files are there, and sound
        _save(place / "x.safetensors", "model.d.weight")
    monkeypatch.setattr(folder_module, "read_header", lambda path: pytest.fail(f"read {path}"))
    _save_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, "model.d.weight": name})
    text = _refusal(sharded)
    assert INDEX_FILE in text
    assert "model.d.weight is said to be in " in text
    assert "which is not the name of a safetensors file in this folder" in text


def test_all_bad_names_at_once(sharded: Path) -> None:
    _save_index(sharded, {"a": "../x.safetensors", "b": FIRST, "c": None, "\x1b[31m\n": "/x.safetensors"})
    text = _refusal(sharded)
    assert "3 problems:" in text
    for key, name in [("a", "'../x.safetensors'"), ("c", "None"), (r"\x1b[31m\n", "'/x.safetensors'")]:
        assert f"{INDEX_FILE}: {key} is said to be in {name}, " in text


# ---- index and files ----


def test_missing_shards_are_named(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    text = _refusal(sharded)
    assert f"{sharded / SECOND}: there is no such file" in text
    assert FIRST not in text
    (sharded / FIRST).unlink()
    (sharded / FIRST).symlink_to("nowhere")
    text = _refusal(sharded)
    assert "2 problems:" in text
    for name in (FIRST, SECOND):
        assert f"{sharded / name}: there is no such file" in text


def test_shard_with_a_name_that_the_system_refuses(sharded: Path) -> None:
    name = "x" * 300 + ".safetensors"
    _save_index(sharded, {"a": FIRST, "b": FIRST, "c": name})
    assert f"{name}: cannot be read" in _refusal(sharded)


def test_shard_is_a_named_pipe(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    os.mkfifo(sharded / SECOND)
    with at_most(10):
        assert f"{sharded / SECOND}: cannot be read: it is a named pipe, not a regular file" in _refusal(sharded)


def test_key_in_two_files(sharded: Path) -> None:
    _save(sharded / SECOND, "b", "c")
    assert f"b: is in {FIRST} and in {SECOND}." in _refusal(sharded)


def test_hostile_key_is_shown_escaped(sharded: Path) -> None:
    key = "k\n\x1b[31m\u202e\ud800"
    _save_index(sharded, {"a": FIRST, "b": FIRST, "c": SECOND, key: "../x"})
    assert r"k\n\x1b[31m\u202e\ud800 is said to be in " in _refusal(sharded)


def test_several_damaged_files_at_once(sharded: Path) -> None:
    for name in (FIRST, SECOND):
        os.truncate(sharded / name, (sharded / name).stat().st_size - 1)
    _save(sharded / "third.safetensors", "d")
    weight_map = {"a": FIRST, "b": FIRST, "c": SECOND, "d": "third.safetensors", "e": "fourth.safetensors"}
    _save_index(sharded, weight_map)
    text = _refusal(sharded)
    assert text.splitlines()[0].endswith(": 3 problems:")
    assert f"{sharded / FIRST}: " in text and f"{sharded / SECOND}: " in text
    assert f"{INDEX_FILE} says that it has a and 1 more." in text
    assert f"{sharded / 'fourth.safetensors'}: there is no such file" in text
    assert (
        f"there is no such file. Copy it again from where the checkpoint came. {INDEX_FILE} says that it has e." in text
    )
    assert "third.safetensors" not in text


def test_not_more_problems_than_one_reads(sharded: Path) -> None:
    _save_index(sharded, {f"layers.{i}.weight": f"{i}.safetensors" for i in range(3500)})
    lines = _refusal(sharded).splitlines()
    assert lines[0].endswith(": 3500 problems:")
    assert len(lines) == 1002
    assert lines[-1] == "  and 2,500 more."


# ---- read_headers ----


def test_read_headers_of_nothing() -> None:
    stored = read_headers([], "checkpoint x")
    assert (stored.tensors, stored.file_bytes) == ({}, {})


def test_read_headers_collects_problems(tmp_path: Path) -> None:
    for i, keys in enumerate([("a", "b"), ("b", "c"), ("b",)]):
        _save(tmp_path / f"{i}.safetensors", *keys)
    (tmp_path / "3.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        read_headers([tmp_path / f"{i}.safetensors" for i in range(5)], f"checkpoint {tmp_path}")
    text = assert_printable(str(caught.value), tmp_path)
    assert text.splitlines()[0].endswith(": 4 problems:")
    assert "b: is in 0.safetensors and in 1.safetensors." in text
    assert "b: is in 1.safetensors and in 2.safetensors." in text
    assert f"{tmp_path / '3.safetensors'}: is cut off, damaged" in text
    assert f"{tmp_path / '4.safetensors'}: there is no such file" in text


def test_size_is_the_one_that_the_header_was_checked_against(tmp_path: Path) -> None:
    """Not asked for a second time: the file may have changed in between, and whoever reads compares."""
    _save(tmp_path / SINGLE_FILE, "a")
    size = (tmp_path / SINGLE_FILE).stat().st_size
    assert read_model_headers(tmp_path).file_bytes == {tmp_path / SINGLE_FILE: size}


# ---- read_json ----


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    assert read_json(path, "checkpoint x") == {"a": [1, "\u00e9"]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no config.json."),
        (b"", "config.json is not valid JSON: "),
        (b"\xff", "config.json is not valid JSON: 'utf-8' codec"),
        (b'{"\n\x1b": 1}', "config.json is not valid JSON: "),
        (b"[" * 100_000, "config.json is not valid JSON: "),
        (b"9" * 100_000, "config.json is not valid JSON: "),
        (b"[]", "config.json is not a JSON object."),
        (b"null", "config.json is not a JSON object."),
    ],
    ids=["missing", "empty", "not UTF-8", "control characters", "deep", "digits", "list", "null"],
)
def test_read_json_refuses(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path, f"checkpoint {tmp_path}")
    text = assert_printable(str(caught.value), tmp_path)
    assert says in text
    assert len(text) < 500 + len(str(tmp_path))


def test_read_json_of_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="checkpoint x: cannot read folder: it is a folder"):
        read_json(tmp_path / "folder", "checkpoint x")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="checkpoint x: cannot read x: Not a directory"):
        read_json(tmp_path / "file" / "x", "checkpoint x")


def test_read_json_of_a_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with at_most(1), pytest.raises(CheckpointError, match="pipe"):
        read_json(tmp_path / "pipe", "checkpoint x")
