"""Chats through the tokenizer's own template, and which part of the text is an answer.

An answer is what the model writes at inference: everything after the prompt that the template makes of the messages
before it, with the generation prompt, up to the end-of-turn token. A template is a program; what it does with a
message can be known only by running it. So each turn is rendered twice, as prompt and as done, and compared with the
whole conversation:

1. A template with `{% generation %}` marks says itself what the assistant wrote.
2. Else, where every done turn is a beginning of the whole, one example holds all answers.
3. A template that rewrites history (Qwen3 leaves out the thoughts of earlier turns) never shows the model the whole
   conversation with all answers in it: one example per answer, each as the model meets it.
4. Where a done turn does not begin with its prompt, the model would learn to answer a prompt that it never gets: an
   error.
"""

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from jinja2.exceptions import TemplateError

from titanlite.data.forms import Chat
from titanlite.data.readers import RowError
from titanlite.data.row_limits import check_template
from titanlite.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Bits of a token: the loss is taken on it, and it is part of an answer. They differ where all tokens are trained.
TRAINED, ANSWER = 1, 2

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What a template can raise: its own raise_exception, and what its expressions do with a value they did not expect.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_REMEDY = "Correct the row, or give another template with data.chat_template."


@dataclass(frozen=True)
class Piece:
    """Text that is tokenized by itself, with `flags` for each of its tokens."""

    text: str
    flags: int


@dataclass(frozen=True)
class Tokens:
    """Text that is tokenized already: ids and flags of each token."""

    ids: list[int]
    flags: list[int]


Rendered = list[Piece] | Tokens


