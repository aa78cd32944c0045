"""Data from several places: `[data.sources.NAME]` in files and overrides, what a source has from
`[data]`, mistakes.
"""

import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig, load_config, save_resolved
from titanlite.config.data import SourceSection, get_source_key, get_sources

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

Load = Callable[..., JobConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def run(text: str, *overrides: str) -> JobConfig:
        file = tmp_path / "job.toml"
        file.write_text(text)
        return load_config(["--config", str(file), *overrides])

    return run


def problem(load: Load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_source_has_its_own_settings_and_the_rest_of_the_section(load: Load) -> None:
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


def test_without_sources_the_section_is_the_only_one(load: Load) -> None:
    data = load(f'{HEAD}path = "a.jsonl"\n').data
    assert get_sources(data) == {"": data}
    assert get_source_key(data, "", "path") == "data.path"


def test_overrides_change_and_add_sources(load: Load) -> None:
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


def test_the_resolved_file_gives_the_same_job(load: Load, tmp_path: Path) -> None:
    job = load(TWO)
    save_resolved(job, tmp_path / "resolved.toml")
    assert load_config(["--config", str(tmp_path / "resolved.toml")]) == job
    assert (
        tomllib.loads((tmp_path / "resolved.toml").read_text())["data"]["sources"]["math"]["weight"]
        == 3.0
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "weight = 3|wieght = 3",
            "unknown key 'data.sources.math.wieght'; did you mean 'data.sources.math.weight'?",
        ),
        (
            "weight = 3|colour = 3",
            "unknown key 'data.sources.math.colour'. Known here: pattern, ",
        ),
        (
            "weight = 3|",
            "data.sources.math.weight is not set, but other sources have weights. Set all of "
            "them, or none.",
        ),
        (
            'path = "math.jsonl"|',
            "needs data.sources.math.path, which is empty. Set it to a file, folder or hub id.",
        ),
        (
            "[data.sources.math]|[data.sources.My-Data]",
            "Name a source with small letters, digits and underscores",
        ),
        (
            "weight = 3|weight = 3\nsplit = 'test'",
            "data.sources.math.split has no effect without a folder or a dataset of the hub",
        ),
        (
            "weight = 3|weight = 3\nformat = 'preference'",
            'data.train_on = "all" does not go with format = "preference"',
        ),
        (
            'train_on = "all"|path = "a.jsonl"',
            'data.path = "a.jsonl" has no effect next to data.sources. Set data.sources.math.path.',
        ),
        (
            'dataset = "examples"|dataset = "images"',
            'data.sources are for data.dataset = "examples" or "text", which is',
        ),
        (
            "weight = 1.5|weight = 1.5\nvalidation_share = 0.5",
            "data.sources.chat_2.validation_share has no effect without rows of path",
        ),
        (
            "[data.sources.math]|[data.sources]\nmath = 3\n[data.sources.x]",
            "data.sources.math is a section. Set its keys one by one: [data.sources.math]",
        ),
    ],
)
def test_mistakes(load: Load, change: str, expected: str) -> None:
    old, _, new = change.partition("|")
    assert old in TWO
    assert expected in problem(load, TWO.replace(old, new, 1))


def test_an_empty_table_is_a_source_without_a_path(load: Load) -> None:
    assert "needs data.sources.math.path, which is empty" in problem(
        load, f"{HEAD}[data.sources.math]\n"
    )


def test_what_is_wrong_in_the_section_is_said_once(load: Load) -> None:
    text = problem(load, TWO.replace('train_on = "all"', 'text_field = ""'))
    assert text.count("names no field") == 1


def test_overrides_of_tables(load: Load) -> None:
    assert (
        "data.sources is a section. Set its keys one by one: [data.sources.NAME] and keys below, "
        "or --data.sources.NAME.path=VALUE." in problem(load, TWO, "--data.sources=a")
    )
    assert (
        "data.sources.math is a section. Set its keys one by one: [data.sources.math]"
        in problem(load, TWO, "--data.sources.math=a")
    )


def test_streams_need_weights_and_have_no_epochs(load: Load) -> None:
    bare = TWO.replace("weight = 3\n", "streaming = true\n").replace("weight = 1.5\n", "")
    assert (
        "data.sources.math.streaming = true: how many sequences a stream has is not known"
        in problem(load, bare)
    )
    text = TWO.replace("weight = 3", "weight = 3\nstreaming = true")
    assert load(text).data.sources["math"].streaming
    assert (
        "training.epochs = 2.0 needs data whose end is known, but data.sources.math.streaming is"
        in problem(load, text, "--training.epochs=2")
    )


def test_epochs_need_sources_without_weights(load: Load) -> None:
    assert "training.epochs = 2.0 needs sources without weights" in problem(
        load, TWO, "--training.epochs=2"
    )
    bare = TWO.replace("weight = 3\n", "").replace("weight = 1.5\n", "")
    assert load(bare, "--training.epochs=2").training.epochs == 2


def test_a_validation_needs_one_source_with_held_out_rows(load: Load) -> None:
    text = TWO.replace("weight = 3", "weight = 3\nstreaming = true")
    assert load(text, "--validation.enable=true").validation.enable
    none = text.replace('validation_path = "held_out.jsonl"\n', "streaming = true\n")
    assert "validation.enable = true needs rows that are held out, and there are none" in problem(
        load, none, "--validation.enable=true"
    )
    shares = TWO.replace('validation_path = "held_out.jsonl"\n', "")
    assert "needs rows that are held out" in problem(
        load, shares, "--data.validation_share=0", "--validation.enable=true"
    ).replace("0.0", "0")


def test_a_list_of_sources_is_refused_with_the_right_form(load: Load) -> None:
    text = problem(load, f'{HEAD}[[data.sources]]\npath = "a.jsonl"\n')
    assert (
        "[data.sources.NAME] and keys below, or --data.sources.NAME.path=VALUE." in text
        and text.count("data.path") == 0
    )


def test_what_no_source_uses_is_refused(load: Load) -> None:
    """And what one of them uses is not."""
    head = TWO.replace('train_on = "all"', 'split = "test"')
    assert "data.split has no effect without a folder or a dataset of the hub" in problem(
        load, head
    )
    assert load(head.replace('"math.jsonl"', '"owner/math"')).data.split == "test"
    rows = TWO.replace('train_on = "all"', "streaming_block_rows = 7")
    assert "data.streaming_block_rows has no effect without rows that are streamed" in problem(
        load, rows
    )
    assert (
        load(rows.replace("weight = 3", "weight = 3\nstreaming = true")).data.streaming_block_rows
        == 7
    )


def test_a_configuration_with_sources_can_be_sent_to_other_ranks() -> None:
    job = JobConfig()
    job.data.sources["a"] = SourceSection(path="a.jsonl", weight=2.0)
    assert pickle.loads(pickle.dumps(job)) == job
