"""Rows from any row on: the same as after reading all before it, without parsing those; and
compressed files.
"""

import gzip
import json
import random
import resource
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, Features, List, load_dataset
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from titanlite.base.errors import DataError
from titanlite.features.sft import readers
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import LocalRows, Row, Rows, find_rows

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


def _compare(row: Row) -> tuple[Any, ...]:
    content = row.content
    error = (content.reason, str(content)) if isinstance(content, RowError) else None
    return row.file, row.number, error or content


def _assert_starts_anywhere(rows: Rows) -> list[Row]:
    found = list(rows)
    expected = [_compare(row) for row in found]
    for start in range(len(expected) + 3):
        assert [_compare(row) for row in rows.iterate_from(start)] == expected[start:], start
    return found


def _write_parquet(file: Path, texts: list[str | None], group: int) -> None:
    write_table(pa.table({"text": pa.array(texts, pa.string())}), file, row_group_size=group)


def test_rows_of_a_mixed_folder_from_any_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BATCH_ROWS", 2)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(
        _MARK + b'\n\n{"a": 1}\n  \n{"a": \n\n[2]\n{"a": "\xff"}\n{"a": 5}'
    )
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(b"\n \n")
    _write_parquet(folder / "d.parquet", [f"text {i}" for i in range(7)], 3)
    (folder / "e.csv").write_bytes(b'a,b\n1,2\n\n3\n"x\ny",4\n')
    _write_parquet(folder / "f.parquet", [], 3)
    (folder / "h.json").write_text('[{"a": 1}, 2, {"a": 3}]')
    (folder / "i.json").write_text("")
    (folder / "j.jsonl").write_bytes(b'{"a": 6}\n{"a": 7}\n')
    found = _assert_starts_anywhere(find_rows(str(folder)))
    assert [sum(row.file == file for row in found) for file in range(9)] == [
        5,
        1,
        1,
        7,
        3,
        1,
        3,
        1,
        2,
    ]
    assert "not UTF-8. Convert it: iconv" in str(found[3].content)


