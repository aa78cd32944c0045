"""Chats and plain texts, parsed from rows in the formats of public data sets.

| format | fields |
|---|---|
| messages | `messages` (role, content), `conversations` (from, value), or a question (`QUESTIONS`) |
| prompt_completion | `prompt` and `completion`: strings, or lists of messages |
| text | `text`, or the field that `data.text_field` names |
| preference | `chosen`, `rejected`: strings or lists of messages, with `prompt` or a shared beginning |

Chats may also have `tools` (OpenAI's older `functions`), `chat_template_kwargs` and `system`. A
list of messages may be JSON text, as CSV files have it. Columns under other names are renamed by
`data.fields`; `data.converter` turns other rows into these.

Rows are checked here, so that a template never has to guess: every message has a known role,
content that is text, and tool calls whose arguments are objects.
"""  # noqa: E501

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

from titanlite.base.files import parse_json
from titanlite.base.text import list_names
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.unread import list_unread, refuse_placeholder, refuse_unread

T = TypeVar("T", str, list[Any], dict[str, Any])
Form = Literal["messages", "prompt_completion", "text", "preference"]
Messages = list[dict[str, Any]]
_Weighted = list[tuple[dict[str, Any], bool]]  # messages, each with False if it is not trained

ROLES = ("system", "developer", "user", "assistant", "tool")
# Alternative names of roles: ShareGPT's, an older one of OpenAI, and Llama's.
_OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
# Fields of a question and its answer in instruction data.
QUESTIONS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("prompt", "response"),
)
_CONTEXTS = ("input", "context")  # of Alpaca and Dolly, after an instruction
# Fields of each row format that `data.fields` can name.
FORM_FIELDS: dict[Form, tuple[str, ...]] = {
    "messages": (
        "messages",
        "conversations",
        *dict.fromkeys(name for pair in QUESTIONS for name in pair),
        *_CONTEXTS,
        "system",
        "tools",
    ),
    "prompt_completion": ("prompt", "completion", "tools"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "system", "tools"),
}
REASONING = ("reasoning_content", "thinking", "reasoning")
# Flags of an assistant's message that decide whether it is trained, in the data of OpenAI,
# Together, ms-swift, axolotl and verl.
WEIGHTS = ("weight", "loss", "train", "training", "trainable", "loss_mask", "loss_scale")
_ALSO_READ = ("tools", "functions", "chat_template_kwargs")
_KEYS = frozenset(
    ("role", "content", "from", "value", "tool_calls", "function_call", *REASONING, *WEIGHTS)
)
_KINDS = {str: "a string", list: "a list", dict: "an object"}
_ROLE_KEYS = ("role", "from")
_JSON_LIST = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True)
class Chat:
    """A conversation for the chat template; `answers` are the indices of the messages to learn."""

    messages: Messages
    answers: tuple[int, ...] = ()
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    arguments_as_text: bool = False  # tool calls' arguments, for templates that accept nothing else


@dataclass(frozen=True)
class Plain:
    """Text without a template: a prompt (None for a document), and its continuation."""

    prompt: str | None
    text: str


