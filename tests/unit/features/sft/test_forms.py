"""Forms of rows, and columns under other names: `data.text_field`, `data.fields`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.check import check_values
from titanlite.config.schema import JobConfig
from titanlite.features.generate.evaluate import read_evaluation_prompts
from titanlite.features.sft import examples
from titanlite.features.sft.forms import Chat, detect_form, parse_row
from titanlite.features.sft.readers import RowError

MakeJob = Callable[..., JobConfig]
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def make_rows(field: str) -> list[dict[str, Any]]:
    return [{"path": f"{i}.py", field: f"what is {i}"} for i in range(20)]


@pytest.mark.parametrize("form", ["auto", "text"])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_text_is_in_the_field_that_is_named(make_job: MakeJob, form: str, streaming: bool) -> None:
    settings: dict[str, Any] = {"seq_len": 48, "format": form, "streaming": streaming}
    expected = build_data(make_job(make_rows("text"), **settings), 0, 1)[1].micro_batches(0)[0]
    job = make_job(make_rows("content"), text_field="content", **settings)
    batch = build_data(job, 0, 1)[1].micro_batches(0)[0]
    assert batch.tokens.equal(expected.tokens) and batch.labels.equal(expected.labels)
    job.data.text_field = "code"
    text = r"no field 'code'; its fields are: 'content', 'path'\. Add or rename the field, or set data\.text_field\."
    with pytest.raises(DataError, match=rf"line 1 and 19 more: {text}"):
        build_data(job, 0, 1)[1].micro_batches(0)


def test_a_column_that_is_named_goes_before_what_else_a_row_has(make_job: MakeJob) -> None:
    job = make_job([CHAT | {"content": "a"}] * 4, seq_len=48, text_field="content")
    assert build_data(job, 0, 1)[1].dataset.form == "text"
    job.data.fields, job.data.text_field = '{"tools": "content"}', "text"
    job.data.format = "text"
    with pytest.raises(
        DataError, match=r"^data\.fields: tools = content cannot be used in rows of form 'text', which ta"
    ):
        build_data(job, 0, 1)


RENAMED = {
    "chat": ({"q": "a", "a": "b"}, {"question": "q", "answer": "a"}, {"question": "a", "answer": "b"}),
    "columns that change places": (
        {"answer": "a", "question": "b"},
        {"question": "answer", "answer": "question"},
        {"question": "a", "answer": "b"},
    ),
    "messages": ({"dialog": CHAT["messages"]}, {"messages": "dialog"}, CHAT),
    "completion": ({"q": "a", "a": "b"}, {"prompt": "q", "completion": "a"}, {"prompt": "a", "completion": "b"}),
    "text": ({"body": "a", "question": "c", "answer": "d"}, {"text": "body"}, {"text": "a"}),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", RENAMED)
def test_columns_have_the_names_that_they_are_given(make_job: MakeJob, case: str, streaming: bool) -> None:
    row, fields, meant = RENAMED[case]
    expected = build_data(make_job([meant] * 8, seq_len=48, streaming=streaming), 0, 1)[1].micro_batches(0)[0]
    job = make_job([row] * 8, seq_len=48, streaming=streaming, fields=json.dumps(fields))
    batch = build_data(job, 0, 1)[1].micro_batches(0)[0]
    assert batch.tokens.equal(expected.tokens) and batch.labels.equal(expected.labels)


def test_pairs_and_evaluation_have_the_names_that_they_are_given(make_job: MakeJob, tmp_path: Path) -> None:
    fields = json.dumps({"prompt": "q", "chosen": "good", "rejected": "bad"})
    job = make_job([{"q": "a", "good": "b", "bad": "c"}] * 8, seq_len=48, fields=fields)
    tokenizer, loader = build_data(job, 0, 1)
    assert loader.dataset.form == "preference"
    (tmp_path / "other.jsonl").write_text(json.dumps({"q": "a", "good": "b", "bad": "c"}) + "\n")
    (prompt,) = read_evaluation_prompts(job.data, str(tmp_path / "other.jsonl"), "test", tokenizer)
    assert prompt.reference.startswith("b")


def test_a_column_that_is_missing_is_named_once_with_its_rows(make_job: MakeJob) -> None:
    rows = [{"q": "a", "a": "b"}] * 3 + [{"q": "a"}] * 360 + [{"q": "a", "a": "b"}] + [{"q": "a"}]
    job = make_job(rows, fields=json.dumps({"question": "q", "answer": "a"}))
    text = (
        r"^data: \S+, line 4 and 360 more: no field 'a'; its fields are: 'q'\. Add or rename the field, or set "
        r"data\.fields\.answer\. To leave such rows out"
    )
    with pytest.raises(DataError, match=text):
        build_data(job, 0, 1)


def test_unknown_fields_are_refused(make_job: MakeJob) -> None:
    job = make_job([])
    job.model.flavor = "debug"
    for text, problem in {
        '{"promt": "a"}': "data.fields.promt = \"a\" cannot be used. Did you mean 'prompt'?",
        '{"prompt": 3}': "data.fields.prompt = 3 cannot be used. Write the name of a column as text.",
        "question": 'data.fields = "question" is no JSON object.',
    }.items():
        job.data.fields = text
        (found,) = check_values(job)
        assert found.startswith(problem)


def test_where_the_setting_has_no_effect_it_is_refused(make_job: MakeJob) -> None:
    job = make_job([], text_field="content")
    job.model.flavor = "debug"
    for form in ("auto", "text"):
        job.data.format = form
        assert check_values(job) == []
    job.data.format = "messages"
    (problem,) = check_values(job)
    assert problem.startswith('data.text_field = "content" has no effect on this data')
    job.data.text_field = "text"
    assert check_values(job) == []
    job.data.text_field = ""
    assert check_values(job) == [
        'data.text_field = "" names no field. Set it to the field with the text, or leave it out.'
    ]
    job.data.text_field, job.data.format, job.data.dataset = "content", "auto", "text"
    assert check_values(job) == [
        'data.text_field = "content" has no effect on this data (data.dataset = "text"). Leave it out.'
    ]


def test_another_column_has_another_cache(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    load = examples._load
    monkeypatch.setattr(examples, "_load", lambda path, content: (loaded.append(path), load(path, content))[1])
    rows = [{"text": f"what is {i}", "content": f"is {i} what"} for i in range(20)]
    for field in ("text", "content", "text"):
        build_data(make_job(rows, seq_len=48, text_field=field), 0, 1)
    assert len(set(loaded)) == 2 and loaded[0] == loaded[-1]


# --- questions and answers


ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "a", "output": "b"}, "a"),
        ({"instruction": "a", "input": "", "output": "b", "text": "Below is an instruction ..."}, "a"),
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
    assert chat == Chat([{"role": "system", "content": "s"}, {"role": "user", "content": question}, ANSWER], 1)


def test_other_forms_go_before_questions() -> None:
    assert detect_form({"question": "a", "answer": "b", **CHAT}) == "messages"
    assert parse_row({"question": "a", "answer": "c", **CHAT}, "messages")[0] == parse_row(CHAT, "messages")[0]
    assert detect_form({"prompt": "a", "response": "b", "completion": "c"}) == "prompt_completion"
    assert detect_form({"instruction": "a", "chosen": "b", "rejected": "c", "output": "b"}) == "preference"
    assert detect_form({"instruction": "a", "input": "b"}) is None


@pytest.mark.parametrize("row", [{"question": "a", "answer": ""}, {"question": 3, "answer": "b"}])
def test_a_question_without_an_answer_is_a_bad_row(row: dict[str, Any]) -> None:
    assert detect_form(row) == "messages"
    with pytest.raises(RowError, match=r"field '(question|answer)' is"):
        parse_row(row, "messages")


def test_the_system_message_of_a_pair_is_in_its_prompt() -> None:
    chosen, _ = parse_row({"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, "preference")
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert chosen == Chat([*asked, ANSWER], answers_from=2)
    lists = {side: [asked[1], {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    assert parse_row({"system": "s", **lists}, "preference")[0].messages[:2] == asked
