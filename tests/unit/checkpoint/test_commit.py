"""A checkpoint folder is complete or absent, a damaged one is reported, and remains of a killed
process are removed.
"""

import errno
import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from files import folder_digests, read_json, write_manifest
from safetensors.torch import load_file

from titanlite.base.errors import CheckpointError, TransientError
from titanlite.checkpoint.commit import (
    MANIFEST_FILE,
    check_folder,
    clean_up,
    commit_folder,
    list_steps,
    remove_old,
    step_folder,
)
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.writer import Item, lay_out
from titanlite.materialize import Region

RNG = "titanlite/rng.safetensors"


def files_of(value, file_bytes=None):
    region = Region((0,), (100,))
    tensors = {name: torch.full((100,), value + i) for i, name in enumerate("ab")}
    items = [
        Item(whole(name, (100,)), torch.float32, tensor, region, is_owner=True)
        for name, tensor in tensors.items()
    ]
    return lay_out(items, "model", file_bytes)


def rest_of(text="{}"):
    return {"config.json": text.encode(), "titanlite/state.json": b"[]"}


def fail(error):
    """Return a function that raises `error`, whatever its arguments are."""

    def raise_error(*_, **__):
        raise error

    return raise_error


def complete_folder(folder):
    """Make a checkpoint with a manifest, without the code under test."""
    (folder / "titanlite").mkdir(parents=True)
    contents = {"model.safetensors": b"some bytes", "config.json": b"{}", RNG: b"x" * 50}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_manifest(folder)
    return folder


def save_manifest(folder, table):
    (folder / MANIFEST_FILE).write_text(table if isinstance(table, str) else json.dumps(table))


def manifest(folder):
    return read_json(folder / MANIFEST_FILE)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


# ---- commit_folder ----


def test_folder_with_everything_that_belongs_to_it(tmp_path, one_rank):
    folder = tmp_path / "checkpoint" / "step-1"  # the parent does not exist, either
    files = files_of(1.0, file_bytes=400)
    commit_folder(folder, files, rest_of())
    assert names_in(folder.parent) == {"step-1"}
    listed = manifest(folder)["files"]
    assert listed.keys() == {*(file.name for file in files), "config.json", "titanlite/state.json"}
    assert len(files) == 2
    for name, entry in listed.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "adler32": f"{zlib.adler32(content):08x}"}, name
    assert torch.equal(load_file(folder / files[1].name)["b"], torch.full((100,), 2.0))
    assert check_folder(folder, checksums=True) == []


def test_older_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path, one_rank, monkeypatch):
    folder = tmp_path / "step-1"
    commit_folder(folder, files_of(1.0, file_bytes=400), rest_of('{"old": 1}'))
    (folder / "of the user").touch()
    before, rename, calls = folder_digests(folder), Path.rename, []

    def refuse_the_second(path, to):
        calls.append(path)
        if len(calls) == 2:  # the old folder is hidden, and the new one does not exist yet
            raise PermissionError(13, "Permission denied")
        return rename(path, to)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Permission denied"):
        patch.setattr(Path, "rename", refuse_the_second)
        commit_folder(folder, files_of(5.0), rest_of('{"new": 1}'))
    assert names_in(tmp_path) == {"step-1"} and folder_digests(folder) == before
    commit_folder(folder, files_of(5.0), rest_of('{"new": 1}'))
    assert names_in(tmp_path) == {"step-1"}
    assert names_in(folder) == {"model.safetensors", "config.json", "titanlite"}
    assert load_file(folder / "model.safetensors")["a"][0] == 5.0
    assert check_folder(folder, checksums=True) == []


def test_nothing_appears_before_everything_is_on_the_disk(tmp_path, one_rank, monkeypatch):
    folder, synced = tmp_path / "step-1", []
    original = os.fsync

    def fsync(descriptor):
        synced.append(
            (os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), folder.exists())
        )
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    commit_folder(folder, files_of(1.0), rest_of())
    before = {name for name, visible in synced if not visible}
    (temporary,) = (name for name in before if name.endswith(".tmp"))
    assert before == {
        "model.safetensors",
        "config.json",
        "state.json",
        "manifest.json",
        "titanlite",
        temporary,
    }
    assert [name for name, visible in synced if visible] == [tmp_path.name]  # the rename itself


# ---- check_folder ----


def flip(path):
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)


BROKEN = {
    "missing": (Path.unlink, f"{RNG}: No such file or directory."),
    "shorter": (
        lambda path: os.truncate(path, 49),
        f"{RNG}: has 49 bytes, titanlite/manifest.json says 50.",
    ),
    "longer": (
        lambda path: os.truncate(path, 51),
        f"{RNG}: has 51 bytes, titanlite/manifest.json says 50.",
    ),
    "flipped bit": (
        flip,
        f"{RNG}: its bytes are not those that were saved (the checksum differs).",
    ),
}


