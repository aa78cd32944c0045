"""Is my chat template trained right? Runs templates through conversations and judges what would be
trained.

    python tests/sweep/check_templates.py FOLDER_OR_FILE.jinja [--verbose]

Each conversation says words that occur nowhere else. The judge knows which of them must be trained,
which must be seen and which must not be trained; it looks at the tokens alone, and shares nothing
with the code that it judges. Classes:

    right      everything that the last message of a turn says is trained, with an end, after the prompt of inference
    refused    the row is an error, by reason
    silent     something that a row says is neither trained nor seen, without an error
    mask       a wrong token is trained or a right one is not, or the prompt is not that of inference
    no end     the trained text does not end with a token that ends it
"""  # noqa: E501

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titanlite.features.sft.chat import ANSWER, END, TRAINED, ChatRenderer
from titanlite.features.sft.chat_template import set_date
from titanlite.features.sft.encode import Document, ExampleEncoder
from titanlite.features.sft.readers import RowError

DATE = "2026-01-02"
CLASSES = ("right", "refused", "silent", "mask", "no end")
# What tokenizers have as special tokens, by how templates spell them; tags in lower case are merely
# added.
SPECIAL = re.compile(
    "<\\|[^<>|\\s]{1,60}\\|>|<\uff5c[^<>\\s]{1,60}\uff5c>|<\\|[a-z_]+>|<[a-z_]+\\|>|\\[/?[A-Z_]{3,}\\]|[\\[\\]][e~]?~b?[\\[\\]]|"
    "</?(?:s|sep|eos|bos|assistant|user|system|SPECIAL_\\d+|seed:[beo]+s|seed:tool_call|"
    "(?:start|end|beginning)_of_(?:turn|sentence))>"
)
ADDED = re.compile(r"</?[a-zA-Z_:]{2,40}>")
_NUMBER = iter(range(10**6))
_SYLLABLES = (
    "ba",
    "do",
    "fi",
    "gu",
    "ke",
    "lo",
    "mi",
    "nu",
    "po",
    "ru",
    "sa",
    "te",
    "vi",
    "wo",
    "xa",
    "zu",
)


def make_word() -> str:
    """A word that no template and no other part of a conversation has."""
    number = next(_NUMBER)
    return "q" + "".join(_SYLLABLES[number >> shift & 15] for shift in (12, 8, 4, 0)) + "j"


