"""Files that tests compare, or that wait."""

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
    """Return the value of each line, as of metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def file_digest(path):
    """SHA-256 of the content. Two contents as operands of an assertion would have pytest work out
    all differences when they differ, with `-v` or CI in the environment: a minute for 20 KB, no end
    for the weights of a model.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digests(folder):
    """Of every file below `folder`, by its path there."""
    return {
        str(path.relative_to(folder)): file_digest(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_manifest(folder):
    """Make a checkpoint of what lies in `folder`, without the code under test."""
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


@contextmanager
def at_most(seconds):
    """Fail the test if what is inside takes longer."""

    def fail(*_):
        # no OSError, which the code under test might catch
        pytest.fail(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def assert_refused(read, path, *words):
    """Return why `read` refuses `path`: it says all of `words`, names the checkpoint, and holds
    nothing that a terminal would obey.
    """
    with pytest.raises(CheckpointError) as caught:
        read(path)
    text = str(caught.value)
    assert (
        text.startswith(f"checkpoint {path}: ")
        and [word for word in words if word not in text] == []
    ), text
    assert set(text) <= set(string.printable) - set("\t\r\v\f")
    return text


def read_table(name):
    """Read `tests/NAME.toml`: what is given, and what must be said or come of it."""
    path = Path(__file__).with_name(f"{name}.toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
