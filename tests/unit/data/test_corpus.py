import os
from hashlib import sha256

import pytest
from files import read_table

from titanlite.base.errors import DataError
from titanlite.data.corpus import (
    build_stdlib_corpus,
    build_text_corpus,
    choose_split,
)


def test_stdlib_leaves_out_packages_and_tests(tmp_path):
    kept = {"b.py": b"b = 1\r\n", "a/z.py": b"z", "a.py": "\u00e9".encode()}
    left_out = {
        "site-packages/numpy.py": b"x",
        "idlelib/idle_test/t.py": b"x",
        "lib2to3/tests/data/bom.py": b"x",
        "__pycache__/a.py": b"x",
        "empty.py": b"",
        "notes.txt": b"x",
    }
    for name, content in (kept | left_out).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = build_stdlib_corpus(tmp_path)
    assert [(name, text.encode()) for name, text in corpus] == sorted(kept.items())
    assert (len(list(corpus)), corpus.num_bytes) == (3, 10)


def test_text_folder_is_sorted_by_relative_path_whatever_the_disk_says(text_folder, monkeypatch):
    expected = build_text_corpus(text_folder)
    names = [name for name, _ in expected]
    assert names == sorted(
        path.relative_to(text_folder).as_posix() for path in text_folder.rglob("*.txt")
    )
    assert "sub/07.txt" in names
    walk = os.walk

    def shuffled_walk(root):
        return [
            (folder, folders, names[::-1]) for folder, folders, names in reversed(list(walk(root)))
        ]

    monkeypatch.setattr(os, "walk", shuffled_walk)
    corpus = build_text_corpus(text_folder)
    assert list(corpus) == list(expected)
    assert corpus.digest == expected.digest


def test_text_pattern_matches_name_or_relative_path(text_folder):
    assert [name for name, _ in build_text_corpus(text_folder, "0[12].txt")] == ["01.txt", "02.txt"]
    assert [name for name, _ in build_text_corpus(text_folder, "sub/*")] == [
        "sub/07.txt",
        "sub/27.txt",
    ]


def test_digest_covers_names_and_bytes_and_their_borders(tmp_path):
    def digest(files):
        folder = tmp_path / sha256(repr(files).encode()).hexdigest()
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        return build_text_corpus(folder, "*").digest

    corpora = [
        {"a": "xy"},
        {"a": "xz"},
        {"a": "x", "b": "y"},
        {"a": "xb", "b": "y"},
        {"ax": "y"},
    ]
    assert len({digest(corpus) for corpus in corpora}) == len(corpora)
    assert build_text_corpus(tmp_path, "*/a").digest == build_text_corpus(tmp_path, "*/a").digest


@pytest.mark.parametrize("case", read_table("rows")["splits"])
def test_files_of_a_split(tmp_path, case):
    files = [tmp_path / name for name in case["names"]]
    found = choose_split(files, tmp_path, case["split"])
    assert [file.name for file in found] == case["chosen"]


@pytest.mark.parametrize(("name", "split"), [("test.jsonl", "train"), ("train.jsonl", "test")])
def test_held_out_files_are_not_trained_and_training_files_not_held_out(tmp_path, name, split):
    with pytest.raises(DataError, match=rf"is for split '{split}'"):
        choose_split([tmp_path / name], tmp_path, split)


def test_a_folder_of_texts_without_one_for_training_is_read_whole(tmp_path):
    for name in ("test.txt", "val.txt"):
        (tmp_path / name).write_text("text")
    assert len(build_text_corpus(tmp_path).files) == 2
