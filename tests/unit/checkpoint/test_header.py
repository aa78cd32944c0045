"""Headers of safetensors files: they are read as the library reads them, or refused with an error
that names the file.
"""

import json
import math
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from files import assert_refused, at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensors import bits, random_tensor

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.folder import DTYPES, StoredTensor, read_header


def _entry(dtype="F32", shape=(1,), offsets=(0, 4), **extra):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def _pack(header, data=b""):
    """Pack a file with `header`: bytes and strings are written unchanged, everything else as
    JSON.
    """
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def _refusal(path, words=""):
    return assert_refused(read_header, path, words)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.safetensors"


# ---- valid files ----


def _example_tensors():
    shapes = [(3, 5), (), (0,), (4, 0, 2), (1, 1, 1), (7,)]
    tensors = {
        f"{name}.{i}": random_tensor(shape, dtype, i)
        for name, dtype in DTYPES.items()
        for i, shape in enumerate(shapes)
    }
    strange = ("", " ", "\u00e9", "\U0001f600", "a\nb\x1b[31m", "\x00", "\\", '"')
    return tensors | {name: torch.ones(1) for name in strange}


def _check(path, tensors):
    raw = path.read_bytes()
    stored = read_header(path)
    assert stored.keys() == tensors.keys()
    for key, tensor in tensors.items():
        found = stored[key]
        payload = bits(tensor).numpy().tobytes()
        assert found == StoredTensor(
            key, tensor.dtype, tuple(tensor.shape), path, found.offset, len(payload), len(raw)
        )
        assert raw[found.offset : found.offset + found.nbytes] == payload
    assert list(stored.values()) == sorted(stored.values(), key=lambda one: one.offset)


def test_what_the_library_writes_is_read(file, monkeypatch):
    for metadata in (None, {}, {"format": "pt", "\n\u00e9": "\x1b"}):
        save_file(_example_tensors(), file, metadata)
        _check(file, _example_tensors())
    with safe_open(file, "pt") as reference:
        for name in DTYPES:
            assert reference.get_slice(f"{name}.0").get_dtype() == name
    link = file.with_name("link")
    link.symlink_to(file.name)
    monkeypatch.chdir(file.parent)
    for path in (link, Path(file.name)):
        assert read_header(path)["F32.0"].file == path


def test_headers_of_other_writers_are_read(file):
    for header in ("{}", "  {}", "{}   ", '{"__metadata__": {}}', '{"__metadata__": null}'):
        file.write_bytes(_pack(header))
        assert read_header(file) == {}
    header = {
        "b": _entry(offsets=[4, 8]),
        "none": _entry(shape=[0], offsets=[4, 4]),
        "a": _entry(offsets=[0, 4]),
    }
    file.write_bytes(_pack(header, b"aaaabbbb"))
    assert list(read_header(file)) == ["a", "none", "b"], "in the order of their bytes"


def test_only_the_header_is_read(file):
    nbytes = 1 << 36  # a sparse file, which would take a minute to read
    header = _pack({"a": _entry("U8", [nbytes], [0, nbytes])})
    file.write_bytes(header)
    os.truncate(file, len(header) + nbytes)
    with at_most(10):
        assert read_header(file)["a"].nbytes == nbytes


def test_descriptor_is_closed(file):
    save_file({"a": torch.ones(2)}, file)
    bad = file.with_name("bad")
    bad.write_bytes(b"1234")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_header(file)
        _refusal(bad)
        _refusal(file.parent)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- refusals ----


