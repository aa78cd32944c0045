"""What a resumed run has in common with its checkpoint."""

from pathlib import Path

import pytest

from titanlite.base.errors import ConfigError
from titanlite.checkpoint import Progress
from titanlite.checkpoint.start import Start
from titanlite.config import JobConfig
from titanlite.run import resolve_held_out


def start_of(identity):
    return Start(Path("step-7"), Progress(7, 56, "data", 4, {}, identity=identity))


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
    start = None if identity is None else start_of(identity)
    job = JobConfig()
    job.validation.enable = wants
    assert resolve_held_out(job, start).data.validation_share == share
    job.data.validation_share = 0.3
    assert resolve_held_out(job, start).data.validation_share == 0.3


def test_rows_that_were_trained_on_are_not_held_out_later():
    start = start_of({"data.validation_share": "0"})
    job = JobConfig()
    job.validation.enable = True
    with pytest.raises(
        ConfigError, match=r"was trained on all rows, .* Set data\.validation_path to other rows"
    ):
        resolve_held_out(job, start)
    job.data.validation_path = "others.jsonl"
    assert resolve_held_out(job, start).data.validation_share == 0
