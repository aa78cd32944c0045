"""Frames that a chat template writes around answers, and the parts of a message that it shows:
found by rendering other texts in their place.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.features.sft.forms import REASONING, Messages
from titanlite.features.sft.readers import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Show = Callable[[Messages], str]  # a finished conversation as text

# Two words that occur in no text and differ at both ends, so that what two renderings have in
# common is the template's.
PROBES = ("Zqxjvq", "Wvkzxw")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_NUMBERS: dict[str, int] = {PROBES[0]: 70351, PROBES[1]: 94082}
_FOLLOWING = "\u00e6"
_MARK = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]+\]")
_CLOSED = (
    r"\s*(?:(?:<[^<>]*>|\[[^\[\]]*\])\s*(?:thought|analysis)?\s*)?"
    r"(?:</[^<>]*(?:think|thought|reason)[^<>]*>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>)\s*"
)
_CLOSED_THOUGHT, _ENDING_THOUGHT = (
    re.compile(pattern, re.IGNORECASE) for pattern in (_CLOSED, rf"{_CLOSED}\Z")
)


@dataclass(frozen=True)
class Frame:
    """Text that the template writes around an answer of one kind.

    Attributes:
        more: end of the prompt that the finished turn does not show: a closed empty thought.
        left: the part of `more` that the finished turn does show.
        tail: end of the finished turn, from the end-of-turn token on.
        glue: white space between answer and end where the finished turn itself shows no end.
        end: the token that ends the turn; empty if there is none.
    """

    more: str = ""
    left: str = ""
    tail: str = ""
    glue: str = ""
    end: str = ""

    def get_start(self, prompt: str, done: str) -> int | None:
        """Return where the answer starts in `done`; None if these texts have another frame."""
        if not done.endswith(self.tail):
            return None
        if done.startswith(prompt):
            return len(prompt)
        if not self.more or not prompt.endswith(self.more):
            return None
        start = prompt[: -len(self.more)] + self.left
        return len(start) if done.startswith(start) else None


class FrameFinder:
    """Finder of the frames of answers in the template's text, with the special tokens of
    `tokenizer`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        self.special_tokens = {
            *tokenizer.all_special_tokens,
            *(token.content for token in added if token.special),
        }
        self.special = _any_of(self.special_tokens)
        # Text on the two sides of these is tokenized apart.
        self.cutting = _any_of(
            {
                t.content
                for t in added
                if not (t.lstrip or t.rstrip or t.single_word or t.normalized)
            }
        )
        contents = {token.content for token in added} | self.special_tokens
        self.mark = re.compile(f"{_any_of(contents).pattern}|{_MARK.pattern}")

    def probe(self, show: Show, messages: Messages, prompt: str) -> tuple[Frame, int] | None:
        """Return the frame that the template writes around the last of `messages`, and where this
        answer starts.

        Found by rendering other texts in its place. None if the finished turn shows another prompt
        or nothing of the answer; RowError if the template fails.
        """
        finished = [[*messages[:-1], probe_message(messages[-1], probe)] for probe in PROBES]
        done = [show(chat) for chat in finished]
        if done[0] == done[1]:
            return None
        found = self._find_start(show, messages, prompt, done)
        if found is None:
            return None
        more, left, start = found
        tail = get_common_end(*done)
        body = done[0][start : len(done[0]) - len(tail)]
        follows = _get_following(show, finished)
        alike = len(tail) if follows is None else get_common_start(tail, follows)
        ends = [match for match in self.special.finditer(tail) if match.end() <= alike]
        end = self._choose_end(show, messages, prompt, ends, body + tail[:alike])
        end = end or self.special.search(tail)  # of no message but the last one
        if end is not None:
            return Frame(more, left, tail[end.start() :], "", end.group()), start
        # what the next message says ends nothing
        rest = (follows or "")[alike:].partition(_FOLLOWING)[0]
        glue = rest[: len(rest) - len(rest.lstrip())]
        return Frame(more, left, tail[alike:], glue, self._get_first_token(rest.lstrip())), start

    def _find_start(
        self, show: Show, messages: Messages, prompt: str, done: list[str]
    ) -> tuple[str, str, int] | None:
        """Find `more` and `left` of a frame, and the answer's start in `done`; None if the turn
        shows another prompt, and not only in its history.
        """
        if done[0].startswith(prompt):
            return "", "", len(prompt)
        same = self.cut_mark(get_common_start(*done, prompt), prompt, done[0])
        more = prompt[same:]
        if _CLOSED_THOUGHT.fullmatch(more):
            place = next(
                (k for k in range(same, len(prompt)) if done[0].startswith(prompt[k:], same)),
                len(prompt),
            )
            return more, prompt[place:], same + len(prompt) - place
        if _begins_with_thought(show, messages, same, done):
            return more, "", same
        # The history differs: the answer starts after the same role mark.
        for shown in (prompt, _ENDING_THOUGHT.sub("", prompt)):
            marks = list(self.special.finditer(shown))
            role = shown[marks[-1].start() :] if marks else ""
            place = done[0].rfind(role, same, get_common_start(*done)) if role else -1
            if place >= 0:
                return "", "", place + len(role)
        # A role mark that the finished turn leaves out because the turn before is the assistant's,
        # too.
        plain = [
            {"role": "user", "content": PROBES[0]},
            {"role": "assistant", "content": PROBES[1]},
        ]
        shown = show(plain) if len(messages) > 2 else ""
        if shown[: max(0, shown.rfind(PROBES[1]))].endswith(_ENDING_THOUGHT.sub("", more)):
            return "", "", same
        return None

    def _choose_end(
        self, show: Show, messages: Messages, prompt: str, ends: list["re.Match[str]"], answer: str
    ) -> "re.Match[str] | None":
        """Return the first of the special tokens `ends` that ends every turn and is not inside of
        answers; or None.
        """
        if messages[-1].get("tool_calls") and ends:  # those of a call may end each call of several
            try:
                plain = self.probe(
                    show, [*messages[:-1], {"role": "assistant", "content": PROBES[0]}], prompt
                )
            except RowError:
                plain = None
            for match in ends if plain is not None else ():
                if plain is not None and match.group() == plain[0].end:
                    return match
        return next((match for match in ends if answer.count(match.group()) == 1), None)

    def _get_first_token(self, text: str) -> str:
        if not text:
            return ""
        encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        return next((text[start:stop] for start, stop in encoding.offsets if stop > start), "")

    def cut_mark(self, length: int, *texts: str) -> int:
        """Return `length`, or less where that is inside of a mark in one of `texts`."""
        for text in texts:
            window = max(0, length - 80)
            for match in self.mark.finditer(text, window):
                if match.start() < length < match.end():
                    length = match.start()
        return length


