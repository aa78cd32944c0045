"""The corpus as one memory-mapped array of token ids, made once per machine."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from tokenizers import Tokenizer

from titanlite.base.files import write_atomic
from titanlite.base.log import logger
from titanlite.config.data import DataSection
from titanlite.data.corpus import (
    Corpus,
    get_cache_folder,
    get_code_digest,
    load_or_build,
    split_text,
)
from titanlite.data.tokenizer import count_ids, get_prefix, serialize

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
    Without `corpus`, the files of the documents are not known.
    """

    tokens: np.ndarray
    eos_token_id: int
    vocab_size: int
    num_documents: int
    corpus: Corpus | None = None

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

    Text that spells a special token is encoded as ordinary text, so no document can forge the end
    of a document. Each document begins with what the tokenizer puts in front of any text, such as
    Llama's begin-of-text token, and ends with the end-of-text token. Documents longer than 1 Mi
    characters are encoded in pieces cut after a newline, at the price of up to one unusual token
    per cut. A damaged file is rebuilt.

    Raises DataError: a document cannot be read, or the cache folder cannot be written.
    """
    serialized = serialize(tokenizer)
    eos_token_id = cast(int, tokenizer.eos_token_id)
    prefix = get_prefix(tokenizer)
    # one token for both: the end of the document before is there already
    if eos_token_id in prefix:
        prefix = ()
    vocab_size = count_ids(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    key = sha256(
        f"{get_code_digest(Path(__file__).parent)} {corpus.digest} {eos_token_id} "
        f"{serialized}".encode()
    ).hexdigest()[:32]
    path = get_cache_folder(data) / "tokens" / f"{key}.bin"

    def load() -> tuple[np.ndarray, int] | None:
        return _load(path, dtype, eos_token_id)

    def build() -> None:
        _write(path, corpus, get_plain_encoder(serialized), prefix, eos_token_id, dtype)

    (tokens, num_documents), elapsed_s = load_or_build(path, load, build)
    if elapsed_s:
        logger.info("data: tokenized %.1f MB in %.1f s", corpus.num_bytes / 1e6, elapsed_s)
    return TokenizedCorpus(tokens, eos_token_id, vocab_size, num_documents, corpus)


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


def _batches(corpus: Corpus) -> Iterator[list[tuple[str, bool, bool]]]:
    """Yield groups of (piece of a document, whether it is the first one of its document, whether
    the last).
    """
    batch: list[tuple[str, bool, bool]] = []
    num_chars = 0
    for _, text in corpus:
        pieces = list(split_text(text, _PIECE_CHARS))
        for i, piece in enumerate(pieces):
            batch.append((piece, i == 0, i == len(pieces) - 1))
            num_chars += len(piece)
            if num_chars >= _BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def _write(
    path: Path,
    corpus: Corpus,
    encoder: Tokenizer,
    prefix: Sequence[int],
    eos_token_id: int,
    dtype: str,
) -> None:
    num_tokens = num_documents = 0
    with write_atomic(path) as file:
        for batch in _batches(corpus):
            encodings = encoder.encode_batch_fast(
                [piece for piece, _, _ in batch], add_special_tokens=False
            )
            for encoding, (_, is_first, is_last) in zip(encodings, batch, strict=True):
                ids = [*prefix, *encoding.ids] if is_first else encoding.ids
                if is_last:
                    ids.append(eos_token_id)
                    num_documents += 1
                file.write(np.array(ids, dtype=dtype).tobytes())
                num_tokens += len(ids)
    # The header comes last: it is what makes the tokens valid.
    with write_atomic(path.with_suffix(".json")) as file:
        file.write(json.dumps({"num_tokens": num_tokens, "num_documents": num_documents}).encode())


def _load(path: Path, dtype: str, eos_token_id: int) -> tuple[np.ndarray, int] | None:
    """Map the tokens and return the number of documents; None if a file is missing, cut off, or
    contradicts the header.

    The header is a JSON file next to the tokens.
    """
    try:
        header = json.loads(path.with_suffix(".json").read_bytes())
        tokens = np.memmap(path, dtype=dtype, mode="r")  # ValueError: part of a token, or nothing
        is_valid = len(tokens) == header["num_tokens"] and tokens[-1] == eos_token_id
        return (tokens, int(header["num_documents"])) if is_valid else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
