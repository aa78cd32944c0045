"""`python -m titanlite data`."""

import re
from types import SimpleNamespace

import pytest
from unit.data.templates import CHATML

from titanlite.__main__ import main
from titanlite.features.tools.preview_data import Painter

_CONFIG = """
[model]
name = "qwen3_moe"
flavor = "debug"
init = "random"
[training]
seq_len = 64
[data]
dataset = "examples"
path = "{path}"
tokenizer_path = "{tokenizer}"
cache_folder = "{cache}"
[validation]
enable = true
"""


@pytest.fixture
def preview(make_job, tmp_path, capsys):
    """`preview(rows, *arguments)` -> exit code, output, error output."""

    def run(rows, *arguments, template=CHATML):
        data = make_job(rows, template).data
        file = tmp_path / "preview.toml"
        file.write_text(
            _CONFIG.format(path=data.path, tokenizer=data.tokenizer_path, cache=data.cache_folder)
        )
        code = main(["data", "--config", str(file), *arguments])
        return code, *capsys.readouterr()

    return run


def chats(count):
    return [
        {
            "id": i + 1,
            "messages": [
                {"role": "user", "content": f"what is {i}"},
                {"role": "assistant", "content": "x" * (i % 7 + 1)},
            ],
        }
        for i in range(count)
    ]


def test_report(preview):
    rows = [*chats(30), {"messages": []}, {"messages": [{"role": "user", "content": "a\x1b[2J"}]}]
    code, out, err = preview(rows, "--data.bad_rows=skip", "--samples=2", "--world-size=2")
    assert (code, err) == (0, "")
    assert "32 from " in out and "messages" in out
    assert "27 examples to train on (messages), 3 held out" in out
    assert "rows skipped (empty field): 1\n             rows skipped (no trained token): 1" in out
    assert "rows.jsonl, row 31: field 'messages' holds no message." in out
    assert out.count("\n             not read: id (30)\n") == 1
    assert " on 2 data ranks" in out and "seed 42" in out
    assert out.count("\nsample ") == 2 and "\nsample 1: " in out
    shown = out.split("\nsample 1: ")[1].split("\nsample 2")[0]
    assert "<|im_start|>user\n" in shown and "[[x" in shown and "<|im_end|>]]" in shown


def test_a_part_of_the_data_order_is_shown(preview):
    def places(*arguments):
        code, out, _ = preview(chats(30), "--data.packing=false", *arguments)
        assert code == 0
        return re.findall(r"^sample \d+: \S+, row (\d+)", out, flags=re.M)

    order = places("--samples=27")
    assert len({*order}) == 27, "an epoch"
    assert places("--samples=4", "--data.skip_to_sample=20") == order[20:24]
    assert len(places("--samples=99", "--data.skip_to_sample=20")) == 27
    assert (
        "tokens, " in preview(chats(30), "--tokens=4", "--samples=1")[1].partition("\n    ... ")[2]
    )


def test_stream(preview):
    rows = [*chats(9), {"messages": []}]
    code, out, err = preview(
        rows,
        "--data.streaming=true",
        "--validation.enable=false",
        "--data.bad_rows=skip",
        "--samples=1",
    )
    assert (
        (code, err) == (0, "") and "a stream of " in out and "\nsample 1: " in out and "[[x" in out
    )
    assert "so far: left out: 1 rows skipped (empty field)" in out
    assert out.count("so far: not read: id (9)\n") == 1
    code, _, err = preview(rows, "--data.streaming=true", "--validation.enable=false")
    assert code == 2 and "rows.jsonl, row 10: field 'messages' holds no message" in err


@pytest.mark.parametrize(
    ("rows", "arguments", "said"),
    [
        ([*chats(2), {"messages": 1}], [], "rows.jsonl, row 3: field 'messages' is of type int"),
        (
            chats(40),
            ["--training.objective=dpo"],
            "needs preference pairs, but the rows have the format 'messages'",
        ),
        (chats(40), ["--model.init=auto"], "the run would begin with random weights"),
        (
            chats(40),
            ["--data.streaming=true", "--validation.enable=false", "--training.objective=dpo"],
            "no known end",
        ),
    ],
)
def test_what_the_run_would_refuse(preview, rows, arguments, said):
    code, out, err = preview(rows, *arguments)
    assert code == 2 and "sample 1" not in out and said in err


def test_control_characters_of_a_text_do_not_reach_the_terminal():
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    painter = Painter(tokenizer, color=False, max_tokens=0)
    shown = painter([*b"a\x1b[31m", ord("b")], [False] * 6 + [True])
    assert "\x1b" not in shown and shown.startswith("    a") and shown.endswith("[[b]]")
