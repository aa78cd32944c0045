"""Columns and keys that nothing reads, flags and older forms that are read, and texts that spell
special tokens at their ends.
"""

import json

import pytest
from files import read_table

from titanlite.assemble import build_data
from titanlite.features.sft.forms import WEIGHTS, Plain, detect_form, parse_row
from titanlite.features.sft.readers import RowError

ROWS = read_table("rows")
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def parse(row):
    form = detect_form(row)
    assert form is not None
    return parse_row(row, form)


@pytest.mark.parametrize("case", ROWS["refused"], ids=lambda case: case["says"])
def test_what_changes_what_is_learned_is_refused_by_name(case):
    with pytest.raises(RowError, match=case["says"]):
        parse(json.loads(case["row"]))


def test_what_changes_nothing_is_accepted():
    for case in ROWS["accepted"]:
        assert parse(json.loads(case["row"])), case


def test_flags_of_messages_are_weights():
    for name in WEIGHTS:
        (chat,) = parse({"messages": [USER, ANSWER | {name: 0}, USER, ANSWER | {name: 1}]})
        assert chat.untrained == {1} and chat.messages == [USER, ANSWER, USER, ANSWER]


def test_flags_of_pairs_are_weights():
    turns = [USER, ANSWER | {"loss": False}, USER]
    sides = {
        name: [*turns, ANSWER | {"loss": False}, USER, ANSWER | {"content": name}]
        for name in ("chosen", "rejected")
    }
    sides["rejected"][3] = ANSWER | {"content": "d", "loss": False}
    chosen, rejected = parse(sides)
    assert chosen.answers_from == rejected.answers_from == 3
    assert chosen.untrained == rejected.untrained == {3}


def test_older_calls_of_functions_are_tool_calls():
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


def test_lists_of_messages_may_be_json_text():
    for case in ROWS["lists"]:
        row = json.loads(case["row"])
        as_text = {name: json.dumps(value, indent=2) for name, value in row.items()}
        assert parse(as_text) == parse(row), case


def test_other_json_is_text_to_learn():
    (found,) = parse({"prompt": "a", "completion": '[ {"x": 1}]'})
    assert found == Plain("a", '[ {"x": 1}]')


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_not_read_is_one_line_with_counts(make_job, caplog, streaming):
    caplog.set_level("INFO", logger="titanlite")
    row = {"messages": [USER | {"id": 7}, ANSWER | {"score": 1}], "source": "web", "empty": ""}
    job = make_job([row] * 8, seq_len=48, streaming=streaming)
    loader = build_data(job, 0, 1)[1]
    loader.micro_batches(0)
    assert caplog.text.count("not read: ") == 1
    assert "not read: source (8), messages[].id (8), messages[].score (8)" in caplog.text


@pytest.mark.parametrize(
    ("text", "streaming"),
    [("what is<|endoftext|>\n", False), ("<s>what is<|endoftext|>", True)],
)
def test_a_text_may_spell_its_begin_and_end(make_job, text, streaming):
    shared = {"seq_len": 48, "streaming": streaming, "format": "text"}
    tokenizer, loader = build_data(make_job([{"text": text}] * 8, **shared), 0, 1)
    batch = loader.micro_batches(0)[0]
    begin = [tokenizer.bos_token_id] * text.startswith("<s>")  # it puts none before a text
    document = [*begin, *tokenizer("what is")["input_ids"], tokenizer.eos_token_id]
    assert batch.tokens[0, : len(document)].tolist() == document
    assert batch.document_ids[0, len(document)] == 1
