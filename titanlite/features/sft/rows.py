"""Rows of examples from files or from the Hugging Face hub, each with a location for error
messages.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from titanlite.base.errors import DataError, raise_problems
from titanlite.base.extension import load_extension
from titanlite.base.files import check_regular, open_regular
from titanlite.base.text import describe_error, first_line
from titanlite.config.assets import is_hub_id, suggest_path
from titanlite.config.data import DataSection, get_fields
from titanlite.data.corpus import choose_split, find_files, read_once
from titanlite.features.sft.forms import rename_fields
from titanlite.features.sft.readers import (
    SUFFIXES,
    Numbered,
    RowError,
    drop_none,
    get_kind,
    read_rows,
)

_CHUNK_BYTES = 2**22
# The place of a row is file * PER_FILE + number: rows count from 1 in their file, in the order of
# the lines. 0 is the place before all rows.
PER_FILE = 1 << 40


@dataclass(frozen=True)
class Row:
    """A row, or the error for which it cannot be read."""

    place: int
    content: dict[str, Any] | RowError


@dataclass(frozen=True)
class LocalRows:
    """The rows of some files, in the order of the files."""

    files: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(file) for file in self.files)

    @property
    def identity(self) -> tuple[str, ...]:
        """Name and size of each file, independent of its path."""
        with _naming_file():
            return tuple(
                f"{file.name} of {check_regular(file).st_size} bytes" for file in self.files
            )

    def get_digest(self, cache_folder: Path) -> str:
        """Return a digest of all bytes. It is computed once and stored in `cache_folder`."""
        return read_once(cache_folder, "rows", self.files, self._compute_digest)

    def _compute_digest(self) -> str:
        digest = sha256()
        with _naming_file():
            for file in self.files:
                # Lengths first: otherwise the last bytes of one file could be the first bytes of
                # the next one.
                digest.update(f"{file.suffix} {file.stat().st_size} ".encode())
                with open_regular(file) as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        digest.update(chunk)
        return digest.hexdigest()

    def read(self, file: int, start: int) -> Numbered:
        with _naming_file():
            yield from read_rows(self.files[file], start)


@contextmanager
def _naming_file() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data: cannot read {error.filename}: {error.strerror}. Check data.path and its "
            "permissions."
        ) from None


@dataclass(frozen=True)
class HubRows:
    """The rows of a dataset of the Hugging Face hub, downloaded and cached by `datasets` on first
    use; with `streaming` they are downloaded while they are read.
    """

    path: str
    subset: str
    split: str
    streaming: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.path}{f'/{self.subset}' if self.subset else ''} ({self.split})",)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the dataset in the local cache; empty for a stream."""
        files = () if self.streaming else self._dataset.cache_files
        return tuple(Path(file["filename"]) for file in files)

    @cached_property
    def _dataset(self) -> Any:
        from datasets import load_dataset

        repository, _, revision = self.path.partition("@")
        if self.streaming:  # fixes the revision: a resumed run must read the same rows
            revision = self._revision
        with _reading_hub(f"'{self.path}', split '{self.split}',"):
            return load_dataset(
                repository,
                self.subset or None,
                split=self.split,
                revision=revision or None,
                streaming=self.streaming,
            )

    @cached_property
    def _revision(self) -> str:
        """The commit of the repository."""
        from huggingface_hub import HfApi

        repository, _, revision = self.path.partition("@")
        with _reading_hub(f"'{self.path}'"):
            return str(HfApi().dataset_info(repository, revision=revision or None).sha)

    @property
    def identity(self) -> tuple[str, ...]:
        return (f"{self.names[0]}, {self._revision}",)

    def get_digest(self, cache_folder: Path) -> str:
        return f"{self.names[0]} {LocalRows(self.files).get_digest(cache_folder)}"

    def read(self, _: int, start: int) -> Numbered:
        with _reading_hub(self.names[0]):
            for number, row in enumerate(self._dataset.skip(start), start + 1):
                yield number, drop_none(row)