@pytest.mark.parametrize(("change", "says"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_the_saved_one_is_found(tmp_path, change, says):
    folder = complete_folder(tmp_path / "step-1")
    (folder / "README.md").write_text("of the user")
    assert check_folder(folder, checksums=True) == []
    change(folder / RNG)
    assert check_folder(folder, checksums=True) == [says]
    assert check_folder(folder) == ([] if change is flip else [says])


# An entry of the model in the manifest, and the problem that is reported.
WRONG_ENTRIES = [
    *((entry, "its entry in titanlite/manifest.json is damaged.") for entry in (5, {"bytes": 1})),
    ({"bytes": "many", "adler32": ""}, "has 10 bytes, titanlite/manifest.json says many."),
    ({"bytes": 10, "adler32": None}, "its bytes are not those"),
]


def test_what_the_manifest_cannot_say_is_a_problem(tmp_path):
    folder = complete_folder(tmp_path / "step-1")
    table = manifest(folder)
    for entry, says in WRONG_ENTRIES:
        save_manifest(folder, {**table, "files": {**table["files"], "model.safetensors": entry}})
        (problem,) = check_folder(folder, checksums=True)
        assert problem.startswith(f"model.safetensors: {says}"), entry
    for name in ["\ud800", "a\n\x1b[31m"]:
        save_manifest(folder, {**table, "files": {name: {"bytes": 1, "adler32": "0"}}})
        (problem,) = check_folder(folder, checksums=True)
        assert problem.isprintable()
    for text in ["{", "[]", '{"files": []}']:
        save_manifest(folder, text)
        (problem,) = check_folder(folder)
        assert problem.startswith(f"{folder}: ") and "manifest.json" in problem
    (folder / MANIFEST_FILE).unlink()
    assert check_folder(folder) == [f"{folder}: there is no manifest.json."]
    assert check_folder(tmp_path / "nowhere") == [
        f"{tmp_path / 'nowhere'}: there is no manifest.json."
    ]


def test_checksum_of_a_file_larger_than_a_chunk(tmp_path, one_rank):
    commit_folder(tmp_path / "x", [], {"model.safetensors": b"ab" * (9 << 20)})
    assert check_folder(tmp_path / "x", checksums=True) == []
    with open(tmp_path / "x" / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"c")
    assert len(check_folder(tmp_path / "x", checksums=True)) == 1


def test_ranks_share_the_files(tmp_path, monkeypatch):
    folder = complete_folder(tmp_path / "step-1")
    for name in manifest(folder)["files"]:
        (folder / name).write_bytes(b"z" * (folder / name).stat().st_size)
    everything = check_folder(folder, checksums=True)
    assert len(everything) == 3
    for num_ranks in (1, 2, 3, 4):
        found = [
            check_folder(folder, checksums=True, stripe=(rank, num_ranks))
            for rank in range(num_ranks)
        ]
        assert sorted(problem for problems in found for problem in problems) == sorted(everything)
        assert max(map(len, found)) == -(-3 // num_ranks)


# ---- steps ----


def test_list_steps_has_only_folders_that_step_folder_finds(tmp_path):
    names = (
        "step-10",
        "step-9",
        "step-0",
        "step-100",
        ".step-3.a.tmp",
        "step-5.bak",
        "step-",
        "step-x",
        "step--1",
    )
    for name in (*names, "Step-6", "step-7 ", "step-007", "model"):
        (tmp_path / name).mkdir()
    assert list_steps(tmp_path) == [0, 9, 10, 100]
    assert list_steps(tmp_path / "nowhere") == []
    assert step_folder(tmp_path, 12) == tmp_path / "step-12"


def test_clean_up_removes_what_killed_processes_left(tmp_path):
    complete_folder(tmp_path / "step-1")
    complete_folder(tmp_path / ".step-1.a.old")  # killed after both renames of a replacement
    complete_folder(tmp_path / ".step-2.a.tmp")  # it may be complete, but was not flushed
    complete_folder(tmp_path / ".step-3.a.gone")  # killed while removing
    kept = {"step-1", ".other.tmp", "notes", ".step-4"}
    for name in kept - {"step-1"}:
        (tmp_path / name).mkdir()
    clean_up(tmp_path)
    assert names_in(tmp_path) == kept
    assert check_folder(tmp_path / "step-1", checksums=True) == []
    clean_up(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("keep_latest", "keep_every", "left"),
    [
        (0, 0, [2, 4, 6, 8, 10]),
        (3, 0, [6, 8, 10]),
        (9, 0, [2, 4, 6, 8, 10]),
        (1, 4, [4, 8, 10]),
        (2, 3, [6, 8, 10]),
        (0, 4, [2, 4, 6, 8, 10]),
    ],
)
def test_remove_old(tmp_path, keep_latest, keep_every, left):
    for step in (2, 4, 6, 8, 10):
        complete_folder(step_folder(tmp_path, step))
    (tmp_path / "notes").mkdir()
    remove_old(tmp_path, keep_latest, keep_every)
    assert list_steps(tmp_path) == left
    assert names_in(tmp_path) == {"notes", *(f"step-{step}" for step in left)}


def test_remove_old_counts_complete_checkpoints_only(tmp_path):
    # A run was resumed from step 4, because step 10 is damaged, and has just saved step 6. Step 6
    # must be kept.
    for step in (4, 6, 10):
        complete_folder(step_folder(tmp_path, step))
    (tmp_path / "step-10" / "model.safetensors").unlink()
    remove_old(tmp_path, 1, 0)
    assert 6 in list_steps(tmp_path)


def test_a_file_system_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    """If such an error counted as damage, every checkpoint would be set aside and the run would
    start from scratch.
    """
    folder = complete_folder(tmp_path / "step-1")
    error = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    monkeypatch.setattr("titanlite.checkpoint.commit._checksum_of", fail(error))
    with pytest.raises(TransientError, match=f"model.safetensors cannot be read: {error.strerror}"):
        check_folder(folder, checksums=True)
    assert check_folder(folder) == []
