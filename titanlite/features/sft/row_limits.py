"""Limits of a single row: a row or template that costs too much is an error of that row, and does not end the run.

A template that loops is interrupted in any thread that renders it: a watchdog, one thread per process, raises there.
This interrupts Python code, such as templates, but no single C call; powers, which can take hours in one, are refused
first.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from titanlite.features.sft.readers import RowError

T = TypeVar("T")
ROW_LIMIT_S = 60.0
REMEDY = "Correct the row, or give another template with data.chat_template."
_LOOK_S = 0.5


class _TimeUpError(Exception):
    """Raised by the watchdog in the thread whose time is up."""


class _Watchdog:
    """Watchdog over deadlines of threads, checked twice a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def run(self, limit_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function`; raise _TimeUpError after `limit_s`. Costs 1 us."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._watch, name="row-limit", daemon=True)
                    self._thread.start()
        me = threading.get_ident()
        self._deadlines[me] = time.monotonic() + limit_s
        try:
            return function(*arguments)
        finally:
            while True:
                try:
                    with self._lock:
                        self._deadlines.pop(me, None)
                        _raise_in(me, None)  # cancel an error that was not delivered yet
                    break
                except _TimeUpError:  # delivered here
                    continue

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            with self._lock:
                # Repeatedly, because something may have caught it.
                for thread in [thread for thread, deadline in tuple(self._deadlines.items()) if deadline < now]:
                    _raise_in(thread, _TimeUpError)


_watchdog = _Watchdog()


def _renew_watchdog() -> None:
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_renew_watchdog)  # a fork has no other threads, but their held locks


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Make a thread raise `error` before its next bytecode; None cancels that."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def run_row(function: Callable[..., T], *arguments: Any) -> T:
    """Return what `function` makes of one row.

    Raises:
        RowError: it takes more than 60 s, nests deeper than Python's stack, or needs more memory than there is.
    """
    try:
        return _watchdog.run(ROW_LIMIT_S, function, *arguments)
    except _TimeUpError:
        text = f"rendering the row takes more than {ROW_LIMIT_S:g} s: the chat template may loop without end"
    except RecursionError:
        text = "the row, or the chat template with it, is nested too deeply for Python"
    except MemoryError:
        text = "the row, or the chat template with it, needs more memory than there is"
    reason = "beyond a limit"
    raise RowError(reason, f"{text}. {REMEDY}")


def render_chat(owner: Any, messages: list[Any], *, add_generation_prompt: bool = False, **options: Any) -> str:
    """Render one chat, by the template of a tokenizer or a processor; `options` are those of `apply_chat_template`.

    Raises:
        RowError: as `run_row` and `check_template`.
        Exception: of any kind, what the template raises.
    """
    return run_row(_render_chat, owner, messages, options | {"add_generation_prompt": add_generation_prompt})


def _render_chat(owner: Any, messages: list[Any], options: dict[str, Any]) -> str:
    for one in (owner, getattr(owner, "tokenizer", None)):
        template = getattr(one, "chat_template", None)
        for text in template.values() if isinstance(template, dict) else [template]:
            check_template(text or "")
    return str(owner.apply_chat_template(messages, tokenize=False, **options))


@lru_cache(16)
def check_template(template: str) -> None:
    """Refuse a template with a power: `9 ** 9 ** 9` is one call of C that nothing interrupts.

    Raises:
        RowError: it has one; names its line.
    """
    from jinja2 import Environment, TemplateSyntaxError

    before = ""
    try:
        for line, _, token in Environment(autoescape=False).lex(template):
            if token == "**" and before not in ("(", ","):  # there it unpacks arguments
                text = f"line {line} of the chat template has a power (**), which could take for ever. Take it out."
                raise RowError("template failed", text)
            before = token if token.strip() else before
    except TemplateSyntaxError:
        return  # rendering says what is wrong
