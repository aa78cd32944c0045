#!/usr/bin/env python
"""Do two runs, or two commits, train alike? Compares losses and gradient norms step by step.

    python scripts/loss_compare.py outputs/a outputs/b
    python scripts/loss_compare.py --commits main . -- --config configs/qwen3_moe.toml
    --training.steps=20

The first form reads metrics.jsonl of two dump folders. The second runs both commits (`.` is the
working tree with its changes) with the same arguments and training.deterministic, each from a git
worktree of its own, and compares them.

Exit code 0: identical, or no difference is larger than --tolerance; 1: one is; 2: there is nothing
to compare.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

METRICS = ("loss/train", "grad_norm", "loss/aux", "loss/validation")
ROOT = Path(__file__).resolve().parents[1]


def fail(text: str) -> SystemExit:
    """Print an error and return the exit that stands for "nothing to compare"."""
    print(f"loss_compare: error: {text}", file=sys.stderr)
    return SystemExit(2)


def read_values(run: Path) -> dict[str, dict[int, float]]:
    """Values by metric and step of a dump folder; a value that was not finite is nan.

    A resumed run does steps again: the later lines count.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise fail(f"{path} does not exist. Name the dump folder of a run.")
    values: dict[str, dict[int, float]] = {metric: {} for metric in METRICS}
    for point in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        for metric, found in values.items():
            if metric in point:
                while found and next(reversed(found)) >= point["step"]:
                    found.popitem()
                found[point["step"]] = math.nan if point[metric] is None else point[metric]
    return values


def compare(metric: str, a: Mapping[int, float], b: Mapping[int, float]) -> tuple[list[str], float]:
    """The row of the table for one metric, and its largest difference; inf where only one value is
    finite.
    """
    distances = {}
    for step in sorted(a.keys() & b.keys()):
        both_nan = math.isnan(a[step]) and math.isnan(b[step])
        distance = 0.0 if both_nan else abs(a[step] - b[step])
        distances[step] = math.inf if math.isnan(distance) else distance
    differing = {step: distance for step, distance in distances.items() if distance}
    largest = max(differing.values(), default=0.0)
    at = max(differing, key=differing.__getitem__, default="-")
    row = [
        metric,
        len(distances),
        len(distances) - len(differing),
        f"{largest:.3g}",
        at,
        min(differing, default="-"),
    ]
    return list(map(str, row)), largest


def run_commit(commit: str, arguments: Sequence[str], ranks: int, folder: Path) -> Path:
    """Train with the code of `commit`; returns the dump folder. Relative paths begin at the current
    folder.
    """
    dump, code = folder / "run", ROOT if commit == "." else folder / "code"
    folder.mkdir()
    if commit != ".":
        done = git("worktree", "add", "--detach", str(code), commit)
        if done.returncode:
            reason = done.stderr.strip()
            raise fail(
                f"--commits: cannot check out '{commit}': {reason}. Name a commit, branch or tag."
            )
    try:
        subject = git("log", "-1", "--format=%h %s", "HEAD" if commit == "." else commit).stdout
        print(f"{commit}: {subject.strip()}", flush=True)
        command = [
            sys.executable,
            "-m",
            "titanlite.launch",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        command += [
            "-m",
            "titanlite",
            "train",
            *arguments,
            f"--job.dump_folder={dump}",
            "--training.deterministic=true",
        ]
        command += ["--metrics.log_freq=1", "--checkpoint.enable=false"]
        # Not the folder that this is called in: its titanlite may be another.
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
        ended = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        if commit != ".":
            git("worktree", "remove", "--force", str(code))
    if ended.returncode:
        last = "\n".join(ended.stdout.splitlines()[-20:])
        raise fail(f"{commit}: the run ended with exit code {ended.returncode}:\n{last}")
    return dump


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git in this checkout."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    rest = given[split + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="dump folder of a run, two of them"
    )
    parser.add_argument(
        "--commits", nargs=2, metavar=("A", "B"), help="run these instead, with what follows --"
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="of each run of a commit (default: %(default)s)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="largest difference that passes (default: 0)"
    )
    options = parser.parse_args(given[:split])
    if len(options.runs) != (0 if options.commits else 2) or bool(rest) != bool(options.commits):
        parser.error(
            "give two dump folders, or --commits A B -- ARGUMENTS, for example -- --config FILE"
        )
    with tempfile.TemporaryDirectory(prefix="loss-compare-") as folder:
        runs = options.runs or [
            run_commit(commit, rest, options.ranks, Path(folder, name))
            for commit, name in zip(options.commits, "ab", strict=True)
        ]
        a, b = map(read_values, runs)
    if not a["loss/train"].keys() & b["loss/train"].keys():
        raise fail(
            f"{runs[0]} and {runs[1]} have no step with a loss in common. Use the same "
            "metrics.log_freq."
        )
    found = [
        compare(metric, a[metric], b[metric])
        for metric in METRICS
        if a[metric].keys() & b[metric].keys()
    ]
    for row in [
        ["metric", "steps", "identical", "max difference", "at step", "first at step"],
        *(row for row, _ in found),
    ]:
        print(
            "  ".join(
                f"{cell:>{width}}" for cell, width in zip(row, (16, 5, 9, 14, 7, 13), strict=True)
            )
        )
    largest = max(difference for _, difference in found)
    verdict = (
        "identical"
        if not largest
        else f"different, by up to {largest:.3g} (--tolerance {options.tolerance:g})"
    )
    print(f"\n{verdict}")
    return int(largest > options.tolerance)


if __name__ == "__main__":
    sys.exit(main())
