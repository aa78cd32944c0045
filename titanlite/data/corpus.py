"""Plain text in files, and the cache: results that are built once per machine and shared by all
processes.

Every rank requests the same cache file; one rank builds it, while the others wait on a file lock
and then read it. Files appear by `os.replace`, so a reader sees a whole file or none, and a killed
builder leaves nothing that looks complete.
"""

import json
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from titanlite.base.errors import DataError
from titanlite.base.files import check_regular, open_regular, read_regular, replace_file
from titanlite.base.process import get_cache_home
from titanlite.base.text import list_names
from titanlite.config.assets import suggest_path
from titanlite.config.data import DataSection

T = TypeVar("T")
# Installed packages differ from machine to machine, and test data holds deliberately broken files.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# Words in file names that mark a split, as in the `datasets` library.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}


@dataclass(frozen=True)
class Corpus:
    """An ordered, deterministic sequence of text files, each with one document or several.

    `files` are (name, path) pairs in reading order; the name is the path relative to the dataset,
    with '/' on every system. `separator` is `data.document_separator`. With a `cache_folder`,
    digest and sizes are computed again only for files that have changed.
    """

    files: tuple[tuple[str, Path], ...]
    cache_folder: Path | None = None
    separator: str = "none"

    def get_documents(self, ends: Iterable[str], found: Counter[str]) -> Iterator[str]:
        """Yield every document; `ends` are the tokens that may end a text. `found` is filled with
        the number of each separator.

        With the separator "found", an end token at the beginning or end of a line separates
        documents; a program that quotes the token has it inside a line. The newline after a
        separator belongs to it. Blank text between two separators is not a document.

        Raises DataError: as the iteration over the files.
        """
        tokens = ends if self.separator == "found" else [self.separator]
        where = r"(?:\r?\n|\Z|(?<![^\n]{0}))" if self.separator == "found" else r"(?:\r?\n)?"
        pattern = "|".join(escaped + where.format(escaped) for escaped in map(re.escape, tokens))
        for _, text in self:
            if self.separator in ("none", ""):
                yield text
                continue
            parts = re.split(f"({pattern})", text)
            found.update(part.rstrip("\r\n") or part for part in parts[1::2])
            for document in parts[::2]:
                if document.strip() or len(parts) == 1:
                    yield document

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of every file that is not empty; newlines are unchanged.

        Raises DataError: a file cannot be read, or is not UTF-8.
        """
        for name, path in self.files:
            try:
                # decode(), not open(): text mode would turn \r\n into \n, and the digest is over
                # the bytes.
                text = read_regular(path, None).decode("utf-8")
            except OSError as error:
                raise DataError(
                    f"data: cannot read {path}: {error.strerror}. Check data.path and its "
                    "permissions."
                ) from None
            except UnicodeDecodeError as error:
                raise DataError(
                    f"data: {path} is not UTF-8 (byte {error.start}: {error.reason}). Convert it, "
                    "or narrow data.pattern."
                ) from None
            if text:
                yield name, text

    @cached_property
    def _summary(self) -> tuple[str, int]:
        """Return (sha256 in hex, bytes)."""
        if self.cache_folder is None:
            return self._summarize()
        what = f"corpus {[name for name, _ in self.files]}"
        paths = [path for _, path in self.files]
        digest, num_bytes = read_once(self.cache_folder, what, paths, self._summarize)
        return digest, num_bytes

    def _summarize(self) -> tuple[str, int]:
        digest = sha256()
        num_bytes = 0
        for name, text in self:
            content = text.encode("utf-8")
            # Lengths first: otherwise ("a", "bc") and ("ab", "c") would be the same corpus.
            digest.update(f"{len(name.encode())} {len(content)} {name}".encode())
            digest.update(content)
            num_bytes += len(content)
        return digest.hexdigest(), num_bytes

    @property
    def digest(self) -> str:
        """sha256 over names and bytes of all files, in hex."""
        return self._summary[0]

    @property
    def num_bytes(self) -> int:
        return self._summary[1]


def _get_size(path: Path) -> int:
    try:
        return check_regular(path).st_size
    except OSError:
        return 1  # a broken link, or a pipe: the later read raises an error that names it


def find_files(
    root: Path, pattern: str, skipped_folders: frozenset[str] = frozenset()
) -> tuple[tuple[str, Path], ...]:
    """Return all files below `root` whose name or relative path matches `pattern`, sorted by
    relative path.
    """
    found: list[tuple[str, Path]] = []
    for folder, subfolders, filenames in os.walk(root):
        # Pruned in place so that os.walk never enters site-packages, which can hold 100 times more
        # files than the rest.
        subfolders[:] = [name for name in subfolders if name not in skipped_folders]
        for filename in filenames:
            path = Path(folder, filename)
            name = path.relative_to(root).as_posix()
            if fnmatch(filename, pattern) or fnmatch(name, pattern):
                found.append((name, path))
    return tuple(sorted(found))


def choose_split(files: Sequence[Path], root: Path, split: str) -> list[Path]:
    """Return the `files` in `root` whose names contain `split`; if there are none, the files whose
    names contain a synonym (`dev` for `validation`, see `_SPLITS`); if there are none either, the
    files without a split in their names.

    Raises DataError: all files are of different splits.
    """
    splits = {file: _find_split(file.relative_to(root)) for file in files}
    kind = _find_split(Path(split))
    kinds = sorted({name for name in splits.values() if name})
    named = rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])"  # train_prefs is not train_sft
    if exact := [
        file
        for file in files
        if split != kind and re.search(named, str(file.relative_to(root)).lower())
    ]:
        return exact
    found = [file for file in files if splits[file] == kind] or [
        file for file in files if splits[file] is None
    ]
    # validation files may be named "test"
    if not found and kinds and (len(kinds) > 1 or "train" in (kind, *kinds)):
        text = f"data: no file in {root} is for split '{split}', only for {list_names(kinds)}. "
        raise DataError(text + "Set data.split (or data.validation_split) to one of them.")
    return found or list(files)


def _find_split(path: Path) -> str | None:
    words = re.split(r"[-._ \d/]+", path.as_posix().lower())
    return next((split for split, names in _SPLITS.items() if not names.isdisjoint(words)), None)


def build_stdlib_corpus(root: str | Path) -> Corpus:
    """Return the `.py` files in `root`, the folder of Python's standard library, without packages,
    tests and caches.

    About 12 MB and 700 documents for Python 3.11.
    """
    return Corpus(find_files(Path(root), "*.py", _NOT_STDLIB))


def build_text_corpus(path: str | Path, pattern: str = "") -> Corpus:
    """Build the corpus of a file, or of all files below a folder whose name or relative path
    matches `pattern`.

    Without a pattern it takes all .txt files; if each of them belongs to a split (train.txt,
    test.txt), only those for training.

    Raises DataError: `path` does not exist, nothing matches `pattern`, or every file is empty.
    """
    root = Path(path)
    if root.is_dir():
        wanted = pattern or "*.txt"
        files = find_files(root, wanted)
        kinds = [_find_split(Path(name)) for name, _ in files]
        if not pattern and all(kinds) and "train" in kinds:
            chosen = choose_split([path for _, path in files], root, "train")
            files = tuple(pair for pair in files if pair[1] in chosen)
        if not files:
            raise DataError(
                f'data: no file in {root} matches pattern "{wanted}". Change data.pattern or '
                "data.path."
            )
    elif root.exists():
        files = ((root.name, root),)
    else:
        raise DataError(f"data: {root} does not exist. {suggest_path('data.path')}")
    if not any(_get_size(file) for _, file in files):
        raise DataError(
            f"data: {root} is empty: {len(files)} file(s), 0 bytes. Set data.path to a file with "
            "text."
        )
    return Corpus(files)


def build_corpus(data: DataSection) -> Corpus:
    """Build the corpus that the `[data]` section names.

    Raises DataError: as `build_text_corpus`.
    """
    cache_folder = get_cache_folder(data)
    if data.dataset == "stdlib":
        corpus = build_stdlib_corpus(sysconfig.get_path("stdlib"))
        return replace(corpus, cache_folder=cache_folder)
    corpus = build_text_corpus(data.path, data.pattern)
    return replace(corpus, cache_folder=cache_folder, separator=data.document_separator)


def split_text(text: str, max_chars: int) -> Iterator[str]:
    """Yield `text` in pieces of at most `max_chars` characters, cut after a newline if there is
    one.
    """
    start = 0
    while len(text) - start > max_chars:
        stop = text.rfind("\n", start, start + max_chars) + 1
        if stop <= start:  # one very long line
            stop = start + max_chars
        yield text[start:stop]
        start = stop
    yield text[start:]


def get_cache_folder(data: DataSection) -> Path:
    """Return `data.cache_folder`, or `$XDG_CACHE_HOME/titanlite`, or `~/.cache/titanlite`. It need
    not exist.
    """
    return Path(data.cache_folder).expanduser() if data.cache_folder else get_cache_home()


@cache
def get_code_digest(*folders: Path) -> str:
    """Return a digest of the code in `folders`. It is part of cache keys, because different code
    gives different results.
    """
    digest = sha256()
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def load_or_build(
    path: Path, load: Callable[[], T | None], build: Callable[[], None]
) -> tuple[T, float]:
    """Return `load()`, after `build()` if there was nothing valid to load.

    `load` returns None if the file is missing or damaged; it may run while another process builds.
    `build` runs under a lock and must replace the file atomically. The second result is the time in
    seconds spent on building, or on waiting for another process to build.

    Raises DataError: the folder of `path` cannot be created, locked or written.
    """
    if (value := load()) is not None:
        return value, 0.0
    start_s = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: other processes may wait for it.
        with FileLock(path.with_name(f"{path.name}.lock")):
            if (value := load()) is None:  # no other process built it in the meantime
                build()
                value = load()
    except OSError as error:
        raise DataError(
            f"data: cannot use the cache folder {path.parent}: {error}. Set data.cache_folder to a "
            "writable folder."
        ) from error
    assert value is not None, f"{path} was just written"
    return value, time.monotonic() - start_s


def stamp_files(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Return (path, inode, size, mtime, ctime) of each file, times in ns. The result is equal if a
    file has not changed.

    No program can set ctime, the time of the last change. Raises OSError: a file is missing or
    cannot be read.
    """
    stamps = []
    for file in files:
        # A network file system asks its server only when a file is opened.
        with open_regular(file) as stream:
            s = os.fstat(stream.fileno())
        stamps.append((os.path.abspath(file), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns))
    return stamps


def read_once(folder: Path, what: str, files: Sequence[Path], compute: Callable[[], T]) -> T:
    """Return `compute()`, or its cached result for the same files: a JSON value, not None.

    Without the cache, the digest of a terabyte would take each rank a quarter of an hour at each
    start. Files are the same if their stamps are equal. `what` identifies the value and everything
    else that it depends on. Raises as `load_or_build`.
    """
    try:
        stamps = stamp_files(files)
    except OSError:
        return compute()  # its error names the file
    key = sha256(
        json.dumps([get_code_digest(Path(__file__).parent), what, stamps]).encode()
    ).hexdigest()[:32]
    path = folder / "read" / f"{key}.json"

    def load() -> T | None:
        try:
            return json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def build() -> None:
        replace_file(path, json.dumps(compute()))

    return load_or_build(path, load, build)[0]
