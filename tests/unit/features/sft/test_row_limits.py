"""A template that loops, nests or fills the memory is its row's error, in any thread, and leaves nothing behind."""

import argparse
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_transformers import save_tiny_processor

from titanlite.base.errors import DataError
from titanlite.data.tokenizer import load_tokenizer
from titanlite.features.generate.generate import get_end_of_turn_ids
from titanlite.features.images import ImageDataset, ImageRow, load_processor
from titanlite.features.sft import row_limits
from titanlite.features.sft.encode import ExampleEncoder
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.row_limits import check_template, render_chat, run_row
from titanlite.features.tools.generate import _encode

RANGES = "".join(f"{{% for i{n} in range(99999) %}}" for n in range(3))
ENDS = "{% endfor %}" * 3
ENDLESS = {
    "loops": RANGES + ENDS,
    "loops over text": RANGES + "{% set x = messages[0].content ~ i2 %}" + ENDS,
    "namespace": "{% set n = namespace(i=0) %}" + RANGES + "{% set n.i = n.i + 1 %}" + ENDS,
    "macros": "{% macro f(n) %}{% for i in range(9) %}{{ f(n) if n < 9999999 }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{% for i in range(99999) %}{{ i|string|trim }}{% endfor %}{% endfor %}",
}
CHAT = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "red"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_processor(path)
    return path


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_limits, "ROW_LIMIT_S", 0.3)
    monkeypatch.setattr(row_limits, "_LOOK_S", 0.1)


def with_template(folder: Path, template: str) -> Any:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_row_whose_template_loops_is_named_and_the_next_is_encoded(
    folder: Path, soon: None, template: str, in_thread: bool
) -> None:
    turns = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    tokenizer = with_template(folder, "{% if messages[0].content == 'w1' %}" + template + "{% endif %}" + turns)
    encoder = ExampleEncoder(tokenizer, "messages", train_all=False)
    loops = [{"role": "user", "content": "w1"}, CHAT[1]]

    def encode() -> list[Any]:
        return list(encoder.encode([{"messages": CHAT}, {"messages": loops}, {"messages": CHAT}]))

    first, bad, last = ThreadPoolExecutor(1).submit(encode).result() if in_thread else encode()
    assert isinstance(bad, RowError)
    assert "takes more than 0.3 s: the chat template may loop without end" in str(bad)
    assert len(first) == len(last) == 1


_OPTIONS = argparse.Namespace(chat_template_kwargs="", tools=None, system=None)


def test_every_way_to_a_template_has_the_limit(folder: Path, soon: None, tmp_path: Path) -> None:
    template = ENDLESS["loops"]
    with pytest.raises(DataError, match=r"generate: --chat: .* may loop without end"):
        _encode(with_template(folder, template), "what", chat=True, options=_OPTIONS)
    assert get_end_of_turn_ids(with_template(folder, template)) == []
    processor = load_processor(str(folder))
    processor.chat_template = template
    with pytest.raises(DataError, match=r"chats\.jsonl, line 1: .* may loop without end"):
        ImageDataset([ImageRow("chats.jsonl, line 1", CHAT, ())], processor, 20, 0)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply for Python"),
        ("{{ 'a' * 99999999999999999 }}", "more memory than there is"),
        ("{{ 9 ** 9 ** 9 }}", r"line 1 of the chat template has a power"),
        ("{{ f(1)\n ** 2 }}", r"line 2 of the chat template has a power"),
        ("{{ x [1]** 2 }}", r"line 1 of the chat template has a power"),
    ],
)
def test_what_is_beyond_a_limit_is_a_row_error(folder: Path, template: str, says: str) -> None:
    with pytest.raises(RowError, match=says):
        render_chat(with_template(folder, template), CHAT)


def test_training_does_not_render_a_template_with_a_power(folder: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{{ '' if tools else 0 * 9 ** 9 ** 2 }}"
    (found,) = ExampleEncoder(with_template(folder, template), "messages", train_all=False).encode([{"messages": CHAT}])
    assert isinstance(found, RowError) and "line 1 of the chat template has a power" in str(found)


def test_unpacked_arguments_are_no_power() -> None:
    check_template("{{ f(**x) }}{{ f(1, **x) }}{# 2 ** 3 #}{{ '2 ** 3' }} 2 ** 3")


def test_a_deep_row_is_its_own_error(folder: Path) -> None:
    deep: Any = "w1"
    for _ in range(5000):
        deep = [deep]
    encoder = ExampleEncoder(with_template(folder, "{{ messages[0].x|tojson }}"), "messages", train_all=False)
    rows = [{"messages": [CHAT[0] | {"x": deep}, CHAT[1]]}]
    (found,) = encoder.encode(rows)
    assert isinstance(found, RowError)


def test_what_comes_late_hits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that end about when their time is up: each ends or is refused, and nothing is raised outside."""
    monkeypatch.setattr(row_limits, "ROW_LIMIT_S", 0.0)
    monkeypatch.setattr(row_limits, "_LOOK_S", 0.0)
    monkeypatch.setattr(row_limits, "_watchdog", row_limits._Watchdog())
    ended = refused = 0
    end = time.monotonic() + 3
    while time.monotonic() < end:
        try:
            run_row(lambda: sum(range(200)))
            ended += 1
        except RowError:
            refused += 1
        sum(range(50))
    assert ended and refused


def test_threads_have_deadlines_of_their_own(soon: None) -> None:
    def spin(until_s: float) -> Callable[[], str]:
        def run() -> str:
            end = time.monotonic() + until_s
            while time.monotonic() < end:
                pass
            return "ended"

        return run

    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(run_row, spin(30.0))
        assert threads.submit(run_row, spin(0.05)).result() == "ended"
        with pytest.raises(RowError, match=r"more than 0\.3 s"):
            slow.result()


def test_a_forked_process_has_the_limit_too(soon: None) -> None:
    def loop() -> None:
        while True:
            pass

    run_row(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            run_row(loop)
        except RowError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_row_costs_microseconds() -> None:
    start = time.process_time()
    for _ in range(10_000):
        run_row(int)
    assert (time.process_time() - start) / 10_000 < 20e-6  # 2 us on a quiet core; rendering takes 50 to 500
