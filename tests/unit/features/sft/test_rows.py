"""Every way in which a file of rows can be bad, and what is said about it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from files import error_of, read_table, write_lines

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.data import DataSection
from titanlite.features.sft.rows import PER_FILE, open_rows

GOOD = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


ROWS = read_table("rows")
# Which TOML cannot hold, or nobody wants to read.
BAD_BYTES = [
    {"row": b'{"prompt": "\xff", "completion": "b"}', "says": "not valid JSON .*'utf-8' codec"},
    {"row": b"[" * 100_000, "says": "not valid JSON .*nested too deeply"},
]


@pytest.mark.parametrize("case", [*ROWS["bad"], *BAD_BYTES])
def test_bad_line_is_named_or_skipped(make_job, case, caplog):
    text, problem = case["row"], case["says"]
    good = json.dumps(GOOD).encode() + b"\n"
    job = make_job("", seq_len=16)
    bad = text if isinstance(text, bytes) else text.encode()
    Path(job.data.path).write_bytes(good * 2 + b"\n" + bad + b"\n" + good)
    with pytest.raises(
        DataError, match=rf'^data: \S*rows\.jsonl, row 4: .*{problem}.*data\.bad_rows = "skip"'
    ):
        build_data(job, 0, 1)
    job.data.bad_rows = "skip"
    caplog.set_level("INFO", logger="titanlite")
    dataset = build_data(job, 0, 1)[1].dataset
    assert (dataset.num_train_sequences, dataset.num_validation_sequences) == (1, 1)
    assert "left out: rows skipped (" in caplog.text


@pytest.mark.parametrize("case", ROWS["bad_chats"])
def test_bad_chat_is_named(make_job, case):
    content, text = json.loads(case["row"]), case["says"]
    with pytest.raises(DataError, match=rf"^data: \S*rows\.jsonl, row 2: .*{text}"):
        build_data(make_job([CHAT, content, CHAT]), 0, 1)


def test_all_bad_rows_of_a_batch_are_named_at_once(make_job):
    job = make_job([GOOD, {"prompt": "a"}, GOOD, {"completion": "b"}])
    _, first, second = error_of(DataError, build_data, job, 0, 1).splitlines()
    assert "row 2: no field 'completion'" in first and "row 4: " in second


def test_rows_of_a_file_with_the_same_problem_share_a_line(make_job, tmp_path):
    (tmp_path / "both").mkdir()
    for name in ("a", "b"):
        write_lines(tmp_path / f"both/{name}.jsonl", [GOOD, {"prompt": "a"}, GOOD, {"prompt": "a"}])
    job = make_job("")
    job.data.path = str(tmp_path / "both")
    with pytest.raises(DataError) as caught:
        build_data(job, 0, 1)
    _, first, second = str(caught.value).splitlines()
    assert "a.jsonl, row 2 and 1 more: no" in first and "b.jsonl, row 2 and 1 more: no" in second


def test_without_tokenizer_or_template(make_job, tmp_path):
    job = make_job([CHAT, CHAT], template=None)
    with pytest.raises(
        DataError, match=r"tokenizer has no chat template\. Set data\.chat_template"
    ):
        build_data(job, 0, 1)
    job.data.chat_template = str(tmp_path / "none.jinja")
    with pytest.raises(DataError, match=r"data\.chat_template: cannot read .*none\.jinja"):
        build_data(job, 0, 1)
    Path(job.data.chat_template).write_text(
        "{{ messages[0].content }}|{{ (messages[1] or {'content': ''}).content }}"
    )
    tokenizer, loader = build_data(job, 0, 1)
    assert tokenizer.chat_template.startswith("{{ messages[0]")  # saved with every checkpoint
    assert tokenizer.decode(loader.dataset.batch([0]).tokens[0, :3]) == "a|b"
    job.data.tokenizer_path = ""
    with pytest.raises(DataError, match=r"rows of examples, and data\.sources, need a tok"):
        build_data(job, 0, 1)


def open_path(path, **settings):
    return open_rows(DataSection(path=str(path), **settings))


def read(rows):
    return [(*divmod(row.place, PER_FILE), row.content) for row in rows.iterate_from()]


def test_saved_rows(tmp_path):
    """Keys that only some messages have are absent again, not None."""
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]
    rows = [{"messages": messages}]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    DatasetDict({"test": Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "saved"))
    for found in (
        open_path(tmp_path / "a.parquet"),
        open_path(tmp_path / "saved/test"),
        open_path(tmp_path / "saved", split="test"),
    ):
        assert read(found) == [(0, 1, rows[0])]


def test_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "sub/a.csv", "readme.txt"):
        (tmp_path / name).write_text(
            "prompt,completion\na,b\n" if name.endswith("csv") else '{"prompt": "x"}\n'
        )
    rows = open_path(tmp_path)
    assert [Path(name).name for name in rows.names] == ["b.jsonl", "a.csv"]
    assert [place[:2] for place in read(rows)] == [(0, 1), (1, 1)]
    some = open_path(tmp_path, pattern="*.csv")
    assert some.names == (str(tmp_path / "sub/a.csv"),)
    cache = tmp_path / "cache"
    assert rows.get_digest(cache) != some.get_digest(cache)


def test_hub_id(tmp_path, monkeypatch):
    asked = {}
    Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "c"}]).save_to_disk(
        str(tmp_path / "saved")
    )
    saved = Dataset.load_from_disk(str(tmp_path / "saved"))

    def load(*args, streaming, **kwargs):
        asked.update(kwargs, args=args)
        return saved.to_iterable_dataset() if streaming else saved

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = open_path("owner/name@v1", subset="sub", split="test")
    assert rows.names == ("owner/name@v1/sub (test)",)
    assert read(rows) == [(0, 1, {"prompt": "a", "completion": "b"}), (0, 2, {"prompt": "c"})]
    assert asked == {"args": ("owner/name", "sub"), "split": "test", "revision": "v1"}
    digest = rows.get_digest(tmp_path / "cache")
    assert len(digest) == 64 and digest != open_path("owner/name@v1").get_digest(tmp_path / "cache")

    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda *_, **__: SimpleNamespace(sha="abc")
    )
    stream = open_rows(DataSection(path="owner/name"), streaming=True)
    assert [(row.place, row.content) for row in stream.iterate_from(1)] == [(2, {"prompt": "c"})]
    assert asked["revision"] == "abc" and stream.identity == ("owner/name (train), abc",)

    def fail(*_, **__):
        raise ValueError('Unknown split "test".')

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(
        DataError, match=r"cannot read 'owner/name', split 'test', from the .* Unknown split"
    ):
        read(open_path("owner/name", split="test"))
