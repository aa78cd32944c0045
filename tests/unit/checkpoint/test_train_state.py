"""train_state.json: what is written is read, older files are, damaged ones are refused."""

import json

import pytest

from titanlite.base.errors import CheckpointError
from titanlite.base.log import logger
from titanlite.checkpoint import Progress, Rewind, save_rewinds
from titanlite.checkpoint.train_state import REWINDS_FILE, STATE_FILE, load_rewinds
from titanlite.config import JobConfig
from titanlite.data.order import Stretch
from titanlite.features.generate.results import Results


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


def test_what_each_step_took_is_kept(tmp_path):
    stretches = (Stretch(0, 0, 8, "data"), Stretch(5, 40, 4, "data"))
    write(Progress(7, 48, "data", 4, {}, stretches=stretches), tmp_path)
    assert Progress.read(tmp_path).stretches == stretches
    table = json.loads((tmp_path / STATE_FILE).read_text())
    for damage in ({"samples": "40"}, {"more": 1}):
        (tmp_path / STATE_FILE).write_text(json.dumps({**table, "stretches": [{**table["stretches"][0], **damage}]}))
        with pytest.raises(CheckpointError, match="is damaged"):
            Progress.read(tmp_path)
    del table["stretches"]
    (tmp_path / STATE_FILE).write_text(json.dumps(table))
    assert Progress.read(tmp_path).stretches == (), "of an older version"


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


FIRST, SECOND = Rewind(14, 16, 10, 128), Rewind(33, 36, 30, 300)


@pytest.mark.parametrize(
    ("step", "known", "expected"),
    [
        (10, (), (FIRST, SECOND)),  # killed before anything was saved, and step 30 is damaged
        (30, (FIRST,), (FIRST, SECOND)),  # killed after the second rewind, before a save
        (35, (FIRST, SECOND), (FIRST, SECOND)),
        (35, (FIRST,), (FIRST,)),  # saved by a run that did not go back
        (20, (Rewind(15, 16, 10, 128),), (Rewind(15, 16, 10, 128),)),  # the file is of another run
    ],
)
def test_rewinds_that_no_checkpoint_has_seen_are_found(tmp_path, step, known, expected):
    save_rewinds(tmp_path, [FIRST, SECOND])
    assert [path.name for path in tmp_path.iterdir()] == [REWINDS_FILE]
    start = Progress(step, 8 * step, "data", 4, {}, rewinds=known)
    assert tuple(load_rewinds(tmp_path, start)) == expected


def test_rewinds_of_a_run_that_begins_anew_are_forgotten(tmp_path):
    save_rewinds(tmp_path, [FIRST])
    assert tuple(load_rewinds(tmp_path, None)) == ()
    assert tuple(load_rewinds(tmp_path, Progress(5, 40, "data", 4, {}))) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1, "rewinds": [{"spike_step": "x"}]}'])
def test_damaged_rewinds_are_a_warning(tmp_path, text, caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    (tmp_path / REWINDS_FILE).write_text(text)
    assert tuple(load_rewinds(tmp_path, Progress(30, 240, "data", 4, {}, rewinds=(FIRST,)))) == (FIRST,)
    assert "Rewinds since step 30 are not known." in caplog.text


def test_rewinds_that_cannot_be_written_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"checkpoint: cannot write .*rewinds\.json"):
        save_rewinds(tmp_path / "gone", [FIRST])
