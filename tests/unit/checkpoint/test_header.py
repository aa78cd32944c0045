import contextlib
import json
import math
import os
import socket
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from files import assert_printable, at_most
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.folder import DTYPES, StoredTensor, encode_header, read_header

FIELDS = {"dtype", "shape", "data_offsets"}


def _entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def _pack(header: object, data: bytes = b"") -> bytes:
    """A file with `header`: bytes and text as they are, everything else as JSON."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def _refusal(path: Path) -> str:
    """What `read_header` says against `path`; always names the file and is fit to be printed."""
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return assert_printable(str(caught.value), path)


def _payload(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


# ---- files that are as they should be ----


def _example_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        raw = torch.randint(2 if dtype is torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).view(shape)

    shapes = [(3, 5), (), (0,), (4, 0, 2), (1, 1, 1), (7,)]
    return {f"{name}.{len(shape)}.{i}": draw(DTYPES[name], shape) for name in DTYPES for i, shape in enumerate(shapes)}


def _check(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    raw = path.read_bytes()
    stored = read_header(path)
    assert stored.keys() == tensors.keys()
    for key, tensor in tensors.items():
        found = stored[key]
        payload = _payload(tensor)
        expected = StoredTensor(key, tensor.dtype, tuple(tensor.shape), path, found.offset, len(payload))
        assert found == expected
        assert raw[found.offset : found.offset + found.nbytes] == payload
    assert list(stored.values()) == sorted(stored.values(), key=lambda one: one.offset)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "\n\u00e9": "\x1b"}])
def test_what_the_library_writes_is_read(file: Path, metadata: dict[str, str] | None) -> None:
    tensors = _example_tensors()
    save_file(tensors, file, metadata)
    _check(file, tensors)


def test_every_dtype_is_the_one_that_the_library_means(file: Path) -> None:
    for name, dtype in DTYPES.items():
        save_file({"a": torch.zeros(2, 3).to(dtype)}, file)
        with safe_open(file, "pt") as reference:
            assert reference.get_slice("a").get_dtype() == name
        assert read_header(file)["a"].dtype == dtype


def test_names_of_any_script_are_kept(file: Path) -> None:
    tensors = {name: torch.zeros(1) for name in ("", " ", "\u00e9", "\U0001f600", "a\nb\x1b[31m", "\x00", "\\", '"')}
    save_file(tensors, file)
    _check(file, tensors)


@pytest.mark.parametrize("header", ["{}", "  {}", "{}   ", '{"__metadata__": {}}', '{"__metadata__": null}'])
def test_file_without_tensors(file: Path, header: str) -> None:
    file.write_bytes(_pack(header))
    assert read_header(file) == {}


def test_order_in_the_header_does_not_matter(file: Path) -> None:
    header = {"b": _entry(offsets=[4, 8]), "none": _entry(shape=[0], offsets=[4, 4]), "a": _entry(offsets=[0, 4])}
    file.write_bytes(_pack(header, b"aaaabbbb"))
    assert list(read_header(file)) == ["a", "none", "b"]


def test_relative_path_and_link(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(2)}, file)
    link = file.with_name("link")
    link.symlink_to(file.name)
    monkeypatch.chdir(file.parent)
    for path in (link, Path(file.name)):
        assert read_header(path)["a"].file == path


def test_million_dims_are_read_as_the_library_reads_them(file: Path) -> None:
    file.write_bytes(_pack({"a": _entry("U8", [1] * 10**6, [0, 1])}, b"1"))
    assert len(read_header(file)["a"].shape) == 10**6


def test_only_the_header_is_read(file: Path) -> None:
    nbytes = 1 << 36  # a sparse file: reading it would take a minute
    header = _pack({"a": _entry("U8", [nbytes], [0, nbytes])})
    file.write_bytes(header)
    os.truncate(file, len(header) + nbytes)
    with at_most(10):
        assert read_header(file)["a"].nbytes == nbytes


def test_descriptor_is_closed(file: Path) -> None:
    save_file({"a": torch.ones(2)}, file)
    bad = file.with_name("bad")
    bad.write_bytes(b"1234")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        read_header(file)
        _refusal(bad)
        _refusal(file.parent)
    assert len(os.listdir("/proc/self/fd")) == before


def test_encoded_header_is_read_by_the_library(file: Path) -> None:
    tensors = _example_tensors() | {"\u00e9\U0001f600\n": torch.ones(3)}
    start, rows = 0, []
    for key, tensor in tensors.items():
        rows.append((key, tensor.dtype, tuple(tensor.shape), start))
        start += len(_payload(tensor))
    header = encode_header(rows)
    assert len(header) % 8 == 0
    file.write_bytes(header + b"".join(map(_payload, tensors.values())))
    _check(file, tensors)
    loaded = load_file(file)
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape)
        assert _payload(loaded[key]) == _payload(tensor)
    with safe_open(file, "pt") as reference:
        assert reference.metadata() == {"format": "pt"}  # transformers refuses a file without it


def test_encoded_header_of_nothing(file: Path) -> None:
    file.write_bytes(encode_header([]))
    assert read_header(file) == load_file(file) == {}


# ---- no safetensors file ----


def test_missing_file(file: Path) -> None:
    assert "there is no such file" in _refusal(file)
    file.symlink_to("nowhere")
    assert "there is no such file" in _refusal(file)


def test_special_files(file: Path) -> None:
    os.mkfifo(file)
    folder = file.with_name("folder.safetensors")
    folder.mkdir()
    with at_most(10):
        for path in (file, folder, Path("/dev/zero"), Path("/dev/null")):
            assert "not a regular file" in _refusal(path) or path.is_dir()


def test_paths_that_cannot_be_opened(file: Path, tmp_path: Path) -> None:
    assert "cannot be read" in _refusal(tmp_path / ("x" * 300))
    file.touch()
    assert "cannot be read: Not a directory" in _refusal(file / "x.safetensors")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert "cannot be read" in _refusal(loop)
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):  # a socket's path is short
        server.bind("socket")
        assert "cannot be read" in _refusal(tmp_path / "socket")


def test_every_truncation_is_refused(file: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.ones(5, dtype=torch.uint8)}
    save_file(tensors, file)
    raw = file.read_bytes()
    for size in range(len(raw)):
        file.write_bytes(raw[:size])
        assert "is cut off, damaged, or no safetensors file" in _refusal(file)


@pytest.mark.parametrize("length", [3, 100_000_001, 2**31, 2**63, 2**64 - 1])
def test_header_longer_than_the_file(file: Path, length: int) -> None:
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    _refusal(file)
    os.truncate(file, 8 + 100_000_001)  # a sparse file
    with at_most(10):
        _refusal(file)


# ---- no JSON, or not the right JSON ----

NO_HEADER = {
    "length 0": b"",
    "spaces": b"    ",
    "not UTF-8": b'{"\xff": 1}',
    "overlong UTF-8": b'{"\xc0\x80": 1}',
    "surrogate as UTF-8": b'{"\xed\xa0\x80": 1}',
    "UTF-16": "{}".encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "padded with zeros": b"{}\0\0",
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "text": b'"a"',
    "pickle": b"\x80\x02}q\x00.",
    "cut off": b'{"a": {"dtype": "F32"',
    "comma at the end": b'{"__metadata__": {},}',
    "two objects": b"{}{}",
    "comment": b"{} // a",
    "single quotes": b"{'a': 1}",
    "newline in name": b'{"a\nb": 1}',
    "deep lists": b"[" * 100_000,
    "deep lists, closed": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep objects, closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep metadata": b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("text", NO_HEADER.values(), ids=NO_HEADER)
def test_not_a_header(file: Path, text: bytes) -> None:
    file.write_bytes(_pack(text, b"1234"))
    with at_most(20):
        assert "no safetensors file: " in _refusal(file)


# ---- entries ----

# Entry of the tensor, bytes of data.
BAD_ENTRIES: dict[str, tuple[Any, int]] = {
    "no object": (None, 4),
    "a list, which the library takes": (["F32", [1], [0, 4]], 4),
    "misspelt": ({"dtype": "F32", "shape": [1], "offsets": [0, 4]}, 4),
    "dtype hostile": (_entry("\x1b[31m\n\u202e\ud800"), 4),
    "dtype long": (_entry("F" * 10**6), 4),
    "dtype that torch does not have": (_entry("U16", [2]), 4),
    "size negative": (_entry(shape=[-1]), 4),
    "size true": (_entry(shape=[True]), 4),
    "three offsets": (_entry(offsets=[0, 4, 4]), 4),
    "offsets reversed": (_entry(offsets=[4, 0]), 4),
    "offsets behind the file": (_entry(shape=[0], offsets=[8, 8]), 4),
    "dtype too wide": (_entry("F64", [1], [0, 4]), 4),
    "bytes for size 0": (_entry("U8", [3, 0], [0, 4]), 4),
    "product is 2**64 + 4": (_entry("U8", [4, 2**62 + 1], [0, 4]), 4),
    "size with 400 digits": (_entry("U8", [10**400], [0, 4]), 4),
    "gap": (_entry(offsets=[4, 8]), 8),
    "bytes of no tensor": (_entry(), 7),
}


@pytest.mark.parametrize(("entry", "num_bytes"), BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_bad_entry_is_refused(file: Path, entry: object, num_bytes: int) -> None:
    file.write_bytes(_pack({"model.a.weight": entry}, bytes(num_bytes)))
    with at_most(20):
        text = _refusal(file)
    assert len(text) < 1000 + len(str(file))


def test_tensors_that_overlap_are_named(file: Path) -> None:
    file.write_bytes(_pack({"a": _entry(), "b.weight": _entry(offsets=[2, 6])}, bytes(6)))
    assert "b.weight" in _refusal(file)


# ---- property-based ----

# dtype, shape of every tensor that the reference implementation sees.
Reference = dict[str, tuple[str, tuple[int, ...]]]


def _get_reference(path: Path) -> Reference | None:
    """What safetensors itself reads; None if it refuses."""
    try:
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
            return {key: (one.get_dtype(), tuple(one.get_shape())) for key, one in slices.items()}
    except (SafetensorError, OSError):
        return None


def _is_refused_on_purpose(raw: bytes) -> bool:
    """What we refuse and safetensors reads: other dtypes than ours, and entries as lists."""
    length = struct.unpack("<Q", raw[:8])[0]
    table = json.loads(raw[8 : 8 + length])
    entries = [entry for key, entry in table.items() if key != "__metadata__"]
    if not all(isinstance(entry, dict) for entry in entries):
        return True
    return not all(isinstance(entry["dtype"], str) and entry["dtype"] in DTYPES for entry in entries)


def _check_raw(path: Path, raw: bytes) -> None:
    """The property: refused with a message that names the file, or in range, without overlap, of the right size, and
    what the reference implementation reads."""
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
                assert _payload(file.get_tensor(key)) == raw[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


@settings(max_examples=300)
@given(st.binary(max_size=64) | st.builds(_pack, st.binary(max_size=64), st.binary(max_size=16)))
@example(b"")
@example(_pack(b""))
def test_any_bytes(fuzzed: Path, raw: bytes) -> None:
    _check_raw(fuzzed, raw)


def _valid_files() -> list[bytes]:
    table = {
        "__metadata__": {"format": "pt"},
        "a": _entry("F32", [2, 1], [0, 8]),
        "b": _entry("BF16", [], [8, 10]),
        "c": _entry("U8", [0, 3], [10, 10]),
        "d": _entry("F8_E4M3", [3], [10, 13]),
    }
    return [
        _pack(table, bytes(range(13))),
        _pack(json.dumps(table, separators=(",", ":")) + "  ", bytes(range(13))),
        _pack({"x": _entry("BOOL", [2], [0, 2])}, b"\0\1"),
    ]


_JSON_BYTES = st.sampled_from(list(b'{}[]",:0123456789-.eE\\u \n\0\xff')) | st.integers(0, 255)


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """A valid file with a few bytes changed, added or taken away; sometimes with a length that fits again."""
    raw = draw(st.sampled_from(_valid_files()))
    length = struct.unpack("<Q", raw[:8])[0]
    keep_length = draw(st.booleans())
    content = bytearray(raw[8:])
    for _ in range(draw(st.integers(1, 3))):
        # Two of three hit the header.
        end = length if draw(st.integers(0, 2)) else len(content)
        at = draw(st.integers(0, max(min(end, len(content)) - 1, 0)))
        size = len(content)
        match draw(st.sampled_from(["flip", "set", "insert", "delete", "truncate"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if content:
                content[at] = draw(_JSON_BYTES)
            case "insert":
                content[at:at] = bytes(draw(st.lists(_JSON_BYTES, min_size=1, max_size=4)))
            case "delete":
                del content[at : at + draw(st.integers(1, 4))]
            case "truncate" if not draw(st.integers(0, 3)):
                del content[at:]
        if at < length and not keep_length:
            length = max(length + len(content) - size, 0)
    head = bytearray(struct.pack("<Q", length))
    if not draw(st.integers(0, 9)):
        head[draw(st.integers(0, 7))] ^= 1 << draw(st.integers(0, 7))
    return bytes(head + content)


@settings(max_examples=400)
@given(_damaged())
def test_damaged_files(fuzzed: Path, raw: bytes) -> None:
    _check_raw(fuzzed, raw)


_EDGES = [-1, 0, 1, 2, 4, 8, 2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]
_NUMBERS = st.integers(0, 8) | st.integers(-(2**70), 2**70) | st.sampled_from(_EDGES)
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_DTYPE_NAMES = st.sampled_from([*DTYPES, "U16", "C64", "F8_E8M0", "F4", "I128", "f32", ""])
_METADATA = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | _VALUES
# With halves of surrogate pairs, which `st.text()` leaves out.
_TENSOR_NAMES = st.text(st.characters(exclude_categories=()), max_size=3) | st.sampled_from(["a", "b", "__metadata__"])


def _change(draw: st.DrawFn, entry: dict[str, Any]) -> Any:
    """`entry` with one thing changed in place, or something else instead of it."""
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    position = draw(st.integers(0, max(len(shape) - 1, 0)))
    changes: dict[str, Callable[[], Any]] = {
        "dtype": lambda: entry.update(dtype=draw(_DTYPE_NAMES | _VALUES)),
        "shape": lambda: entry.update(shape=draw(st.lists(_NUMBERS, max_size=4) | _VALUES)),
        "size": lambda: shape.__setitem__(slice(position, position + 1), [draw(_LEAVES)]),
        "equal shape": lambda: entry.update(shape=[1, *shape[::-1]]),
        "offsets": lambda: entry.update(data_offsets=draw(st.lists(_NUMBERS, min_size=2, max_size=2) | _VALUES)),
        "reversed": lambda: entry.update(data_offsets=[end, begin]),
        "shifted": lambda: entry.update(data_offsets=[begin + 1, end + 1]),
        "longer": lambda: entry.update(data_offsets=[begin, end + 1]),
        "missing field": lambda: entry.pop(draw(st.sampled_from(sorted(FIELDS)))),
        "extra field": lambda: entry.update({draw(st.text(max_size=3)): draw(_VALUES)}),
    }
    if draw(st.integers(0, 11)) == 0:
        return draw(_VALUES)
    changes[draw(st.sampled_from(sorted(changes)))]()
    return entry


@st.composite
def _structured(draw: st.DrawFn) -> bytes:
    """A file that is valid but for a few changes to entries, names, metadata, and the amount of data."""
    rows: list[tuple[str, Any]] = []
    start = 0
    for _ in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        rows.append((draw(_TENSOR_NAMES), _entry(dtype, shape, [start, start + nbytes])))
        start += nbytes
    if rows and draw(st.booleans()):
        chosen = draw(st.integers(0, len(rows) - 1))
        name, entry = rows[chosen]
        rows[chosen] = (name, _change(draw, entry))
    if draw(st.booleans()):
        rows.append(("__metadata__", draw(_METADATA)))
    rows = draw(st.permutations(rows))
    text = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in rows)
    start += draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    return _pack(f"{{{text}}}", bytes(i % 2 for i in range(start)))


@settings(max_examples=400)
@given(_structured())
def test_damaged_headers(fuzzed: Path, raw: bytes) -> None:
    _check_raw(fuzzed, raw)
