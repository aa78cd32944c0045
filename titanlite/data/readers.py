"""Readers of JSON lines, JSON arrays, CSV and Parquet: (number, row) pairs, with a `RowError` where a row is bad.

JSON lines and CSV are read with the standard library: line numbers are exact, "123" stays text, and a key that one row
has and another has not stays absent, where a columnar reader would merge the schemas and fill in None.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class RowError(Exception):
    """One row cannot be used. `reason` is a few words to count by, the text says what is wrong and what to do."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _read_jsonl(file: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    start = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as some editors write
            if line.strip():
                try:
                    yield number, _parse_json(line.rstrip())
                except RowError as error:
                    yield number, error
                except UnicodeDecodeError as error:
                    text = f"byte {start + error.start} of the file is not UTF-8 ({error.reason}). Convert the file."
                    yield number, RowError("not UTF-8", text)
            start += len(line)


def _read_json(file: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """A file with one array of rows, or JSON lines under another name."""
    with file.open("rb") as stream:
        head = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith(b"["):
        yield from _read_jsonl(file)
        return
    try:
        rows = _load_json(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except RowError as error:
        yield 0, error
        return
    except UnicodeDecodeError as error:
        text = f"byte {error.start} of the file is not UTF-8 ({error.reason}). Convert the file."
        yield 0, RowError("not UTF-8", text)
        return
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, dict) else _not_an_object(row)


def _parse_json(line: bytes) -> dict[str, Any]:
    row = _load_json(line)
    if not isinstance(row, dict):
        raise _not_an_object(row)
    return row


def _load_json(content: bytes) -> Any:
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        text = f"not valid JSON ({error.msg}, {line}column {error.colno}). Write one JSON object per line."
        raise RowError("invalid JSON", text) from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid JSON", f"not valid JSON ({error}). Write one JSON object per line.") from None
    if b"\\ud" in content or b"\\uD" in content:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            text = "an escape \\ud800 to \\udfff stands alone and is no character. Write the text as UTF-8."
            raise RowError("not UTF-8", text) from None
    return value


def _not_an_object(row: Any) -> RowError:
    text = f"the row is a JSON {_json_type(row)}, not an object. Write rows such as {{"
    return RowError("wrong type", text + '"prompt": "...", "completion": "..."}.')


def _json_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _read_csv(file: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB is less than a long document
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, RowError("invalid CSV", f"not valid CSV ({error}). Quote fields that hold quotes.")
                continue
            if not cells:
                continue
            if header is None:
                header = cells
            else:
                yield number, _csv_row(header, cells)


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any] | RowError:
    if len(cells) != len(header):
        text = f"{len(cells)} fields, but the first line names {len(header)} columns. Quote fields that hold commas."
        return RowError("invalid CSV", text)
    for name, cell in zip(header, cells, strict=True):
        escaped = re.search("[\ud800-\udfff]", cell)
        if escaped:
            byte = ord(escaped[0]) - 0xDC00
            return RowError("not UTF-8", f"column '{name}' holds the byte 0x{byte:02x}, no UTF-8. Convert the file.")
    return dict(zip(header, cells, strict=True))


def _read_parquet(file: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    from datasets import load_dataset  # takes a second, and most rows are JSON lines
    from pyarrow import ArrowException

    try:
        # Streaming reads the file in place; without it, datasets would first copy it into its own cache.
        rows: Iterable[Any] = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield number, drop_none(row)
    except (ArrowException, ValueError) as error:
        text = f"not a readable Parquet file ({first_line(error)}). Write it again."
        yield 0, RowError("invalid Parquet", text)


def drop_none(value: Any) -> Any:
    """`value` without the None entries of its dicts: a column store writes None where a row has no such key."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


def first_line(error: BaseException) -> str:
    """What an error says, without what follows its first line; its name if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
