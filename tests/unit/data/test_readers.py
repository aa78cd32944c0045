"""Rows from any row on: the same as after reading all before it, without parsing those."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, Features, List, load_dataset
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import ParquetFile, write_table

from titanlite.data import readers
from titanlite.data.readers import RowError
from titanlite.data.rows import Row, Rows, build_rows

_MARK = b"\xef\xbb\xbf"
LINES = [b'{"a": 1}', b'{"a": "\xc3\xa9"}', b"", b" \t\r", b"{", b"[1]", b'{"a": "\xff"}', _MARK, _MARK + b'{"a": 2}']


def _compare(row: Row) -> tuple[Any, ...]:
    content = row.content
    error = (content.reason, str(content)) if isinstance(content, RowError) else None
    return row.file, row.number, error or content


def _assert_starts_anywhere(rows: Rows, cache_folder: Path) -> list[Row]:
    found = list(rows)
    expected = [_compare(row) for row in found]
    for folder in (None, cache_folder, cache_folder):  # without a cache, and with one that is empty, then filled
        for start in range(len(expected) + 3):
            assert [_compare(row) for row in rows.iterate_from(start, folder)] == expected[start:], start
    return found


def _write_parquet(file: Path, texts: list[str | None], group: int) -> None:
    write_table(pa.table({"text": pa.array(texts, pa.string())}), file, row_group_size=group)


def test_rows_of_a_mixed_folder_from_any_row_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MARK_BYTES", 12)
    monkeypatch.setattr(readers, "_BATCH_ROWS", 2)
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(_MARK + b'\n\n{"a": 1}\n  \n{"a": \n\n[2]\n{"a": "\xff"}\n{"a": 5}')
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(b"\n \n")
    _write_parquet(folder / "d.parquet", [f"text {i}" for i in range(7)], 3)
    (folder / "e.csv").write_bytes(b'a,b\n1,2\n\n3\n"x\ny",4\n')
    _write_parquet(folder / "f.parquet", [], 3)
    (folder / "g.parquet").write_bytes(b"PAR1 nonsense")
    (folder / "h.json").write_text('[{"a": 1}, 2, {"a": 3}]')
    (folder / "i.json").write_text("")
    (folder / "j.jsonl").write_bytes(b'{"a": 6}\n{"a": 7}\n')
    found = _assert_starts_anywhere(build_rows(str(folder)), tmp_path / "cache")
    assert [sum(row.file == file for row in found) for file in range(10)] == [5, 1, 1, 7, 3, 1, 1, 3, 1, 2]
    byte = (folder / "a.jsonl").read_bytes().index(b"\xff")
    assert f"byte {byte} of the file is not UTF-8" in str(found[3].content)


@given(lines=st.lists(st.sampled_from(LINES), max_size=12), ends=st.booleans())
def test_lines_from_any_row_on(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n" * ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_MARK_BYTES", 10)
        rows = build_rows(str(folder))
        expected = [_compare(row) for row in rows]
        for start in range(len(expected) + 2):
            assert [_compare(row) for row in rows.iterate_from(start)] == expected[start:]


def test_rows_that_are_skipped_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second resume does not even look for their lines."""
    monkeypatch.setattr(readers, "_MARK_BYTES", 400)
    monkeypatch.setattr(readers, "_BATCH_ROWS", 8)
    work = {"parsed": 0, "converted": 0, "looked at": 0}

    def counted(name: str, kind: str, size: Any) -> None:
        original = getattr(readers, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            work[kind] += size(*args)
            return original(*args, **kwargs)

        monkeypatch.setattr(readers, name, call)

    counted("_load_json", "parsed", lambda *_: 1)
    counted("_is_blank", "looked at", lambda *_: 1)
    counted("_convert", "converted", lambda batch: batch.num_rows)
    for number in range(2):
        lines = "".join(json.dumps({"a": i}) + "\n" for i in range(1000))
        (tmp_path / f"{number}.jsonl").write_text(lines)
        _write_parquet(tmp_path / f"{number}.parquet", [f"text {i}" for i in range(1000)], 100)
    rows = build_rows(str(tmp_path))
    for first, start, file in ((True, 3500, 3), (False, 3500, 3), (True, 2500, 2), (False, 1500, 1), (False, 500, 0)):
        work |= dict.fromkeys(work, 0)
        row = next(iter(rows.iterate_from(start, tmp_path / "cache")))
        place = (row.file, row.number, row.content)
        assert place == (file, 501, {"a": 500} if rows.names[file].endswith("l") else {"text": "text 500"})
        assert work["parsed"] <= 1 and work["converted"] <= 8
        assert work["looked at"] <= (2050 if first else 50), start


def test_a_row_group_that_cannot_be_read_is_as_many_bad_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the rows behind it keep their numbers, whether it is read or skipped."""
    file = tmp_path / "a.parquet"
    _write_parquet(file, [f"text {i}" for i in range(12)], 4)
    original = ParquetFile.iter_batches

    def damaged(self: ParquetFile, size: int, row_groups: list[int]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(original(self, size, row_groups=row_groups)):
            if row_groups == [1] and number == 1:
                raise pa.ArrowInvalid("Output buffer size (4) must be 9 or larger.")
            yield batch

    monkeypatch.setattr(ParquetFile, "iter_batches", damaged)
    monkeypatch.setattr(readers, "_BATCH_ROWS", 2)
    found = _assert_starts_anywhere(build_rows(str(file)), tmp_path / "cache")
    assert [row.number for row in found if isinstance(row.content, RowError)] == [7, 8]
    text = "row group 2 of the file cannot be read (Output buffer size (4) must be 9 or larger.). Write the file again."
    assert str(found[6].content) == text and len(found) == 12


def test_a_text_of_a_parquet_file_that_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    write_table(pa.table({"text": pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffc"))}), file)
    found = _assert_starts_anywhere(build_rows(str(file)), tmp_path / "cache")
    assert [row.content for row in found[::2]] == [{"text": "a"}, {"text": "c"}]
    assert str(found[1].content) == "a text of the row is not UTF-8 (invalid start byte). Write the file again."


def test_parquet_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    """What a column means is not in its storage alone: `datasets` writes objects of mixed types as JSON text."""
    rows = [{"a": [{"b": 1, "d": b"x"}], "e": 1.5, "f": "g"}, {"a": [], "e": 2.5, "f": "h"}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    columns = {
        "time": pa.array([10**9, None, 0], pa.timestamp("us")),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(),
        "long": pa.array(["x", "y", None], pa.large_string()),
        "pair": pa.array([[1, 2]] * 3, pa.list_(pa.int32(), 2)),
        "nest": pa.array([{"a": [1], "b": None}, {"a": [], "b": "c"}, {"a": None, "b": "d"}]),
    }
    write_table(pa.table(columns), tmp_path / "b.parquet", row_group_size=2)
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    if mixed := getattr(datasets, "Json", None):  # datasets 5
        features = Features({"a": List(mixed())})
        objects = Dataset.from_dict({"a": [[{"b": 0}, {"c": "d"}]]}, features=features)
        objects.to_parquet(str(tmp_path / "c.parquet"))
        files.append(tmp_path / "c.parquet")
    for file in files:
        expected = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        found = [row.content for row in build_rows(str(file))]
        assert found == [readers.drop_none(row) for row in expected]
    if mixed:
        assert found == [{"a": [{"b": 0}, {"c": "d"}]}]
