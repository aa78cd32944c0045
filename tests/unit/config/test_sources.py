"""Data from several places: `[data.sources.NAME]` in files and overrides, what a source has from
`[data]`, mistakes.
"""

import tomllib

import pytest

from titanlite.config import load_config, save_resolved
from titanlite.config.data import get_source_key, get_sources

HEAD = '[model]\nflavor = "debug"\n[data]\ndataset = "examples"\ntrain_on = "all"\n'
TWO = f"""{HEAD}
[data.sources.math]
path = "math.jsonl"
weight = 3
[data.sources.chat_2]
path = "chats.jsonl"
weight = 1.5
train_on = "assistant"
validation_path = "held_out.jsonl"
"""


@pytest.fixture
def load(tmp_path):
    def run(text, *overrides):
        file = tmp_path / "job.toml"
        file.write_text(text)
        return load_config(["--config", str(file), *overrides])

    return run


def test_a_source_has_its_own_settings_and_the_rest_of_the_section(load):
    job = load(TWO, "--data.too_long=cut")
    sources = get_sources(job.data)
    assert list(sources) == ["chat_2", "math"], "in the order of their names"
    assert [source.weight for source in job.data.sources.values()] == [3.0, 1.5]
    assert [source.path for source in sources.values()] == ["chats.jsonl", "math.jsonl"]
    assert [source.train_on for source in sources.values()] == ["assistant", "all"]
    assert [source.validation_path for source in sources.values()] == ["held_out.jsonl", ""]
    assert {source.too_long for source in sources.values()} == {"cut"}
    assert not any(source.sources for source in sources.values())
    assert get_source_key(job.data, "math", "train_on") == "data.train_on"
    assert get_source_key(job.data, "chat_2", "train_on") == "data.sources.chat_2.train_on"


def test_overrides_change_and_add_sources(load):
    job = load(
        TWO,
        "--data.sources.math.weight=7",
        "--data.sources.web.path=w.jsonl",
        "--data.sources.web.weight",
        "1",
    )
    assert {name: source.weight for name, source in job.data.sources.items()} == {
        "math": 7.0,
        "chat_2": 1.5,
        "web": 1,
    }
    assert get_sources(job.data)["web"].path == "w.jsonl"


def test_the_resolved_file_gives_the_same_job(load, tmp_path):
    job = load(TWO)
    save_resolved(job, tmp_path / "resolved.toml")
    assert load_config(["--config", str(tmp_path / "resolved.toml")]) == job
    assert (
        tomllib.loads((tmp_path / "resolved.toml").read_text())["data"]["sources"]["math"]["weight"]
        == 3.0
    )
