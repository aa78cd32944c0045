"""Every row of tests/refusals.toml, through the preflight as the command line calls it."""

from pathlib import Path

import pytest
from files import read_table

from titanlite.config import load_config
from titanlite.preflight import main

SECTIONS = read_table("refusals")
FILES = (
    "chats.jsonl",
    "owner/rows/a.jsonl",
    "rows.csv",
    "rows/a.jsonl",
    "books/a.txt",
    "both/a.txt",
    "both/b.jsonl",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with data of each kind and a model."""
    monkeypatch.chdir(tmp_path)
    for name in (*FILES, "model/config.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"model_type": "qwen3"}' if name.endswith("config.json") else "")


def write(base, given):
    """Write x.toml and return the arguments that name it and override it."""
    overrides = [text for text in given if text.startswith("--")]
    lines = [text for text in given if text not in overrides]
    Path("x.toml").write_text(base + "\n".join(lines), encoding="utf-8")
    return ["--config", "x.toml", *overrides]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_wrong_configuration_is_one_error_that_names_what_is_wrong(name, capsys):
    section = SECTIONS[name]
    wrong = []
    for row in section["refused"]:
        arguments = write(section["base"], row["given"])
        code = main(["--world-size", str(row.get("ranks", 1)), *arguments])
        out, said = capsys.readouterr()
        is_one_line = said.startswith("titanlite: error: ") and said.count("\n") == 1
        if (code, out) != (2, "") or not is_one_line or any(t not in said for t in row["says"]):
            wrong.append((row, code, said))
    assert not wrong and len(section["refused"]) > 3


def test_what_is_at_the_edge_of_a_refusal_is_accepted():
    for section in SECTIONS.values():
        for given in section.get("accepted", []):
            load_config(write(section["base"], given))