class ChatRenderer:
    """Renders chats with the template of `tokenizer`; `train_all` trains every token and not only the answers.

    `num_open_turns` counts answers without a special token at their end.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, train_all: bool) -> None:
        self.tokenizer = tokenizer
        self.train_all = train_all
        self.num_open_turns = 0
        special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        # Longest first, so that <|end|> is not found inside <|im_end|>.
        ends = "|".join(re.escape(token) for token in sorted(special, key=lambda token: (-len(token), token)) if token)
        self._turn_end = re.compile(rf"(?:{ends})(?=\s*\Z)") if ends else None

    def render(self, chat: Chat) -> list[Rendered]:
        """The examples of one chat: one, or one per answer if the template rewrites history.

        Raises:
            DataError: the tokenizer has no chat template.
            RowError: the template fails, drops a message, or shows answers after another prompt than at inference; or
                the chat has no answer.
        """
        turns = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        answers = [i for i in turns if i >= chat.answers_from and i not in chat.untrained]
        if not answers and not self.train_all:
            raise RowError("no trained token", "there is no message of the assistant to train on. Remove the row.")
        if answers and answers[0] == 0:
            text = "the first message is the assistant's, so it answers nothing. Put a user's message before it."
            raise RowError("no prompt", text)
        template = self._get_template(chat)
        whole = self._apply(chat, len(chat.messages))
        self._check_tools(chat, template, whole)
        _check_messages(chat, whole)
        if _GENERATION.search(template):
            return [self._render_marked(chat, whole, turns, answers)]

        spans: list[tuple[int, str]] = []  # (characters of the prompt, prompt and answer)
        for i in answers:
            prompt = self._apply(chat, i, add_generation_prompt=True)
            done = whole if i + 1 == len(chat.messages) else self._apply(chat, i + 1)
            if not done.startswith(prompt):
                raise _wrong_prompt(i, prompt, done)
            answer = done[len(prompt) :]
            self._check_answer(chat.messages[i], i, answer)
            spans.append((len(prompt), prompt + self._cut_answer(answer)))
        if all(whole.startswith(done) for _, done in spans):
            return [self._split(whole, [(start, len(done)) for start, done in spans])]
        if self.train_all:  # the whole conversation as the template shows it; only its last answer is one to compare
            last = [(start, len(done)) for start, done in spans if whole.startswith(done)]
            return [self._split(whole, last[-1:])]
        return [self._split(done, [(start, len(done))]) for start, done in spans]

    def _split(self, text: str, spans: list[tuple[int, int]]) -> list[Piece]:
        """Pieces of `text`, answers in `spans` (characters, in order). What follows the last answer is kept."""
        other = TRAINED if self.train_all else 0
        pieces, place = [], 0
        for start, stop in spans:
            pieces += [Piece(text[place:start], other), Piece(text[start:stop], TRAINED | ANSWER)]
            place = stop
        pieces.append(Piece(text[place:], other))
        return [piece for piece in pieces if piece.text]

    def _cut_answer(self, answer: str) -> str:
        """`answer` up to its end-of-turn token: the newline behind it is the template's, the model stops before."""
        found = self._turn_end.search(answer) if self._turn_end else None
        if found is None:
            self.num_open_turns += 1
            return answer
        return answer[: found.end()]

    def _check_answer(self, message: dict[str, Any], index: int, answer: str) -> None:
        if not answer.strip():
            text = f"the chat template shows nothing of messages[{index}], an answer of the assistant. {_REMEDY}"
            raise RowError("dropped by the template", text)
        for key in ("reasoning_content", "thinking", "reasoning"):
            thought = message.get(key)
            if isinstance(thought, str) and thought.strip() not in answer:
                text = f"the chat template drops messages[{index}].{key}. {_REMEDY}"
                raise RowError("dropped by the template", text)

    def _render_marked(self, chat: Chat, whole: str, turns: list[int], answers: list[int]) -> Tokens:
        """By the template's own marks; of those, the turns in `answers` only."""
        try:
            encoded = cast(
                Any,
                self.tokenizer.apply_chat_template(
                    chat.messages,
                    tools=cast(Any, chat.tools),
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
                    **chat.template_kwargs,
                ),
            )
        except _TEMPLATE_ERRORS as error:
            raise _template_failed(error) from None
        ids, marks = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        if chat.answers_from:
            prompt = self._apply(chat, chat.answers_from, add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise _wrong_prompt(chat.answers_from, prompt, whole)
            starts = [start for start, _ in encoded["offset_mapping"]]
            marks = [mark if start >= len(prompt) else 0 for mark, start in zip(marks, starts, strict=True)]
        if chat.untrained.intersection(turns):
            marks = _drop_runs(marks, [i for i in turns if i >= chat.answers_from], answers)
        if not any(marks) and not self.train_all:
            text = f"the template's {{% generation %}} marks leave no token of the assistant. {_REMEDY}"
            raise RowError("no trained token", text)
        other = TRAINED if self.train_all else 0
        return Tokens(ids, [TRAINED | ANSWER if mark else other for mark in marks])

    def _check_tools(self, chat: Chat, template: str, whole: str) -> None:
        """The template must show tools: what a row says must not get lost in silence."""
        if chat.tools is None:
            return
        try:
            bare = self.tokenizer.apply_chat_template(
                chat.messages, chat_template=template, tokenize=False, **chat.template_kwargs
            )
        except _TEMPLATE_ERRORS:
            return  # a template that cannot do without tools shows them
        if bare == whole:
            raise RowError("dropped by the template", f"the chat template drops the tools. {_REMEDY}")

    def _apply(self, chat: Chat, num_messages: int, *, add_generation_prompt: bool = False) -> str:
        """The first `num_messages` messages as text."""
        try:
            text = self.tokenizer.apply_chat_template(
                chat.messages[:num_messages],
                tools=cast(Any, chat.tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **chat.template_kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise _template_failed(error) from None
        return cast(str, text)

    def _get_template(self, chat: Chat) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                "data: the rows are chats, but the tokenizer has no chat template. Set data.chat_template to a Jinja "
                "file, use the tokenizer of a chat model (data.tokenizer_path), or give prompt and completion as text."
            )
        try:
            template = self.tokenizer.get_chat_template(None, cast(Any, chat.tools))
            check_template(template)
            return template
        except ValueError as error:  # several named templates, none of them the default
            raise DataError(f"data: {error} Set data.chat_template to a Jinja file.") from None


def _template_failed(error: Exception) -> RowError:
    said = str(error).strip().rstrip(".") or type(error).__name__
    return RowError("template failed", f"the chat template fails: {said}. {_REMEDY}")


def _wrong_prompt(index: int, prompt: str, done: str) -> RowError:
    same = next((i for i, (a, b) in enumerate(zip(prompt, done, strict=False)) if a != b), min(len(prompt), len(done)))
    text = (
        f"the chat template shows messages[{index}] after another prompt than at inference: {prompt[same:][:40]!r} "
        f"there, {done[same:][:40]!r} here. Set data.chat_template to a template that shows both alike, or that marks "
        "the assistant's text with {% generation %}."
    )
    return RowError("prompt differs", text)


def _drop_runs(marks: list[int], turns: list[int], answers: list[int]) -> list[int]:
    """`marks` without the runs of those `turns` that are not among `answers`."""
    starts = [i for i, mark in enumerate(marks) if mark and (i == 0 or not marks[i - 1])]
    if len(starts) != len(turns):
        text = f"the template marks {len(starts)} texts of the assistant in {len(turns)} messages. Remove the weights."
        raise RowError("weights do not fit", text)
    kept = list(marks)
    for start, turn in zip(starts, turns, strict=True):
        i = start
        while turn not in answers and i < len(marks) and marks[i]:
            kept[i] = 0
            i += 1
    return kept


def _count_tools(chat: Chat, name: str) -> int:
    """How often the tools alone show `name`, at least."""
    return sum((tool.get("function") or tool).get("name") == name for tool in chat.tools or ())


def _check_messages(chat: Chat, whole: str) -> None:
    """Every template ignores what it does not know; what the row says must not get lost in silence.

    Raises:
        RowError: names the first message or call that the text does not show.
    """
    for index, message in enumerate(chat.messages):
        content = message.get("content", "").strip()
        if message["role"] != "assistant" and content not in whole:
            # Some templates write what a tool returned as JSON.
            if any(json.dumps(content, ensure_ascii=ascii)[1:-1] in whole for ascii in (True, False)):
                continue
            text = f"the chat template drops messages[{index}], of the role '{message['role']}'. {_REMEDY}"
            raise RowError("dropped by the template", text)
        for call in message.get("tool_calls", ()):
            name = call["function"]["name"]
            if whole.count(name) <= _count_tools(chat, name):
                text = f"the chat template drops messages[{index}].tool_calls, a call of '{name}'. {_REMEDY}"
                raise RowError("dropped by the template", text)
