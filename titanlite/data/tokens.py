"""The corpus as one memory-mapped array of token ids, built once per machine."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from titanlite.base.files import replace_file, write_atomic
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
from titanlite.data.tokenizer import (
    END_OF_TEXT,
    HFTokenizer,
    build_end_reader,
    count_ids,
    serialize,
)

_PIECE_CHARS = 2**20
_SEARCHED_TOKENS = 2**24  # searched at once for ends of documents
_BATCH_CHARS = 4 * 2**20  # bounds the memory of the encodings; 16 Mi is 8% faster, 1 Mi 4% slower


@dataclass(frozen=True)
class TokenizedCorpus:
    """All tokens of a corpus. Every document, including the last, is followed by `eos_token_id`.

    `tokens (num_tokens,)` is read-only and memory-mapped: uint16 if `vocab_size` is at most 65536,
    else uint32. `vocab_size` is one more than the largest id that the tokenizer can produce.
    `separators` counts the separators between documents; `spelled` counts the special tokens that
    occur as text inside documents.
    """

    tokens: np.ndarray
    eos_token_id: int
    vocab_size: int
    num_documents: int
    separators: dict[str, int] = field(default_factory=dict)
    spelled: dict[str, int] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe the number of documents, and what separates them."""
        split = f", split at {_list_counts(self.separators)}" if self.separators else ""
        return f"{format_count(self.num_documents, 'document')}{split}"

    def get_warning(self) -> str:
        """Return a warning about special tokens that occur as text in documents; empty if there are
        none.
        """
        if not self.spelled:
            return ""
        return (
            f"the text contains {_list_counts(self.spelled)} inside documents, where special "
            "tokens are trained as plain text. Remove them; or set data.document_separator to the "
            "separator between documents."
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """Positions of the end-of-text tokens, int64, ascending. The first call reads all
        tokens.
        """
        starts = range(0, len(self.tokens), _SEARCHED_TOKENS)
        parts = (self.tokens[start : start + _SEARCHED_TOKENS] for start in starts)
        found = [
            start + np.flatnonzero(part == self.eos_token_id)
            for start, part in zip(starts, parts, strict=True)
        ]
        return np.concatenate(found)


def build_tokens(data: DataSection, corpus: Corpus, tokenizer: HFTokenizer) -> TokenizedCorpus:
    """Tokenize `corpus`, or map the file that an earlier call made for the same text and tokenizer.

    A special token in the text is encoded as ordinary text, except between documents and at the
    ends of one (`build_end_reader`). Each document begins with the tokens that the tokenizer puts
    in front of any text, such as Llama's begin-of-text token, and ends with the end-of-text token.
    Documents longer than 1 Mi characters are encoded in pieces cut after a newline; at each cut,
    one token may differ from an encoding in one piece. A damaged file is rebuilt.

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
        megabytes = corpus.num_bytes / 1e6
        logger.info(f"data: tokenized {megabytes:.1f} MB in {elapsed_s:.1f} s")
    return TokenizedCorpus(tokens, eos_token_id, vocab_size, **counts)


@lru_cache(maxsize=2)  # shared by sources: for 150 k tokens it takes half a second and 50 MB
def get_plain_encoder(serialized: str, *, special_is_text: bool = True) -> Tokenizer:
    """Return a copy of the tokenizer that never truncates or pads; `special_is_text` makes it treat
    special tokens as text.
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
    """Yield the pieces of all documents, in batches that the tokenizer encodes in one call."""
    batch: list[_Piece] = []
    num_chars = 0
    for document in documents:
        prefix, text = read_ends(document)
        # If one token begins and ends documents, the previous document's end is already there.
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


def _write(path: Path, corpus: Corpus, tokenizer: HFTokenizer, dtype: str) -> None:
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
    header = {
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "separators": separators,
        "spelled": spelled,
    }
    # The header is written last: it makes the tokens valid.
    replace_file(path.with_suffix(".json"), json.dumps(header))


def _load(path: Path, dtype: str, eos_token_id: int) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Map the tokens and return the counts in their header, a JSON file next to them; None if a
    file is missing, cut off, or contradicts the header.
    """
    try:
        header = json.loads(path.with_suffix(".json").read_bytes())
        tokens = np.memmap(path, dtype=dtype, mode="r")  # ValueError: half a token, or empty
        is_valid = len(tokens) == header.pop("num_tokens") and tokens[-1] == eos_token_id
        return (tokens, header) if is_valid else None
    except (FileNotFoundError, ValueError, KeyError):
        return None
