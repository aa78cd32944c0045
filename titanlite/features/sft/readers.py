"""Readers of JSON lines, JSON arrays, CSV and Parquet: (number, row) pairs, with a `RowError` where
a row is bad.

JSON lines and CSV are read with the standard library: line numbers are exact, "123" stays text, and
a key that one row has and another has not stays absent, where a columnar reader would merge the
schemas and fill in None.

A stream that resumes skips rows by the million: lines of JSON and row groups of Parquet are counted
without being parsed. Bad rows are counted too; a file that is damaged is an error of the run.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import repeat
from pathlib import Path
from typing import IO, Any

from titanlite.base.errors import DataError
from titanlite.base.files import check_regular, open_regular, parse_json

_BUFFER_BYTES = 2**16  # with the default of 8 KiB, skipping lines of 3 KB takes twice as long
_BATCH_ROWS = 256  # of Parquet, in memory at once as Python objects
_MOST_LINE_BYTES = 2**26  # 30 books; more would be a bomb, or no lines of JSON
_PART = 2**16  # bytes of a longer line that are in memory
_MOST_ARRAY_BYTES = 2**30  # of a .json file with an array, which is read at once
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # as some editors write


class RowError(Exception):
    """One row cannot be used. `reason` is a few words to count by, the text says what is wrong and
    what to do.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


# (number, row) pairs; None stands for a skipped row, which was not parsed.
_Numbered = Iterator[tuple[int, dict[str, Any] | RowError | None]]


def _read_jsonl(file: Path, start: int) -> _Numbered:
    """Yield the non-blank lines as rows; before row `start` they are only counted, and UTF-16 is
    refused.
    """
    num_rows = 0
    for number, line in enumerate(_read_lines(file), 1):
        if _is_blank(line, is_first=number == 1):
            continue
        num_rows += 1
        if isinstance(line, int):
            yield number, _too_long("line", line)
        elif number == 1 and line.startswith(_UTF_16):
            yield 0, _not_utf8(file, "UTF-16")
            return
        elif num_rows <= start:
            yield number, None
        else:
            text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            try:
                row = _load_json(text.rstrip())
                yield number, row if isinstance(row, dict) else _not_an_object(row)
            except RowError as error:
                yield number, error
            except UnicodeDecodeError:
                yield number, _not_utf8(file)


def _too_long(what: str, nbytes: int) -> RowError:
    text = (
        f"the {what} has {nbytes} bytes, more than the {_MOST_LINE_BYTES} of a row. Split it, or "
        "take it out."
    )
    return RowError("too long", text)


def _not_utf8(file: Path, encoding: str = "ISO-8859-1") -> RowError:
    """Return an error that is the same for all rows of a file."""
    what = "the file is UTF-16" if encoding == "UTF-16" else "not UTF-8"
    how = f": iconv -f {encoding} -t UTF-8 {file.name} > converted{file.suffix}"
    return RowError("not UTF-8", f"{what}. Convert it{'' if _is_compressed(file) else how}.")


def _read_lines(file: Path) -> Iterator[bytes | int]:
    """Yield the lines of a file, decompressed; of one longer than 64 MiB only its length in
    bytes.
    """
    number = 0
    with _open(file) as stream:
        try:
            while line := stream.readline(_MOST_LINE_BYTES + 1):
                length, end = len(line), line[-1:]
                while (
                    length > _MOST_LINE_BYTES and end != b"\n" and (part := stream.readline(_PART))
                ):
                    length, end = length + len(part), part[-1:]
                yield line if length <= _MOST_LINE_BYTES else length
                number += 1
        except OSError as error:
            if getattr(error, "errno", None) is not None or not _is_compressed(file):
                raise  # of the disk, not of the content
            # what was in the buffer is lost
            where = f" somewhere after line {number}" if number else ""
            raise DataError(
                f"data: {file} is damaged or cut off{where} ({first_line(error)}). Write or copy "
                "it again."
            ) from None


def _is_compressed(file: Path) -> bool:
    return file.suffix in _COMPRESSIONS


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    with open_regular(file, buffering=_BUFFER_BYTES) as stream:
        if not _is_compressed(file):
            yield stream
            return
        from pyarrow import CompressedInputStream  # takes half a second

        # Alone it does not give lines as fast as a reader with a buffer.
        decompressed: Any = CompressedInputStream(stream, _COMPRESSIONS[file.suffix])
        with BufferedReader(decompressed, _BUFFER_BYTES) as lines:
            yield lines


def _is_blank(line: bytes | int, *, is_first: bool) -> bool:
    if isinstance(line, int):
        return False
    return line.isspace() or (is_first and not line.removeprefix(_BYTE_ORDER_MARK).strip())


def _read_json(file: Path, start: int) -> _Numbered:
    """Yield the rows of a file with one array of rows, or JSON lines under another name."""
    with open_regular(file) as stream:
        head = stream.read(64).removeprefix(_BYTE_ORDER_MARK).lstrip()
    if not head.startswith(b"["):
        yield from _read_jsonl(file, start)
        return
    if (size := file.stat().st_size) > _MOST_ARRAY_BYTES:
        text = (
            f"the file is one JSON array of {size} bytes, more than {_MOST_ARRAY_BYTES}. Write "
            "JSON lines (.jsonl)."
        )
        yield 0, RowError("too long", text)
        return
    try:
        rows = _load_json(file.read_bytes().removeprefix(_BYTE_ORDER_MARK))
    except RowError as error:
        yield 0, error
        return
    except UnicodeDecodeError:
        yield 0, _not_utf8(file)
        return
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, dict) else _not_an_object(row)