@dataclass
class Chat:
    """A row, and the words that must be trained (by message), seen, and neither."""

    row: dict[str, Any] = field(default_factory=lambda: {"messages": []})
    trained: dict[int, list[str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    thoughts: dict[int, list[str]] = field(default_factory=dict)

    def say(self, role: str, text: str | None = "{}", *, train: bool = True, **more: Any) -> "Chat":
        messages = self.row["messages"]
        place = (
            self.trained.setdefault(len(messages), [])
            if role == "assistant" and train
            else self.seen
        )
        message: dict[str, Any] = {"role": role, "content": text and self._fill(text, place)}
        if "thought" in more:
            message["reasoning_content"] = self._fill(more.pop("thought"), [])
            words = message["reasoning_content"].split()
            self.thoughts[len(messages)] = words
        if "calls" in more:
            calls = more.pop("calls")
            message["tool_calls"] = [
                self._call(k, len(messages), name, place, **a) for k, (name, a) in enumerate(calls)
            ]
            if text is None:
                message["content"] = None
        messages.append(message | more)
        return self

    def tools(self, *names: str) -> "Chat":
        self.row["tools"] = []
        for name in names:
            self.seen += [name, about := make_word(), argument := f"{name}arg"]
            properties = {argument: {"type": "string", "description": make_word()}}
            parameters = {"type": "object", "properties": properties, "required": [argument]}
            function = {"name": name, "description": about, "parameters": parameters}
            self.row["tools"].append({"type": "function", "function": function})
        return self

    def _call(
        self, k: int, i: int, name: str, place: list[str], *, as_text: bool = False
    ) -> dict[str, Any]:
        argument = f"{name}arg"
        place += [name, argument, value := make_word()]
        arguments: Any = {argument: value}
        return {
            "id": f"call{i}{k}abcde"[:9],
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if as_text else arguments,
            },
        }

    def _fill(self, text: str, place: list[str]) -> str:
        while "{}" in text:
            place.append(word := make_word())
            text = text.replace("{}", word, 1)
        return text


def make_chats() -> dict[str, Chat]:
    """The conversations, by name."""
    chats: dict[str, Chat] = {}
    tool = [make_word() for _ in range(8)]

    def new(name: str, turns: int = 1, **more: Any) -> Chat:
        """Begin with `turns` of a user and, but for the last one, of the assistant."""
        chats[name] = Chat()
        for turn in range(turns):
            chats[name].say("user")
            if turn < turns - 1:
                chats[name].say("assistant", **more)
        return chats[name]

    def result(chat: Chat, name: str, k: int = 0) -> Chat:
        place = max(
            i for i, message in enumerate(chat.row["messages"]) if message["role"] == "assistant"
        )
        return chat.say("tool", name=name, tool_call_id=f"call{place}{k}abcde"[:9])

    new("three turns", 3).say("assistant")
    chats["system"] = Chat().say("system").say("user").say("assistant").say("user").say("assistant")
    chats["developer"] = Chat().say("developer").say("user").say("assistant")
    new("thoughts in all turns", 2, thought="{} {}").say("assistant", thought="{}")
    new("thought in the last turn", 2).say("assistant", thought="{}")
    for name, switch in (("thought, switched on", True), ("no thought, switched off", False)):
        chat = new(name).say("assistant", **({"thought": "{}"} if switch else {}))
        chat.row["chat_template_kwargs"] = {"enable_thinking": switch, "thinking": switch}
    new("tools without a call").tools(tool[0], tool[1]).say("assistant")
    for name, n, text, more in (
        ("call, content null", 2, None, {}),
        ("content beside a call", 3, "{}", {}),
        ("thoughts beside calls", 4, "", {"thought": "{}"}),
    ):
        chat = new(name, 2).tools(tool[n]).say("assistant", text, calls=[(tool[n], {})], **more)
        result(chat, tool[n]).say("assistant", **more)
    new("call as last message").tools(tool[5]).say(
        "assistant", None, calls=[(tool[5], {"as_text": True})]
    )
    chat = (
        new("two parallel calls")
        .tools(tool[6], tool[7])
        .say("assistant", None, calls=[(n, {}) for n in tool[6:]])
    )
    result(result(chat, tool[6]), tool[7], 1).say("assistant")
    new("an empty answer").say("assistant", "")
    new("unicode and white space").say(
        "assistant", "\n\n \u00e9t\u00e9 {} \u4e16\u754c\U0001f642  \n"
    )
    chats["assistant first"] = Chat().say("assistant").say("user").say("assistant")
    new("two users").say("user").say("assistant")
    new("two assistants").say("assistant").say("assistant")
    new("weight 0").say("assistant", train=False, weight=0).say("user").say("assistant")
    chat = new("content as parts").say("assistant")
    for message in chat.row["messages"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return chats


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with the special tokens that the template spells."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    shown = render_sample(template)
    special = {"<s>", "</s>", *SPECIAL.findall(template + shown)}
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in sorted(special)]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token in sorted({*ADDED.findall(template)} - special)
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def render_sample(template: str) -> str:
    """A conversation as text, for special tokens that a template puts together; empty if it takes
    no such one.
    """
    bare: Any = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        return bare.apply_chat_template([*turn, *turn], chat_template=template, tokenize=False)
    except Exception:  # noqa: BLE001  templates raise anything
        return ""


def judge(tokenizer: Any, chat: Chat) -> tuple[str, str]:
    """The class of what becomes of `chat`, and why."""
    renderer = ChatRenderer(tokenizer, date=DATE)
    (found,) = ExampleEncoder(tokenizer, "messages", renderer=renderer).encode([chat.row])
    if isinstance(found, RowError):
        return "refused", f"{found.reason}: {found}"
    documents = [document for example in found for document in example]
    answers = [answer for document in documents for answer in get_answers(document)]
    texts = [tokenizer.decode(ids) for _, ids in answers]
    everything = "".join(tokenizer.decode(document.ids.tolist()) for document in documents)
    turns = sorted(chat.trained)
    if len(answers) != len(turns):
        return "mask", f"{len(answers)} answers of {len(turns)}"
    for turn, text in zip(turns, texts, strict=True):
        wanted = [*chat.trained[turn], *chat.thoughts.get(turn, [])]
        if missing := [word for word in wanted if word not in text]:
            known = any(word in everything for word in missing)
            return (
                "mask" if known else "silent"
            ), f"messages[{turn}]: {missing[0]} is not trained: {text!r}"
        own = {*wanted}
        others = {
            word
            for t in turns
            if t != turn
            for word in (*chat.trained[t], *chat.thoughts.get(t, []))
        }
        if wrong := [word for word in {*chat.seen, *others} - own if word in text]:
            return "mask", f"messages[{turn}]: {wrong[0]} is trained: {text!r}"
    if missing := [word for word in chat.seen if word not in everything]:
        return "silent", f"{missing[0]} is not seen"
    return judge_edges(tokenizer, chat, turns, answers)


def judge_edges(
    tokenizer: Any, chat: Chat, turns: list[int], answers: list[tuple[list[int], list[int]]]
) -> tuple[str, str]:
    """Prompts and ends against `apply_chat_template` and the whole text."""
    special = {
        *tokenizer.all_special_ids,
        *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special),
    }
    kwargs = chat.row.get("chat_template_kwargs", {})
    for turn, (before, ids) in zip(turns, answers, strict=True):
        prompt = None
        for fit in (parse, parse_text):
            try:
                prompt = tokenizer.apply_chat_template(
                    fit(chat.row["messages"][:turn]),
                    tools=chat.row.get("tools"),
                    tokenize=True,
                    return_dict=False,
                    add_generation_prompt=True,
                    chat_template=set_date(tokenizer.chat_template, DATE),
                    **kwargs,
                )
            except Exception:  # noqa: BLE001  templates raise anything
                continue
            if before == prompt:
                break
        if before != prompt:
            shown = tokenizer.decode(prompt) if prompt else None
            return (
                "mask",
                f"messages[{turn}]: another prompt: {tokenizer.decode(before)[-80:]!r} not "
                f"{shown and shown[-80:]!r}",
            )
        text, end = tokenizer.decode(ids), tokenizer.decode(ids[-1:])
        behind = text[
            max((text.rfind(word) + len(word) for word in chat.trained[turn]), default=0) :
        ]
        messages = parse(chat.row["messages"][: turn + 1])
        follows = show(tokenizer, [*messages, {"role": "user", "content": "a"}], chat).rpartition(
            chat.trained[turn][-1]
        )[2]
        done = show(tokenizer, messages, chat).rpartition(chat.trained[turn][-1])[2]
        known = [tokenizer.decode([i]) for i in special]
        if ids[-1] not in special and (
            any(token in follows for token in known)
            or not follows[len(behind) - 1 :].startswith(end)
        ):
            return "no end", f"messages[{turn}]: {text[-60:]!r}"
        alone = [token for token in known if done.count(token) == 1 and text.count(token) < 2]
        if behind.count(end) != 1 or (text.count(end) != 1 and alone):
            return "mask", f"messages[{turn}]: the end stands inside of the answer: {text!r}"
        header = behind.rsplit(end)[0] if ids[-1] in special else ""
        if re.search(r"user|human|assistant|START_OF_TURN|tool_response", header, re.IGNORECASE):
            return "mask", f"messages[{turn}]: a header is trained: {behind!r}"
    return "right", ""


