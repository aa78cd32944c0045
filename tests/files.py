"""Helpers for files that tests compare, and for calls that may block."""

import hashlib
import json
import signal
import string
import tomllib
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

from titanlite.base.errors import CheckpointError


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def read_lines(path):
    """Return the value of each line of a file like metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def file_digest(path):
    """Return the SHA-256 of the content. If an assertion compared two contents, pytest would
    compute all their differences with `-v` or CI in the environment: this takes a minute for 20 KB,
    and never ends for the weights of a model.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digests(folder):
    """Return the digest of every file below `folder`, by its path there."""
    return {
        str(path.relative_to(folder)): file_digest(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_manifest(folder):
    """Make a checkpoint of the files in `folder`, without the code under test."""
    contents = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    files = {
        name: {"bytes": len(data), "adler32": f"{zlib.adler32(data):08x}"}
        for name, data in contents.items()
    }
    (folder / "titanlite").mkdir(exist_ok=True)
    (folder / "titanlite/manifest.json").write_text(json.dumps({"format": 1, "files": files}))


def first_bytes(buffers, count):
    """Return the first `count` bytes of several buffers, as a system may read or write them."""
    given = []
    for buffer in buffers:
        given.append(buffer[:count])
        count -= len(given[-1])
        if count <= 0:
            break
    return given


@contextmanager
def at_most(seconds):
    """Fail the test if the body takes longer."""

    def fail(*_):
        # This is not an OSError, which the code under test might catch.
        pytest.fail(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def error_of(kind, function, *args, **options):
    """Return the text of the error of this kind that `function` raises."""
    with pytest.raises(kind) as caught:
        function(*args, **options)
    return str(caught.value)


def assert_refused(read, path, *words):
    """Return the error with which `read` refuses `path`: it has all `words`, names the checkpoint,
    and has no control characters of a terminal.
    """
    text = error_of(CheckpointError, read, path)
    assert (
        text.startswith(f"checkpoint {path}: ")
        and [word for word in words if word not in text] == []
    ), text
    assert set(text) <= set(string.printable) - set("\t\r\v\f")
    return text


def read_table(name):
    """Read `tests/NAME.toml`: inputs, and their expected results or messages."""
    path = Path(__file__).with_name(f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