def _load_json(content: bytes) -> Any:
    try:
        value = parse_json(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        what: object = error
        # "Extra data" is where each row ends, and is said once
        if isinstance(error, json.JSONDecodeError):
            what = error.msg if error.msg == "Extra data" else f"{error.msg}, column {error.colno}"
        text = f"not valid JSON ({what}). Write one JSON object per line."
        raise RowError("invalid JSON", text) from None
    except MemoryError:
        text = (
            f"there is no memory for what its {len(content)} bytes stand for. Split it, or take it "
            "out."
        )
        raise RowError("too long", text) from None
    if b"\\ud" in content or b"\\uD" in content:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            text = (
                "an escape \\ud800 to \\udfff stands alone and is no character. Write the text as "
                "UTF-8."
            )
            raise RowError("not UTF-8", text) from None
    return value


def _not_an_object(row: Any) -> RowError:
    text = (
        f"the row is of type {type(row).__name__}, not an object. Write rows such as "
        f'{{"messages": [...]}}.'
    )
    return RowError("wrong type", text)


def _read_csv(file: Path, _: int) -> _Numbered:
    csv.field_size_limit(_MOST_LINE_BYTES)  # the default of 128 KiB is less than a long document
    with open_regular(
        file, "r", encoding="utf-8-sig", errors="surrogateescape", newline=""
    ) as stream:
        reader = csv.reader(stream, strict=True)
        header: list[str] | None = None
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield (
                    number,
                    RowError(
                        "invalid CSV", f"not valid CSV ({error}). Quote fields that hold quotes."
                    ),
                )
                continue
            if not cells:
                continue
            if header is not None:
                yield number, _csv_row(file, header, cells)
                continue
            header = cells
            if len(cells) == 1 and (
                sign := next((sign for sign in ";\t|" if sign in cells[0]), "")
            ):
                yield (
                    number,
                    RowError(
                        "invalid CSV", f"columns are separated by {sign!r}. Write ',' between them."
                    ),
                )
                return


def _csv_row(file: Path, header: list[str], cells: list[str]) -> dict[str, Any] | RowError:
    if len(cells) != len(header):
        text = (
            f"{len(cells)} fields, but the first line names {len(header)} columns. Quote fields "
            "that hold commas."
        )
        return RowError("invalid CSV", text)
    if any(re.search("[\ud800-\udfff]", cell) for cell in (*header, *cells)):
        return _not_utf8(file)
    return dict(zip(header, cells, strict=True))


@contextmanager
def _reading_columns(file: Path) -> Iterator[None]:
    """Raise a DataError that names the file if pyarrow or `datasets` cannot read it: the missing
    rows are unknown.
    """
    from pyarrow import ArrowException

    check_regular(file)
    try:
        yield
    except (ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"data: {file} is damaged ({first_line(error)}). Write or copy it again."
        ) from None


def _read_parquet(file: Path, start: int) -> _Numbered:
    """Yield the rows as `datasets` decodes them (its JSON columns are objects again). Row groups
    before `start` are not read.
    """
    from pyarrow.parquet import ParquetFile

    number = 0
    with _reading_columns(file), ParquetFile(file) as parquet:
        for group in range(parquet.num_row_groups):
            size = parquet.metadata.row_group(group).num_rows
            if number + size <= start:
                yield from repeat((0, None), size)
                number += size
                continue
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group]):
                is_long = batch.nbytes > _MOST_LINE_BYTES
                for part in (
                    map(batch.slice, range(batch.num_rows), repeat(1)) if is_long else [batch]
                ):
                    if part.nbytes > _MOST_LINE_BYTES:
                        number += 1
                        yield number, _too_long("row", part.nbytes)
                        continue
                    for row in _convert(part):
                        number += 1
                        yield number, row


def _convert(part: Any) -> Iterator[dict[str, Any] | RowError]:
    """Yield the rows of a record batch; a text that is not UTF-8 is an error of its row."""
    from datasets import Dataset
    from pyarrow import Table

    done = 0
    while done < part.num_rows:
        try:
            for row in Dataset(Table.from_batches([part.slice(done)]), fingerprint="rows"):
                done += 1
                yield drop_none(row)
        except UnicodeDecodeError as error:
            done += 1
            yield RowError(
                "not UTF-8",
                f"a text of the row is not UTF-8 ({error.reason}). Write the file again.",
            )


def _read_arrow(file: Path, _: int) -> _Numbered:
    """Yield the rows of a file of a folder that `datasets` saved."""
    from datasets import Dataset

    with _reading_columns(file):
        for number, row in enumerate(Dataset.from_file(str(file)), 1):
            yield number, drop_none(row)


def drop_none(value: Any) -> Any:
    """Return `value` without None entries of dicts: a column store writes None where a row has no
    such key.
    """
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its class name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def get_suffix(file: Path) -> str:
    """Return the suffix that selects the reader of a file, such as '.jsonl.gz'."""
    ending = "".join(file.suffixes[-2:])
    return ending if ending in READERS else file.suffix


# The rows of a file by its ending; those before a row, counted from 0, need not be parsed.
READERS: dict[str, Callable[[Path, int], _Numbered]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".json.gz": _read_jsonl,  # as C4 and Dolma name their JSON lines
    ".json.zst": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
