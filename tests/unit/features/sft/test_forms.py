"""Forms of rows, and columns under other names: `data.text_field`, `data.fields`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import titanlite
from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.check import check_values
from titanlite.config.schema import JobConfig
from titanlite.features.sft.forms import Chat, count_unread, detect_form, parse_row
from titanlite.features.sft.readers import RowError

MakeJob = Callable[..., JobConfig]
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_a_column_that_is_named_goes_before_what_else_a_row_has(make_job: MakeJob) -> None:
    job = make_job([CHAT | {"content": "a"}] * 4, seq_len=48, text_field="content")
    assert build_data(job, 0, 1)[1].dataset.form == "text"
    job.data.fields, job.data.text_field = '{"tools": "content"}', "text"
    job.data.format = "text"
    with pytest.raises(
        DataError,
        match=r"^data\.fields: tools = content cannot be used in rows of form 'text', which ta",
    ):
        build_data(job, 0, 1)


RENAMED: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "chat": (
        {"q": "a", "a": "b"},
        {"question": "q", "answer": "a"},
        {"question": "a", "answer": "b"},
    ),
    "columns that change places": (
        {"answer": "a", "question": "b"},
        {"question": "answer", "answer": "question"},
        {"question": "a", "answer": "b"},
    ),
    "messages": ({"dialog": CHAT["messages"]}, {"messages": "dialog"}, CHAT),
    "completion": (
        {"q": "a", "a": "b"},
        {"prompt": "q", "completion": "a"},
        {"prompt": "a", "completion": "b"},
    ),
    "pair": (
        {"q": "a", "good": "b", "bad": "c"},
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ),
    "text": ({"body": "a", "question": "c", "answer": "d"}, {"text": "body"}, {"text": "a"}),
    "text_field": ({"path": "b", "content": "what"}, {}, {"text": "what"}),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", RENAMED)
def test_columns_have_the_names_that_they_are_given(
    make_job: MakeJob, case: str, streaming: bool
) -> None:
    row, fields, meant = RENAMED[case]
    shared = {
        "seq_len": 48,
        "streaming": streaming,
        "format": "preference" if case == "pair" else "auto",
    }
    expected = build_data(make_job([meant] * 8, **shared), 0, 1)[1].micro_batches(0)[0]
    named = {"fields": json.dumps(fields)} if fields else {"text_field": "content"}
    batch = build_data(make_job([row] * 8, **shared, **named), 0, 1)[1].micro_batches(0)[0]
    assert batch.tokens.equal(expected.tokens) and batch.labels.equal(expected.labels)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"fields": '{"promt": "a"}'}, 'data.fields.promt = "a"'),
        ({"fields": '{"prompt": 3}'}, "data.fields.prompt = 3"),
        ({"fields": "question"}, 'data.fields = "question"'),
        ({"text_field": ""}, 'data.text_field = ""'),
        ({"path": ""}, 'data.dataset = "examples" needs data.path'),
        ({"format": "preference", "train_on": "all"}, 'data.train_on = "all"'),
        ({"text_field": "content", "format": "text"}, None),
    ],
)
def test_settings_without_an_effect_are_refused(
    make_job: MakeJob, settings: dict[str, Any], problem: str | None
) -> None:
    job = make_job([], **settings)
    job.model.flavor = "debug"
    found = [problem.text for problem in check_values(job)]
    assert len(found) == (problem is not None) and all(
        text.startswith(problem or "") for text in found
    )


def test_a_column_that_is_missing_is_named_once_with_its_rows(make_job: MakeJob) -> None:
    rows = [{"q": "a", "a": "b"}] * 3 + [{"q": "a"}] * 360 + [{"q": "a", "a": "b"}] + [{"q": "a"}]
    job = make_job(rows, fields=json.dumps({"question": "q", "answer": "a"}))
    text = (
        r"^data: \S+, row 4 and 360 more: no field 'a'; its fields are: 'q'\. Add or rename the "
        r"field, or set "
        r"data\.fields\.answer\. To leave such rows out"
    )
    with pytest.raises(DataError, match=text):
        build_data(job, 0, 1)


def test_the_example_rows_of_the_documents_are_read() -> None:
    page = Path(titanlite.__file__).parents[1] / "docs/fine_tuning.md"
    block = page.read_text().split("```json\n")[1].split("```")[0]
    rows = [json.loads(line) for line in block.splitlines()]
    forms = [detect_form(row) for row in rows]
    assert forms == ["messages"] * 4 + ["prompt_completion", "text", "preference"]
    for row, form in zip(rows, forms, strict=True):
        assert form and parse_row(row, form) and not count_unread([row], form, "")


# --- questions and answers


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "a", "output": "b"}, "a"),
        (
            {"instruction": "a", "input": "", "output": "b", "text": "Below is an instruction ..."},
            "a",
        ),
        ({"instruction": "a", "input": "c", "output": "b"}, "a\n\nc"),
        ({"instruction": "a", "context": "c", "response": "b"}, "a\n\nc"),
        ({"question": "a", "answer": "b", "id": 3, "context": ""}, "a"),
        ({"prompt": "a", "response": "b"}, "a"),
    ],
)
def test_a_question_and_its_answer_are_a_chat(row: dict[str, Any], question: str) -> None:
    assert detect_form(row) == "messages"
    (chat,) = parse_row(row, "messages")
    assert chat == Chat([{"role": "user", "content": question}, ANSWER])
    (chat,) = parse_row({**row, "system": "s"}, "messages")
    assert chat == Chat(
        [{"role": "system", "content": "s"}, {"role": "user", "content": question}, ANSWER], 1
    )


def test_other_forms_go_before_questions() -> None:
    assert detect_form({"question": "a", "answer": "b", **CHAT}) == "messages"
    assert (
        parse_row({"question": "a", "answer": "c", **CHAT}, "messages")[0]
        == parse_row(CHAT, "messages")[0]
    )
    assert detect_form({"prompt": "a", "response": "b", "completion": "c"}) == "prompt_completion"
    assert (
        detect_form({"instruction": "a", "chosen": "b", "rejected": "c", "output": "b"})
        == "preference"
    )
    assert detect_form({"instruction": "a", "input": "b"}) is None


@pytest.mark.parametrize("row", [{"question": "a", "answer": ""}, {"question": 3, "answer": "b"}])
def test_a_question_without_an_answer_is_a_bad_row(row: dict[str, Any]) -> None:
    assert detect_form(row) == "messages"
    with pytest.raises(RowError, match=r"field '(question|answer)' is"):
        parse_row(row, "messages")


def test_the_system_message_of_a_pair_is_in_its_prompt() -> None:
    chosen, _ = parse_row(
        {"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, "preference"
    )
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert chosen == Chat([*asked, ANSWER], answers_from=2)
    lists = {
        side: [asked[1], {"role": "assistant", "content": side}] for side in ("chosen", "rejected")
    }
    assert parse_row({"system": "s", **lists}, "preference")[0].messages[:2] == asked
