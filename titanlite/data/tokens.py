"""The corpus as one memory-mapped array of token ids, made once per machine."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from titanlite.base.files import write_atomic
from titanlite.base.log import logger
from titanlite.base.text import format_count, list_names
from titanlite.config.data import DataSection
from titanlite.data.corpus import (
    Corpus,
    get_cache_folder,
    get_code_digest,
    load_or_build,
    split_text,
)
from titanlite.data.tokenizer import END_OF_TEXT, build_end_reader, count_ids, serialize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PIECE_CHARS = 2**20
_SEARCHED_TOKENS = 2**24  # at once, for ends of documents
_BATCH_CHARS = 4 * 2**20  # bounds the memory of the encodings; 16 Mi is 8% faster, 1 Mi 4% slower


@dataclass(frozen=True)
class TokenizedCorpus:
    """All tokens of a corpus. Every document is followed by `eos_token_id`, the last one too.

    `tokens (num_tokens,)` is read-only and memory-mapped: uint16 if `vocab_size` is at most 65536,
    else uint32. `vocab_size` is one more than the largest id that the tokenizer can produce.
    `separators` and `spelled` count texts in the files: between documents, and special tokens
    inside documents.
    """

    tokens: np.ndarray
    eos_token_id: int
    vocab_size: int
    num_documents: int
    separators: dict[str, int] = field(default_factory=dict)
    spelled: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the number of documents in words, and what separates them."""
        split = f", split at {_list_counts(self.separators)}" if self.separators else ""
        return f"{format_count(self.num_documents, 'document')}{split}"

    def get_warning(self) -> str:
        """Return a warning about special tokens that documents spell; empty if there are none."""
        if not self.spelled:
            return ""
        return (
            f"the text spells {_list_counts(self.spelled)} inside documents, where special tokens "
            "are trained as letters. Remove them; or set data.document_separator to the one that "
            "is between documents."
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """Places of the end-of-text tokens, int64, ascending. The first call reads all tokens."""
        starts = range(0, len(self.tokens), _SEARCHED_TOKENS)
        parts = (self.tokens[start : start + _SEARCHED_TOKENS] for start in starts)
        found = [
            start + np.flatnonzero(part == self.eos_token_id)
            for start, part in zip(starts, parts, strict=True)
        ]
        return np.concatenate(found)


def build_tokens(
    data: DataSection, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast"
) -> TokenizedCorpus:
    """Tokenize `corpus`, or map the file made by an earlier call for the same text and the same
    tokenizer.

    Text that spells a special token is encoded as ordinary text, except where it separates
    documents, and at the ends of one (`build_end_reader`). Each document begins with what the
    tokenizer puts in front of any text, such as Llama's begin-of-text token, and ends with the
    end-of-text token. Documents longer than 1 Mi characters are encoded in pieces cut after a
    newline, at the price of up to one unusual token per cut. A damaged file is rebuilt.

    Raises DataError: a document cannot be read, or the cache folder cannot be written.
    """
    eos_token_id = cast(int, tokenizer.eos_token_id)
    vocab_size = count_ids(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    key = sha256(
        f"{get_code_digest(Path(__file__).parent)} {corpus.digest} {corpus.separator} "
        f"{tokenizer.bos_token} {eos_token_id} {serialize(tokenizer)}".encode()
    ).hexdigest()[:32]
    path = get_cache_folder(data) / "tokens" / f"{key}.bin"

    (tokens, counts), elapsed_s = load_or_build(
        path,
        load=lambda: _load(path, dtype, eos_token_id),
        build=lambda: _write(path, corpus, tokenizer, dtype),
    )
    if elapsed_s:
        logger.info("data: tokenized %.1f MB in %.1f s", corpus.num_bytes / 1e6, elapsed_s)
    return TokenizedCorpus(tokens, eos_token_id, vocab_size, **counts)


@lru_cache(maxsize=2)  # several sources share one: of 150 k tokens it takes half a second and 50 MB
def get_plain_encoder(serialized: str, *, special_is_text: bool = True) -> Tokenizer:
    """Return a copy of the tokenizer that treats special tokens as text, or not, and never
    truncates or pads.
    """
    encoder = Tokenizer.from_str(serialized)
    encoder.encode_special_tokens = special_is_text
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _list_counts(counts: Mapping[str, int]) -> str:
    return list_names(f"{text!r} ({count:,})" for text, count in counts.items())


class _Piece(NamedTuple):
    """A piece of a document, and the ids before and after it."""

    text: str
    before: tuple[int, ...]
    after: tuple[int, ...]


def _batches(
    documents: Iterator[str],
    read_ends: Callable[[str], tuple[tuple[int, ...], str]],
    eos_token_id: int,
) -> Iterator[list[_Piece]]:
    """Yield the pieces of all documents, in groups that are tokenized at once."""
    batch: list[_Piece] = []
    num_chars = 0
    for document in documents:
        prefix, text = read_ends(document)
        # one token for both: the end of the document before is there already
        before = () if eos_token_id in prefix else prefix
        pieces = list(split_text(text, _PIECE_CHARS)) if text else []
        for i, piece in enumerate(pieces):
            after = (eos_token_id,) if i == len(pieces) - 1 else ()
            batch.append(_Piece(piece, before if i == 0 else (), after))
            num_chars += len(piece)
            if num_chars >= _BATCH_CHARS:
                yield batch
                batch = []
                num_chars = 0
    if batch:
        yield batch


def _write(path: Path, corpus: Corpus, tokenizer: "PreTrainedTokenizerFast", dtype: str) -> None:
    num_tokens = num_documents = 0
    separators = Counter[str]()
    spelled = Counter[str]()
    encoder = get_plain_encoder(serialize(tokenizer))
    ends = dict.fromkeys([cast(str, tokenizer.eos_token), END_OF_TEXT])
    special = re.compile("|".join(map(re.escape, [*ends, *tokenizer.all_special_tokens])))
    documents = corpus.get_documents(ends, separators)
    batches = _batches(documents, build_end_reader(tokenizer), cast(int, tokenizer.eos_token_id))
    with write_atomic(path) as file:
        for batch in batches:
            texts = [piece.text for piece in batch]
            encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
            for encoding, piece in zip(encodings, batch, strict=True):
                ids = [*piece.before, *encoding.ids, *piece.after]
                file.write(np.array(ids, dtype=dtype).tobytes())
                num_tokens += len(ids)
                num_documents += bool(piece.after)
                spelled.update(special.findall(piece.text))
    header = {"num_tokens": num_tokens, "num_documents": num_documents}
    header |= {"separators": separators, "spelled": spelled}
    # The header comes last: it is what makes the tokens valid.
    with write_atomic(path.with_suffix(".json")) as file:
        file.write(json.dumps(header).encode())


def _load(path: Path, dtype: str, eos_token_id: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Map the tokens and return the counts of the header, a JSON file next to them; None if a file
    is missing, cut off, or contradicts the header.
    """
    try:
        header = json.loads(path.with_suffix(".json").read_bytes())
        tokens = np.memmap(path, dtype=dtype, mode="r")  # ValueError: part of a token, or nothing
        is_valid = len(tokens) == header.pop("num_tokens") and tokens[-1] == eos_token_id
        return (tokens, header) if is_valid else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
