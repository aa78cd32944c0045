import os
from pathlib import Path

import pytest

from titanlite.base.errors import DataError
from titanlite.base.files import write_atomic
from titanlite.config.data import DataSection
from titanlite.data.corpus import get_cache_folder, load_or_build, read_once


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_folder(DataSection()) == Path("/home/someone/.cache/titanlite")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert get_cache_folder(DataSection()) == Path("/scratch/titanlite")
    assert get_cache_folder(DataSection(cache_folder="~/mine")) == Path("/home/someone/mine")


def test_unusable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below" / "x"

    def build():
        with write_atomic(path):
            pass

    with pytest.raises(
        DataError,
        match=rf"data: cannot use the cache folder {path.parent}: .*Set data\.cache_folder",
    ):
        load_or_build(path, lambda: None, build)


def test_files_are_read_once_until_they_change(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text(file.name)
    reads = []

    def read(what="text"):
        def compute():
            reads.append(what)
            return [file.read_text() for file in files]

        return read_once(tmp_path / "cache", what, files, compute)

    assert read() == read() == ["a", "b"] and reads == ["text"]
    before = files[0].stat()
    # at once, of the same size, and with the old time: nothing but ctime tells
    files[0].write_text("c")
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read() == read() == ["c", "b"] and len(reads) == 2
    assert read("other") == ["c", "b"] and len(reads) == 3
    files.reverse()
    assert read() == ["b", "c"] and len(reads) == 4
    for kept in (tmp_path / "cache/read").glob("*.json"):
        kept.write_text('["half')
    assert read() == ["b", "c"] and len(reads) == 5  # damaged
