import errno
import itertools
import os
import re
import socket
from pathlib import Path

import pytest
from files import at_most, error_of

from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.files import (
    AppendedFile,
    is_full,
    open_regular,
    parse_json,
    read_regular,
    replace_file,
)
from titanlite.checkpoint.folder import INDEX_FILE, SINGLE_FILE, read_model_headers
from titanlite.config import load_config
from titanlite.config.data import DataSection
from titanlite.config.schema import JobConfig
from titanlite.data.corpus import build_text_corpus
from titanlite.data.tokenizer import load_tokenizer
from titanlite.features.images import load_image, read_image_rows
from titanlite.features.sft.build import _read_template
from titanlite.features.sft.readers import SUFFIXES
from titanlite.features.sft.rows import LocalRows, open_rows
from titanlite.features.tools.generate import _read_prompts
from titanlite.metrics.run_folder import make_dump_folder
from titanlite.models.families import any_model_config_from_hf


def make_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # its name may have 108 bytes at most
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


SPECIAL = [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), make_socket]


# Where the package opens what a user names, and the name that the file must have there.
OPENED = {
    "config.toml": lambda path: load_config(["--config", str(path)]),
    SINGLE_FILE: lambda path: read_model_headers(path.parent),
    INDEX_FILE: lambda path: read_model_headers(path.parent),
    "config.json": lambda path: any_model_config_from_hf(path.parent, "model"),
    "tokenizer.json": lambda path: load_tokenizer(path),
    "template.jinja": lambda path: _read_template(str(path)),
    "prompts.txt": _read_prompts,
    "prompts.jsonl": _read_prompts,
    "images.jsonl": read_image_rows,
    "corpus.txt": lambda path: dict(build_text_corpus(path.parent)),
    "image.png": lambda path: load_image("row 1", path),
    **{
        f"rows{ending}": lambda path: list(open_rows(DataSection(path=str(path))).iterate_from())
        for ending in (*SUFFIXES, ".jsonl.gz", ".jsonl.xz")
    },
    "digest.jsonl": lambda path: LocalRows((path,)).get_digest(path.parent),
}


@pytest.fixture
def impatient():
    with at_most(60):
        yield


def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path, impatient):
    makers = itertools.cycle(SPECIAL)
    for number, (name, open_it) in enumerate(OPENED.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        next(makers)(path)
        text = error_of(TitanliteError, open_it, path)
        assert re.search(rf"{re.escape(name)}.*it is not a regular file", text), name


def test_nothing_is_written_to_what_is_no_regular_file(tmp_path, impatient, one_rank):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    before = path.lstat()
    for write in (lambda: AppendedFile(path).append(b"x"), lambda: replace_file(path, "x")):
        with pytest.raises(OSError, match="it is not a regular file"):
            write()
    assert path.lstat().st_ino == before.st_ino
    with pytest.raises(
        ConfigError, match=r"cannot write to .*it is not a regular file: .*metrics\.jsonl"
    ):
        make_dump_folder(JobConfig(), tmp_path)


def test_regular_files_links_to_them_and_their_limit(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link", 4) == b"text"
    with pytest.raises(OSError, match="it has 4 bytes, more than the 3 that are read"):
        read_regular(tmp_path / "link", 3)
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")
    with open_regular(tmp_path / "new", "w", encoding="utf-8") as file:
        file.write("new")
    assert (tmp_path / "new").read_text() == "new"
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


def test_records_wait_in_order_and_none_is_torn(tmp_path, full_disk):
    file = AppendedFile(tmp_path / "new/file")
    file.append(b"one\n")
    full_disk(6)  # room for half of the next
    for record in (b"two\n", b"three\n"):
        with pytest.raises(OSError, match="File too large") as caught:
            file.append(record)
        assert is_full(caught.value)
    assert file.path.read_bytes() == b"one\n"
    full_disk(None)
    file.append()
    assert file.path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_that_cannot_be_replaced_stays(tmp_path, full_disk):
    path = tmp_path / "file"
    replace_file(path, "before")
    full_disk(3)
    with pytest.raises(OSError, match="File too large"):
        replace_file(path, "after")
    full_disk(None)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_run_starts_again_on_a_full_disk_if_it_may_go_on(tmp_path, one_rank, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("titanlite.metrics.run_folder.save_resolved", fail)
    job = JobConfig()
    with pytest.raises(
        ConfigError, match=r"job\.dump_folder: cannot write to .*No space left on device"
    ):
        make_dump_folder(job, tmp_path)
    job.checkpoint.on_save_error = "continue"
    make_dump_folder(job, tmp_path)
