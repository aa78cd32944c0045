"""Rows of examples from files or from the Hugging Face hub, each with the place that an error can
name.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from titanlite.base.errors import DataError
from titanlite.base.extension import load_extension
from titanlite.base.files import check_regular, open_regular
from titanlite.base.text import describe_error
from titanlite.config.assets import is_hub_id, suggest_path
from titanlite.config.data import DataSection, get_fields
from titanlite.data.corpus import choose_split, find_files, read_once, stamp_files
from titanlite.features.sft.forms import rename_fields
from titanlite.features.sft.readers import READERS, RowError, drop_none, first_line, get_suffix

T = TypeVar("T")
_SUFFIXES = tuple(READERS)
_OF_LINES = (".jsonl", ".gz", ".zst", ".csv")
_CHUNK_BYTES = 2**22
_PROBLEM = re.compile(r"(.*?, (?:line|row)) (\d+): (.*)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A row, or why it cannot be read.

    `number` counts from 1: lines of a JSONL or CSV file, rows of anything else; 0 stands for the
    file as a whole.
    """

    file: int
    number: int
    content: dict[str, Any] | RowError


class Rows(Protocol):
    """An ordered set of rows that can be read again and again.

    `names` are paths, or the id of a dataset: `Row.file` is an index into them. `get_digest` hashes
    all that rows are read from, and is cached in `cache_folder`; `get_stamp` identifies the rows
    without reading them; `get_identity` has name and size, or revision, wherever the files are.
    `iterate_from(start)` counts rows from 0, bad ones too.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    def get_digest(self, cache_folder: Path) -> str: ...
    def get_stamp(self) -> str: ...
    def get_identity(self) -> tuple[str, ...]: ...
    def iterate_from(self, start: int) -> Iterator[Row]: ...
    def __iter__(self) -> Iterator[Row]:
        return self.iterate_from(0)


@dataclass(frozen=True)
class ConvertedRows(Rows):
    """Rows after the function of `data.converter`, if one is named, and with columns renamed to
    `fields`.
    """

    rows: Rows
    fields: Mapping[str, str]
    converter: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.rows.names

    @cached_property
    def _function(self) -> Callable[[dict[str, Any]], Any] | None:
        return load_extension("data.converter", self.converter, ["row"]) if self.converter else None

    @cached_property
    def _code(self) -> tuple[str, ...]:
        """The converter and a digest of its code; nothing without one."""
        return (
            ()
            if self._function is None
            else (f"{self.converter}, code {_digest_code(self.converter)[:16]}",)
        )

    def get_digest(self, cache_folder: Path) -> str:
        return sha256(
            " ".join((self.rows.get_digest(cache_folder), *self._code)).encode()
        ).hexdigest()

    def get_stamp(self) -> str:
        return " ".join((self.rows.get_stamp(), *self._code))

    def get_identity(self) -> tuple[str, ...]:
        return (*self.rows.get_identity(), *self._code)

    def iterate_from(self, start: int) -> Iterator[Row]:
        for row in self.rows.iterate_from(start):
            content = row.content
            if isinstance(content, dict):
                try:
                    content = rename_fields(self._convert(content), self.fields)
                except RowError as error:
                    content = error
            yield Row(row.file, row.number, content)

    def _convert(self, content: dict[str, Any]) -> dict[str, Any]:
        if self._function is None:
            return content
        where = f"data.converter '{self.converter}'"
        try:
            found = self._function(content)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the user's function may raise anything
            text = f"{where} raised {describe_error(error)}. Correct the function or the row."
            raise RowError("converter failed", text) from None
        if not isinstance(found, dict):
            raise RowError(
                "converter failed", f"{where} returned {type(found).__name__}. Return a dictionary."
            )
        return found


def describe_place(names: tuple[str, ...], file: int, number: int) -> str:
    """Return the place of a row in words: 'chats.jsonl, line 7'."""
    if number == 0:
        return names[file]
    return f"{names[file]}, {'line' if names[file].endswith(_OF_LINES) else 'row'} {number}"


def merge_row_problems(problems: Sequence[str]) -> list[str]:
    """Merge problems of rows, "place: text": one line, with the first place, for all rows of a file
    with one text.
    """
    found = defaultdict[tuple[str, str], list[str]](list)
    for problem in problems:
        match = _PROBLEM.fullmatch(problem)
        place, number, text = match.groups() if match else (problem, "", "")
        found[place, text].append(number)
    merged = []
    for (place, text), numbers in found.items():
        more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        merged.append(f"{place} {numbers[0]}{more}: {text}" if text else place)
    return merged


@dataclass(frozen=True)
class LocalRows(Rows):
    """The rows of some files, in the order of the files. A row that cannot be read is a `RowError`
    in its place.
    """

    files: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(file) for file in self.files)

    def get_digest(self, cache_folder: Path) -> str:
        return read_once(cache_folder, "rows", self.files, self._compute_digest)

    def _compute_digest(self) -> str:
        digest = sha256()
        for file in self.files:
            try:
                # Lengths first, or the last bytes of one file could be the first ones of the next.
                digest.update(f"{file.suffix} {file.stat().st_size} ".encode())
                with open_regular(file) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        digest.update(chunk)
            except OSError as error:
                raise _unreadable(file, error) from None
        return digest.hexdigest()

    def get_stamp(self) -> str:
        return self._look(lambda: str(stamp_files(self.files)))

    def get_identity(self) -> tuple[str, ...]:
        return self._look(
            lambda: tuple(
                f"{file.name} of {check_regular(file).st_size} bytes" for file in self.files
            )
        )

    def _look(self, find: Callable[[], T]) -> T:
        try:
            return find()
        except OSError as error:
            raise DataError(
                f"data: cannot read the files: {error}. Check data.path and its permissions."
            ) from None

    def iterate_from(self, start: int) -> Iterator[Row]:
        for index, file in enumerate(self.files):
            try:
                num_rows = yield from self._read(index, start)
            except OSError as error:
                raise _unreadable(file, error) from None
            if num_rows == 0:
                num_rows = 1
                if start == 0:
                    text = "the file holds no row. Remove it, or write rows into it."
                    yield Row(index, 0, RowError("empty file", text))
            start = max(start - num_rows, 0)

    def _read(self, index: int, start: int) -> Generator[Row, None, int]:
        """Yield the rows of a file from `start` on; returns how many it has, those before `start`
        included.
        """
        file, num_rows = self.files[index], 0
        for number, content in READERS[get_suffix(file)](file, start):
            num_rows += 1
            if num_rows > start and content is not None:
                yield Row(index, number, content)
        return num_rows


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(
        f"data: cannot read {file}: {error.strerror or error}. Check data.path and its permissions."
    )


@contextmanager
def _reading_hub(what: str) -> Iterator[None]:
    """Raise a DataError that names the dataset for any error while reading from the hub, HTTP
    errors included.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    bases: Any = HfHubHTTPError.__mro__
    transport = tuple(base for base in bases if base.__name__ in ("HTTPError", "RequestException"))
    try:
        yield
    # ValueError: no such split
    except (DatasetsError, HfHubHTTPError, OSError, ValueError, *transport) as error:
        raise DataError(
            f"data: cannot read {what} from the Hugging Face hub: {first_line(error)} Correct "
            "data.path, data.subset and data.split, check the network, or give a local file; a run "
            "can be resumed."
        ) from None