@contextmanager
def _reading_hub(what: str) -> Iterator[None]:
    """Turn any error while reading from the hub, including HTTP errors, into a DataError that names
    the dataset.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    bases: Any = HfHubHTTPError.__bases__  # every error of the HTTP client, and OSError
    try:
        yield
    # ValueError: the split does not exist
    except (DatasetsError, *bases, ValueError) as error:
        raise DataError(
            f"data: cannot read {what} from the Hugging Face hub: {first_line(error)}. Correct "
            "data.path, data.subset and data.split, check the network, or give a local file; a run "
            "can be resumed."
        ) from None


@dataclass(frozen=True)
class Rows:
    """An ordered set of rows that can be read repeatedly. `data.converter`, if it is set, has
    converted them, and columns are renamed to `fields`.
    """

    source: LocalRows | HubRows
    fields: Mapping[str, str]
    converter: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Paths, or the id of a dataset: the files of `Row.place`."""
        return self.source.names

    @cached_property
    def _function(self) -> Callable[[dict[str, Any]], Any] | None:
        return load_extension("data.converter", self.converter, ["row"]) if self.converter else None

    @property
    def _code(self) -> tuple[str, ...]:
        """The converter's name and a digest of its file; empty without a converter."""
        if self._function is None:
            return ()
        file = sys.modules[self.converter.partition(":")[0]].__file__
        digest = sha256(Path(file).read_bytes() if file else b"").hexdigest()
        return (f"{self.converter}, code {digest[:16]}",)

    @property
    def identity(self) -> tuple[str, ...]:
        """Names, sizes or revision of the data, and the converter: known without reading the
        rows.
        """
        return (*self.source.identity, *self._code)

    def get_digest(self, cache_folder: Path) -> str:
        """Return a digest of everything that the rows depend on. It is computed once and stored in
        `cache_folder`.
        """
        parts = (self.source.get_digest(cache_folder), *self._code)
        return sha256(" ".join(parts).encode()).hexdigest()

    def iterate_from(self, place: int = 0) -> Iterator[Row]:
        """Yield the rows after `place`; earlier rows are not parsed."""
        first, start = divmod(place, PER_FILE)
        for file in range(first, len(self.names)):
            for number, content in self.source.read(file, start if file == first else 0):
                if isinstance(content, dict):
                    try:
                        content = rename_fields(self._convert(content), self.fields)
                    except RowError as error:
                        content = error
                yield Row(file * PER_FILE + number, content)

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


def describe_place(names: Sequence[str], place: int) -> str:
    """Return the location of a row, such as 'chats.jsonl, row 7'."""
    file, number = divmod(place, PER_FILE)
    return f"{names[file]}, row {number}"


def refuse_rows(names: Sequence[str], problems: Sequence[tuple[int, str]], remedy: str) -> None:
    """Raise a DataError for the problems of rows (place, text). Rows of a file with the same
    text share one line, which names the first of them.
    """
    found = defaultdict[tuple[int, str], list[int]](list)
    for place, text in problems:
        found[place // PER_FILE, text].append(place)
    lines = []
    for (_, text), places in found.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(f"{describe_place(names, places[0])}{more}: {text}")
    lines[-1] += f" {remedy}"
    raise_problems(DataError, "data", lines)


def open_rows(data: DataSection, *, streaming: bool = False) -> Rows:
    """Return the rows of `data.path`: a file, all row files in a folder and its subfolders, or a
    dataset of the hub.

    A folder saved by `datasets` gives its rows; if it has several splits, the rows of `data.split`.
    Any other folder gives its files that match `data.pattern`, or by default all files with rows of
    `data.split` (`choose_split`). A name `owner/name[@revision]` that is not a local path is looked
    up on the hub.

    Raises:
        DataError: `data.path` does not exist, or holds nothing that can be rows.
    """
    root = Path(data.path)
    if not root.exists() and is_hub_id(data.path):
        source = HubRows(data.path, data.subset, data.split, streaming)
    else:
        source = LocalRows(tuple(_find_files(root, data.pattern, data.split)))
    return Rows(source, get_fields(data), data.converter)


def _find_files(root: Path, pattern: str, split: str) -> list[Path]:
    endings = ", ".join(SUFFIXES)
    if (root / "dataset_dict.json").is_file():  # written by `DatasetDict.save_to_disk`
        root = root / split
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        state = json.loads((root / "state.json").read_bytes())
        return [root / file["filename"] for file in state["_data_files"]]
    if root.is_dir():
        files = [file for _, file in find_files(root, pattern or "*")]
        if not pattern:
            files = choose_split([file for file in files if get_kind(file)], root, split)
        if not files:
            wanted = f'matches pattern "{pattern}"' if pattern else f"ends with {endings}"
            raise DataError(f"data: no file in {root} {wanted}. Change data.pattern or data.path.")
    elif root.exists():
        files = [root]
    else:
        raise DataError(
            f"data: {root} does not exist. {suggest_path('data.path')} It is a file ({endings}), a "
            "folder of such files, or the id of a dataset on the Hugging Face hub."
        )
    if unknown := [str(file) for file in files if not get_kind(file)]:
        raise DataError(
            f"data: cannot read rows from {', '.join(unknown[:4])}: only {endings} files hold "
            "rows. Convert the file, or narrow data.pattern."
        )
    return files
