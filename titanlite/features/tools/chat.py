"""A chat on the terminal, and text that is printed as its tokens arrive."""

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from titanlite.base.errors import TitanliteError
from titanlite.base.text import suggest
from titanlite.features.generate.generate import Continuation, Sampling

_COMMANDS = ("/exit", "/reset")


def text_of(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Decode the new tokens together with the prompt: alone, many tokenizers drop the space before a word."""
    before: str = tokenizer.decode(prompt)
    text: str = tokenizer.decode([*prompt, *new])
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


class TextStream:
    """Printer of a text as its tokens arrive; a character is held back until its last token is there."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt, self._printed = tokenizer, prompt, 0
        self._new: list[int] = []

    def add(self, token: int) -> None:
        self._new.append(token)
        text = text_of(self._tokenizer, self._prompt, self._new)
        if not text.endswith("\ufffd"):
            print(text[self._printed :], end="", flush=True)
            self._printed = len(text)

    def end(self) -> str:
        """Print the rest, end the line, and return the text."""
        text = text_of(self._tokenizer, self._prompt, self._new)
        print(text[self._printed :], flush=True)
        return text


def chat(
    tokenizer: Any,
    encode: Callable[[Any], list[int]],
    continue_all: Callable[..., list[Continuation]],
    sampling: Sampling,
    max_new_tokens: int,
    limit: int | None,
) -> None:
    """Answer line after line of the terminal, with what was said before, until `/exit` or the end of the input.

    Control-C stops an answer, of which the chat keeps what was printed; a line that cannot be answered is left out.

    `encode` gives the tokens of a row with messages, `continue_all` is `generate` of the model, and each answer draws
    with a seed of its own. An answer has at most `max_new_tokens`, the whole chat at most `limit` tokens.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited, and called back
    print("Chat with the model. /reset begins anew, /exit or Control-D ends, Control-C stops an answer.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            print("\n/exit or Control-D ends.")
            continue
        except EOFError:
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            messages.clear()
            print("The chat begins anew.")
        elif line.startswith("/") and " " not in line and (hint := suggest(line, _COMMANDS)):
            print(f"There is no command {line}.{hint}")
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                prompt = encode({"messages": messages})
                room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))
                if room < 1:
                    raise TitanliteError(f"the chat has {len(prompt)} tokens, and the model reads {limit}. Use /reset.")
            except TitanliteError as error:
                messages.pop()
                print(f"generate: {str(error).removeprefix('generate: ')}")
                continue
            stream = TextStream(tokenizer, prompt)
            drawn = replace(sampling, seed=sampling.seed + len(messages) // 2)
            with suppress(KeyboardInterrupt):
                continue_all([prompt], max_new_tokens=room, sampling=drawn, on_token=stream.add)
            messages.append({"role": "assistant", "content": stream.end()})
