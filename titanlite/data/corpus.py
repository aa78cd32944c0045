"""Documents of a dataset, in an order that depends on nothing but their names and bytes.

Files are read again on every pass: a corpus may be larger than memory. One that changes meanwhile is not noticed.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from titanlite.base.errors import DataError
from titanlite.base.files import check_regular, read_regular
from titanlite.config.data import DataSection
from titanlite.data.cache import get_cache_folder, read_once

# Installed packages differ from machine to machine, and test data holds deliberately broken files.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Words in names of files, as `datasets` understands them.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}


@dataclass(frozen=True)
class Corpus:
    """An ordered, deterministic sequence of documents.

    `files` are (name, path) pairs in reading order; the name is the path relative to the dataset, with '/' on every
    system. Empty files are no documents. With a `cache_folder`, digest and sizes of files that have not changed are not
    computed again.
    """

    files: tuple[tuple[str, Path], ...]
    cache_folder: Path | None = None

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of every document; newlines are kept as they are in the file.

        Raises DataError: a file cannot be read, or is not UTF-8.
        """
        for name, path in self.files:
            content = _read(path)
            try:
                # bytes.decode and not open(): text mode would turn \r\n into \n, and the digest is over the bytes.
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"data: {path} is not UTF-8 (byte {error.start}: {error.reason}). "
                    "Convert it, or narrow data.pattern."
                ) from None
            if text:
                yield name, text

    @cached_property
    def document_files(self) -> list[Path]:
        """The file of each document, in order."""
        return [path for _, path in self.files if _get_size(path)]

    @cached_property
    def _summary(self) -> tuple[str, int]:
        """(sha256 in hex, bytes)."""
        if self.cache_folder is None:
            return self._summarize()
        what = f"corpus {[name for name, _ in self.files]}"
        digest, num_bytes = read_once(self.cache_folder, what, [path for _, path in self.files], self._summarize)
        return digest, num_bytes

    def _summarize(self) -> tuple[str, int]:
        digest, num_bytes = sha256(), 0
        for name, text in self:
            content = text.encode("utf-8")
            # Lengths first: otherwise ("a", "bc") and ("ab", "c") would be the same corpus.
            digest.update(f"{len(name.encode())} {len(content)} {name}".encode())
            digest.update(content)
            num_bytes += len(content)
        return digest.hexdigest(), num_bytes

    @property
    def digest(self) -> str:
        """sha256 over names and bytes of all documents, in hex."""
        return self._summary[0]

    @property
    def num_bytes(self) -> int:
        return self._summary[1]


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise DataError(f"data: cannot read {path}: {error.strerror}. Check data.path and its permissions.") from None


def _get_size(path: Path) -> int:
    try:
        return check_regular(path).st_size
    except OSError:
        return 1  # a broken link, or a pipe: reading it later raises the error that names it


