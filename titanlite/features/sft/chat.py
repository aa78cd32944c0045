"""Chats through the tokenizer's own template: the prompt that the model gets, and the answer that
it should give.

**One rule.** The prompt of an answer is the text that the template renders for the messages before
it, with the generation prompt. The trained text is the part that follows this prompt when the
template renders the messages up to the answer, including the token that ends the turn.

- A generation prompt may end with a closed empty reasoning block that the completed turn omits. The
  block belongs to the prompt.
- A template may render earlier messages differently once the turn is completed. The answer then
  starts after the role header that ends the prompt.
- The end of a turn is found once per template, with made-up words, because an answer may contain
  any text.
- Every text of a message must appear in its turn's answer or in the next prompt. Otherwise the
  template drops the text, which is an error.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile
from os.path import commonprefix
from typing import Any, NamedTuple

from titanlite.base.errors import DataError
from titanlite.data.tokenizer import HFTokenizer
from titanlite.features.sft.chat_template import REMEDY, render_chat
from titanlite.features.sft.forms import REASONING, Chat, Messages
from titanlite.features.sft.readers import RowError

# Flags of a token: it counts in the loss; it is part of an answer; it ends an answer.
TRAINED = 1
ANSWER = 2
END = 4
# Keys of `ChatRenderer.counts` that deserve a warning; the last one is a prefix of several keys.
NO_END = "answers without an end"
SPELLED = "texts that contain special tokens"
DROPPED = "parts dropped by the template: "

# Words that occur in no template: for the question, the answer and the next message.
_WORDS = ("Kwyjqz", "Zqxjvq", "Wvkzxw")
_ARGUMENTS = {"a": _WORDS[1]}
_CALL = {"type": "function", "id": "callAB000", "function": {"name": "f", "arguments": _ARGUMENTS}}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": _PARAMETERS},
}

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_EMPTY_THOUGHT = re.compile(
    r"\s*(?:(?:<[^<>]*>|\[[^\[\]]*\])\s*(?:thought|analysis)?\s*)?"
    r"(?:</[^<>]*(?:think|thought|reason)[^<>]*>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>)\s*\Z",
    re.IGNORECASE,
)
_OPEN_THOUGHT = re.compile(r"(?:<[^/<>]*think[^<>]*>|\[THINK\])\s*\Z", re.IGNORECASE)
_OPEN_MARK = re.compile(r"<[^<>\s]*\Z|\[/?[A-Z_]*\Z")
_INDEX = re.compile(r"\[.*?\]|, .*")
_SPACE = re.compile(r"[\s\\]+")


class Turn(NamedTuple):
    """One answer as inference produces it: the model gets `prompt` and writes `answer` and `end`,
    the token that ends the turn.
    """

    prompt: str
    answer: str
    end: str

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.end


class Conversation(NamedTuple):
    """The turns to train on, and the text of the whole completed conversation."""

    turns: list[Turn]
    whole: str


class End(NamedTuple):
    """How the template ends a completed turn.

    Attributes:
        tail: the template's text after the answer, beginning with the token that ends the turn.
        text: the text that is trained in place of `tail`: that token, after white space if only a
            next message shows it; empty if no token ends the turn.
        header: generation prompt, if a completed turn begins with it.
    """

    tail: str = ""
    text: str = ""
    header: str = ""


class ChatRenderer:
    """Renderer of chats with the template of `tokenizer`. `date` is the template's current date in
    ISO format; empty: today.

    With `train_all`, every token is trained. With `warn_of_dropped`, parts that the template drops
    are counted instead of refused. `counts` has the number of chats or answers for each remark in
    the log.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        *,
        train_all: bool = False,
        warn_of_dropped: bool = False,
        date: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.train_all = train_all
        self.warn_of_dropped = warn_of_dropped
        self.counts: Counter[str] = Counter()
        self._date = date
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        self._special = any_of({*tokenizer.all_special_tokens, *special})
        self._ends: dict[str, End] = {}

    def render_prompt(self, chat: Chat) -> str:
        """Return the text that the model gets at inference to answer the last message of `chat`.
        Raises as `render_chat`.
        """
        chat = self._choose_arguments(chat)
        return self.show(chat, chat.messages, prompt=True)

    def render(self, chat: Chat) -> Conversation:
        """Return the answers of one chat, each as inference produces it.

        Raises:
            DataError: the tokenizer has no chat template.
            RowError: the template fails, drops a part, or shows an answer after a different prompt
                than at inference; or the chat has no answer.
        """
        answers = chat.answers
        if not answers and not self.train_all:
            raise RowError(
                "no trained token",
                "there is no message of the assistant to train on. Remove the row.",
            )
        if answers and answers[0] == 0:
            raise RowError(
                "no prompt",
                "the first message is the assistant's, so it answers nothing. Put a user's message "
                'before it, or give it "weight": 0.',
            )
        shown = self._choose_arguments(chat)
        prompts = [self.show(shown, shown.messages[:i], prompt=True) for i in answers]
        done = [self.show(shown, shown.messages[: i + 1]) for i in answers]
        turns = [self._find_turn(shown, *each) for each in zip(answers, prompts, done, strict=True)]
        is_last = answers[-1:] == (len(chat.messages) - 1,)
        whole = done[-1] if is_last else self.show(shown, shown.messages)
        dropped = _list_dropped(chat, turns, whole)
        if dropped and not self.warn_of_dropped:
            raise RowError(
                "dropped by the template", f"the chat template drops {dropped[0]}. {REMEDY}"
            )
        self.counts.update(f"{DROPPED}{_INDEX.sub('', name)}" for name in dropped)
        return Conversation(turns, whole)

    def count_spelled(self, text: str) -> None:
        """Count `text` if it contains special tokens as plain text: most likely it is a chat that a
        template has rendered before.
        """
        if self._special.search(text):
            self.counts[SPELLED] += 1

    def take_counts(self) -> Counter[str]:
        """Return `counts` since the last call, and reset them."""
        taken = self.counts
        self.counts = Counter()
        return taken

    def _find_turn(self, chat: Chat, i: int, prompt: str, done: str) -> Turn:
        """Return the turn of the answer messages[i]; `done` is the text of all messages up to
        it.
        """
        message = chat.messages[i]
        as_parts = isinstance(message["content"], list)
        end = self.get_end(chat, has_calls="tool_calls" in message, as_parts=as_parts)
        start = self._find_start(prompt, done, end.header)
        stop = len(done) - len(end.tail)
        if start is None or stop < start or not done.endswith(end.tail):
            same = _count_common(prompt, done)
            raise RowError(
                "prompt differs",
                f"the chat template shows messages[{i}] after a different prompt than at "
                f"inference: {prompt[same:][:40]!r} there, {done[same:][:40]!r} here. Give the "
                "answer the reasoning that the prompt opens, set an argument of the template with "
                "data.chat_template_kwargs, such as {enable_thinking = false}, or set "
                "data.chat_template to a template that shows both in the same way.",
            )
        if not end.text:
            self.counts[NO_END] += 1
        elif not end.tail.startswith(end.text):
            self.counts["answers that end with the first token of the next message"] += 1
        if not done.startswith(prompt) and _EMPTY_THOUGHT.search(prompt):
            self.counts["answers after empty reasoning that only the prompt shows"] += 1
        return Turn(prompt, done[start:stop], end.text)

    def _find_start(self, prompt: str, done: str, header: str) -> int | None:
        """Return where the answer begins in `done`, the text of the completed turn; None if `done`
        begins with a different prompt.
        """
        if done.startswith(prompt):
            return len(prompt)
        same = _count_common(prompt, done)
        more = prompt[same:]
        # The completed turn shows at most the end of an empty reasoning block, and opens no other
        # block.
        if _EMPTY_THOUGHT.fullmatch(more):
            starts = (match.start() for match in re.finditer(r"<|\[|\s+\Z|\Z", more))
            left = next(len(more) - k for k in starts if done.startswith(more[k:], same))
            if left or not _OPEN_THOUGHT.search(prompt, max(0, same - 80), same):
                return same + left
        # After a message of the assistant, or a tool's result, a turn may continue without a
        # header.
        if header and more == header:
            return same
        # The history differs: the answer starts after the same role header.
        for shown in (prompt, _EMPTY_THOUGHT.sub("", prompt)):
            marks = [*self._special.finditer(shown)]
            role = shown[marks[-1].start() :] if marks else ""
            place = done.rfind(role, same) if role else -1
            if place >= 0:
                return place + len(role)
        return None

    def get_end(self, chat: Chat, *, has_calls: bool, as_parts: bool) -> End:
        """Return how the template ends a turn, given the tools and arguments of `chat`.

        The turn has a call (`has_calls`), or content that is text or a list of parts (`as_parts`).
        The end of each kind of turn is found once.

        Raises DataError: the tokenizer has no chat template.
        """
        as_text = chat.arguments_as_text
        key = json.dumps([has_calls, as_parts, bool(chat.tools), as_text, chat.template_kwargs])
        if key not in self._ends:
            probe = replace(chat, tools=[_TOOL] if chat.tools else None)
            try:
                end = self._find_end(probe, has_calls=has_calls, as_parts=as_parts)
            except RowError:
                end = self.get_end(chat, has_calls=False, as_parts=as_parts) if has_calls else End()
            self._ends[key] = end
        return self._ends[key]

    def _find_end(self, chat: Chat, *, has_calls: bool, as_parts: bool) -> End:
        """Find how a completed turn ends, as `get_end`. Raises RowError: the template rejects or
        drops it.
        """

        def say(role: str, word: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": word}] if as_parts else word}

        asked = say("user", _WORDS[0])
        answer = say("assistant", _WORDS[1])
        then = say("user", _WORDS[2])
        if has_calls:
            answer |= {"content": "", "tool_calls": [_CALL]}
            then |= {"role": "tool", "name": "f", "tool_call_id": _CALL["id"]}
        prompt = self.show(chat, [asked], prompt=True)
        finished = self.show(chat, [asked, answer])
        header = prompt.removeprefix(self.show(chat, [asked]))
        if _WORDS[1] not in finished:
            raise RowError("dropped by the template", f"the chat template drops answers. {REMEDY}")
        try:
            followed = self.show(chat, [asked, answer, then])
        except RowError:
            followed = finished
        tail = finished.rpartition(_WORDS[1])[2]
        rest = followed.rpartition(_WORDS[1])[2].partition(_WORDS[2])[0]
        alike = len(commonprefix([tail, rest]))  # noqa: RUF071  these are no paths
        # A template may end the last turn of a chat differently than earlier turns.
        ends = [*self._special.finditer(tail, 0, alike)] or [*self._special.finditer(tail)][:1]
        role = self._special.search(header)  # if the next role header begins, the turn has ended
        own = [*takewhile(lambda match: not role or match.group() != role.group(), ends)]
        named = [match for match in own if match.group() == self.tokenizer.eos_token]
        header = header if finished.startswith(prompt) else ""
        if ends:
            end = (named or own[-1:] or ends)[0]
            return End(tail[end.start() :], end.group(), header)
        rest = rest[alike:]
        glue = rest[: len(rest) - len(rest.lstrip())]
        return End(tail[alike:], glue + self._get_first_token(rest.lstrip()), header)

    def _get_first_token(self, text: str) -> str:
        if match := self._special.match(text):
            return match.group()
        encoder = self.tokenizer.backend_tokenizer
        offsets = encoder.encode(text, add_special_tokens=False).offsets if text else []
        return next((text[start:stop] for start, stop in offsets if stop > start), "")

    def _choose_arguments(self, chat: Chat) -> Chat:
        """Return `chat` with the arguments of its calls as JSON text, if the template accepts that,
        but fails on objects or prints them in Python's syntax.
        """
        calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
        if not calls:
            return chat
        given = [call["function"]["arguments"] for call in calls]
        text = self._try_to_show(chat)
        if text and not any(_shows_python(text, value) for value in _walk(given)):
            return chat
        as_text = replace(chat, arguments_as_text=True)
        other = self._try_to_show(as_text)
        # A template that prints each argument separately may show nothing of a JSON text.
        if not other or (text and not all(_to_json(one) in other for one in given if one)):
            return chat
        self.counts["chats with tool arguments as JSON text"] += 1
        return as_text

    def _try_to_show(self, chat: Chat) -> str:
        """Return the text of `chat`, or "" if the template fails."""
        try:
            return self.show(chat, chat.messages)
        except RowError:
            return ""

    def show(self, chat: Chat, messages: Messages, *, prompt: bool = False) -> str:
        """Render `messages` with the tools and arguments of `chat`. Raises as `render_chat`."""
        if chat.arguments_as_text:
            messages = [_with_text_arguments(message) for message in messages]
        return render_chat(
            self.tokenizer,
            self._date,
            messages,
            chat.tools,
            chat.template_kwargs,
            prompt=prompt,
        )


def _count_common(prompt: str, done: str) -> int:
    """Return the length of the beginning that both texts share, without cutting a special token."""
    same = len(commonprefix([prompt, done]))  # noqa: RUF071  these are no paths
    while mark := _OPEN_MARK.search(prompt, max(0, same - 80), same):
        same = mark.start()
    return same


def _list_dropped(chat: Chat, turns: list[Turn], whole: str) -> list[str]:
    """Name the texts of the chat that the template does not show: templates ignore unknown
    fields.
    """
    shown = [*(turn.prompt for turn in turns), whole]
    dropped: list[str] = []
    for i, message in enumerate(chat.messages):
        place = bisect_left(chat.answers, i)
        trained = i in chat.answers
        text = turns[place].answer if trained else shown[place]
        parts = _list_texts(message, with_thought=trained)
        dropped += [f"messages[{i}]{name}" for name, part in parts if not shows(text, part)]
    for k, tool in enumerate(chat.tools or ()):
        parts = _list_tool_texts(tool)
        dropped += [f"tools[{k}]{name}" for name, part in parts if not shows(shown[0], part)]
    return dropped


def _list_texts(message: dict[str, Any], *, with_thought: bool) -> Iterator[tuple[str, str]]:
    """Yield the texts that a rendered message must show, with their fields. The reasoning of an
    answer that is not trained may be dropped, as at inference.
    """
    role = message["role"]
    content = message.get("content") or ""
    if isinstance(content, list):
        yield from ((".content", part.get("text", "")) for part in content)
        return
    thought = _THOUGHT.search(content)
    if with_thought and thought:
        yield ".content (its thought)", thought[1]
    name = ".content" if role == "assistant" else f", of the role '{role}'"
    yield name, content[thought.end() :] if thought else content
    given = [key for key in REASONING if isinstance(message.get(key), str)]
    if with_thought and given:
        yield f".{given[0]}", message[given[0]]
    for k, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield (
            f".tool_calls{f'[{k}]' if k else ''}, a call of '{function['name']}'",
            function["name"],
        )
        for key, value in function["arguments"].items():
            where = f".tool_calls[{k}].function.arguments['{key}']"
            yield where, key
            yield from ((where, text) for text in _walk(value) if isinstance(text, str))


def _list_tool_texts(tool: dict[str, Any]) -> Iterator[tuple[str, str]]:
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    for key in ("name", "description"):
        if isinstance(function.get(key), str):
            yield f".{key}", function[key]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    for name in properties if isinstance(properties, dict) else ():
        yield f".parameters.{name}", name


def _walk(value: Any) -> Iterator[Any]:
    """Yield a JSON value, and all values in it."""
    yield value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _walk(item)


def shows(rendered: str, text: str) -> bool:
    """Return True if `rendered` contains `text`, as it is or escaped as in a JSON string.
    Differences in white space do not count, because templates change it.
    """
    text = text.strip()
    forms = [text, _to_json(text)[1:-1], json.dumps(text)[1:-1]]
    if any(form in rendered for form in forms):
        return True
    bare = _SPACE.sub("", rendered)
    return any(_SPACE.sub("", form) in bare for form in forms)


def _shows_python(rendered: str, value: Any) -> bool:
    """Return True if `rendered` contains a list or an object in Python's syntax, where it differs
    from JSON.
    """
    text = str(value) if isinstance(value, dict | list) else ""
    return text in rendered and text not in ("", _to_json(value))


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the arguments of its calls as JSON text, for templates that accept
    nothing else.
    """
    message = deepcopy(message)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = _to_json(call["function"]["arguments"])
    return message


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def any_of(tokens: set[str]) -> "re.Pattern[str]":
    """Return a pattern that matches any of `tokens`, the longest first, so that <|end|> does not
    match inside <|im_end|>.
    """
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def get_end_token(tokenizer: HFTokenizer) -> list[int]:
    """Return the special token that ends an answer without calls in the tokenizer's chat template;
    empty if there is none.
    """
    try:
        end = ChatRenderer(tokenizer).get_end(Chat([]), has_calls=False, as_parts=False)
    except DataError:  # it has no template
        return []
    ids: list[int] = tokenizer.encode(end.text, add_special_tokens=False)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [token for token in ids[-1:] if token in special]
