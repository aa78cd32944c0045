"""train_state.json: what is written is read, older files are, damaged ones are refused."""

import json

import pytest

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import Progress
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import JobConfig
from titanlite.metrics.results import Results


def write(progress, folder):
    (folder / STATE_FILE).parent.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_bytes(progress.to_json())
    return progress


def make(folder, **results):
    return write(Progress(7, 56, "data", 4, {"torch": "2"}, results), folder)


@pytest.fixture
def series():
    results = Results(JobConfig())
    results.add_validation(3, 2.5)
    return results.state()["validation"]


def test_round_trip(tmp_path, series):
    written = make(tmp_path, validation=series)
    assert Progress.read(tmp_path) == written
    assert Results(JobConfig(), Progress.read(tmp_path).results).validation.best == 2.5


def test_what_each_step_took_is_read_of_older_versions_as_far_as_later_steps_leave_samples_out(tmp_path):
    stretches = [{"step": 0, "samples": 0}, {"step": 5, "samples": 40}, {"step": 9, "samples": 99}]
    for number, skip_to in ((2, 0), (3, 99)):
        write_older(tmp_path, 7, stretches=stretches[:number])
        assert Progress.read(tmp_path) == Progress(7, 56, "data", 4, {}, skip_to=skip_to)
    write_older(tmp_path, 7, stretches=[{"step": 0, "samples": "40"}])
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(tmp_path)


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


FIRST = {"spike_step": 14, "found_step": 16, "to_step": 10, "samples": 128}


def write_older(folder, step, **more):
    write(Progress(step, 8 * step, "data", 4, {}), folder)
    table = json.loads((folder / STATE_FILE).read_text())
    (folder / STATE_FILE).write_text(json.dumps({**table, **more}))


def test_rewinds_of_an_older_version_are_carried_out_or_refused(tmp_path):
    folder, rewinds = tmp_path / "step-10", tmp_path / "rewinds.json"
    folder.mkdir()
    write_older(folder, 10, rewinds=[FIRST])
    assert Progress.read(folder).skip_to == 128
    rewinds.write_text(json.dumps({"format": 1, "rewinds": [FIRST]}))
    Progress.read(folder)
    write_older(folder, 10, rewinds=[])  # killed after the rewind, before a save
    with pytest.raises(CheckpointError, match=r"data of steps 14 to 16. Remove .*, and set data.skip_to_sample = 128"):
        Progress.read(folder)
    write_older(folder, 10)  # of a run that began anew, by this version
    assert Progress.read(folder).step == 10
    write_older(folder, 20, rewinds=[FIRST])
    assert Progress.read(folder).skip_to == 0
    write_older(folder, 20, rewinds=[{"spike_step": "x"}])
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(folder)
