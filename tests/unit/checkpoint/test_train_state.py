"""train_state.json: what is written is read, damaged files are refused."""

import json

import pytest

from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.checkpoint import Progress
from titanlite.checkpoint.train_state import STATE_FILE, resolve_held_out
from titanlite.config import JobConfig
from titanlite.config.data import DataSection
from titanlite.metrics.point import Results


def write(progress, folder):
    (folder / STATE_FILE).parent.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_bytes(progress.to_json())
    return progress


def make(folder, **results):
    return write(Progress(7, 56, "data", 4, {"torch": "2"}, results), folder)


@pytest.fixture
def series():
    results = Results(JobConfig().validation, "none")
    results.add_validation(3, 2.5)
    return results.state()["validation"]


def test_round_trip(tmp_path, series):
    written = make(tmp_path, validation=series)
    assert Progress.read(tmp_path) == written
    assert (
        Results(JobConfig().validation, "none", Progress.read(tmp_path).results).validation.best
        == 2.5
    )


@pytest.mark.parametrize("change", [{"more": 1}, {"step": None}])
def test_other_fields_are_refused(tmp_path, change):
    make(tmp_path)
    table = json.loads((tmp_path / STATE_FILE).read_text()) | change
    (tmp_path / STATE_FILE).write_text(
        json.dumps({name: value for name, value in table.items() if value is not None})
    )
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(tmp_path)


@pytest.mark.parametrize(
    ("identity", "wants", "share"),
    [
        (None, False, 0.0),  # nobody would look at them
        (None, True, None),
        ({"data.validation_share": "0"}, False, 0.0),
        # it began with validation, and goes on with the same rows
        ({"data.validation_share": ""}, False, None),
        ({"data.validation_share": ""}, True, None),
    ],
)
def test_a_run_goes_on_with_the_rows_that_it_was_trained_on(identity, wants, share):
    before = None if identity is None else Progress(7, 56, "data", 4, {}, identity=identity)
    data = DataSection()
    assert resolve_held_out(data, before, "outputs", wanted=wants).validation_share == share
    data.validation_share = 0.3
    assert resolve_held_out(data, before, "outputs", wanted=wants).validation_share == 0.3


def test_rows_that_were_trained_on_are_not_held_out_later():
    before = Progress(7, 56, "data", 4, {}, identity={"data.validation_share": "0"})
    data = DataSection()
    with pytest.raises(
        ConfigError, match=r"was trained on all rows, .* Set data\.validation_path to others"
    ):
        resolve_held_out(data, before, "outputs", wanted=True)
    data.validation_path = "others.jsonl"
    assert resolve_held_out(data, before, "outputs", wanted=True).validation_share == 0
