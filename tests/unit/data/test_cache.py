import threading
import time
from pathlib import Path

import pytest

from titanlite.config.schema import DataSection
from titanlite.data.cache import get_cache_folder, load_or_build, write_atomic
from titanlite.errors import DataError


def _load(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_folder(DataSection()) == Path("/home/someone/.cache/titanlite")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert get_cache_folder(DataSection()) == Path("/scratch/titanlite")
    assert get_cache_folder(DataSection(cache_folder="~/mine")) == Path("/home/someone/mine")


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    # flock is per open file, so threads of one process exclude each other as processes do.
    path, loads, builds, results = tmp_path / "new" / "file", [], [], []

    def load() -> str | None:
        loads.append(1)
        return _load(path)

    def build() -> None:
        builds.append(1)
        while len(loads) < 5:  # all four have found nothing, this one twice
            time.sleep(0.01)
        with write_atomic(path) as file:
            file.write(b"content")

    def run() -> None:
        results.append(load_or_build(path, load, build))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert [value for value, _ in results] == ["content"] * 4
    assert all(elapsed_s > 0 for _, elapsed_s in results)  # the waiters report their wait: rank 0 logs it
    assert load_or_build(path, lambda: _load(path), build) == ("content", 0.0)


def test_failed_build_leaves_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def build(fail: bool) -> None:
        with write_atomic(path) as file:
            file.write(b"half")
            if fail:
                raise DataError("data: no luck")

    with pytest.raises(DataError, match="no luck"):
        load_or_build(path, lambda: _load(path), lambda: build(True))
    assert [file.name for file in tmp_path.iterdir()] == ["file.lock"]
    assert load_or_build(path, lambda: _load(path), lambda: build(False))[0] == "half"


def test_unusable_folder_and_damaged_result_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "below" / "x"
    with pytest.raises(DataError, match=rf"data: cannot use the cache folder {path.parent}: .*Set data\.cache_folder"):
        load_or_build(path, lambda: None, lambda: None)
    path = tmp_path / "x"
    with pytest.raises(DataError, match=rf"data: {path} is damaged although it was just written"):
        load_or_build(path, lambda: None, lambda: None)
