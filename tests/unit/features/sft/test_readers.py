"""Readers return exactly the rows of a file, starting from any row, and name damaged files."""

import bz2
import gzip
import json
import lzma
import random

import pyarrow as pa
import pytest
from datasets import Dataset, Features, Json, List, load_dataset
from files import write_lines
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from titanlite.base.errors import DataError
from titanlite.config.data import DataSection
from titanlite.features.sft.readers import RowError, drop_none, read_rows
from titanlite.features.sft.rows import PER_FILE, open_rows

_MARK = b"\xef\xbb\xbf"
LINES = [
    b'{"a": 1}',
    b'{"a": "\xc3\xa9"}',
    b"",
    b" \t\r",
    b"{",
    b"[1]",
    b'{"a": "\xff"}',
    _MARK,
    _MARK + b'{"a": 2}',
]


def open_path(path, **settings):
    return open_rows(DataSection(path=str(path), **settings))


def _compare(row):
    content = row.content
    error = (content.reason, str(content)) if isinstance(content, RowError) else None
    return row.place, error or content


def _assert_starts_anywhere(rows):
    found = list(rows.iterate_from())
    expected = [_compare(row) for row in found]
    for i, row in enumerate(found, 1):
        assert [_compare(r) for r in rows.iterate_from(row.place)] == expected[i:]
    return found