def find_files(root: Path, pattern: str, skipped_folders: frozenset[str] = frozenset()) -> tuple[tuple[str, Path], ...]:
    """Return all files below `root` whose name or relative path matches `pattern`, sorted by relative path."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, filenames in os.walk(root):
        # Pruned in place so that os.walk never enters site-packages, which can hold 100 times more files than the rest.
        subfolders[:] = [name for name in subfolders if name not in skipped_folders]
        for filename in filenames:
            path = Path(folder, filename)
            name = path.relative_to(root).as_posix()
            if fnmatch(filename, pattern) or fnmatch(name, pattern):
                found.append((name, path))
    return tuple(sorted(found))


def choose_split(files: Sequence[Path], root: Path, split: str) -> list[Path]:
    """Return the `files` in `root` with `split` in their names, of its kind, or of none; DataError: others."""
    splits = {file: _find_split(file.relative_to(root)) for file in files}
    kind, kinds = _find_split(Path(split)), sorted({name for name in splits.values() if name})
    named = rf"(?<![a-z]){re.escape(split.lower())}(?![a-z])"  # train_prefs, next to train_sft
    if exact := [file for file in files if split != kind and re.search(named, str(file.relative_to(root)).lower())]:
        return exact
    found = [file for file in files if splits[file] == kind] or [file for file in files if splits[file] is None]
    if not found and kinds and (len(kinds) > 1 or "train" in (kind, *kinds)):  # validation may be called test
        text = f"data: no file in {root} is of split '{split}', their names have {', '.join(kinds)}. "
        raise DataError(text + "Set data.split (or data.validation_split) to one of them.")
    return found or list(files)


def _find_split(path: Path) -> str | None:
    words = re.split(r"[-._ \d/]+", path.as_posix().lower())
    return next((split for split, names in _SPLITS.items() if not names.isdisjoint(words)), None)


def describe_left_out(data: DataSection, read: Iterable[str | Path]) -> str:
    """Describe the files of the folder `data.path` that are not `read`: "; not read: 2 *.md, test.txt"; "" for none."""
    known = {Path(file) for file in read}
    same = {file.suffix for file in known}
    files = find_files(Path(data.path), "*") if os.path.isdir(data.path) and not data.pattern else ()
    rest = [file for name, file in files if file not in known and not re.search(r"(^|/)\.", name)]
    kinds = Counter(file.name if file.suffix in same else f"*{file.suffix or file.name}" for file in rest)
    found = [f"{count} {kind}" if kind[0] == "*" else kind for kind, count in kinds.most_common(6)]
    return f"; not read: {', '.join(found)}" if found else ""


def build_stdlib_corpus(root: str | Path | None = None) -> Corpus:
    """Find the `.py` files of the running Python's standard library, or of `root`, without packages, tests and caches.

    About 12 MB and 700 documents for Python 3.11.

    Raises DataError: the folder holds no `.py` file (some minimal Python builds ship the library as a zip file).
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    corpus = Corpus(find_files(root, "*.py", _NOT_STDLIB))
    if not corpus.files:
        raise DataError(f'data: no .py file in {root}. Set data.dataset = "text" and data.path to your own text.')
    return corpus


def build_text_corpus(path: str | Path, pattern: str = "") -> Corpus:
    """Build the corpus of a file, or of all files below a folder whose name or relative path matches `pattern`.

    Without a pattern all .txt files; where each is of a split (train.txt, test.txt), those for training.

    Raises DataError: `path` does not exist, nothing matches `pattern`, or every file is empty.
    """
    root = Path(path)
    if root.is_dir():
        files = find_files(root, pattern or "*.txt")
        kinds = [_find_split(Path(name)) for name, _ in files]
        if not pattern and all(kinds) and "train" in kinds:
            chosen = choose_split([path for _, path in files], root, "train")
            files = tuple(pair for pair in files if pair[1] in chosen)
        if not files:
            endings = Counter(file.suffix for _, file in find_files(root, "*") if file.suffix).most_common(1)
            there = f'; for example, {endings[0][1]} match "*{endings[0][0]}"' if endings else ""
            text = f'data: no file in {root} matches pattern "{pattern or "*.txt"}"{there}. '
            raise DataError(f"{text}Change data.pattern or data.path.")
    elif root.exists():
        files = ((root.name, root),)
    else:
        raise DataError(f"data: path {root} does not exist. Set data.path to a text file or a folder of text files.")
    if not any(_get_size(file) for _, file in files):
        raise DataError(f"data: {root} is empty: {len(files)} file(s), 0 bytes. Set data.path to a file with text.")
    return Corpus(files)


def build_corpus(data: DataSection) -> Corpus:
    """Build the corpus that the `[data]` section names. DataError as `build_stdlib_corpus` and `build_text_corpus`."""
    if data.dataset == "stdlib":
        return replace(build_stdlib_corpus(), cache_folder=get_cache_folder(data))
    return replace(build_text_corpus(data.path, data.pattern), cache_folder=get_cache_folder(data))


def split_text(text: str, max_chars: int) -> Iterator[str]:
    """Yield `text` in pieces of at most `max_chars` characters, cut after a newline wherever there is one."""
    start = 0
    while len(text) - start > max_chars:
        stop = text.rfind("\n", start, start + max_chars) + 1
        if stop <= start:  # one very long line
            stop = start + max_chars
        yield text[start:stop]
        start = stop
    yield text[start:]
