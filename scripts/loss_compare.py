#!/usr/bin/env python
"""Do two runs, or two commits, train alike? Compares losses and gradient norms step by step.

    python scripts/loss_compare.py outputs/a outputs/b
    python scripts/loss_compare.py --commits main . -- --config configs/qwen3_moe.toml --training.steps=20

The first form reads metrics.jsonl of two dump folders. The second runs both commits (`.` is the working tree with its
changes) with the same arguments and training.deterministic, each from a git worktree of its own, and compares them.

Exit code 0: identical, or no difference is larger than --tolerance; 1: one is; 2: there is nothing to compare.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from titanlite.base.files import check_regular
from titanlite.features.report.read import METRICS as METRICS_FILE
from titanlite.features.report.read import Series, read_metrics

METRICS = ("loss/train", "grad_norm", "loss/aux", "loss/validation")
ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _HEIGHT = 72, 14


class CompareError(Exception):
    """There is nothing to compare; the text says why."""


@dataclass(frozen=True)
class Difference:
    """How one metric of two runs differs.

    Attributes:
        metric: its name in metrics.jsonl.
        steps: steps that both runs have.
        same: steps at which both have the same bits.
        largest: largest absolute difference; inf where only one is finite.
        largest_step, first_step: where that is, and the first step that differs; None without a difference.
    """

    metric: str
    steps: int
    same: int
    largest: float
    largest_step: int | None
    first_step: int | None


def read_values(run: Path) -> dict[str, dict[int, float]]:
    """Values by metric and step of a dump folder, or of a metrics.jsonl, as the report reads them.

    Of a resumed run the later points count. Broken lines are left out and named on stderr. A value that was not finite
    is nan.
    """
    path = run / METRICS_FILE if run.is_dir() else run
    try:
        check_regular(path)
        found = read_metrics(path)
    except OSError as error:
        raise CompareError(f"{path}: {error.strerror}. Name the dump folder of a run.") from None
    for problem in found.problems:
        print(f"loss_compare: warning: {path.parent / problem}", file=sys.stderr)
    series = {metric: found.scalars.get(metric, Series()) for metric in METRICS}
    return {metric: dict(zip(of.steps, of.values, strict=True)) for metric, of in series.items()}


def compare_metric(metric: str, a: Mapping[int, float], b: Mapping[int, float]) -> Difference:
    """Compare at the steps that both have; nan equals nan."""
    same, largest, largest_step, first_step = 0, 0.0, None, None
    steps = sorted(a.keys() & b.keys())
    for step in steps:
        if a[step] == b[step] or (math.isnan(a[step]) and math.isnan(b[step])):
            same += 1
            continue
        distance = abs(a[step] - b[step])
        distance = math.inf if math.isnan(distance) else distance
        first_step = step if first_step is None else first_step
        if distance > largest:
            largest, largest_step = distance, step
    return Difference(metric, len(steps), same, largest, largest_step, first_step)


def compare(runs: Sequence[Path], values: Sequence[Mapping[str, Mapping[int, float]]]) -> list[Difference]:
    """Every metric that both of two runs have; `values` are those of `read_values`."""
    of_a, of_b = values
    found = [compare_metric(metric, of_a[metric], of_b[metric]) for metric in METRICS]
    found = [difference for difference in found if difference.steps]
    if not any(difference.metric == "loss/train" for difference in found):
        ranges = [
            f"{run} has steps {min(of['loss/train'], default='-')} to {max(of['loss/train'], default='-')}"
            for run, of in zip(runs, values, strict=True)
        ]
        raise CompareError(
            f"no step with a loss in both: {', '.join(ranges)}. Compare runs with the same metrics.log_freq."
        )
    return found


def render(differences: Sequence[Difference], tolerance: float) -> str:
    """The table and the verdict."""
    rows = [("metric", "steps", "identical", "max difference", "at step", "first at step")]
    for d in differences:
        shown = "0" if d.largest == 0 else f"{d.largest:.3g}"
        rows.append((d.metric, str(d.steps), str(d.same), shown, str(d.largest_step or "-"), str(d.first_step or "-")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*lines, "", verdict(differences, tolerance)])


def verdict(differences: Sequence[Difference], tolerance: float) -> str:
    """One line."""
    if all(d.same == d.steps for d in differences):
        return "identical"
    over = [d for d in differences if d.largest > tolerance]
    if not over:
        return f"different, by no more than --tolerance {tolerance:g}"
    first = min(d.first_step for d in over if d.first_step is not None)
    return f"different: {', '.join(d.metric for d in over)}, from step {first} on (--tolerance {tolerance:g})"


def plot(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    """Both losses over the steps as text: `a`, `b`, and `*` where they meet."""
    runs = [{step: value for step, value in run.items() if math.isfinite(value)} for run in (a, b)]
    values, steps = [v for run in runs for v in run.values()], [s for run in runs for s in run]
    if not values:
        return "(no finite loss to plot)"
    low, high = min(values), max(values)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for sign, run in zip("ab", runs, strict=True):
        for step, value in run.items():
            x = round((step - min(steps)) / max(max(steps) - min(steps), 1) * (_WIDTH - 1))
            y = round((high - value) / ((high - low) or 1.0) * (_HEIGHT - 1))
            rows[y][x] = sign if rows[y][x] in (" ", sign) else "*"
    labels = [f"{high:10.4f} |", *[" " * 11 + "|"] * (_HEIGHT - 2), f"{low:10.4f} |"]
    lines = [label + "".join(row).rstrip() for label, row in zip(labels, rows, strict=True)]
    axis = " " * 12 + f"step {min(steps)}".ljust(_WIDTH - len(str(max(steps)))) + str(max(steps))
    return "\n".join(["loss/train: a, b, * both", *lines, axis])


# --- two commits


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A folder with the files of `commit`, gone afterwards; `.` is the checkout of this script as it is."""
    if commit == ".":
        yield ROOT
        return
    done = _git("worktree", "add", "--detach", str(folder), commit)
    if done.returncode:
        raise CompareError(
            f"--commits: cannot check out '{commit}': {done.stderr.strip()}. Name a commit, branch or tag."
        )
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def run_commit(commit: str, arguments: Sequence[str], ranks: int, folder: Path) -> Path:
    """Train with the code of `commit`; returns the dump folder. Relative paths begin at the current folder."""
    dump = folder / "run"
    with checked_out(commit, folder / "code") as code:
        subject = _git("log", "-1", "--format=%h %s", "HEAD" if commit == "." else commit).stdout.strip()
        print(f"{commit}: {subject}{' and the changes in the working tree' if commit == '.' else ''}", flush=True)
        command = [sys.executable, "-m", "titanlite.launch", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "titanlite.train", *arguments, f"--job.dump_folder={dump}", "--training.deterministic=true"]
        command += ["--metrics.log_freq=1", "--checkpoint.enable=false"]
        # Not the folder that this is called in: its titanlite may be another.
        env = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        with open(folder / "log", "w+", encoding="utf-8") as log:
            code_ = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
            log.seek(0)
            if code_:
                last = "".join(f"    {line}" for line in log.readlines()[-20:])
                raise CompareError(f"{commit}: the run ended with exit code {code_}:\n{last.rstrip()}")
    return dump


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def count_ranks() -> int:
    """The visible GPUs, or 4 CPU processes, as run_train.sh counts them."""
    import torch

    return torch.cuda.device_count() or 4


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="dump folder of a run, two of them")
    parser.add_argument("--commits", nargs=2, metavar=("A", "B"), help="run these instead, with what follows --")
    parser.add_argument("--ranks", type=int, help="of each run of a commit (default: visible GPUs, or 4 without a GPU)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest absolute difference that passes (default: 0)"
    )
    parser.add_argument("--plot", action="store_true", help="also show both losses as text")
    options = parser.parse_args(own)
    if (len(options.runs) != 2) if options.commits is None else bool(options.runs):
        parser.error("give two dump folders, or --commits A B -- ARGUMENTS")
    if bool(rest) != (options.commits is not None):
        parser.error("what follows -- are the arguments of the runs of --commits, for example -- --config FILE")
    if not options.tolerance >= 0:
        parser.error(f"--tolerance is {options.tolerance}; give a number of 0 or more")
    try:
        with tempfile.TemporaryDirectory(prefix="loss-compare-") as folder:
            runs = options.runs
            if options.commits is not None:
                ranks = options.ranks or count_ranks()
                places = [Path(folder, name) for name in "ab"]
                for place in places:
                    place.mkdir()
                runs = [run_commit(c, rest, ranks, p) for c, p in zip(options.commits, places, strict=True)]
            values = [read_values(run) for run in runs]
            differences = compare(runs, values)
            print(render(differences, options.tolerance))
            if options.plot:
                print("\n" + plot(*(of["loss/train"] for of in values)))
    except CompareError as error:
        print(f"loss_compare: error: {error}", file=sys.stderr)
        return 2
    return int(any(difference.largest > options.tolerance for difference in differences))


if __name__ == "__main__":
    sys.exit(main())
