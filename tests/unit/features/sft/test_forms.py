"""Forms of rows, and columns under other names: `data.text_field`, `data.fields`."""

import json
from pathlib import Path

import pytest
from files import read_table

import titanlite
from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.features.sft.forms import Chat, count_unread, detect_form, parse_row

ROWS = read_table("rows")
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


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


@pytest.mark.parametrize("case", ROWS["renamed"], ids=lambda case: case["row"][:40])
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


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize("case", ROWS["questions"], ids=lambda case: case["row"][:40])
def test_a_question_and_its_answer_are_a_chat(case):
    row, question = json.loads(case["row"]), {"role": "user", "content": case["asked"]}
    assert detect_form(row) == "messages"
    (chat,) = parse_row(row, "messages")
    assert chat == Chat([question, ANSWER])
    (chat,) = parse_row({**row, "system": "s"}, "messages")
    assert chat == Chat([{"role": "system", "content": "s"}, question, ANSWER], 1)


def test_other_forms_go_before_questions():
    both = {"question": "a", "answer": "c", **CHAT}
    assert detect_form(both) == "messages"
    assert parse_row(both, "messages")[0] == parse_row(CHAT, "messages")[0]
    assert detect_form({"prompt": "a", "response": "b", "completion": "c"}) == "prompt_completion"
    pair = {"instruction": "a", "chosen": "b", "rejected": "c", "output": "b"}
    assert detect_form(pair) == "preference"
    assert detect_form({"instruction": "a", "input": "b"}) is None
