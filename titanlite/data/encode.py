"""From rows to token ids with a flag for each: what is trained, and what is an answer.

**Prompt and answer are tokenized one after the other**, not as one text. At inference the model gets the tokens of the
prompt and writes the answer behind them; a token that reaches over the seam (a newline of the template merged with one
of the answer) would never occur there. Tokenizers that put a space in front of every text (SentencePiece) are the
exception: a piece from the middle would get a space that is not in the text. There the whole is tokenized, and taken if
it begins with the tokens of each prompt.

**Special tokens are added once.** A chat template writes the begin-of-text token itself; a prompt as plain text gets
what the tokenizer puts in front of any text, unless it is there already. Completions and documents end with the
end-of-text token, for nothing else would teach the model to stop. In a document, text that spells a special token is
plain text, as in pretraining data; in chats and prompts it is the token, for prompts are written that way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from titanlite.data.chat import ANSWER, TRAINED, ChatRenderer, Piece, Tokens
from titanlite.data.forms import Chat, Form, Plain, parse_row
from titanlite.data.readers import RowError
from titanlite.data.row_limits import run_row
from titanlite.data.tokenizer import get_prefix, serialize
from titanlite.data.tokens import get_plain_encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Document:
    """Token ids (n,) int64 and flags (n,) uint8 of one document."""

    ids: np.ndarray
    flags: np.ndarray

    @property
    def num_trained(self) -> int:
        """Trained tokens; the first token follows nothing, so it is never a label."""
        return int(np.count_nonzero(self.flags[1:] & TRAINED))


@dataclass(frozen=True)
class _Draft:
    """What becomes one document: text pieces or ids, with ids in front and behind."""

    pieces: list[Piece] | Tokens
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    plain: bool = False


Example = tuple[Document, ...]  # one document, or chosen and rejected


class ExampleEncoder:
    """Encodes rows of one form; one row can become several examples, an example is one document or a pair of them."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", form: Form, *, train_all: bool, text_field: str = "text"
    ) -> None:
        self.form: Form = form
        self.text_field = text_field
        self.renderer = ChatRenderer(tokenizer, train_all=train_all)
        self.train_all = train_all
        self.eos_token_id = cast(int, tokenizer.eos_token_id)
        serialized = serialize(tokenizer)
        self._plain = get_plain_encoder(serialized)
        self._special = get_plain_encoder(serialized, special_is_text=False)
        self._adds_space = any(sign in serialized for sign in ('"Metaspace"', '"Prepend"', '"add_prefix_space":true'))
        self._prefix = get_prefix(tokenizer)

    def encode(self, rows: Sequence[dict[str, Any]]) -> Iterator[list[Example] | RowError]:
        """The examples of each row, or why it has none; in order. All texts are tokenized in one call.

        Raises:
            DataError: the tokenizer has no chat template.
        """
        drafts: list[list[list[_Draft]] | RowError] = []
        for row in rows:
            try:
                drafts.append(run_row(self._draft, row))
            except RowError as error:
                drafts.append(error)
        every = [one for found in drafts if not isinstance(found, RowError) for pair in found for one in pair]
        documents = iter(self._tokenize(every))
        for found in drafts:
            if isinstance(found, RowError):
                yield found
                continue
            examples = [tuple(next(documents) for _ in pair) for pair in found]
            if all(document.num_trained for example in examples for document in example):
                yield examples
            else:
                yield RowError(
                    "no trained token", "no token of the row is trained. Remove it, or look at the template."
                )

    def _draft(self, row: dict[str, Any]) -> list[list[_Draft]]:
        """Examples of one row; each is a list of documents."""
        parsed = parse_row(row, self.form, self.text_field)
        sides = [self._draft_one(one) for one in parsed]
        if len(sides) == 1:
            return [[draft] for draft in sides[0]]
        if any(len(side) != 1 for side in sides):
            text = (
                "chosen or rejected has several answers, and the chat template rewrites earlier ones, so no single "
                "text shows them all. Move all but the last answer into the prompt."
            )
            raise RowError("several answers", text)
        return [[side[0] for side in sides]]

    def _draft_one(self, parsed: Chat | Plain) -> list[_Draft]:
        if isinstance(parsed, Chat):
            return [_Draft(rendered) for rendered in self.renderer.render(parsed)]
        other = TRAINED if self.train_all else 0
        if parsed.prompt is None:
            pieces = [Piece(parsed.text, TRAINED)]
        else:
            pieces = [Piece(parsed.prompt, other), Piece(parsed.text, TRAINED | ANSWER)]
        suffix = (self.eos_token_id,)
        return [_Draft([piece for piece in pieces if piece.text], self._prefix, suffix, plain=parsed.prompt is None)]

    def _tokenize(self, drafts: list[_Draft]) -> list[Document]:
        pieces = [(piece.text, draft.plain) for draft in drafts for piece in _get_pieces(draft)]
        ids = iter(self._encode_batch(pieces))
        documents = []
        for draft in drafts:
            if isinstance(draft.pieces, Tokens):
                documents.append(_make_document(draft.pieces.ids, draft.pieces.flags))
                continue
            parts = [next(ids) for _ in draft.pieces]
            if self._adds_space and len(parts) > 1:
                parts = self._encode_whole([piece.text for piece in draft.pieces]) or parts
            prefix = draft.prefix
            if prefix and tuple(parts[0][: len(prefix)]) == prefix:
                prefix = ()  # the text spells the begin-of-text token itself
            tokens = list(prefix)
            flags = [TRAINED if self.train_all or draft.plain else 0] * len(prefix)
            for part, piece in zip(parts, draft.pieces, strict=True):
                tokens += part
                flags += [piece.flags] * len(part)
            suffix = draft.suffix
            if suffix and tuple(tokens[-len(suffix) :]) == suffix:
                suffix = ()  # the text spells the end-of-text token itself
            tokens += suffix
            flags += [draft.pieces[-1].flags] * len(suffix)
            documents.append(_make_document(tokens, flags))
        return documents

    def _encode_batch(self, texts: list[tuple[str, bool]]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in texts]
        for encoder, plain in ((self._special, False), (self._plain, True)):
            places = [i for i, (_, is_plain) in enumerate(texts) if is_plain is plain]
            encodings = encoder.encode_batch_fast([texts[i][0] for i in places], add_special_tokens=False)
            for i, encoding in zip(places, encodings, strict=True):
                found[i] = encoding.ids
        return found

    def _encode_whole(self, texts: list[str]) -> list[list[int]] | None:
        """The tokens of the joined texts, cut where each text begins; None if a prompt alone has other tokens."""
        encoder: Tokenizer = self._special
        whole = encoder.encode("".join(texts), add_special_tokens=False).ids
        cuts = [0]
        for i in range(1, len(texts)):
            before = encoder.encode("".join(texts[:i]), add_special_tokens=False).ids
            if whole[: len(before)] != before:
                return None
            cuts.append(len(before))
        return [whole[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(whole)], strict=True)]


def _get_pieces(draft: _Draft) -> list[Piece]:
    return [] if isinstance(draft.pieces, Tokens) else draft.pieces


def _make_document(ids: list[int], flags: list[int]) -> Document:
    return Document(np.array(ids, dtype=np.int64), np.array(flags, dtype=np.uint8))