@dataclass(frozen=True)
class HubRows(Rows):
    """The rows of a dataset of the Hugging Face hub, downloaded and cached by `datasets` on first
    use.
    """

    path: str
    subset: str
    split: str
    streaming: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.path}{f'/{self.subset}' if self.subset else ''} ({self.split})",)

    @cached_property
    def _dataset(self) -> Any:
        from datasets import load_dataset

        repository, _, revision = self.path.partition("@")
        if self.streaming:  # pin today's revision, or a resumed run could read other rows
            revision = self.get_stamp()
        with _reading_hub(f"'{self.path}', split '{self.split}',"):
            return load_dataset(
                repository,
                self.subset or None,
                split=self.split,
                revision=revision or None,
                streaming=self.streaming,
            )

    def get_digest(self, cache_folder: Path) -> str:
        digest = sha256(f"{self.names}".encode())
        digest.update(str(self._dataset.num_rows).encode())
        files = tuple(Path(file["filename"]) for file in self._dataset.cache_files)
        return sha256(
            digest.digest() + LocalRows(files).get_digest(cache_folder).encode()
        ).hexdigest()

    def get_stamp(self) -> str:
        return self._revision

    def get_identity(self) -> tuple[str, ...]:
        return (f"{self.names[0]}, {self._revision}",)

    @cached_property
    def _revision(self) -> str:
        """The commit of the repository."""
        from huggingface_hub import HfApi

        repository, _, revision = self.path.partition("@")
        with _reading_hub(f"'{self.path}'"):
            return str(HfApi().dataset_info(repository, revision=revision or None).sha)

    def iterate_from(self, start: int) -> Iterator[Row]:
        rows = self._dataset.skip(start) if start else self._dataset
        with _reading_hub(self.names[0]):
            for number, row in enumerate(rows, start + 1):
                yield Row(0, number, drop_none(row))


