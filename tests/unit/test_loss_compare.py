"""scripts/loss_compare.py on files; what it says of two commits is in tests/functional/test_docs_commands.py."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/loss_compare.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("loss_compare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(tmp_path):
    def make(name: str, losses: dict[int, float | None], norm: float = 1.0, tail: str = "") -> str:
        folder = tmp_path / name
        folder.mkdir()
        points = [{"step": s, "time": 0, "loss/train": loss, "grad_norm": norm} for s, loss in losses.items()]
        text = "".join(json.dumps(point) + "\n" for point in points)
        (folder / "metrics.jsonl").write_text(text + '{"step": 2, "loss/validation": 3.5}\n' + tail)
        return str(folder)

    return make


def test_identical_runs(script, write, capsys):
    losses = {1: 4.25, 2: None, 3: 0.1 + 0.2}
    assert script.main([write("a", losses), write("b", losses, tail='{"step": 4, "lo')]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "metric" and lines[-1] == "identical"
    assert [line.split() for line in lines[1:4]] == [
        ["loss/train", "3", "3", "0", "-", "-"],
        ["grad_norm", "3", "3", "0", "-", "-"],
        ["loss/validation", "1", "1", "0", "-", "-"],
    ]


def test_last_bit_differs(script, write, capsys):
    runs = [write("a", {1: 1.0, 2: 0.3, 3: 2.0}), write("b", {1: 1.0, 2: 0.1 + 0.2, 3: 2.5, 9: 7.0})]
    assert script.main(runs) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["loss/train", "3", "1", "0.5", "3", "2"]
    assert out.splitlines()[-1] == "different: loss/train, from step 2 on (--tolerance 0)"
    assert script.main([*runs, "--tolerance=0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "different, by no more than --tolerance 0.5"
    assert script.main([*runs, "--tolerance=0.49"]) == 1


def test_a_loss_that_is_not_finite_in_one_run_is_infinitely_far(script, write):
    runs = [Path(write("a", {1: 1.0, 2: None})), Path(write("b", {1: 1.0, 2: 5.0}))]
    difference = script.compare(runs, [script.read_values(run) for run in runs])[0]
    assert (difference.largest, difference.first_step) == (math.inf, 2)
    assert script.main([write("c", {1: None}), write("d", {1: 1.0}), "--tolerance=1e30"]) == 1


def test_a_resumed_run_counts_with_its_later_points(script, write):
    first = json.dumps({"step": 1, "loss/train": 9.0, "grad_norm": 1.0}) + "\n"
    assert script.main([write("a", {1: 1.0}, tail=first), write("b", {1: 9.0})]) == 0


def test_steps_that_a_resumed_run_gave_up_are_not_compared(script, write, capsys):
    again = json.dumps({"step": 2, "loss/train": 2.0, "grad_norm": 1.0}) + "\n"
    runs = [write("a", {1: 1.0, 2: 5.0, 3: 6.0}, tail=again), write("b", {1: 1.0, 2: 2.0, 3: 3.0})]
    assert script.main(runs) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["loss/train", "2", "2", "0", "-", "-"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (({1: 1.0}, {2: 1.0}), "no step with a loss in both: "),
        (({1: 1.0}, None), "metrics.jsonl: No such file or directory. Name the dump folder of a run."),
    ],
)
def test_nothing_to_compare_is_one_error(script, write, tmp_path, capsys, runs, message):
    folders = [
        str(tmp_path / "none") + "/metrics.jsonl" if r is None else write(n, r) for n, r in zip("ab", runs, strict=True)
    ]
    assert script.main(folders) == 2
    error = capsys.readouterr().err
    assert error.startswith("loss_compare: error: ") and message in error


def test_a_damaged_line_is_named_and_left_out(script, write, capsys):
    run = write("a", {1: 1.0, 3: 2.0})
    path = Path(run, "metrics.jsonl")
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, "nonsense\n", *others]))
    assert script.main([run, write("b", {1: 1.0, 3: 2.0})]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split() == ["loss/train", "2", "2", "0", "-", "-"]
    assert captured.err == f"loss_compare: warning: {path}: 1 of 4 lines are broken and skipped (line 2).\n"


@pytest.mark.parametrize(
    "arguments",
    [["a"], ["a", "b", "c"], ["--commits", "a", "b"], ["a", "b", "--", "--config=x"], ["a", "b", "--tolerance=-1"]],
)
def test_wrong_arguments(script, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        script.main(arguments)
    assert caught.value.code == 2 and "error: " in capsys.readouterr().err


def test_a_commit_that_is_not_there(script, capsys):
    assert script.main(["--commits", "no-such-commit", ".", "--ranks=1", "--", "--config=x.toml"]) == 2
    assert "cannot check out 'no-such-commit'" in capsys.readouterr().err


def test_the_plot_has_both_losses(script):
    text = script.plot({1: 4.0, 2: 3.0, 3: 2.0}, {1: 4.0, 2: 3.5, 3: 2.0, 4: math.nan})
    rows = text.splitlines()
    assert rows[1].startswith("    4.0000 |*") and rows[14].startswith("    2.0000 |") and rows[14].endswith("*")
    assert "a" in text.split("|", 1)[1] and "b" in text.split("|", 1)[1]
