"""Readers of rows: (number, row) pairs, with a `RowError` in place of a bad line of JSON.

CSV, Parquet and Arrow files are read by `datasets`. Lines of JSON are parsed here, because
`datasets` infers one type for each column from the first 10 MB: the text "2024-01-01" becomes a
date, "1" next to a number becomes a number, a list in a column of texts becomes text, and a key
that first appears later ends the run. None of that may happen to a chat or to the arguments of a
tool.
"""

import glob
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from titanlite.base.errors import DataError
from titanlite.base.files import check_regular, open_regular, parse_json
from titanlite.base.text import first_line

_BUILDERS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_BATCH_ROWS = 1024
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # as some editors write it
SUFFIXES = (".jsonl", ".json", *_BUILDERS)  # after .jsonl and .json one of `_PACKED` may follow


class RowError(Exception):
    """One row cannot be used. `reason` is a short phrase to count by; the text says what is wrong
    and what to do.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


Numbered = Iterator[tuple[int, dict[str, Any] | RowError]]


def get_kind(file: Path) -> str:
    """Return the suffix that selects a file's reader, such as '.jsonl' for 'a.jsonl.gz'; '' if
    there is no reader.
    """
    if file.suffix in _PACKED:
        kind = Path(file.stem).suffix
        return kind if kind in (".jsonl", ".json") else ""
    return file.suffix if file.suffix in SUFFIXES else ""


def read_rows(file: Path, start: int = 0) -> Numbered:
    """Yield the rows of a file after number `start`; rows are numbered from 1, including blank
    lines of JSON.

    Raises:
        DataError: the file is damaged, or not of the kind that its name says.
        OSError: the file is not a regular one, or cannot be opened.
    """
    check_regular(file)
    kind = get_kind(file)
    with _naming(file):
        yield from _read_columns(file, kind, start) if kind in _BUILDERS else _read(file, start)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn each error in the content of `file` into a DataError that names the file."""
    try:
        yield
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        if isinstance(error, UnicodeDecodeError):
            raise DataError(
                f"data: cannot read {file}: it is not UTF-8. Convert it: iconv -f ISO-8859-1 -t "
                f"UTF-8 {file} > utf8-{file.name}, if those are its letters."
            ) from None
        raise DataError(
            f"data: cannot read {file}: {first_line(error)}. The file is damaged, or not what its "
            "name says: write or copy it again."
        ) from None


def _read(file: Path, start: int) -> Numbered:
    """Yield the rows of a file with lines of JSON, or with one JSON array of rows."""
    with _open(file) as stream:
        head = stream.read(64)
        if get_kind(file) == ".json" and head.strip(_BYTE_ORDER_MARK + b" \t\r\n")[:1] == b"[":
            rows = parse_json((head + stream.read()).decode("utf-8-sig"))
            yield from ((i, _check(row)) for i, row in enumerate(rows, 1) if i > start)
            return
        lines = chain(BytesIO(head + stream.readline()), stream)
        for number, line in enumerate(lines, 1):
            if number > start and line.strip(_BYTE_ORDER_MARK).strip():
                yield number, _parse(line)


def _open(file: Path) -> IO[bytes]:
    if file.suffix == ".xz":
        return lzma.open(file)
    if file.suffix in _PACKED:
        from pyarrow import input_stream  # takes half a second to import

        return BufferedReader(input_stream(str(file)), 1 << 16)
    return open_regular(file)


def _parse(line: bytes) -> dict[str, Any] | RowError:
    try:
        text = line.decode("utf-8-sig").strip()
        row = parse_json(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is not a character
            json.dumps(row, ensure_ascii=False).encode()
    except ValueError as error:
        what = first_line(error).replace("line 1 column", "column")
        text = f"not valid JSON ({what}). Write one JSON object per line, in UTF-8."
        return RowError("invalid JSON", text)
    return _check(row)


def _check(row: Any) -> dict[str, Any] | RowError:
    if isinstance(row, dict):
        return row
    text = (
        f"the row is of type {type(row).__name__}, not an object. Write rows such as "
        f'{{"messages": [...]}}.'
    )
    return RowError("wrong type", text)


def _read_columns(file: Path, kind: str, start: int) -> Numbered:
    """Yield the rows that `datasets` reads, one at a time; it stores no copy of the file."""
    from datasets import load_dataset

    options: dict[str, Any] = _declare_text(file) if kind == ".csv" else {}
    if kind == ".parquet":  # otherwise it reads whole row groups, and fails on an empty one
        options["batch_size"] = _BATCH_ROWS
    with TemporaryDirectory() as folder:  # for its locks: a streamed file is not cached
        rows = load_dataset(
            _BUILDERS[kind],
            data_files=glob.escape(str(file)),
            split="train",
            streaming=True,
            cache_dir=folder,
            **options,
        )
    for number, row in enumerate(rows.skip(start), start + 1):
        yield number, drop_none(row)


def _declare_text(file: Path) -> dict[str, Any]:
    """Return the options with which every field of a CSV file stays text."""
    from datasets import Features, Value
    from pandas import RangeIndex, read_csv

    head = read_csv(file, nrows=1, dtype=str)
    if not isinstance(head.index, RangeIndex):  # pandas would use the first fields as labels
        raise ValueError("the first row has more fields than there are columns, quote its commas")
    features = Features({str(name): Value("string") for name in head.columns})
    return {"features": features, "keep_default_na": False}


def drop_none(value: Any) -> Any:
    """Return `value` without None entries of dicts: a column store writes None for keys that a row
    does not have.
    """
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value