def _digest_code(name: str) -> str:
    """Return sha256 in hex of the file of an imported extension."""
    file = sys.modules[name.partition(":")[0]].__file__
    return sha256(Path(file).read_bytes() if file else name.encode()).hexdigest()


def open_rows(data: DataSection, *, streaming: bool = False) -> Rows:
    """Return the rows of `data.path` as `[data]` says: converted, with columns renamed."""
    rows = find_rows(data.path, data.pattern, data.subset, data.split, streaming=streaming)
    return ConvertedRows(rows, get_fields(data), data.converter)


def find_rows(
    path: str, pattern: str = "", subset: str = "", split: str = "train", *, streaming: bool = False
) -> LocalRows | HubRows:
    """Return the rows at `path`: a file, all such files in a folder and its subfolders, or a
    dataset of the hub.

    A folder that `datasets` saved gives its rows; of several splits, those of `split`. Another
    folder gives its files that match `pattern`, or without one all files with rows of `split`
    (`choose_split`). A name `owner/name[@revision]` that is no local path is looked up on the hub;
    with `streaming` its rows are downloaded as they are read.

    Raises:
        DataError: there is nothing at `path`, or nothing that can hold rows.
    """
    root = Path(path)
    if (root / "dataset_dict.json").is_file():  # as `DatasetDict.save_to_disk` writes it
        root = root / split
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        files = [
            root / file["filename"]
            for file in json.loads((root / "state.json").read_bytes())["_data_files"]
        ]
    elif root.is_dir():
        files = [file for _, file in find_files(root, pattern or "*")]
        if not pattern:
            files = choose_split(
                [file for file in files if get_suffix(file) in _SUFFIXES], root, split
            )
        if not files:
            wanted = (
                f'matches pattern "{pattern}"' if pattern else f"ends with {', '.join(_SUFFIXES)}"
            )
            raise DataError(f"data: no file in {root} {wanted}. Change data.pattern or data.path.")
    elif root.exists():
        files = [root]
    elif is_hub_id(path):
        return HubRows(path, subset, split, streaming)
    else:
        raise DataError(
            f"data: {root} does not exist. {suggest_path('data.path')} It is a file "
            f"({', '.join(_SUFFIXES)}), a folder of such files, or the id of a dataset on the "
            "Hugging Face hub."
        )
    unknown = [str(file) for file in files if get_suffix(file) not in _SUFFIXES]
    if unknown:
        raise DataError(
            f"data: cannot read rows from {', '.join(unknown[:4])}: only {', '.join(_SUFFIXES)} "
            "files hold rows. Convert the file, or narrow data.pattern."
        )
    return LocalRows(tuple(files))