def _call(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


LONG = "y" * 11_000
KEPT = {
    "null": [_call(a=1, b=None), _call(a=None)],
    "numbers": [_call(a=1), _call(a=1.5), _call(a=2**70)],
    "nested": [_call(a={"b": [1, {"c": None}]}), _call(a=[1, "x"]), _call(a={"z": 1})],
    "a late type": [{"content": LONG}] * 1000 + [{"content": [{"type": "text"}]}],
}


def test_lines_of_json_are_kept_as_they_are(tmp_path):
    """Types and keys of one row do not depend on other rows."""
    file = tmp_path / "a.jsonl"
    for kind, rows in KEPT.items():
        write_lines(file, rows)
        assert [row for _, row in read_rows(file)] == rows, kind


def _write_parquet(file, texts):
    write_table(pa.table({"text": pa.array(texts, pa.string())}), file, row_group_size=3)


def test_rows_of_a_mixed_folder_from_any_row_on(tmp_path):
    folder = tmp_path / "rows [1]*"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(
        _MARK + b'\n\n{"a": 1}\n  \n{"a": \n\n[2]\n{"a": "\xff"}\n{"a": 5}'
    )
    (folder / "b.jsonl").write_bytes(b"")
    _write_parquet(folder / "d.parquet", [f"text {i}" for i in range(7)])
    (folder / "e.csv").write_bytes(b'a,b\n1,2\n\n3\n"x\ny",4\n')
    _write_parquet(folder / "f.parquet", [])
    (folder / "h.json").write_text('[{"a": 1}, 2, {"a": 3}]')
    (folder / "j.jsonl").write_bytes(b'{"a": 6}\n{"a": 7}\n')
    found = _assert_starts_anywhere(open_path(folder))
    assert [sum(row.place // PER_FILE == file for row in found) for file in range(7)] == [
        5,
        0,
        7,
        3,
        0,
        3,
        2,
    ]
    assert "not valid JSON ('utf-8' codec" in str(found[3].content)


@given(lines=st.lists(st.sampled_from(LINES), max_size=12), ends=st.booleans())
def test_lines_from_any_row_on(tmp_path_factory, lines, ends):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n" * ends)
    found = _assert_starts_anywhere(open_path(folder / "a.jsonl"))
    blank = [b"", b" \t\r", _MARK]
    assert [row.place for row in found] == [
        number for number, line in enumerate(lines, 1) if line not in blank
    ]


def test_parquet_is_read_as_datasets_reads_it(tmp_path):
    """The storage alone does not define a column: `datasets` writes objects of mixed types as JSON
    text.
    """
    rows = [{"a": [{"b": 1, "d": b"x"}], "e": 1.5, "f": "g"}, {"a": [], "e": 2.5, "f": "h"}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    columns = {
        "time": pa.array([10**9, None, 0], pa.timestamp("us")),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
        "nest": pa.array([{"a": [1], "b": None}, {"a": [], "b": "c"}, {"a": None, "b": "d"}]),
    }
    write_table(pa.table(columns), tmp_path / "b.parquet", row_group_size=2)
    features = Features({"a": List(Json())})
    objects = Dataset.from_dict({"a": [[{"b": 0}, {"c": "d"}]]}, features=features)
    objects.to_parquet(str(tmp_path / "c.parquet"))
    assert [row for _, row in read_rows(tmp_path / "c.parquet")] == [{"a": [{"b": 0}, {"c": "d"}]}]
    for file in tmp_path.iterdir():
        expected = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        assert [row for _, row in read_rows(file)] == [drop_none(row) for row in expected]


def test_csv_is_text(tmp_path, monkeypatch):
    """The reader needs no cache and uses none: a file that is written again has other rows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/proc/nowhere")
    file = tmp_path / "a.csv"
    file.write_bytes(_MARK + b'a,b\n1,NA\n"two\nlines",\n007,1.50\n"x ""y""",null\n')
    assert [row for _, row in read_rows(file)] == [
        {"a": "1", "b": "NA"},
        {"a": "two\nlines", "b": ""},
        {"a": "007", "b": "1.50"},
        {"a": 'x "y"', "b": "null"},
    ]
    file.write_bytes(file.read_bytes().replace(b"007", b"008"))
    rest = list(read_rows(file, 2))
    assert rest[0][1] == {"a": "008", "b": "1.50"}


def _compress_zstd(content):
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(content)
    return file.getvalue().to_pybytes()


COMPRESS = {
    ".gz": gzip.compress,
    ".zst": _compress_zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_lines_are_the_same_rows(tmp_path, ending):
    """This includes files that were made by appending one to another, as parallel compressors
    do.
    """
    contents = {
        "a.jsonl": _MARK + b'\n{"a": 1}\n \n{\n[2]\n',
        "a.v1.jsonl": b'{"a": 3}\n\n{"a": 4}',
        "b.json": b'{"a": 5}\n{"a": 6}\n' * 3,
        "c.json": b'[{"a": 7}, {"a": 8}]',
    }
    for folder in ("plain", "compressed"):
        (tmp_path / folder).mkdir()
    for name, content in contents.items():
        (tmp_path / "plain" / name).write_bytes(content)
        half = len(content) // 2
        packed = COMPRESS[ending](content[:half]) + COMPRESS[ending](content[half:])
        (tmp_path / "compressed" / (name + ending)).write_bytes(packed)
    found = _assert_starts_anywhere(open_path(tmp_path / "compressed"))
    plain = open_path(tmp_path / "plain").iterate_from()
    assert [_compare(row) for row in found] == [_compare(row) for row in plain]


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_damaged_compressed_file_is_named(tmp_path, ending):
    """The damage is not a bad row that could be skipped, because nobody knows which rows are
    missing.
    """
    noise = random.Random(0)
    lines = [json.dumps({"a": noise.randbytes(500).hex()}).encode() + b"\n" for _ in range(100)]
    whole = COMPRESS[ending](b"".join(lines))
    file = tmp_path / f"a.jsonl{ending}"
    for content in (whole[: len(whole) // 2], whole[:-1], b"of another format"):
        file.write_bytes(content)
        for start in (0, 10**6):
            with pytest.raises(DataError, match=rf"^data: cannot read {file}: .* is damaged, or"):
                list(read_rows(file, start))


BAD_FILES = {
    "later.csv": (b"a,b\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
    "magic.parquet": (b"PAR1 nonsense", "Parquet magic bytes not found"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_named(tmp_path, name):
    content, problem = BAD_FILES[name]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"^data: cannot read {file}: .*{problem}.* write or copy"):
        list(read_rows(file))
