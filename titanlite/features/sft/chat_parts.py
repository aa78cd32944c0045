"""Parts of a message, and other values in their place: what a template does with a part shows when it changes."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from titanlite.features.sft.forms import REASONING

# Two words that occur in no text and differ at both ends, so that what two renderings have in common is the template's.
PROBES = ("Zqxjvq", "Wvkzxw")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_NUMBERS: dict[str, int] = {PROBES[0]: 70351, PROBES[1]: 94082}


class Part(NamedTuple):
    """One value of a message or a tool: its name, as it continues that of the whole, and how to put a probe there."""

    name: str
    replace: Callable[[str], dict[str, Any]]
    is_thought: bool = False


def get_shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return the kind of a message: everything but its words that templates are known to look at."""
    content = message.get("content", "")
    if len(message) == 2:  # most are role and content alone
        return message["role"], bool(content) and not content.isspace(), "</think>" in content
    calls = tuple(
        tuple((type(value), any(list_python_texts(value))) for value in call["function"]["arguments"].values())
        for call in message.get("tool_calls", ())
    )
    thoughts = tuple(key for key in REASONING if message.get(key))
    return message["role"], bool(content.strip()), "</think>" in content, thoughts, calls, len(message)


def list_python_texts(value: Any) -> list[str]:
    """How Python writes the objects and lists in `value`, itself included, as far as JSON writes them otherwise."""
    if not isinstance(value, dict | list) or not value:
        return []
    text = str(value)
    if text == json.dumps(value, ensure_ascii=False):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [text, *(found for one in inner for found in list_python_texts(one))]


def get_parts(message: dict[str, Any]) -> Iterator[Part]:
    """Yield the parts of a message that a template can drop: content, thought, and names and arguments of calls."""
    content = message.get("content", "")
    if not isinstance(content, str):  # a list of parts, images among them
        return
    if found := _THOUGHT.search(content):
        if found.group(1).strip():
            yield Part(".content (its thought)", _put(message, ("content",), _around(content, *found.span(1))), True)
        if content[found.end() :].strip():
            yield Part(".content", _put(message, ("content",), _around(content, found.end(), len(content))))
    elif content.strip():
        name = ".content" if message["role"] == "assistant" else f", of the role '{message['role']}'"
        yield Part(name, _put(message, ("content",), str))
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            yield Part(f".{key}", _put(message, (key,), str), True)
            break
    for k, call in enumerate(message.get("tool_calls", ())):
        path = ("tool_calls", k, "function")
        which = f"[{k}]" if k else ""
        yield Part(f".tool_calls{which}, a call of '{call['function']['name']}'", _put(message, (*path, "name"), str))
        for name, value in call["function"]["arguments"].items():
            where = f".tool_calls[{k}].function.arguments['{name}']"
            yield Part(f"{where}, its name", _put(message, (*path, "arguments"), _renamed(call, name)))
            if value not in ("", None, [], {}):
                yield Part(where, _put(message, (*path, "arguments", name), _like(value)))


def get_tool_parts(tool: dict[str, Any]) -> Iterator[Part]:
    """Yield the parts of a tool that a template can drop: its name, description and parameters."""
    inside: tuple[str, ...] = ("function",) if isinstance(tool.get("function"), dict) else ()
    function = tool["function"] if inside else tool
    for key in ("name", "description"):
        if isinstance(function.get(key), str) and function[key].strip():
            yield Part(f".{key}", _put(tool, (*inside, key), str))
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    for name in properties if isinstance(properties, dict) else ():
        new = _renamed({"function": {"arguments": properties}}, name)
        yield Part(f".parameters.{name}", _put(tool, (*inside, "parameters", "properties"), new))


def probe_message(message: dict[str, Any], probe: str) -> dict[str, Any]:
    """`message` with `probe` in place of everything that it says."""
    other = dict(message)
    content = message.get("content", "")
    if isinstance(content, list):
        other["content"] = [part | {"text": probe} if part["type"] == "text" else part for part in content]
    elif found := _THOUGHT.search(content):
        inner, rest = (probe if text.strip() else text for text in (found.group(1), content[found.end() :]))
        other["content"] = f"{content[: found.start(1)]}{inner}</think>{rest}"
    elif content.strip():
        other["content"] = probe
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            other[key] = probe
    if "tool_calls" in message:
        other["tool_calls"] = [_probe_call(call, probe) for call in message["tool_calls"]]
    return other


def _probe_call(call: dict[str, Any], probe: str) -> dict[str, Any]:
    function = call["function"]
    if not function["arguments"]:
        return call | {"function": function | {"name": probe}}
    return call | {"function": function | {"arguments": {k: _like(v)(probe) for k, v in function["arguments"].items()}}}


def get_common_start(*texts: str) -> int:
    """Count the characters that all `texts` begin with alike."""
    first, last = min(texts), max(texts)  # what these two begin with, all do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def get_common_end(*texts: str) -> str:
    """Return the end that all `texts` have in common."""
    length = get_common_start(*(text[::-1] for text in texts))
    return texts[0][len(texts[0]) - length :]


def _put(message: dict[str, Any], path: tuple[Any, ...], new: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    return lambda probe: _set(message, path, new(probe))


def _set(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    other = list(value) if isinstance(value, list) else dict(value)
    other[path[0]] = _set(value[path[0]], path[1:], new)
    return other


def _around(text: str, start: int, stop: int) -> Callable[[str], str]:
    return lambda probe: text[:start] + probe + text[stop:]


def _renamed(call: dict[str, Any], name: str) -> Callable[[str], dict[str, Any]]:
    arguments = call["function"]["arguments"]
    return lambda probe: {probe if key == name else key: value for key, value in arguments.items()}


def _like(value: Any) -> Callable[[str], Any]:
    """Return a probe of the type of `value`, for templates write each type in their own way."""
    if isinstance(value, bool):
        return lambda probe: (not value) if probe == PROBES[0] else value
    if isinstance(value, int | float):
        return lambda probe: _NUMBERS[probe]
    if isinstance(value, list):
        return lambda probe: [probe]
    return (lambda probe: {probe: probe}) if isinstance(value, dict) else str