@given(lines=st.lists(st.sampled_from(LINES), max_size=12), ends=st.booleans())
def test_lines_from_any_row_on(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n" * ends)
    _assert_starts_anywhere(find_rows(str(folder)))


def test_parquet_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    """What a column means is not in its storage alone: `datasets` writes objects of mixed types as
    JSON text.
    """
    rows = [{"a": [{"b": 1, "d": b"x"}], "e": 1.5, "f": "g"}, {"a": [], "e": 2.5, "f": "h"}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    columns = {
        "time": pa.array([10**9, None, 0], pa.timestamp("us")),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
        "pair": pa.array([[1, 2]] * 3, pa.list_(pa.int32(), 2)),
        "nest": pa.array([{"a": [1], "b": None}, {"a": [], "b": "c"}, {"a": None, "b": "d"}]),
    }
    write_table(pa.table(columns), tmp_path / "b.parquet", row_group_size=2)
    if mixed := getattr(datasets, "Json", None):  # datasets 5
        features = Features({"a": List(mixed())})
        objects = Dataset.from_dict({"a": [[{"b": 0}, {"c": "d"}]]}, features=features)
        objects.to_parquet(str(tmp_path / "c.parquet"))
        assert [row.content for row in find_rows(str(tmp_path / "c.parquet"))] == [
            {"a": [{"b": 0}, {"c": "d"}]}
        ]
    for file in tmp_path.iterdir():
        expected = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        found = [row.content for row in find_rows(str(file))]
        assert found == [readers.drop_none(row) for row in expected]


def _compress_zstd(content: bytes) -> bytes:
    file = pa.BufferOutputStream()
    with pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(content)
    return file.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".zst": _compress_zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_lines_are_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Also of files that were made by appending one to another, as parallel compressors do."""
    compress = COMPRESS[ending]
    contents = [
        _MARK + b'\n{"a": 1}\n \n{\n[2]\n',
        b'{"a": 3}\n\n{"a": 4}',
        b"",
        b'{"a": 5}\n{"a": 6}\n' * 3,
    ]
    names = ("a.jsonl", "a.v1.jsonl", "b.json", "c.jsonl")
    for folder in ("plain", "compressed"):
        (tmp_path / folder).mkdir()
    for name, content in zip(names, contents, strict=True):
        (tmp_path / "plain" / name).write_bytes(content)
        half = len(content) // 2
        (tmp_path / "compressed" / (name + ending)).write_bytes(
            compress(content[:half]) + compress(content[half:])
        )
    plain = find_rows(str(tmp_path / "plain"))
    rows = find_rows(str(tmp_path / "compressed"))
    found = _assert_starts_anywhere(rows)
    assert [_compare(row) for row in found] == [_compare(row) for row in plain]
    assert find_rows(str(tmp_path / "compressed"), "c.*").names == (
        str(tmp_path / f"compressed/c.jsonl{ending}"),
    )


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_damaged_compressed_file_is_named(tmp_path: Path, ending: str) -> None:
    """It is no bad row that could be skipped, for nobody knows what is missing."""
    noise = random.Random(0)
    lines = b"".join(
        json.dumps({"a": noise.randbytes(500).hex()}).encode() + b"\n" for _ in range(400)
    )
    whole = COMPRESS[ending](lines)
    file = tmp_path / f"a.jsonl{ending}"
    for content, place in (
        # of the 200 lines in the first half
        (whole[: len(whole) // 2], r" somewhere after line 1\d\d"),
        (whole[:-1], r" somewhere after line 3\d\d"),
        (whole + b"trailing", r" somewhere after line 3\d\d"),
        (b"of another format", ""),
    ):
        file.write_bytes(content)
        rows = find_rows(str(file))
        for start in (0, 10**6):
            with pytest.raises(
                DataError,
                match=rf"^data: {file} is damaged or cut off{place} \(.*\)\. Write or copy",
            ):
                list(rows.iterate_from(start))


@pytest.mark.parametrize(
    "ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet"]
)
def test_a_row_that_is_too_long_is_named_and_the_next_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(readers, "_MOST_LINE_BYTES", 5000)
    texts = ["first", "x" * 9000, "y" * 70_000, "last"]
    path = tmp_path / f"rows{ending}"
    if ending == ".csv":
        path.write_text("\n".join(["text", *texts, ""]))
    elif ending == ".parquet":
        write_table(pa.table({"text": texts}), path)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        with pa.output_stream(
            path, compression={"gz": "gzip", "zst": "zstd"}.get(ending[7:])
        ) as stream:
            stream.write(lines)
    rows = _assert_starts_anywhere(LocalRows((path,)))
    first = 2 if ending == ".csv" else 1
    assert [row.number for row in rows] == [first, first + 1, first + 2, first + 3]
    assert [row.content for row in rows if isinstance(row.content, dict)] == [
        {"text": "first"},
        {"text": "last"},
    ]
    problem = "field limit (5000)" if ending == ".csv" else "more than the 5000 of a row"
    assert all(problem in str(row.content) for row in rows[1:3])


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst"])
def test_a_bomb_costs_time_and_no_memory(tmp_path: Path, ending: str) -> None:
    """One line of 300 MB, between two rows."""
    path = tmp_path / f"rows{ending}"
    with pa.output_stream(
        path, compression={"gz": "gzip", "zst": "zstd"}.get(ending[7:])
    ) as stream:
        stream.write(b'{"text": "a"}\n')
        for _ in range(300):
            stream.write(b" " * 10**6)
        stream.write(b'\n{"text": "b"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = [row.content for row in LocalRows((path,))]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (rows[0], rows[2]) == ({"text": "a"}, {"text": "b"}) and "300000001 bytes" in str(
        rows[1]
    )
    assert grown < 200_000, "KiB"


def test_a_text_of_a_parquet_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    write_table(
        pa.table({"text": pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffc"))}), file
    )
    found = _assert_starts_anywhere(find_rows(str(file)))
    assert [row.content for row in found[::2]] == [{"text": "a"}, {"text": "c"}] and found[
        1
    ].number == 2
    assert (
        str(found[1].content)
        == "a text of the row is not UTF-8 (invalid start byte). Write the file again."
    )


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), "the file is UTF-16"),
        ("a.csv", b"question;answer\na;b\nc;d\n", "columns are separated by ';'"),
    ],
)
def test_what_is_wrong_with_a_file_as_a_whole_is_said_once(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (row,) = LocalRows((tmp_path / name,))
    assert str(row.content).startswith(problem)


def test_skipped_lines_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(
        readers, "parse_json", lambda text: (parsed.append(text), json.loads(text))[1]
    )
    (tmp_path / "a.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(1000)))
    row = next(iter(find_rows(str(tmp_path)).iterate_from(500)))
    assert (row.number, row.content, len(parsed)) == (501, {"a": 500}, 1)
