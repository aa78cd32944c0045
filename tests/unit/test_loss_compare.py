"""scripts/loss_compare.py on files; tests/functional/test_docs_commands.py compares two commits."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "scripts/loss_compare.py"))["main"]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, losses: list[tuple[int, float | None]], tail: str = "") -> str:
        folder = tmp_path / name
        folder.mkdir()
        points = [{"step": step, "loss/train": loss, "grad_norm": 1.0} for step, loss in losses]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points) + tail)
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("a", "b", "row"),
    [
        ([(1, 4.25), (2, None), (3, 0.3)], [(1, 4.25), (2, None), (3, 0.3)], "3 3 0 - -"),
        ([(1, 1.0), (2, 0.3), (3, 2.0)], [(1, 1.0), (2, 0.1 + 0.2), (3, 2.5), (9, 7.0)], "3 1 0.5 3 2"),  # the last bit
        ([(1, 1.0), (2, None)], [(1, 1.0), (2, 5.0)], "2 1 inf 2 2"),
        ([(1, 1.0), (2, 5.0), (3, 6.0), (2, 2.0)], [(1, 1.0), (2, 2.0), (3, 3.0)], "2 2 0 - -"),  # resumed after step 1
    ],
)
def test_losses_are_compared_step_by_step(write, capsys, a, b, row) -> None:
    torn = '{"step": 4, "lo'
    runs = [write("a", a), write("b", b, torn)]
    steps, same, largest = row.split()[:3]
    assert main(runs) == (steps != same)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["loss/train", *row.split()]
    assert shown.out.splitlines()[-1].startswith("identical" if steps == same else f"different, by up to {largest} ")
    assert shown.err.endswith("b/metrics.jsonl: 1 lines are broken and left out.\n")
    assert main([*runs, "--tolerance=0.5"]) == (largest == "inf")
    assert main([*runs, "--tolerance=0.49"]) == (largest in ("0.5", "inf"))


def test_nothing_to_compare_is_an_error(write, capsys) -> None:
    run, other = write("a", [(1, 1.0)]), write("b", [(2, 1.0)])
    commits = ["--commits", "no-such-commit", ".", "--", "--config=x.toml"]
    for arguments, message in {
        (run, other): "no step with a loss in common",
        (run, run + "/none"): "No such file or directory. Name the dump folder of a run.",
        (run,): "give two dump folders",
        (run, other, "--", "--config=x"): "give two dump folders",
        tuple(commits[:3]): "give two dump folders",
        tuple(commits): "cannot check out 'no-such-commit'",
    }.items():
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2 and message in capsys.readouterr().err, arguments
