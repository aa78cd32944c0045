import errno
import os
from pathlib import Path

import pytest

from titanlite import run_files
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError
from titanlite.run_files import AppendedFile, is_full, replace_file
from titanlite.run_setup import make_dump_folder


def test_records_wait_in_order_and_none_is_torn(tmp_path: Path, full_disk):
    file = AppendedFile(tmp_path / "new/file")
    file.append(b"one\n")
    full_disk(6)  # room for half of the next
    for record in (b"two\n", b"three\n"):
        with pytest.raises(OSError, match="File too large") as caught:
            file.append(record)
        assert is_full(caught.value)
    assert file.path.read_bytes() == b"one\n" and file.num_waiting == 2
    full_disk(None)
    file.append()
    assert file.path.read_bytes() == b"one\ntwo\nthree\n" and file.num_waiting == 0


def test_what_waits_is_bounded_and_the_oldest_goes(tmp_path: Path, full_disk, monkeypatch):
    monkeypatch.setattr(run_files, "_MOST_BYTES", 8)
    file = AppendedFile(tmp_path / "file")
    full_disk(0)
    for record in (b"1111", b"2222", b"3333"):
        with pytest.raises(OSError, match="File too large"):
            file.append(record)
    full_disk(None)
    file.append(b"4")
    assert file.path.read_bytes() == b"222233334"


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, full_disk):
    path = tmp_path / "file"
    replace_file(path, "before")
    full_disk(3)
    with pytest.raises(OSError, match="File too large"):
        replace_file(path, "after")
    full_disk(None)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_run_starts_again_on_a_full_disk_if_it_may_go_on(tmp_path: Path, run_ranks, monkeypatch):
    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rank_main() -> None:
        monkeypatch.setattr("titanlite.run_setup.save_resolved", fail)
        job = JobConfig()
        with pytest.raises(ConfigError, match=r"job\.dump_folder: cannot write to .*No space left on device"):
            make_dump_folder(job, tmp_path)
        job.checkpoint.on_save_error = "continue"
        make_dump_folder(job, tmp_path)

    run_ranks(1, rank_main)
