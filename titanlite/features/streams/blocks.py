"""What a block of a stream's rows becomes: made by one process of a machine, and read by its others.

Each rank needs every block, for the length of a block is not known without. Tokenizing it in all of them would take the
CPUs of a machine with 8 GPUs 8 times.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np

from titanlite.data.cache import get_code_digest, load_or_make, stamp_files
from titanlite.features.sft.encode import Example, ExampleEncoder
from titanlite.features.sft.examples import CODE, ExampleHeader, TokenizedExamples, encode_rows, get_place
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import Row, describe_place

_ARRAYS = ("tokens", "flags", "offsets", "num_trained", "places")


@dataclass(frozen=True)
class EncodedBlock:
    """The examples of a block, in memory; None if no row can be used.

    Attributes:
        problems: (reason, place and what is wrong) of each row that cannot be used, in order.
    """

    examples: TokenizedExamples | None
    problems: list[tuple[str, str]]


def encode_block(encoder: ExampleEncoder | None, batch: list[Row], names: tuple[str, ...]) -> EncodedBlock:
    """Render and tokenize the rows of one block. Without an encoder, no row has a known form."""
    found: list[tuple[Row, Example]] = []
    problems = []
    for row, result in encode_rows(encoder, batch):
        if isinstance(result, RowError):
            problems.append((result.reason, f"{describe_place(names, row.file, row.number)}: {result}"))
        else:
            found += [(row, example) for example in result]
    examples = _join(found, encoder, names) if found and encoder is not None else None
    return EncodedBlock(examples, problems)


def name_folder(key: str, files: Sequence[str]) -> str:
    """Where the blocks of a stream lie: its key tells what they are made of, but not how, and of files not enough."""
    try:
        stamps = stamp_files([Path(file) for file in files])
    except OSError:
        stamps = []  # of the hub: the key has the revision
    return sha256(json.dumps([key, get_code_digest(*CODE, Path(__file__).parent), stamps]).encode()).hexdigest()[:32]


def share_block(folder: Path, start: int, make: Callable[[], EncodedBlock], *, keep: int) -> EncodedBlock:
    """`make()`, by one of the processes of this machine that ask for the block from row `start` on in this folder.

    It is the first one that asks; the others wait. A run of one process per machine makes its blocks itself, and so
    does each process where the folder cannot be written. Of all files in the folder the newest `keep` stay, for ranks
    that are not as far.

    Raises:
        Exception: what `make` raises.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return make()
    path = folder / f"{start}.npz"

    def save(block: EncodedBlock, file: IO[bytes]) -> None:
        _save(block, file)
        _remove_old(folder, keep - 1)

    return load_or_make(path, lambda: _load(path), make, save, lock=folder / "lock")


def _remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` files; which are the newest is no matter of life and death."""
    found = []
    for path in folder.glob("*.npz"):
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(found, reverse=True)[keep:]:
        with suppress(OSError):
            path.unlink()


def _save(block: EncodedBlock, file: IO[bytes]) -> None:
    header = {"problems": block.problems, "header": block.examples and asdict(block.examples.header)}
    arrays = {name: getattr(block.examples, name) for name in _ARRAYS} if block.examples is not None else {}
    np.savez(file, json=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)


def _load(path: Path) -> EncodedBlock | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            content = json.loads(stored["json"].tobytes())
            problems = [(reason, text) for reason, text in content["problems"]]
            if content["header"] is None:
                return EncodedBlock(None, problems)
            table: dict[str, Any] = content["header"]
            table |= {name: tuple(table[name]) for name in ("names", "stop_token_ids")}
            header = ExampleHeader(**table)
            arrays = {name: stored[name] for name in _ARRAYS}
    except (OSError, BadZipFile, ValueError, KeyError, TypeError, EOFError):
        return None
    return EncodedBlock(TokenizedExamples(header=header, content="", **arrays), problems)


def _join(found: list[tuple[Row, Example]], encoder: ExampleEncoder, names: tuple[str, ...]) -> TokenizedExamples:
    """Join examples to the same arrays as a tokenized file has."""
    documents = [document for _, example in found for document in example]
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)])
    header = ExampleHeader(
        form=encoder.form,
        dtype="uint32",
        documents_per_example=len(documents) // len(found),
        num_examples=len(found),
        num_tokens=int(offsets[-1]),
        vocab_size=max(int(document.ids.max()) for document in documents) + 1,
        num_rows=len(found),
        stop_token_ids=tuple(sorted(encoder.stop_token_ids)),
        counts=encoder.renderer.take_counts(),
        names=names,
    )
    return TokenizedExamples(
        tokens=np.concatenate([document.ids for document in documents]).astype(np.uint32),
        flags=np.concatenate([document.flags for document in documents]),
        offsets=offsets,
        num_trained=np.array([document.num_trained for document in documents]),
        places=np.array([get_place(row) for row, _ in found]),
        header=header,
        content="",
    )
