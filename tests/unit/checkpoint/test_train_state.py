"""train_state.json: what is written is read, older files are, damaged ones are refused."""

import json

import pytest

from titanlite.checkpoint import Progress
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import JobConfig
from titanlite.errors import CheckpointError
from titanlite.results import Results


def make(folder, **results):
    progress = Progress(7, 56, "data", 4, {"torch": "2"}, results)
    progress.write(folder)
    return progress


@pytest.fixture
def series():
    results = Results(JobConfig())
    results.add_validation(3, 2.5)
    return results.state()["validation"]


def test_round_trip(tmp_path, series):
    written = make(tmp_path, validation=series)
    assert Progress.read(tmp_path) == written
    assert Results(JobConfig(), Progress.read(tmp_path).results).validation.best == 2.5


def test_a_file_without_results_is_of_an_older_version(tmp_path):
    make(tmp_path)
    table = json.loads((tmp_path / STATE_FILE).read_text())
    del table["results"]
    (tmp_path / STATE_FILE).write_text(json.dumps(table))
    assert Progress.read(tmp_path).results == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"best": "2.5"},
        {"stale": None},
        {"best_step": 1.5},
        {"name": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_damaged_results_are_refused(tmp_path, series, damage):
    make(tmp_path, validation={**series, **damage})
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(tmp_path)


@pytest.mark.parametrize("results", [[], {"validation": []}, {"validation": {}}, 3])
def test_results_of_another_shape_are_refused(tmp_path, results):
    make(tmp_path)
    table = json.loads((tmp_path / STATE_FILE).read_text())
    (tmp_path / STATE_FILE).write_text(json.dumps({**table, "results": results}))
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(tmp_path)
