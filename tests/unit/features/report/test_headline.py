"""How the report says that a run ended."""

from pathlib import Path

from report_run import write_run

from titanlite.features.report.headline import describe_end
from titanlite.features.report.read import read_run


def test_a_run_that_ended_with_an_error_says_so_until_it_starts_again(tmp_path: Path):
    write_run(tmp_path, steps=3)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "step": 2, "kind": "error", "text": "memory: rank 0 ran out of memory"}\n')
    assert describe_end(read_run(tmp_path)) == "Ended with an error at step 2: memory: rank 0 ran out of memory."
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 2, "step": 2, "kind": "restart", "text": "restart 1 of 3"}\n')
    assert describe_end(read_run(tmp_path)).startswith("No end recorded")
