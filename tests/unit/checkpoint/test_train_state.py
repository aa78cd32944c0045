"""train_state.json: the written values are read back, and damaged files are refused."""

import pytest
from files import read_json, write_json

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint import Progress
from titanlite.checkpoint.train_state import STATE_FILE
from titanlite.config import JobConfig
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
    table = read_json(tmp_path / STATE_FILE) | change
    write_json(
        tmp_path / STATE_FILE, {name: value for name, value in table.items() if value is not None}
    )
    with pytest.raises(CheckpointError, match="is damaged"):
        Progress.read(tmp_path)
