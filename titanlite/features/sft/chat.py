"""Chats through the tokenizer's own template, and which part of the text is an answer.

**One turn is trained as inference will produce it.** Its prompt is `apply_chat_template(messages
before it, add_generation_prompt=True)`; the trained text is what the finished turn shows after that
prompt, up to and including the token that ends it. A template is a program: what it does with a
message is known only by running it. So the turn is rendered with other texts in its place, and the
texts are compared:

- **Start**: the prompt. A closed empty thought that the generation prompt adds and the finished
  turn does not show belongs to the prompt; any other difference is an error, because inference
  would never ask for this answer.
- **End**: the first special token that the finished turn, and the same turn followed by a message,
  show alike. Where there is none, the first token of the message that follows.
- **Dropped part**: a part (a call, an argument, a tool) whose replacement does not change the text
  is an error.

Results are cached per kind of message, so that most rows are rendered twice: as prompt and
finished.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

from titanlite.base.errors import DataError
from titanlite.features.sft.chat_frame import (
    PROBES,
    Frame,
    FrameFinder,
    Part,
    change_message,
    change_tool,
    get_common_start,
    get_shape,
    list_parts,
    list_python_texts,
    put_probe,
)
from titanlite.features.sft.chat_template import REMEDY, ChatTemplate, Marks
from titanlite.features.sft.forms import Chat, Messages
from titanlite.features.sft.readers import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Bits of a token: the loss is taken on it; it is part of an answer; it ends an answer.
TRAINED, ANSWER, END = 1, 2, 4
# Kinds of `ChatRenderer.counts` that are worth a warning; the last is a prefix of several.
NO_END = "answers without an end"
SPELLED = "texts that spell special tokens"
DROPPED = "parts dropped by the template: "

_LONG = 500  # characters of an answer that is more than marks
_INDEX = re.compile(r"\[.*?\]|, .*")


@dataclass(frozen=True)
class Turn:
    """One answer as inference produces it: the model gets `prompt` and writes `body` and `end`. Of
    `body` only `marks` are trained, places that the template marks with {% generation %}; None: all
    of it.
    """

    prompt: str
    body: str
    end: str
    marks: tuple[tuple[int, int], ...] | None = None

    @cached_property
    def text(self) -> str:
        return self.prompt + self.body + self.end


@dataclass(frozen=True)
class Conversation:
    """Turns to train on; the finished conversation; and whether each turn's prompt begins with the
    turn before.
    """

    turns: list[Turn]
    joined: bool
    whole: str


class ChatRenderer:
    """Renderer of chats with the template of `tokenizer`; `date` is its date of today, as ISO text
    (empty: the actual).

    With `train_all` every token is trained; with `warn_of_dropped` parts that the template drops
    are counted, not refused. `counts`: chats or answers, by the remark that the log makes about
    them.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        train_all: bool = False,
        warn_of_dropped: bool = False,
        date: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, date)
        self.train_all = train_all
        self.warn_of_dropped = warn_of_dropped
        self.counts: Counter[str] = Counter()
        self._finder = FrameFinder(tokenizer)
        self.cutting = self._finder.cutting  # tokens on whose two sides text is tokenized apart
        self._frames: dict[object, Frame] = {}
        self._lost: dict[object, tuple[int, ...]] = {}
        self._as_text: dict[object, bool] = {}

    def render_prompt(self, chat: Chat) -> str:
        """Return the text that the model gets at inference to answer all messages of `chat`; raises
        as `ChatTemplate.render`.
        """
        chat = self._prepare(chat)
        return self._apply(chat, chat.messages, prompt=True)

    def render(self, chat: Chat) -> Conversation:
        """Return the answers of one chat, each as inference produces it.

        Raises:
            DataError: the tokenizer has no chat template.
            RowError: the template fails, drops a part, or shows an answer after another prompt than
                at inference; or the chat has no answer.
        """
        answers = [
            i
            for i, message in enumerate(chat.messages)
            if message["role"] == "assistant" and i >= chat.answers_from and i not in chat.untrained
        ]
        if not answers and not self.train_all:
            raise RowError(
                "no trained token",
                "there is no message of the assistant to train on. Remove the row.",
            )
        if answers and answers[0] == 0:
            raise RowError(
                "no prompt",
                "the first message is the assistant's, so it answers nothing. Put a user's message "
                "before it, or give "
                'it "weight": 0.',
            )
        chat = self._prepare(chat)
        keys = _list_keys(chat, answers)
        prompts = self._apply_all(chat, [chat.messages[:i] for i in answers], prompt=True)
        texts = self._apply_all(chat, [chat.messages[: i + 1] for i in answers])
        turns = [
            self._find_turn(chat, i, keys[i], prompt, *shown)
            for i, (prompt, _), shown in zip(answers, prompts, texts, strict=True)
        ]
        whole = (
            texts[-1][0]
            if answers and answers[-1] == len(keys) - 1
            else self._apply(chat, chat.messages)
        )
        self._check_parts(chat, keys, answers)
        joined = all(after.prompt.startswith(turn.text) for turn, after in pairwise(turns))
        return Conversation(turns, joined, whole)

    def count_spelled(self, text: str) -> None:
        """Count a text that spells special tokens of the template: a chat that was rendered before,
        most likely.
        """
        if any(token in text for token in self._spelled):
            self.counts[SPELLED] += 1

    @cached_property
    def _spelled(self) -> list[str]:
        """Special tokens that the template spells, or without one all; and those that begin and end
        any text, which `build_end_reader` has taken off its ends.
        """
        template = str(self.tokenizer.chat_template or "")
        named: dict[str, Any] = self.tokenizer.special_tokens_map
        plain = {named.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        tokens = {
            match.group() for match in self._finder.special.finditer(template)
        } or self._finder.special_tokens
        ends = {named[name] for name in ("bos_token", "eos_token") if name in named}
        return sorted((tokens - plain) | ends)

    def take_counts(self) -> dict[str, int]:
        """Return `counts` since the last call."""
        taken, self.counts = dict(self.counts), Counter()
        return taken

    def _prepare(self, chat: Chat) -> Chat:
        first = next((message for message in chat.messages if message.get("tool_calls")), None)
        if first is None:
            return chat
        key = (get_shape(first), bool(chat.tools), str(chat.template_kwargs))
        if key not in self._as_text:
            self._as_text[key] = self._needs_text(chat)
        if not self._as_text[key]:
            return chat
        self.counts["chats with tool arguments as JSON text"] += 1
        return replace(chat, arguments_as_text=True)

    def _needs_text(self, chat: Chat) -> bool:
        """Return True if the template fails on objects as arguments, or prints them as Python, and
        takes JSON text.
        """
        calls = [
            call["function"]["arguments"]
            for message in chat.messages
            for call in message.get("tool_calls", ())
        ]
        try:
            text = self._apply(chat, chat.messages)
        except RowError:
            text = ""
        if text and not any(
            value in text for arguments in calls for value in list_python_texts(arguments)
        ):
            return False
        try:
            other = self._apply(replace(chat, arguments_as_text=True), chat.messages)
        except RowError:
            return False
        # A template that prints each argument by itself may show nothing of JSON text.
        return not text or all(
            json.dumps(arguments, ensure_ascii=False) in other for arguments in calls if arguments
        )

    def _find_turn(
        self, chat: Chat, i: int, key: object, prompt: str, done: str, marks: Marks | None
    ) -> Turn:
        """Return the turn of the answer messages[i]; `done` is the text of the conversation up to
        and including it.
        """
        frame = self._frames.get(key)
        start = None if frame is None else frame.get_start(prompt, done)
        if frame is None or start is None:
            found = self._finder.probe(
                lambda messages: self._apply(chat, messages), chat.messages[: i + 1], prompt
            )
            if (
                found is None
                and not self._finder.mark.sub("", done[get_common_start(prompt, done) :]).strip()
            ):
                raise _shows_nothing(chat, i)
            if found is None:
                raise self._wrong_prompt(chat, i, prompt, done)
            frame, start = found
            self._frames[key] = frame
        if not done.endswith(frame.tail) or len(done) - len(frame.tail) < start:
            raise self._wrong_prompt(chat, i, prompt, done)
        stop = len(done) - len(frame.tail)
        body = done[start:stop] + frame.glue
        if (
            len(body) < _LONG
            and not body[:1].isalnum()
            and not self._finder.mark.sub("", body).strip()
        ):
            raise _shows_nothing(chat, i)
        inside = None
        if marks is not None:
            inside = tuple(
                (max(a, start) - start, min(b, stop) - start)
                for a, b in marks
                if a < stop and b > start
            )
            if not inside:
                text = (
                    f"the template's {{% generation %}} marks leave no token of messages[{i}]. "
                    f"{REMEDY}"
                )
                raise RowError("no trained token", text)
        if not frame.end:
            self.counts[NO_END] += 1
        elif not frame.tail.startswith(frame.end):
            self.counts["answers that end with the first token of the next message"] += 1
        if frame.more:
            self.counts["answers after an empty thought that only the prompt shows"] += 1
        return Turn(prompt, body, frame.end, inside)

    def _check_parts(self, chat: Chat, keys: list[object], answers: list[int]) -> None:
        """Refuse or count parts of the chat that the text does not show: templates ignore fields
        they do not know.
        """
        if not chat.tools and not any(map(self._lost.get, keys, repeat((0,)))):
            return
        size = len(chat.messages)
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        first = turns[0] if turns else size
        lost: list[str] = []
        for k, tool in enumerate(chat.tools or ()):
            key = (
                k,
                len(chat.tools or ()),
                tuple(list_parts(change_tool, tool)),
                str(chat.template_kwargs),
            )
            lost += self._find_lost(chat, "tools", k, key, first, prompt=bool(turns))
        for i, key in enumerate(keys):
            trained = i in answers
            stop = i + 1 if trained else next((turn for turn in turns if turn > i), size)
            # Thoughts of turns that are not trained may be dropped, as at inference.
            prompt = stop < size and not trained
            lost += self._find_lost(chat, "messages", i, key, stop, prompt=prompt, thoughts=trained)
        if lost and not self.warn_of_dropped:
            text = (
                f"the chat template drops {lost[0]}. "
                f"{REMEDY}{self._template.describe_arguments(chat.tools)}"
            )
            raise RowError("dropped by the template", text)
        for name in lost:
            self.counts[f"{DROPPED}{_INDEX.sub('', name)}"] += 1

    def _find_lost(
        self,
        chat: Chat,
        field: str,
        i: int,
        key: object,
        stop: int,
        *,
        prompt: bool,
        thoughts: bool = True,
    ) -> list[str]:
        """Name the parts of message or tool `i` whose probes do not change the text of the first
        `stop` messages.
        """
        if not self._lost.get(key, (0,)):
            return []
        change, whole = change_tool if field == "tools" else change_message, getattr(chat, field)[i]
        parts = list_parts(change, whole)

        def show(other: dict[str, Any]) -> str:
            items = [*getattr(chat, field)]
            items[i] = other
            changed = replace(chat, **{field: items})
            return self._apply(changed, changed.messages[:stop], prompt=prompt)

        def is_lost(part: Part) -> bool:
            try:
                text = show(whole)
                return all(text == show(put_probe(change, whole, part, probe)) for probe in PROBES)
            except RowError:
                return False  # a template that refuses another value looks at it

        if key not in self._lost:
            looked_at = [
                (n, part) for n, part in enumerate(parts) if thoughts or part.kind != "thought"
            ]
            self._lost[key] = tuple(n for n, part in looked_at if is_lost(part))
        return [f"{field}[{i}]{parts[n].name}" for n in self._lost[key]]

    def _apply(self, chat: Chat, messages: Messages, *, prompt: bool = False) -> str:
        return self._apply_all(chat, [messages], prompt=prompt)[0][0]

    def _apply_all(
        self, chat: Chat, conversations: list[Messages], *, prompt: bool = False
    ) -> list[tuple[str, Marks | None]]:
        if chat.arguments_as_text:
            conversations = [
                [_with_text_arguments(message) for message in messages]
                for messages in conversations
            ]
        return self._template.render(conversations, chat.tools, chat.template_kwargs, prompt=prompt)

    def _wrong_prompt(self, chat: Chat, index: int, prompt: str, done: str) -> RowError:
        same = self._finder.cut_mark(get_common_start(prompt, done), prompt, done)
        text = (
            f"the chat template shows messages[{index}] after another prompt than at inference: "
            f"{prompt[same:][:40]!r} there, {done[same:][:40]!r} here. Give the answer the thought "
            "that the prompt opens, or set data.chat_template to a template that shows both "
            f"alike.{self._template.describe_arguments(chat.tools)}"
        )
        return RowError("prompt differs", text)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the arguments of its calls as JSON text, for templates that take
    nothing else.
    """
    if "tool_calls" not in message:
        return message
    calls = [
        call
        | {
            "function": call["function"]
            | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        }
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _list_keys(chat: Chat, answers: list[int]) -> list[object]:
    """List a key for each message, of all that decides how the template shows it: its kind,
    neighbours and roles.

    An answer is rendered as the last message.
    """
    shapes = [get_shape(message) for message in chat.messages]
    roles = [shape[0] for shape in shapes]
    common = roles[0], len(chat.tools or ()), str(chat.template_kwargs)
    keys: list[object] = []
    for i in range(len(roles)):
        stop, later = (i + 1, None) if i in answers else (i + 2, frozenset(roles[i + 1 :]))
        keys.append((i == 0, "user" in roles[:i], *shapes[max(0, i - 1) : stop], later, *common))
    return keys


def get_end_token(tokenizer: "PreTrainedTokenizerFast") -> int | None:
    """Return the special token that ends an answer of the tokenizer's chat template; None if there
    is none.
    """
    chat = Chat(
        [{"role": "user", "content": PROBES[0]}, {"role": "assistant", "content": PROBES[1]}]
    )
    try:
        turn = ChatRenderer(tokenizer).render(chat).turns[0]
    except (DataError, RowError):
        return None  # it has no template, or one that wants more than every chat has
    ids: list[int] = tokenizer.encode(turn.end, add_special_tokens=False)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return ids[-1] if ids and ids[-1] in special else None


def _shows_nothing(chat: Chat, i: int) -> RowError:
    parts = [
        part.name
        for part in list_parts(change_message, chat.messages[i])
        if ".tool_calls" in part.name
    ]
    text = (
        f"drops messages[{i}]{parts[0]}"
        if parts
        else f"shows nothing of messages[{i}], an answer of the assistant"
    )
    return RowError("dropped by the template", f"the chat template {text}. {REMEDY}")