def rename_fields(row: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return `row` with the columns named in `fields` renamed to their fields.

    Raises RowError: one of these columns is missing.
    """
    for name, column in fields.items():
        if column not in row:
            raise _missing(
                row, column, "data.text_field" if name == "text" else f"data.fields.{name}"
            )
    if not fields:
        return row
    others = {column: value for column, value in row.items() if column not in fields.values()}
    return others | {name: row[column] for name, column in fields.items()}


def detect_form(row: Mapping[str, Any]) -> Form | None:
    """Return the row format whose fields are in `row`, or None."""
    if "chosen" in row and "rejected" in row:
        return "preference"
    if "messages" in row or "conversations" in row:
        return "messages"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if _find_question(row):
        return "messages"
    return "text" if "text" in row else None


def parse_row(row: dict[str, Any], form: Form | None) -> tuple[Chat | Plain, ...]:
    """Return the single document of `row`, or the chosen and the rejected one of a preference pair.

    Raises:
        RowError: a field is missing, empty or of the wrong type, a role is unknown, or an unread
            column would change what is learned, or the format is not known (None).
    """
    if form is None:
        found = list_names(map(repr, sorted(row))) or "none"
        raise RowError(
            "missing field",
            f"the fields are {found}, which no known format has. Rename them: messages, question "
            "and answer, prompt and completion, text, or prompt, chosen and rejected; or name "
            "them: --data.fields.question=COLUMN.",
        )
    refuse_unread(row, form)
    if form == "preference":
        return _parse_preference(row)
    if form == "text":
        text = _get_text(row, "text")
        refuse_placeholder(text, "field 'text'")
        return (Plain(None, text),)
    return (_parse_messages(row) if form == "messages" else _parse_prompt_completion(row),)


def parse_image_chat(row: dict[str, Any]) -> Chat:
    """Return the chat of a row with images: a list of parts, of text or images, stays a list.
    Raises as `parse_row`.
    """
    refuse_unread(row, "images")
    return _join({}, [], _get_messages(row, "messages", ("text", "image")))


def count_unread(
    rows: Iterable[Mapping[str, Any]], form: Form | None, template: str
) -> Counter[str]:
    """Count the columns that the row format does not read, and the keys of messages that neither it
    nor the chat template reads; any word of a template may be a key.
    """
    if form is None:
        return Counter()
    keys = _KEYS.union(re.findall(r"\w+", template))
    unread = (list_unread(row, _list_fields(row, form), keys) for row in rows)
    return Counter(chain.from_iterable(unread))


def _list_fields(row: Mapping[str, Any], form: Form) -> tuple[str, ...]:
    """List the fields of this row that the row format reads."""
    if form != "messages":
        return (*FORM_FIELDS[form], *_ALSO_READ)
    if pair := _find_question(row):
        return (*pair, *(_CONTEXTS if pair[0] == "instruction" else ()), "system", *_ALSO_READ)
    return ("messages" if "messages" in row else "conversations", "system", *_ALSO_READ)


def _find_question(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fields of a question and its answer, if `row` has no messages."""
    if "messages" in row or "conversations" in row:
        return None
    return next((pair for pair in QUESTIONS if pair[0] in row and pair[1] in row), None)


def _ask(row: dict[str, Any], *names: str) -> Messages:
    """Return a user message with the texts of the fields."""
    text = "\n\n".join(_get_text(row, name) for name in names)
    refuse_placeholder(text, f"field '{names[0]}'")
    return [{"role": "user", "content": text}]


def _answer(row: dict[str, Any], name: str) -> _Weighted:
    return [({"role": "assistant", "content": _get_text(row, name)}, True)]


def _get_system(row: dict[str, Any], turns: Messages) -> Messages:
    """Return the system message from the row's own field, unless its turns begin with one."""
    text = row.get("system")
    if not isinstance(text, str) or not text or (turns and turns[0]["role"] == "system"):
        return []
    return [{"role": "system", "content": text}]


def _parse_messages(row: dict[str, Any]) -> Chat:
    if pair := _find_question(row):
        names = _CONTEXTS if pair[0] == "instruction" else ()
        before = _ask(row, pair[0], *(name for name in names if row.get(name)))
        after = _answer(row, pair[1])
    else:
        before = []
        after = _get_messages(row, "messages" if "messages" in row else "conversations")
    return _join(row, [*_get_system(row, before or _list_messages(after)), *before], after)


def _parse_prompt_completion(row: dict[str, Any]) -> Chat | Plain:
    if str in _get_kinds(row, "prompt", "completion"):
        prompt = _get_text(row, "prompt", may_be_empty=True)
        refuse_placeholder(prompt, "field 'prompt'")
        return Plain(prompt, _get_text(row, "completion"))
    before = _list_messages(_get_messages(row, "prompt"))
    return _join(row, before, _get_messages(row, "completion"))


def _parse_preference(row: dict[str, Any]) -> tuple[Chat | Plain, ...]:
    names = ("chosen", "rejected")
    is_text = str in _get_kinds(row, *names)
    if _get(row, "chosen") == _get(row, "rejected"):
        raise RowError(
            "equal pair", "chosen and rejected are equal, so nothing is preferred. Remove the row."
        )
    prompt = _get(row, "prompt") if row.get("prompt") is not None else None
    if is_text and prompt is None:
        raise _missing(row, "prompt")
    if is_text and isinstance(prompt, str) and not _get_system(row, []):
        start = _get_text(row, "prompt", may_be_empty=True)
        refuse_placeholder(start, "field 'prompt'")
        return tuple(Plain(start, _get_text(row, name)) for name in names)
    if is_text:
        before = _get_asked(row, prompt)
        answers = [_answer(row, name) for name in names]
    else:
        before, answers = _split_pair(row, prompt)
    before = [*_get_system(row, before), *before]
    return tuple(_join(row, before, answer) for answer in answers)


def _get_asked(row: dict[str, Any], prompt: Any) -> Messages:
    if isinstance(prompt, str):
        return _ask(row, "prompt")
    return _list_messages(_get_messages(row, "prompt"))


def _split_pair(row: dict[str, Any], prompt: Any) -> tuple[Messages, list[_Weighted]]:
    """Return the prompt and the answers of a pair of message lists; the prompt may be in its own
    field, in the lists, or in both.
    """
    sides = [_get_messages(row, name) for name in ("chosen", "rejected")]
    lists = [_list_messages(side) for side in sides]
    shared = 0
    while shared < min(map(len, lists)) and lists[0][shared] == lists[1][shared]:
        shared += 1
    if prompt is None or (isinstance(prompt, str) and shared):
        if not shared:
            raise RowError(
                "missing field",
                "there is no 'prompt', and chosen and rejected begin with different messages. Add "
                "it.",
            )
        before = lists[0][:shared]
    else:
        before = _get_asked(row, prompt)
        shared = len(before) if all(side[: len(before)] == before for side in lists) else 0
    return before, [side[shared:] for side in sides]


def _list_messages(weighted: _Weighted) -> Messages:
    return [message for message, _ in weighted]


def _join(row: dict[str, Any], before: Messages, after: _Weighted) -> Chat:
    answers = (
        index
        for index, (message, is_trained) in enumerate(after, len(before))
        if is_trained and message["role"] == "assistant"
    )
    given = row.get("chat_template_kwargs")
    arguments = {} if given in (None, "") else parse_object(given, "field 'chat_template_kwargs'")
    messages = [*before, *_list_messages(after)]
    return Chat(messages, tuple(answers), _get_tools(row), arguments)


def _missing(row: dict[str, Any], name: str, setting: str = "") -> RowError:
    setting = setting or ("data.text_field" if name == "text" else "data.format")
    found = list_names(map(repr, sorted(row))) or "none"
    text = f"no field '{name}'; its fields are: {found}. Add or rename the field, or set {setting}."
    return RowError("missing field", text)


def _expect(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise RowError(
            "wrong type", f"{where} is {found}, not {_KINDS[kind]}. Correct the row, or remove it."
        )
    return value


def _get_text(row: dict[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    if name not in row:
        raise _missing(row, name)
    value = _expect(row[name], str, f"field '{name}'")
    if not value and not may_be_empty:
        raise RowError("empty field", f"field '{name}' is empty. Remove the row, or write text.")
    return value


def _get(row: dict[str, Any], name: str) -> Any:
    """Return the field: text, or messages, which may be given as JSON text. Other JSON is text to
    learn.
    """
    if name not in row:
        raise _missing(row, name)
    value = row[name]
    if isinstance(value, str) and _JSON_LIST.match(value):
        try:
            found = parse_json(value)
        except ValueError:  # a text that begins like JSON
            return value
        if all(isinstance(item, dict) and not item.keys().isdisjoint(_ROLE_KEYS) for item in found):
            return found
    return value


def _get_kinds(row: dict[str, Any], *names: str) -> set[type]:
    """Return the types of the fields. Raises RowError: text in one and messages in the other."""
    kinds = {type(_get(row, name)) for name in names}
    if kinds == {str, list}:
        raise RowError(
            "wrong type",
            f"one of {' and '.join(names)} is a string, the other a list. Use one type for both.",
        )
    return kinds


def _from_json(value: Any, where: str) -> Any:
    """Return `value`, parsed as JSON if it is a string."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RowError(
            "invalid JSON", f"{where} is not valid JSON ({error}). Correct it."
        ) from None


def _get_messages(row: dict[str, Any], name: str, kinds: tuple[str, ...] = ("text",)) -> _Weighted:
    """Return the messages of a field in OpenAI's format, whose contents have parts of these
    `kinds`.
    """
    where = f"field '{name}'"
    value = _expect(_get(row, name), list, where)
    if not value:
        raise RowError(
            "empty field", f"{where} holds no message. Remove the row, or write messages."
        )
    found = []
    for index, given in enumerate(value):
        where = f"{name}[{index}]"
        message = _unify(_expect(given, dict, where), where)
        is_trained = _take_weight(message, where)
        refuse_unread(message, "messages", where)
        found.append((_check_message(message, where, kinds), is_trained))
    return found


def _take_weight(message: dict[str, Any], where: str) -> bool:
    """Remove the flags in `WEIGHTS` from `message`, and return whether it is trained.

    Raises RowError: a flag is not 0, 1, true or false, or marks a message of another role as
    trained.
    """
    is_trained = True
    for name in WEIGHTS:
        weight = message.pop(name, None)
        if weight not in (None, 0, 1):
            raise RowError("wrong type", f"{where}.{name} is {weight!r}. Write 0 or 1.")
        if weight and name != "weight" and message.get("role") != "assistant":
            raise RowError(
                f"'{name}' is not read",
                f"{where}.{name} is {weight!r}, and only messages of the assistant are trained. "
                "Remove it from the others.",
            )
        is_trained &= weight != 0
    return is_trained


def _unify(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with `role`, `content` and `tool_calls`; ShareGPT's `from` and `value`, and
    OpenAI's older `function_call`, are converted.
    """
    role_key = "from" if "from" in given and "role" not in given else "role"
    content_key = "value" if "value" in given and "content" not in given else "content"
    message = {key: item for key, item in given.items() if key not in (role_key, content_key)}
    said = given.get(role_key)
    plain = said.strip().lower() if isinstance(said, str) else ""
    message["role"] = _OTHER_ROLES.get(plain, plain if plain in ROLES else said)
    call = message.pop("function_call", None)
    if plain == "function_call":
        call = parse_object(given.get(content_key), f"{where}.{content_key}")
    elif content_key in given:
        message["content"] = given[content_key]
    if call:
        message["tool_calls"] = [call]
    return message


def _check_message(message: dict[str, Any], where: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    role = message.get("role")
    if role is None:
        raise RowError("missing field", f"{where} has no 'role'. Use one of {', '.join(ROLES)}.")
    if role not in ROLES:
        raise RowError("unknown role", f"{where}.role is {role!r}. Use one of {', '.join(ROLES)}.")
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = _check_tool_calls(message["tool_calls"], f"{where}.tool_calls")
        if not message["tool_calls"]:
            del message["tool_calls"]
    says_otherwise = role == "assistant" and (
        "tool_calls" in message or any(message.get(key) for key in REASONING)
    )
    if "content" not in message and not says_otherwise:
        raise RowError("missing field", f"{where} has no 'content'. Write text.")
    # templates would print a missing text as None
    content = message.setdefault("content", "")
    text = _get_content(content, f"{where}.content", kinds)
    if kinds == ("text",):
        # templates for text would print a list of parts in Python's syntax
        message["content"] = text
        if role == "user":
            refuse_placeholder(text, f"{where}.content")
    if role == "assistant" and not says_otherwise and not text.strip():
        raise RowError(
            "empty field",
            f"{where} is an empty message of the assistant. Remove it, or write an answer.",
        )
    return message


def _get_content(content: Any, where: str, kinds: tuple[str, ...]) -> str:
    """Return the text of a content. Raises RowError: it is neither text nor a list of parts of
    these `kinds`.
    """
    if not isinstance(content, list):
        return _expect(content, str, where)
    texts = []
    for index, part in enumerate(content):
        kind = _expect(part, dict, f"{where}[{index}]").get("type")
        if kind not in kinds:
            raise RowError(
                "wrong type",
                f"{where}[{index}] is a part of type {kind!r}, not {' or '.join(kinds)}. Remove "
                "such parts.",
            )
        value = _expect(part.get(kind), str, f"{where}[{index}].{kind}")
        if kind == "text":
            texts.append(value)
    return "".join(texts)


def _check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    checked = []
    for index, call in enumerate(_expect(calls, list, where)):
        call = _expect(call, dict, f"{where}[{index}]")
        function = _expect(call.get("function", call), dict, f"{where}[{index}].function")
        _expect(function.get("name"), str, f"{where}[{index}].function.name")
        # OpenAI gives the arguments as JSON text; templates print them with tojson, which would
        # quote text again.
        arguments = parse_object(function.get("arguments", {}), f"{where}[{index}].arguments")
        call = {"type": "function"} | {
            key: value for key, value in call.items() if key not in ("name", "arguments")
        }
        checked.append(call | {"function": function | {"arguments": arguments}})
    return checked


def parse_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, parsed as JSON if it is a string. Raises RowError, which names `where`: it is
    not an object.
    """
    return _expect(_from_json(value, where), dict, where)


def _get_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools; OpenAI's older `functions` are converted to tools."""
    tools = []
    for name in ("tools", "functions"):
        where = f"field '{name}'"
        listed = _expect(_from_json(row.get(name) or None, where) or [], list, where)
        for k, given in enumerate(listed):
            tool = _expect(given, dict, f"{name}[{k}]")
            tools.append(tool if name == "tools" else {"type": "function", "function": tool})
    return tools or None
