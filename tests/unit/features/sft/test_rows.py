"""Every way in which a file of rows can be bad, and what is said about it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.schema import JobConfig
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import HubRows, find_rows

MakeJob = Callable[..., JobConfig]
GOOD = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def read(path: Path | str, **options: str) -> list[tuple[int, object]]:
    return [(row.number, row.content) for row in find_rows(str(path), **options)]


def message(**changes: object) -> dict[str, object]:
    return {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "b"} | changes]}


BAD_ROWS = {
    "missing field": ('{"prompt": "a"}', r"no field 'completion'; its fields are: 'prompt'\. Add or rename"),
    "wrong type": ('{"prompt": "a", "completion": 5}', r"field 'completion' is of type int, not a"),
    "null": ('{"prompt": "a", "completion": null}', r"field 'completion' is missing, not a"),
    "empty": ('{"prompt": "a", "completion": ""}', r"field 'completion' is empty\. Remove the row"),
    "invalid JSON": (
        '{"prompt": "a"',
        r"not valid JSON \(Expecting ',' delimiter, column 15\)\. Write one JSON object per",
    ),
    "array": ("[1, 2]", r"the row is of type list, not an object\. Write rows such as"),
    "surrogate": ('{"prompt": "\\ud800", "completion": "b"}', r"\\ud800 to \\udfff stands alone"),
    "nested": ("[" * 100_000, "not valid JSON .*nested too deeply"),
}
BAD_CHATS = {
    "no role": (message(role=None), r"messages\[1\] has no 'role'\. Use one of system, developer, user"),
    "unknown role": (message(role="robot"), r"messages\[1\]\.role is 'robot'\. Use one of system, developer, user"),
    "no content": (message(content=None), r"messages\[1\] has no 'content'"),
    "empty content": (message(content=" "), r"messages\[1\] is an empty message of the assistant"),
    "content type": (message(content=1), r"messages\[1\]\.content is of type int, not a string"),
    "image": (
        message(content=[{"type": "image", "url": "x"}]),
        r"messages\[1\]\.content\[0\] is a part of type 'image'",
    ),
    "weight": (message(weight=2), r"messages\[1\]\.weight is 2\. Write 0 or 1"),
    "tool call": (
        message(tool_calls=[{"id": "1"}]),
        r"messages\[1\]\.tool_calls\[0\]\.function\.name is missing, not a string",
    ),
    "arguments": (
        message(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        r"messages\[1\]\.tool_calls\[0\]\.arguments is not valid JSON",
    ),
    "tools": (CHAT | {"tools": [1]}, r"tools\[0\] is of type int, not an object"),
    "no list": ({"messages": "hi"}, "field 'messages' is of type str, not a list"),
    "no message": ({"messages": []}, "field 'messages' holds no message"),
    "no dict": ({"messages": ["hi"]}, r"messages\[0\] is of type str, not an object"),
    "no answer": ({"messages": CHAT["messages"][:1]}, "no message of the assistant to train on"),
    "answer first": ({"messages": CHAT["messages"][1:]}, "the first message is the assistant's"),
}


@pytest.mark.parametrize("line", BAD_ROWS)
def test_bad_line_is_named_or_skipped(make_job: MakeJob, line: str, caplog: pytest.LogCaptureFixture) -> None:
    text, message = BAD_ROWS[line]
    good = json.dumps(GOOD) + "\n"
    job = make_job(good * 2 + "\n" + text + "\n" + good, seq_len=16)
    with pytest.raises(DataError, match=rf'^data: \S*rows\.jsonl, line 4: .*{message}.*data\.bad_rows = "skip"'):
        build_data(job, 0, 1)
    job.data.bad_rows = "skip"
    caplog.set_level("INFO", logger="titanlite")
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        dataset = build_data(job, 0, 1)[1].dataset
        assert (dataset.num_train_sequences, dataset.num_validation_sequences) == (1, 1)
        assert "left out: 1 row skipped: " in caplog.text


@pytest.mark.parametrize("row", BAD_CHATS)
def test_bad_chat_is_named(make_job: MakeJob, row: str) -> None:
    content, text = BAD_CHATS[row]
    with pytest.raises(DataError, match=rf"^data: \S*rows\.jsonl, line 2: .*{text}"):
        build_data(make_job([CHAT, content, CHAT]), 0, 1)


def test_all_bad_rows_of_a_batch_are_named_at_once(make_job: MakeJob) -> None:
    with pytest.raises(DataError) as caught:
        build_data(make_job([GOOD, {"prompt": "a"}, GOOD, {"completion": "b"}]), 0, 1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data: 2 problems:" and "line 2: no field 'completion'" in lines[1] and "line 4: " in lines[2]


def test_bytes_that_are_not_utf8(make_job: MakeJob) -> None:
    job = make_job([GOOD, GOOD])
    file = Path(job.data.path)
    file.write_bytes(file.read_bytes() + b'{"prompt": "\xff", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: not UTF-8\. Convert it: iconv -f ISO"):
        build_data(job, 0, 1)
    file.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(
        DataError, match=r"rows\.jsonl: the file is UTF-16\. Convert it: iconv -f UTF-16 -t UTF-8 rows\.jsonl > "
    ):
        build_data(job, 0, 1)


def test_nothing_there(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("")
    with pytest.raises(DataError, match=r"rows\.jsonl: the file holds no row\. Remove it"):
        build_data(job, 0, 1)
    job.data.bad_rows = "skip"
    with pytest.raises(
        DataError, match=r"none of 1 rows can be used \(1 rows: empty file\)\. The first: .*rows\.jsonl"
    ):
        build_data(job, 0, 1)
    job.data.path = str(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl does not exist\. Give a path that exists\..* a file \(\.jsonl, "):
        build_data(job, 0, 1)
    (tmp_path / "empty").mkdir()
    job.data.path = str(tmp_path / "empty")
    with pytest.raises(DataError, match=r"no file in .* ends with \.jsonl"):
        build_data(job, 0, 1)
    (tmp_path / "rows.txt").write_text("a")
    job.data.path = str(tmp_path / "rows.txt")
    with pytest.raises(DataError, match=r"cannot read rows from .*rows\.txt: only \.jsonl, "):
        build_data(job, 0, 1)


def test_unknown_form(make_job: MakeJob) -> None:
    job = make_job([{"ask": "a", "answer": "b"}])
    text = r"line 1: the fields are 'answer', 'ask', which is no known form\. Rename them: .*--data\.fields"
    with pytest.raises(DataError, match=text):
        build_data(job, 0, 1)
    job.data.format = "messages"
    with pytest.raises(DataError, match=r"no field 'conversations'|no field 'messages'"):
        build_data(job, 0, 1)


def test_without_tokenizer_or_template(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job([CHAT, CHAT], template=None)
    with pytest.raises(DataError, match=r"tokenizer has no chat template\. Set data\.chat_template"):
        build_data(job, 0, 1)
    job.data.chat_template = str(tmp_path / "none.jinja")
    with pytest.raises(DataError, match=r"data\.chat_template: cannot read .*none\.jinja"):
        build_data(job, 0, 1)
    Path(job.data.chat_template).write_text("{{ messages[0].content }}|{{ (messages[1] or {'content': ''}).content }}")
    tokenizer, loader = build_data(job, 0, 1)
    assert tokenizer.chat_template.startswith("{{ messages[0]")  # saved with every checkpoint
    assert tokenizer.decode(loader.dataset.batch([0]).tokens[0, :3]) == "a|b"
    job.data.tokenizer_path = ""
    with pytest.raises(DataError, match="rows of examples need a tokenizer"):
        build_data(job, 0, 1)


def test_jsonl_keeps_absent_keys_absent(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"a": 1}\n\n{"b": {"c": null}}\n', encoding="utf-8")
    assert read(file) == [(1, {"a": 1}), (3, {"b": {"c": None}})]


def test_json_array(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"a": 1}, 2]')
    (first, (number, error)) = read(file)
    assert first == (1, {"a": 1}) and number == 2 and "of type int, not an object" in str(error)
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert read(file) == [(1, {"a": 1}), (2, {"a": 2})]


def test_csv(tmp_path: Path) -> None:
    """Everything stays text, and a row is named by the line on which it begins."""
    file = tmp_path / "a.csv"
    file.write_bytes(b'prompt,completion\n1,NA\n"two\nlines",\n\na\nb,\xff\n"c"d,e\nf,g\n')
    rows = read(file)
    assert rows[:2] == [(2, {"prompt": "1", "completion": "NA"}), (3, {"prompt": "two\nlines", "completion": ""})]
    assert [number for number, _ in rows] == [2, 3, 6, 7, 8, 9]
    reasons = [content.reason if isinstance(content, RowError) else None for _, content in rows]
    assert reasons == [None, None, "invalid CSV", "not UTF-8", "invalid CSV", None]
    assert "1 fields, but the first line names 2 columns" in str(rows[2][1]) and "iconv -f ISO-8859-1" in str(
        rows[3][1]
    )


def test_parquet(tmp_path: Path) -> None:
    """Keys that only some messages have are absent again, not None."""
    file = tmp_path / "a.parquet"
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]}]
    Dataset.from_list(rows).to_parquet(str(file))
    assert read(file) == [(1, rows[0])]
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=rf"^data: {file} is damaged \(.*\)\. Write or copy it again\."):
        read(file)


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "sub/a.csv", "readme.txt"):
        (tmp_path / name).write_text("prompt,completion\na,b\n" if name.endswith("csv") else '{"prompt": "x"}\n')
    rows = find_rows(str(tmp_path))
    assert [Path(name).name for name in rows.names] == ["b.jsonl", "a.csv"]
    assert [(row.file, row.number) for row in rows] == [(0, 1), (1, 2)]
    assert find_rows(str(tmp_path), "*.csv").names == (str(tmp_path / "sub/a.csv"),)
    assert rows.get_digest(tmp_path / "cache") != find_rows(str(tmp_path), "*.csv").get_digest(tmp_path / "cache")


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "c"}]).save_to_disk(str(tmp_path / "saved"))
    saved = Dataset.load_from_disk(str(tmp_path / "saved"))
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: (asked.update(kwargs, args=args), saved)[1])
    rows = find_rows("owner/name@v1", subset="sub", split="test")
    assert isinstance(rows, HubRows) and rows.names == ("owner/name@v1/sub (test)",)
    assert [(row.number, row.content) for row in rows] == [
        (1, {"prompt": "a", "completion": "b"}),
        (2, {"prompt": "c"}),
    ]
    assert asked == {"args": ("owner/name", "sub"), "split": "test", "revision": "v1", "streaming": False}
    digest = rows.get_digest(tmp_path / "cache")
    assert len(digest) == 64 and digest != find_rows("owner/name@v1").get_digest(tmp_path / "cache")

    monkeypatch.setattr(
        "datasets.load_dataset", lambda *_, **kwargs: (asked.update(kwargs), saved.to_iterable_dataset())[1]
    )
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="abc"))
    stream = find_rows("owner/name", streaming=True)
    assert [(row.number, row.content) for row in stream.iterate_from(1)] == [(2, {"prompt": "c"})]
    assert asked["streaming"] is True and asked["revision"] == stream.get_stamp() == "abc"

    def cut_off(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", cut_off)
    with pytest.raises(DataError, match=r"cannot read 'owner/other' from the Hugging Face hub: no network"):
        find_rows("owner/other", streaming=True).get_stamp()

    def fail(*_: object, **__: object) -> None:
        raise ValueError('Unknown split "test".')

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(DataError, match=r"cannot read 'owner/name', split 'test', from the .* Unknown split"):
        list(find_rows("owner/name", split="test"))


def test_messages_do_not_grow_with_the_columns(make_job: MakeJob) -> None:
    columns = dict.fromkeys((f"column_{i}" for i in range(3000)), "x")
    for rows, said in (([columns] * 3, "no known form"), ([GOOD, columns], "no field 'prompt'")):
        with pytest.raises(DataError, match=said) as error:
            build_data(make_job(rows), 0, 1)
        assert "'column_0'" in str(error.value) and len(str(error.value)) < 1500


def test_a_pattern_as_a_path_names_the_setting_for_patterns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf'data.path = "{tmp_path}", data.pattern = "\*\.jsonl"'):
        find_rows(f"{tmp_path}/*.jsonl")
