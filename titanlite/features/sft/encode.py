"""Encoding of rows as token ids with flags: trained, part of an answer, end of an answer.

**Prompt and answer are tokenized separately.** At inference the model gets the tokens of the
prompt, and a token that spans the boundary would never occur. Turns share a document if each of
their prompts, tokenized alone, has the same tokens as in the document; otherwise each turn is a
document. For tokenizers that put a space before every text (SentencePiece), prompt and answer are
one text, under the same condition.

**Special tokens are added once.** A chat template writes the begin-of-text token itself. A
plain-text prompt gets the tokens that the tokenizer puts in front of any text, unless they are
there already. Completions and documents end with the end-of-text token. A special token that is
written out in a document is plain text, as in pretraining data; in chats and prompts it is the
token, because prompts are written that way.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np
from tokenizers import Encoding

from titanlite.data.tokenizer import HFTokenizer, build_end_reader, get_prefix, serialize
from titanlite.data.tokens import get_plain_encoder
from titanlite.features.sft.chat import ANSWER, END, TRAINED, ChatRenderer, Turn, any_of
from titanlite.features.sft.forms import Chat, Form, Plain, count_unread, parse_row
from titanlite.features.sft.readers import RowError

TOKEN = np.dtype([("id", np.uint32), ("flags", np.uint8)])  # flags as in `chat.py`
Example = tuple[np.ndarray, ...]  # one document, or chosen and rejected; each (n,) of `TOKEN`


def count_trained(document: np.ndarray) -> int:
    """Count the trained tokens of a document, (n,) of `TOKEN`. The first token is never a label,
    because no token precedes it.
    """
    return int(np.count_nonzero(document["flags"][1:] & TRAINED))


@dataclass(frozen=True)
class _Draft:
    """A document before tokenization.

    Attributes:
        turns: answers with their prompts, each prompt beginning with the previous turn; or empty.
        rest: the text after the last turn.
        flags: flags of all tokens that belong to no answer.
        as_one: True if the whole document is tokenized as one text; otherwise the last prompt, the
            last answer, its end, and the rest are tokenized separately.
        prefix: tokens before a plain text, unless the text begins with them; None for a chat, whose
            template writes all special tokens.
    """

    turns: tuple[Turn, ...]
    rest: str
    flags: int
    as_one: bool
    prefix: tuple[int, ...] | None = None

    @property
    def inner(self) -> tuple[Turn, ...]:
        """Turns whose answers are inside the first piece."""
        return self.turns if self.as_one else self.turns[:-1]

    @cached_property
    def pieces(self) -> list[tuple[str, int]]:
        """Texts that are tokenized separately, with the flags of their tokens."""
        last = self.turns[-1] if self.turns else Turn("", "", "")
        if self.as_one:
            return [(last.text + self.rest, self.flags)]
        found = [
            (last.prompt, self.flags),
            (last.answer, TRAINED | ANSWER),
            (last.end, TRAINED | ANSWER | END),
            (self.rest, self.flags),
        ]
        return [(text, flags) for text, flags in found if text]

    def split(self) -> "list[_Draft]":
        """Return a draft for each turn; for a single turn, a draft whose prompt is tokenized
        separately.
        """
        if len(self.turns) == 1:
            return [replace(self, as_one=False)]
        return [replace(self, turns=(turn,), rest="") for turn in self.turns]


def encode_prompt(tokenizer: HFTokenizer, row: dict[str, Any]) -> list[int]:
    """Return the prompt tokens of the chat in `row`, of the format 'messages': the tokens before
    its answer in training.

    Raises:
        DataError: the tokenizer has no chat template.
        RowError: the row is not a chat, or the template rejects it.
    """
    (chat,) = parse_row(row, "messages")
    text = ChatRenderer(tokenizer).render_prompt(cast(Chat, chat))
    encoder = get_plain_encoder(serialize(tokenizer), special_is_text=False)
    return encoder.encode(text, add_special_tokens=False).ids


class ExampleEncoder:
    """Encoder of rows of one format; None: no format is known, and every row is an error. A row can
    become several examples; an example is one document, or a pair of them.
    """

    def __init__(self, renderer: ChatRenderer, form: Form | None) -> None:
        self.form: Form | None = form
        self.renderer = renderer
        tokenizer = renderer.tokenizer
        self.stop_token_ids: set[int] = set()
        self.eos_token_id = cast(int, tokenizer.eos_token_id)
        self._encoder = get_plain_encoder(serialize(tokenizer), special_is_text=form == "text")
        self._parts: dict[str, Encoding] = {}
        alone, *preceded = (
            self._encoder.encode(text, add_special_tokens=False).ids
            for text in ("a", "\na", ".a", "-a")
        )
        self._adds_space = not any(ids[-len(alone) :] == alone for ids in preceded)
        self._prefix = get_prefix(tokenizer)
        self._read_ends = build_end_reader(tokenizer)
        self._template = str(tokenizer.chat_template or "")
        # Cutting tokens: the tokenizer tokenizes the texts before and after them separately, so a
        # text can be cut there.
        self._cutting = any_of(
            {
                token.content
                for token in tokenizer.added_tokens_decoder.values()
                if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
            }
        )

    def encode(
        self, rows: Sequence[dict[str, Any] | RowError]
    ) -> Iterator[list[Example] | RowError]:
        """Yield the examples of each row in order, or the error why it has none. All texts are
        tokenized in one call.
        """
        read = (row for row in rows if isinstance(row, dict))
        self.renderer.counts.update(count_unread(read, self.form, self._template))
        found: list[list[list[_Draft]] | RowError] = []
        for row in rows:
            try:
                if isinstance(row, RowError):
                    raise row
                found.append([self._draft(parsed) for parsed in parse_row(row, self.form)])
            except RowError as error:
                found.append(error)
        good = [sides for sides in found if not isinstance(sides, RowError)]
        drafts = (draft for sides in good for side in sides for draft in side)
        texts = (text for draft in drafts for text, _ in draft.pieces)
        # The documents of one chat repeat earlier messages: each part is tokenized once.
        parts = list(dict.fromkeys(part for text in texts for part in self._cut(text)))
        encodings = self._encoder.encode_batch(parts, add_special_tokens=False)
        self._parts = dict(zip(parts, encodings, strict=True))
        for sides in found:
            yield sides if isinstance(sides, RowError) else self._make_examples(sides)

    def _make_examples(self, drafts: list[list[_Draft]]) -> list[Example] | RowError:
        """Return the examples of one row: from its document or documents, or from the two sides of
        a pair.
        """
        sides = [[each for draft in side for each in self._tokenize(draft)] for side in drafts]
        if not all(count_trained(document) for side in sides for document in side):
            return RowError(
                "no trained token",
                "no token of the row is trained. Remove it, or look at the template.",
            )
        if len(sides) > 1 and any(len(side) != 1 for side in sides):
            return RowError(
                "several answers",
                "chosen or rejected has several answers, and the chat template rewrites earlier "
                "ones, so no single text shows them all. Move all but the last answer into the "
                "prompt.",
            )
        for document in (document for side in sides for document in side):
            is_end = (document["flags"] & END) != 0
            is_last = is_end & ~np.append(is_end[1:], False)
            self.stop_token_ids.update(document["id"][is_last].tolist())
        if len(sides) > 1:
            return [tuple(side[0] for side in sides)]
        if len(sides[0]) > 1:
            self.renderer.counts["chats that become one example per answer"] += 1
        return [(document,) for document in sides[0]]

    def _draft(self, parsed: Chat | Plain) -> list[_Draft]:
        flags = TRAINED if self.renderer.train_all else 0
        if isinstance(parsed, Plain):
            if parsed.prompt is None:
                prefix, text = self._read_ends(parsed.text)
                if not text:
                    raise RowError(
                        "empty field", "the text consists only of special tokens. Remove the row."
                    )
                self.renderer.count_spelled(text)
                return [_Draft((), text, TRAINED, as_one=True, prefix=prefix)]
            turn = Turn(parsed.prompt, parsed.text, "")
            return [_Draft((turn,), "", flags, as_one=self._adds_space, prefix=self._prefix)]
        turns, whole = self.renderer.render(parsed)
        if not all(after.prompt.startswith(turn.text) for turn, after in pairwise(turns)):
            if not self.renderer.train_all:
                return [_Draft((turn,), "", flags, as_one=self._adds_space) for turn in turns]
            # The whole text is trained, and only the last answer is evaluated.
            turns = turns[-1:] if whole.startswith(turns[-1].text) else []
        last = turns[-1].text if turns else ""
        rest = whole[len(last) :] if whole.startswith(last) else ""
        return [_Draft(tuple(turns), rest, flags, as_one=self._adds_space)]

    def _cut(self, text: str) -> list[str]:
        """Split `text` before each cutting token, see `__init__`. A text without special tokens is
        not split, nor a text that the tokenizer puts a space before.
        """
        if self.form == "text" or self._adds_space:
            return [text]
        starts = [match.start() for match in self._cutting.finditer(text)]
        return [text[start:stop] for start, stop in pairwise([0, *starts, len(text)])]

    def _encode(self, text: str) -> Encoding:
        parts = self._cut(text)
        for part in parts:
            if part not in self._parts:
                self._parts[part] = self._encoder.encode(part, add_special_tokens=False)
        return Encoding.merge([self._parts[part] for part in parts], growing_offsets=True)

    def _tokenize(self, draft: _Draft) -> list[np.ndarray]:
        """Return the document of `draft`; if a prompt that is tokenized alone has different tokens
        than in the document, the documents of its parts.
        """
        encodings = [self._encode(text) for text, _ in draft.pieces]
        ids = [token for encoding in encodings for token in encoding.ids]
        flags = bytearray()
        for encoding, (_, piece_flags) in zip(encodings, draft.pieces, strict=True):
            flags += bytes([piece_flags]) * len(encoding)
        if draft.inner and not self._mark(draft, encodings[0], flags):
            return [document for one in draft.split() for document in self._tokenize(one)]
        if draft.prefix is not None:
            # The text itself may contain the tokens at its beginning and end.
            prefix = () if tuple(ids[: len(draft.prefix)]) == draft.prefix else draft.prefix
            suffix = [] if ids[-1:] == [self.eos_token_id] else [self.eos_token_id]
            ids = [*prefix, *ids, *suffix]
            last = TRAINED | ANSWER | END if draft.turns else draft.flags
            flags = bytearray([draft.flags]) * len(prefix) + flags + bytes([last]) * len(suffix)
        document = np.empty(len(ids), TOKEN)
        document["id"] = ids
        document["flags"] = flags
        return [document]

    def _mark(self, draft: _Draft, encoding: Encoding, flags: bytearray) -> bool:
        """Set the flags of the inner answers. Return False if the tokens before an answer differ
        from the tokens of its prompt alone, or if a token spans the end of the answer.
        """
        ids = encoding.ids
        offsets = encoding.offsets
        starts = [start for start, _ in offsets]
        header = 0  # position of the prompt's last cutting token
        for turn in draft.inner:
            for match in self._cutting.finditer(turn.prompt, header):
                header = match.start()
            borders = len(turn.prompt), len(turn.prompt + turn.answer), len(turn.text)
            start, end, stop = (bisect_left(starts, border) for border in borders)
            alone = self._encode(turn.prompt[header:]).ids
            alike = ids[bisect_left(starts, header) : start] == alone and all(
                offsets[place - 1][1] <= border
                for place, border in zip((end, stop), borders[1:], strict=True)
            )
            if not alike and not draft.flags & TRAINED:
                return False
            flags[start:end] = bytes([TRAINED | ANSWER]) * (end - start)
            flags[end:stop] = bytes([TRAINED | ANSWER | END]) * (stop - end)
        return True
