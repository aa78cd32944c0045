"""Columns and keys that nothing reads, flags and older forms that are read, and texts that spell
special tokens at their ends.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.schema import JobConfig
from titanlite.features.sft.forms import WEIGHTS, Plain, detect_form, parse_row
from titanlite.features.sft.readers import RowError

MakeJob = Callable[..., JobConfig]
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def ask(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, ANSWER]}


def parse(row: dict[str, Any]) -> Any:
    form = detect_form(row)
    assert form is not None
    return parse_row(row, form)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (CHAT | {"label": True}, "field 'label': a label of KTO"),
        (CHAT | {"kto_tag": False}, "field 'kto_tag'"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "field 'label'"),
        (CHAT | {"weight": 0.5}, r"field 'weight': .*data\.sources\.NAME\.weight"),
        ({"text": "a", "weight": "2"}, "field 'weight'"),
        (PAIR | {"loss_weight": 3}, "field 'loss_weight'"),
        (CHAT | {"images": ["a.png"]}, "field 'images': .*data.dataset = \"images\""),
        ({"text": "a", "audios": ["a.wav"]}, "field 'audios'"),
        (ask("<image>What is it?"), r"messages\[0\]\.content has a place for images"),
        (ask("What is it?\n<video>\n"), "a place for videos"),
        ({"question": "<audio> Who?", "answer": "b"}, "field 'question' has a place for audios"),
        ({"text": "<image>\nA cat."}, "field 'text' has a place for images"),
        (CHAT | {"rejected_response": "c"}, "field 'rejected_response'"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "field 'history'"),
        ({"messages": [USER, ANSWER | {"mask": 1}]}, r"messages\[1\]\.mask"),
        ({"messages": [USER | {"images": ["a"]}, ANSWER]}, r"messages\[0\]\.images"),
        ({"messages": [USER | {"train": True}, ANSWER]}, r"messages\[0\]\.train is True"),
        ({"messages": [USER, ANSWER | {"loss_mask": 0.5}]}, r"messages\[1\]\.loss_mask is 0\.5"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_name(row: dict[str, Any], named: str) -> None:
    with pytest.raises(RowError, match=named):
        parse(row)


@pytest.mark.parametrize(
    "row",
    [
        CHAT | {"label": "physics", "weight": 1, "images": [], "history": "", "id": 0},
        {"text": "a", "label": True, "history": "Roman"},
        PAIR | {"label": True},
        ask("Where does <image> stand in SVG?"),
        ask("<video>x</video>: what is it?"),
        {"messages": [USER | {"weight": 1, "loss": False}, ANSWER | {"train": True}]},
    ],
)
def test_what_changes_nothing_is_accepted(row: dict[str, Any]) -> None:
    assert parse(row)


@pytest.mark.parametrize("name", WEIGHTS)
def test_flags_of_messages_are_weights(name: str) -> None:
    (chat,) = parse({"messages": [USER, ANSWER | {name: 0}, USER, ANSWER | {name: 1}]})
    assert chat.untrained == {1}
    assert chat.messages == [USER, ANSWER, USER, ANSWER]


def test_flags_of_pairs_are_weights() -> None:
    turns = [USER, ANSWER | {"loss": False}, USER]
    sides = {
        name: [*turns, ANSWER | {"loss": False}, USER, ANSWER | {"content": name}]
        for name in ("chosen", "rejected")
    }
    sides["rejected"][3] = ANSWER | {"content": "d", "loss": False}
    chosen, rejected = parse(sides)
    assert chosen.answers_from == rejected.answers_from == 3
    assert chosen.untrained == rejected.untrained == {3}


def test_older_calls_of_functions_are_tool_calls() -> None:
    call = {"name": "f", "arguments": '{"x": 1}'}
    function = {"name": "f", "parameters": {}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "2"},
        ANSWER,
    ]
    (chat,) = parse({"messages": messages, "functions": [function]})
    tool_call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert chat.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "name": "f", "content": "2"},
        ANSWER,
    ]
    assert chat.tools == [{"type": "function", "function": function}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"prompt": [USER], "completion": [ANSWER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ],
)
def test_lists_of_messages_may_be_json_text(row: dict[str, Any], indent: int | None) -> None:
    as_text = {name: json.dumps(value, indent=indent) for name, value in row.items()}
    assert parse(as_text) == parse(row)


def test_other_json_is_text_to_learn() -> None:
    (found,) = parse({"prompt": "a", "completion": '[ {"x": 1}]'})
    assert found == Plain("a", '[ {"x": 1}]')


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_not_read_is_one_line_with_counts(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    caplog.set_level("INFO", logger="titanlite")
    row = {"messages": [USER | {"id": 7}, ANSWER | {"score": 1}], "source": "web", "empty": ""}
    job = make_job([row] * 8, seq_len=48, streaming=streaming)
    loader = build_data(job, 0, 1)[1]
    loader.micro_batches(0)
    assert caplog.text.count("not read: ") == 1
    assert "not read: source (8), messages[].id (8), messages[].score (8)" in caplog.text


def test_refused_columns_are_one_line_for_all_rows(make_job: MakeJob) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, (line|row) 1 and 7 more: field 'kto_tag'"):
        build_data(make_job([CHAT | {"kto_tag": True}] * 8), 0, 1)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    "text", ["what is<|endoftext|>", "what is<|endoftext|>\n", "<s>what is<|endoftext|>"]
)
def test_a_text_may_spell_its_begin_and_end(make_job: MakeJob, text: str, streaming: bool) -> None:
    shared = {"seq_len": 48, "streaming": streaming, "format": "text"}
    tokenizer, loader = build_data(make_job([{"text": text}] * 8, **shared), 0, 1)
    batch = loader.micro_batches(0)[0]
    begin = [tokenizer.bos_token_id] * text.startswith("<s>")  # it puts none before a text
    document = [*begin, *tokenizer("what is")["input_ids"], tokenizer.eos_token_id]
    assert batch.tokens[0, : len(document)].tolist() == document
    assert batch.document_ids[0, len(document)] == 1


def test_special_tokens_inside_a_text_are_counted(
    make_job: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"what{token} is<|endoftext|>"} for token in ("", "<s>", "<|endoftext|>")]
    build_data(make_job(rows * 4, None, seq_len=48), 0, 1)
    assert "8 texts that spell special tokens: they are trained as letters" in caplog.text