def test_what_is_no_regular_file_is_refused(file, tmp_path):
    _refusal(file, "there is no such file")
    file.symlink_to("nowhere")
    _refusal(file, "there is no such file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("loop", "file/x", "x" * 300, "/dev/null", "."):
        _refusal(tmp_path / name, "cannot be read")


def test_every_truncation_is_refused(file):
    save_file({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(5, dtype=torch.uint8)}, file)
    raw = file.read_bytes()
    for size in range(len(raw)):
        file.write_bytes(raw[:size])
        _refusal(file, "is cut off, damaged, or not a safetensors file")
    for length in (3, 100_000_001, 2**63, 2**64 - 1):
        file.write_bytes(struct.pack("<Q", length) + b"{}")
        _refusal(file)
        os.truncate(file, 8 + 100_000_001)  # a sparse file
        with at_most(10):
            _refusal(file)


# The header, the number of data bytes, and words of the error.
DAMAGED = {
    "pickle": (b"\x80\x02}q\x00.", 4, "not a safetensors file: "),
    "deep lists": (b"[" * 100_000, 4, "not a safetensors file: "),
    "a list, which the library takes": ({"a": ["F32", [1], [0, 4]]}, 4, ""),
    "dtype hostile": ({"a": _entry("\x1b[31m\n\u202e\ud800")}, 4, ""),
    "dtype that torch does not have": ({"a": _entry("U16", [2])}, 4, ""),
    "product is 2**64 + 4": ({"a": _entry("U8", [4, 2**62 + 1], [0, 4])}, 4, ""),
    "gap": ({"a": _entry(offsets=[4, 8])}, 8, ""),
    "bytes of no tensor": ({"a": _entry()}, 7, ""),
    "overlap": ({"a": _entry(), "b.weight": _entry(offsets=[2, 6])}, 6, "b.weight"),
}


@pytest.mark.parametrize(("header", "num_bytes", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_header_is_refused(file, header, num_bytes, words):
    file.write_bytes(_pack(header, bytes(num_bytes)))
    with at_most(20):
        assert len(_refusal(file, words)) < 1000 + len(str(file))


# ---- property-based ----


def _get_reference(path):
    """Return what safetensors itself reads, or None if it refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            return {key: (one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()}
    except (SafetensorError, OSError):
        return None


def _is_refused_on_purpose(raw):
    """Return True for files that safetensors reads and titanlite refuses: unsupported dtypes, and
    entries that are lists.
    """
    length = struct.unpack("<Q", raw[:8])[0]
    table = json.loads(raw[8 : 8 + length])
    entries = [entry for key, entry in table.items() if key != "__metadata__"]
    if not all(isinstance(entry, dict) for entry in entries):
        return True
    return not all(
        isinstance(entry["dtype"], str) and entry["dtype"] in DTYPES for entry in entries
    )


def _check_raw(path, raw):
    """Check the property: the file is refused with a message that names it, or its tensors are in
    range, do not overlap, have the right sizes, and equal the result of the reference
    implementation.
    """
    path.write_bytes(raw)
    reference = _get_reference(path)
    try:
        stored = read_header(path)
    except CheckpointError:
        _refusal(path)
        assert reference is None or _is_refused_on_purpose(raw)
        return
    for tensor in stored.values():
        assert tensor.file == path
        assert tensor.nbytes == math.prod(tensor.shape) * tensor.dtype.itemsize
        assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(raw)
    for before, after in pairwise(stored.values()):
        assert before.offset + before.nbytes == after.offset
    assert reference is not None
    assert {key: (DTYPES[dtype], shape) for key, (dtype, shape) in reference.items()} == {
        key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()
    }
    with safe_open(path, "pt") as file:
        for key, tensor in stored.items():
            if tensor.nbytes:
                payload = bits(file.get_tensor(key)).numpy().tobytes()
                assert payload == raw[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


_TABLE = {
    "__metadata__": {"format": "pt"},
    "a": _entry("F32", [2, 1], [0, 8]),
    "b": _entry("BF16", [], [8, 10]),
    "c": _entry("U8", [0, 3], [10, 10]),
    "d": _entry("F8_E4M3", [3], [10, 13]),
}
_JSON_BYTES = st.sampled_from(list(b'{}[]",:0123456789-.eE\\u \n\0\xff')) | st.integers(0, 255)


@st.composite
def _damaged(draw):
    """Draw a valid file with a few bytes changed, added or removed; sometimes its length field is
    corrected afterwards.
    """
    raw = _pack(_TABLE, bytes(range(13)))
    length = struct.unpack("<Q", raw[:8])[0]
    keep_length = draw(st.booleans())
    content = bytearray(raw[8:])
    for _ in range(draw(st.integers(1, 3))):
        # Two of three changes are in the header.
        end = length if draw(st.integers(0, 2)) else len(content)
        at = draw(st.integers(0, max(min(end, len(content)) - 1, 0)))
        size = len(content)
        match draw(st.sampled_from(["set", "set", "insert", "delete"])):
            case "set" if content:
                content[at] = draw(_JSON_BYTES)
            case "insert":
                content[at:at] = bytes(draw(st.lists(_JSON_BYTES, min_size=1, max_size=4)))
            case "delete":
                del content[at : at + draw(st.integers(1, 4))]
        if at < length and not keep_length:
            length = max(length + len(content) - size, 0)
    head = bytearray(struct.pack("<Q", length))
    if not draw(st.integers(0, 9)):
        head[draw(st.integers(0, 7))] ^= 1 << draw(st.integers(0, 7))
    return bytes(head + content)


@settings(max_examples=400)
@given(_damaged())
def test_damaged_files(fuzzed, raw):
    _check_raw(fuzzed, raw)