def show(tokenizer: Any, messages: list[dict[str, Any]], chat: Chat) -> str:
    """The messages as text, or nothing where the template takes no such conversation."""
    kwargs = chat.row.get("chat_template_kwargs", {})
    try:
        return tokenizer.apply_chat_template(
            messages, tools=chat.row.get("tools"), tokenize=False, **kwargs
        )
    except Exception:  # noqa: BLE001  templates raise anything
        return ""


def parse(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a server gives them to the template: arguments are objects, content is text."""
    found = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "weight"}
        content = message["content"]
        message["content"] = (
            "".join(p["text"] for p in content) if isinstance(content, list) else content or ""
        )
        calls = [
            call | {"function": dict(call["function"])} for call in message.get("tool_calls", [])
        ]
        for call in calls:
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append(message | ({"tool_calls": calls} if calls else {}))
    return found


def parse_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `parse`, with arguments as JSON text."""
    found = parse(messages)
    for message in found:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
    return found


def get_answers(document: Document) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens before, trained tokens) of each run of trained tokens."""
    flags = document.flags
    ids = document.ids.tolist()
    start = 0
    while start < len(ids):
        if not flags[start] & ANSWER:
            start += 1
            continue
        stop = start + 1
        while (
            stop < len(ids)
            and flags[stop] & ANSWER
            and not (flags[stop - 1] & END and not flags[stop] & END)
        ):
            stop += 1
        trained = [
            i
            for i, flag in zip(ids[start:stop], flags[start:stop].tolist(), strict=True)
            if flag & TRAINED
        ]
        yield ids[:start], trained
        start = stop


def main() -> int:
    """Print the table; exit code 1 if anything is silent, has a wrong mask or no end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a Jinja file, or a folder of them")
    parser.add_argument(
        "--verbose", action="store_true", help="say why, for each row that is not right"
    )
    options = parser.parse_args()
    paths = sorted(options.path.glob("*.jinja")) if options.path.is_dir() else [options.path]
    total: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    print(f"{'template':48}" + "".join(f"{name:>9}" for name in CLASSES))
    for path in paths:
        tokenizer = make_tokenizer(path.read_text(encoding="utf-8"))
        counts: Counter[str] = Counter()
        for name, chat in make_chats().items():
            found, why = judge(tokenizer, chat)
            counts[found] += 1
            if found == "refused":
                reasons[why.partition(":")[0]] += 1
            if options.verbose and found != "right":
                print(f"    {found}: {name}: {why}")
        total += counts
        print(f"{path.stem[:47]:48}" + "".join(f"{counts[name]:9}" for name in CLASSES), flush=True)
    print(f"{'all':48}" + "".join(f"{total[name]:9}" for name in CLASSES))
    print("refused: " + "; ".join(f"{count} {reason}" for reason, count in reasons.most_common()))
    return int(any(total[name] for name in CLASSES[2:]))


if __name__ == "__main__":
    sys.exit(main())
