"""Encoding of rows to token ids, with flags for each: trained, part of an answer, end of an answer.

**Prompt and answer are tokenized separately**: at inference the model gets the tokens of the
prompt, and a token across the seam would never occur. Tokenizers that put a space before every text
(SentencePiece) are the exception: there the whole text is tokenized, and used if it begins with the
tokens of each prompt.

**Special tokens are added once.** A chat template writes the begin-of-text token itself; a prompt
as plain text gets what the tokenizer puts in front of any text, unless it is there already.
Completions and documents end with the end-of- text token. In a document, text that spells a special
token is plain text, as in pretraining data; in chats and prompts it is the token, because prompts
are written that way.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from titanlite.base.text import describe_error
from titanlite.data.tokenizer import build_end_reader, get_prefix, serialize
from titanlite.data.tokens import get_plain_encoder
from titanlite.features.sft.chat import ANSWER, END, TRAINED, ChatRenderer, Conversation, Turn
from titanlite.features.sft.forms import Chat, Form, Plain, count_unread, parse_row
from titanlite.features.sft.readers import RowError

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


class _Piece(NamedTuple):
    """Text that is tokenized by itself, with `flags` for its tokens; with `marks`, only those there
    are trained.
    """

    text: str
    flags: int
    marks: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class _Draft:
    """A document before tokenization: pieces of text, with token ids before (`prefix`) and after
    (`suffix`) them.

    At inference the prompt of the last answer is tokenized as one text. So several turns share a
    document only if every tuple in `seams`, joined to one text, has the tokens of its parts.
    Otherwise each turn in `apart` becomes a document.
    """

    pieces: list[_Piece]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    plain: bool = False
    seams: tuple[tuple[str, ...], ...] = ()
    apart: tuple[Turn, ...] = ()


Example = tuple[Document, ...]  # one document, or chosen and rejected


def encode_prompt(tokenizer: "PreTrainedTokenizerFast", row: dict[str, Any]) -> list[int]:
    """Return the prompt tokens of the chat in `row`, of form 'messages': those that precede its
    answer in training.

    Raises:
        DataError: the tokenizer has no chat template.
        RowError: the row is no chat, or the template refuses it.
    """
    (chat,) = parse_row(row, "messages")
    text = ChatRenderer(tokenizer).render_prompt(cast(Chat, chat))
    encoder = get_plain_encoder(serialize(tokenizer), special_is_text=False)
    return encoder.encode(text, add_special_tokens=False).ids


class ExampleEncoder:
    """Encoder of rows of one form; a row can become several examples, an example is one document or
    a pair of them.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        form: Form,
        *,
        train_all: bool = False,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.form: Form = form
        self.renderer = renderer or ChatRenderer(tokenizer, train_all=train_all)
        self.train_all = self.renderer.train_all
        self.stop_token_ids: set[int] = set()
        self.eos_token_id = cast(int, tokenizer.eos_token_id)
        serialized = serialize(tokenizer)
        self._plain = get_plain_encoder(serialized)
        self._special = get_plain_encoder(serialized, special_is_text=False)
        alone, *preceded = (
            [*self._encode_batch([(text, False)])[0]] for text in ("a", "\na", ".a", "-a")
        )
        self._adds_space = not any(ids[-len(alone) :] == alone for ids in preceded)
        self._prefix = get_prefix(tokenizer)
        self._read_ends = build_end_reader(tokenizer)
        self._template = str(tokenizer.chat_template or "")

    def encode(self, rows: Sequence[dict[str, Any]]) -> Iterator[list[Example] | RowError]:
        """Yield the examples of each row, or why it has none; in order. All texts are tokenized in
        one call.
        """
        drafts: list[list[_Draft] | RowError] = []
        self.renderer.counts.update(count_unread(rows, self.form, self._template))
        for row in rows:
            try:
                drafts.append(self._draft_row(row))
            except RowError as error:
                drafts.append(error)
        documents = iter(
            self._tokenize(
                [one for found in drafts if not isinstance(found, RowError) for one in found]
            )
        )
        for found in drafts:
            if isinstance(found, RowError):
                yield found
                continue
            yield self._join([next(documents) for _ in found])

    def _join(self, sides: list[list[Document]]) -> list[Example] | RowError:
        """Return the examples of one row: of its document or documents, or of the two sides of a
        pair.
        """
        if not all(document.num_trained for side in sides for document in side):
            return RowError(
                "no trained token",
                "no token of the row is trained. Remove it, or look at the template.",
            )
        if len(sides) > 1 and any(len(side) != 1 for side in sides):
            text = (
                "chosen or rejected has several answers, and the chat template rewrites earlier "
                "ones, so no single text shows them all. Move all but the last answer into the "
                "prompt."
            )
            return RowError("several answers", text)
        for document in (document for side in sides for document in side):
            ends = set(np.flatnonzero(document.flags & END).tolist())
            self.stop_token_ids.update(int(document.ids[i]) for i in ends if i + 1 not in ends)
        if len(sides) > 1:
            return [tuple(side[0] for side in sides)]
        if len(sides[0]) > 1:
            self.renderer.counts["chats that become one example per answer"] += 1
        return [(document,) for document in sides[0]]

    def _draft_row(self, row: dict[str, Any]) -> list[_Draft]:
        try:
            return [self._draft(parsed) for parsed in parse_row(row, self.form)]
        except (MemoryError, RecursionError) as error:
            text = (
                "Python cannot hold what it, or its chat template, asks for "
                f"({describe_error(error)}). Remove it."
            )
            raise RowError("too long or too deep", text) from None

    def _draft(self, parsed: Chat | Plain) -> _Draft:
        if isinstance(parsed, Chat):
            return self._draft_chat(self.renderer.render(parsed))
        prompt_flags = TRAINED if self.train_all else 0
        prefix = self._prefix
        if parsed.prompt is None:
            prefix, text = self._read_ends(parsed.text)
            if not text:
                raise RowError("empty field", "the text has special tokens only. Remove the row.")
            self.renderer.count_spelled(text)
            pieces = [_Piece(text, TRAINED)]
        else:
            pieces = [_Piece(parsed.prompt, prompt_flags), _Piece(parsed.text, TRAINED | ANSWER)]
        suffix = (self.eos_token_id,)
        return _Draft(
            [piece for piece in pieces if piece.text],
            prefix,
            suffix,
            plain=parsed.prompt is None,
        )

    def _draft_chat(self, chat: Conversation) -> _Draft:
        turns, prompt_flags = chat.turns, TRAINED if self.train_all else 0
        # the whole text is trained; only the last answer is evaluated
        if self.train_all and not chat.joined:
            turns = turns[-1:] if chat.whole.startswith(turns[-1].text) else []
        if not turns:
            return _Draft([_Piece(chat.whole, prompt_flags)])
        several = len(turns) > 1 and not self.train_all
        if several and not chat.joined:
            return _Draft([], apart=tuple(turns))
        pieces, place, last = [], 0, turns[-1].text
        for turn in turns:
            pieces += [_Piece(last[place : len(turn.prompt)], prompt_flags), *_get_answer(turn)]
            place = len(turn.text)
        if chat.whole.startswith(last):
            pieces.append(_Piece(chat.whole[place:], prompt_flags))
        pieces = [piece for piece in pieces if piece.text]
        if not several:
            return _Draft(pieces)
        seams = () if self._adds_space else self._list_seams(pieces, turns[-1].prompt)
        return _Draft(pieces, seams=seams, apart=tuple(turns))

    def _list_seams(self, pieces: list[_Piece], prompt: str) -> tuple[tuple[str, ...], ...]:
        """List the stretches of `prompt` between special tokens that borders of `pieces` cut, each
        as its parts.
        """
        cuts = list(accumulate(len(piece.text) for piece in pieces))
        seams: list[tuple[str, ...]] = []
        start = 0
        for match in (*self.renderer.cutting.finditer(prompt), None):
            stop, next_start = match.span() if match else (len(prompt), 0)
            places = [start, *cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)], stop]
            if len(places) > 2:
                seams.append(tuple(prompt[i:j] for i, j in pairwise(places)))
            start = next_start
        return tuple(seams)

    def _tokenize(self, drafts: list[_Draft]) -> list[list[Document]]:
        texts = [(piece.text, draft.plain) for draft in drafts for piece in draft.pieces]
        texts += [
            (text, False)
            for draft in drafts
            for seam in draft.seams
            for text in (*seam, "".join(seam))
        ]
        ids = iter(self._encode_batch(texts))
        parts = [[next(ids) for _ in draft.pieces] for draft in drafts]
        found: list[list[Document]] = []
        apart: list[Turn] = []
        for draft, tokens in zip(drafts, parts, strict=True):
            document = self._make_document(draft, tokens) if tokens else None
            alike = [
                [*chain.from_iterable(next(ids) for _ in seam)] == next(ids) for seam in draft.seams
            ]
            fits = document is not None and all(alike)
            found.append([document] if fits and document is not None else [])
            apart += [] if fits else draft.apart
        if apart:
            rest = iter(
                self._tokenize(
                    [_Draft([_Piece(turn.prompt, 0), *_get_answer(turn)]) for turn in apart]
                )
            )
            for draft, documents_of_draft in zip(drafts, found, strict=True):
                if not documents_of_draft:
                    documents_of_draft += [next(rest)[0] for _ in draft.apart]
        return found

    def _make_document(self, draft: _Draft, parts: list[list[int]]) -> Document | None:
        if self._adds_space and len(parts) > 1:
            whole = self._encode_whole([piece.text for piece in draft.pieces])
            if whole is None and draft.apart:
                return None
            parts = whole or parts
        prefix, suffix = draft.prefix, draft.suffix
        if prefix and tuple(parts[0][: len(prefix)]) == prefix:
            prefix = ()  # the text spells the begin-of-text token itself
        tokens = list(prefix)
        flags = bytearray([TRAINED if self.train_all or draft.plain else 0]) * len(prefix)
        for part, piece in zip(parts, draft.pieces, strict=True):
            tokens += part
            flags += self._get_flags(piece, part)
        if suffix and tuple(tokens[-len(suffix) :]) == suffix:
            suffix = ()  # the text spells the end-of-text token itself
        tokens += suffix
        last = draft.pieces[-1].flags
        flags += bytes([last | END if last & ANSWER else last]) * len(suffix)
        return Document(np.array(tokens, dtype=np.int64), np.frombuffer(flags, dtype=np.uint8))

    def _get_flags(self, piece: _Piece, ids: list[int]) -> bytes:
        if piece.marks is None or self.train_all:
            return bytes([piece.flags]) * len(ids)
        offsets = self._special.encode(piece.text, add_special_tokens=False).offsets
        # cut from the tokens of the whole text: the answer was not tokenized alone
        if len(offsets) != len(ids):
            return bytes([piece.flags]) * len(ids)
        inside = [
            any(start < stop_mark and stop > start_mark for start_mark, stop_mark in piece.marks)
            for start, stop in offsets
        ]
        return bytes(piece.flags if found else piece.flags & ~TRAINED for found in inside)

    def _encode_batch(self, texts: list[tuple[str, bool]]) -> list[list[int]]:
        # each once: many are the template's
        found: dict[tuple[str, bool], list[int]] = {text: [] for text in texts}
        for encoder, plain in ((self._special, False), (self._plain, True)):
            some = [text for text, is_plain in found if is_plain is plain]
            encodings = encoder.encode_batch_fast(some, add_special_tokens=False)
            found |= {
                (text, plain): encoding.ids for text, encoding in zip(some, encodings, strict=True)
            }
        return [found[text] for text in texts]

    def _encode_whole(self, texts: list[str]) -> list[list[int]] | None:
        """Tokenize the joined texts and cut them where each text begins; None if a prompt alone has
        other tokens.
        """
        encoder: Tokenizer = self._special
        whole = encoder.encode("".join(texts), add_special_tokens=False).ids
        cuts = [0]
        for i in range(1, len(texts)):
            before = encoder.encode("".join(texts[:i]), add_special_tokens=False).ids
            if whole[: len(before)] != before:
                return None
            cuts.append(len(before))
        return [
            whole[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(whole)], strict=True)
        ]


def _get_answer(turn: Turn) -> list[_Piece]:
    pieces = [
        _Piece(turn.body, TRAINED | ANSWER, turn.marks),
        _Piece(turn.end, TRAINED | ANSWER | END),
    ]
    return [piece for piece in pieces if piece.text]
