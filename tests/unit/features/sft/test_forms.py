"""Forms of rows, columns under other names (`data.text_field`, `data.fields`), columns that nothing
reads, older forms that are read, and texts that spell special tokens at their ends.
"""

import json
from pathlib import Path

import pytest
from files import read_table

import titanlite
from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.features.sft.forms import (
    WEIGHTS,
    Chat,
    Plain,
    count_unread,
    detect_form,
    parse_row,
)
from titanlite.features.sft.readers import RowError

ROWS = read_table("rows")
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ANSWER]}


def test_a_column_that_is_named_goes_before_what_else_a_row_has(make_job):
    job = make_job([CHAT | {"content": "a"}] * 4, seq_len=48, text_field="content")
    assert build_data(job, 0, 1)[1].dataset.form == "text"
    job.data.fields, job.data.text_field = '{"tools": "content"}', "text"
    job.data.format = "text"
    with pytest.raises(
        DataError,
        match=r"^data\.fields: tools = content cannot be used in rows of format 'text', which ",
    ):
        build_data(job, 0, 1)


@pytest.mark.parametrize("case", ROWS["renamed"])
def test_columns_have_the_names_that_they_are_given(make_job, case):
    row, meant = json.loads(case["row"]), json.loads(case["meant"])
    shared = {"seq_len": 48, "streaming": "fields" in case}
    shared["format"] = "preference" if "chosen" in meant else "auto"
    named = {"fields": case["fields"]} if "fields" in case else {"text_field": "content"}
    expected = build_data(make_job([meant] * 8, **shared), 0, 1)[1].micro_batches(0)[0]
    batch = build_data(make_job([row] * 8, **shared, **named), 0, 1)[1].micro_batches(0)[0]
    assert batch.tokens.equal(expected.tokens) and batch.labels.equal(expected.labels)


def test_the_example_rows_of_the_documents_are_read():
    page = Path(titanlite.__file__).parents[1] / "docs/fine_tuning.md"
    block = page.read_text().split("```json\n")[1].split("```")[0]
    rows = [json.loads(line) for line in block.splitlines()]
    forms = [detect_form(row) for row in rows]
    assert forms == ["messages"] * 4 + ["prompt_completion", "text", "preference"]
    for row, form in zip(rows, forms, strict=True):
        assert form and parse_row(row, form) and not count_unread([row], form, "")


# --- questions and answers


@pytest.mark.parametrize("case", ROWS["questions"])
def test_a_question_and_its_answer_are_a_chat(case):
    row, question = json.loads(case["row"]), {"role": "user", "content": case["asked"]}
    assert detect_form(row) == "messages"
    (chat,) = parse_row(row, "messages")
    assert chat == Chat([question, ANSWER], (1,))
    (chat,) = parse_row({**row, "system": "s"}, "messages")
    assert chat == Chat([{"role": "system", "content": "s"}, question, ANSWER], (2,))


def test_other_forms_go_before_questions():
    both = {"question": "a", "answer": "c", **CHAT}
    assert detect_form(both) == "messages"
    assert parse_row(both, "messages")[0] == parse_row(CHAT, "messages")[0]
    assert detect_form({"prompt": "a", "response": "b", "completion": "c"}) == "prompt_completion"
    pair = {"instruction": "a", "chosen": "b", "rejected": "c", "output": "b"}
    assert detect_form(pair) == "preference"
    assert detect_form({"instruction": "a", "input": "b"}) is None


# --- what is read, and what is not


def parse(row):
    return parse_row(row, detect_form(row))


@pytest.mark.parametrize("case", ROWS["refused"])
def test_what_changes_what_is_learned_is_refused_by_name(case):
    with pytest.raises(RowError, match=case["says"]):
        parse(json.loads(case["row"]))


def test_what_changes_nothing_is_accepted():
    for case in ROWS["accepted"]:
        assert parse(json.loads(case["row"])), case


def test_flags_of_messages_are_weights():
    for name in WEIGHTS:
        (chat,) = parse({"messages": [USER, ANSWER | {name: 0}, USER, ANSWER | {name: 1}]})
        assert chat.answers == (3,) and chat.messages == [USER, ANSWER, USER, ANSWER]


def test_flags_of_pairs_are_weights():
    turns = [USER, ANSWER | {"loss": False}, USER]
    sides = {
        name: [*turns, ANSWER | {"loss": False}, USER, ANSWER | {"content": name}]
        for name in ("chosen", "rejected")
    }
    sides["rejected"][3] = ANSWER | {"content": "d", "loss": False}
    chosen, rejected = parse(sides)
    assert chosen.answers == rejected.answers == (5,)


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