def _get_following(show: Show, finished: list[Messages]) -> str | None:
    """Return the end that the `finished` conversations have in common when a message follows; None
    if none can.
    """
    calls = finished[0][-1].get("tool_calls")
    user = {"role": "user", "content": _FOLLOWING}
    result = {"role": "tool", "content": _FOLLOWING}
    if calls:
        result |= {"name": calls[0]["function"]["name"], "tool_call_id": calls[0].get("id", "")}
    for message in (result, user) if calls else (user,):
        try:
            texts = [show([*messages, message]) for messages in finished]
        except RowError:
            continue
        return get_common_end(*texts)
    return None


def _begins_with_thought(show: Show, messages: Messages, start: int, done: list[str]) -> bool:
    """Return whether the thought of the last message follows at `start`, after what the prompt
    opens.
    """
    place = get_common_start(*done)
    message = messages[-1]
    thought = next(
        (part for part in list_parts(change_message, message) if part.kind == "thought"), None
    )
    if thought is None or done[0][start:place].strip():
        return False
    texts = [
        show([*messages[:-1], put_probe(change_message, message, thought, probe)])
        for probe in PROBES
    ]
    return get_common_start(*texts) == place


def _any_of(tokens: set[str]) -> "re.Pattern[str]":
    # Longest first, so that <|end|> is not found inside <|im_end|>.
    longest_first = sorted(tokens - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


class Part(NamedTuple):
    """One value of a message or a tool that a template can drop.

    Attributes:
        name: how it continues the name of the whole.
        kind: "value", "thought", or "name", of an argument or of a call that has arguments.
    """

    name: str
    kind: str = "value"


# What to put in place of a part, given it and its value.
Change = Callable[[Part, Any], Any]


def get_shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return the kind of a message: everything that templates are known to look at, except its
    words.
    """
    content = message.get("content", "")
    if len(message) == 2:  # most are role and content alone
        return message["role"], bool(content) and not content.isspace(), "</think>" in content
    calls = tuple(
        tuple(
            (type(value), any(list_python_texts(value)))
            for value in call["function"]["arguments"].values()
        )
        for call in message.get("tool_calls", ())
    )
    thoughts = tuple(key for key in REASONING if message.get(key))
    return (
        message["role"],
        bool(content.strip()),
        "</think>" in content,
        thoughts,
        calls,
        len(message),
    )


def list_python_texts(value: Any) -> list[str]:
    """List how Python prints the objects and lists in `value`, itself included, where JSON
    differs.
    """
    if not isinstance(value, dict | list) or not value:
        return []
    text = str(value)
    if text == json.dumps(value, ensure_ascii=False):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [text, *(found for one in inner for found in list_python_texts(one))]


def change_message(message: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return `message` with each of its parts changed: content, thought, and names and arguments of
    calls.
    """

    def change_text(name: str, text: str, kind: str = "value") -> str:
        return change(Part(name, kind), text) if text.strip() else text

    other, content, role = dict(message), message.get("content"), message["role"]
    if isinstance(content, list):  # images are among them
        other["content"] = [
            p | {"text": change_text(".content", p["text"])} if p["type"] == "text" else p
            for p in content
        ]
    elif content and (found := _THOUGHT.search(content)):
        thought = change_text(".content (its thought)", found.group(1), "thought")
        rest = change_text(".content", content[found.end() :])
        other["content"] = f"{content[: found.start(1)]}{thought}</think>{rest}"
    elif content:
        other["content"] = change_text(
            ".content" if role == "assistant" else f", of the role '{role}'", content
        )
    thoughts = [
        key for key in REASONING if isinstance(message.get(key), str) and message[key].strip()
    ]
    # one is enough
    other |= {key: change_text(f".{thoughts[0]}", message[key], "thought") for key in thoughts}
    if "tool_calls" in message:
        other["tool_calls"] = [
            _change_call(k, call, change) for k, call in enumerate(message["tool_calls"])
        ]
    return other


def _change_call(k: int, call: dict[str, Any], change: Change) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    part = Part(
        f".tool_calls{f'[{k}]' if k else ''}, a call of '{name}'", "name" if arguments else "value"
    )
    name = change(part, name)  # first: a call that is dropped is named as a whole
    where = f".tool_calls[{k}].function.arguments"
    changed = {
        change(Part(f"{where}['{key}'], its name", "name"), key): change(
            Part(f"{where}['{key}']"), value
        )
        for key, value in arguments.items()
    }
    return call | {"function": call["function"] | {"name": name, "arguments": changed}}


def change_tool(tool: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return `tool` with each of its parts changed: its name, description, and names of
    parameters.
    """
    inside = isinstance(tool.get("function"), dict)
    function = dict(tool["function"] if inside else tool)
    for key in ("name", "description"):
        if isinstance(function.get(key), str) and function[key].strip():
            function[key] = change(Part(f".{key}"), function[key])
    parameters = function.get("parameters")
    if isinstance(parameters, dict) and isinstance(
        properties := parameters.get("properties"), dict
    ):
        changed = {
            change(Part(f".parameters.{name}"), name): value for name, value in properties.items()
        }
        function["parameters"] = parameters | {"properties": changed}
    return tool | {"function": function} if inside else function


def list_parts(change_whole: Callable[..., Any], whole: dict[str, Any]) -> list[Part]:
    """List the parts of `whole`, a message or a tool, that `change_whole` changes, except empty
    arguments.
    """
    found: dict[Part, Any] = {}
    change_whole(whole, lambda part, value: found.setdefault(part, value))
    return [part for part, value in found.items() if value not in ("", None, [], {})]


def put_probe(
    change_whole: Callable[..., Any], whole: dict[str, Any], part: Part, probe: str
) -> dict[str, Any]:
    """Return `whole` with `probe` in place of one part."""
    changed: dict[str, Any] = change_whole(
        whole, lambda other, value: _like(value, probe) if other == part else value
    )
    return changed


def probe_message(message: dict[str, Any], probe: str) -> dict[str, Any]:
    """Return `message` with `probe` in place of all its texts."""
    return change_message(
        message, lambda part, value: value if part.kind == "name" else _like(value, probe)
    )


def _like(value: Any, probe: str) -> Any:
    """Return a probe of the type of `value`, because templates write each type in their own way."""
    if isinstance(value, bool):
        return (not value) if probe == PROBES[0] else value
    if isinstance(value, int | float):
        return _NUMBERS[probe]
    return (
        [probe] if isinstance(value, list) else {probe: probe} if isinstance(value, dict) else probe
    )


def get_common_start(*texts: str) -> int:
    """Count the characters that all `texts` begin with alike."""
    first, last = min(texts), max(texts)  # what these two begin with, all do
    return next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )


def get_common_end(*texts: str) -> str:
    """Return the end that all `texts` have in common."""
    length = get_common_start(*(text[::-1] for text in texts))
    return texts[0][len(texts[0]) - length :]
