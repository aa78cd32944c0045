"""scripts/loss_compare.py on files; tests/functional/test_docs_commands.py compares two commits."""

import json
import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "scripts/loss_compare.py"))["main"]


def write(tmp_path, name, losses, tail=""):
    folder = tmp_path / name
    folder.mkdir()
    points = [{"step": step, "loss/train": loss, "grad_norm": 1.0} for step, loss in losses]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(point) + "\n" for point in points) + tail
    )
    return str(folder)


@pytest.mark.parametrize(
    ("b", "row"),
    [
        ([(1, 1.0), (2, 0.3), (3, 2.0)], "3 3 0 - -"),
        ([(1, 1.0), (2, 0.1 + 0.2), (3, 2.5), (9, 7.0)], "3 1 0.5 3 2"),  # the last bit
        ([(1, 1.0), (2, None)], "2 1 inf 2 2"),
        ([(1, 1.0), (2, 5.0), (3, 6.0), (2, 0.3), (3, 2.0)], "3 3 0 - -"),  # resumed after step 1
    ],
)
def test_losses_are_compared_step_by_step(tmp_path, capsys, b, row):
    runs = [
        write(tmp_path, "a", [(1, 1.0), (2, 0.3), (3, 2.0)]),
        write(tmp_path, "b", b, '{"step": 4, "lo'),
    ]
    steps, same, largest = row.split()[:3]
    assert main(runs) == (steps != same)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].split() == ["loss/train", *row.split()]
    assert shown.out.splitlines()[-1].startswith(
        "identical" if steps == same else f"different, by up to {largest} "
    )
    assert shown.err.endswith("b/metrics.jsonl: 1 lines are broken and left out.\n")
    assert main([*runs, "--tolerance=0.5"]) == (largest == "inf")
    assert main([*runs, "--tolerance=0.49"]) == (largest in ("0.5", "inf"))
