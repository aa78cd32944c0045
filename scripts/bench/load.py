#!/usr/bin/env python
"""Compare ways to load (and, with --save, to save) a Hugging Face checkpoint sharded over several
CPU ranks.

    python scripts/bench/load.py --size-gb 1.0 --ranks 4 --rounds 3 --save

Makes a random Qwen3-MoE checkpoint once, then runs every way in every round, in rotating order,
each time in freshly forked processes, model build included, with the files in the page cache and
after all free memory that a run may get was touched. After each run, outside the clock, every
parameter is compared with the checkpoint bit for bit, so that a way that loads garbage fails.

wall s     from the first rank's start to the last rank's end: median over the rounds, then lowest and highest
CPU s      user and system time of all threads of all ranks
above MB   highest memory that no file backs (anonymous, not RSS, for mapped files count there), above the start and the
           rank's shards, which it has to hold; on a save they are there before the start
MB are 1e6 bytes; "a / b" is rank 0 / the worst other rank. The `floor` only copies each rank's
share of the files from the page cache into fresh memory. titanlite alone flushes what it saved.
"""  # noqa: E501

import argparse
import importlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

# Before torch is imported: one thread per rank, and nothing that talks to the network or draws
# progress bars.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from load_checkpoint import checkpoint_path, is_made, make_checkpoint, weight_bytes, weight_files
from load_ranks import Measurement, Way, WayFailed, run_alone, run_way, touch_memory
from load_ways import load_ways, save_ways

_WARM_UP_GB = 0.001
# Imported by every way, or once per process by someone: forked ranks find them there.
_MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "titanlite.checkpoint",
    "titanlite.distributed",
    "titanlite.materialize",
    "titanlite.models.decoder",
)
_Results = dict[str, list[Measurement]]


def main() -> int:
    """Run what the command line asks for; 0 unless every way failed."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    # before any parallel region: forked ranks must not inherit a pool without its threads
    torch.set_num_threads(1)
    for name in _MODULES:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()

    root = arguments.folder.resolve()
    root.mkdir(parents=True, exist_ok=True)
    folder = checkpoint_path(root, arguments.size_gb)
    if is_made(root, arguments.size_gb):
        say(f"checkpoint: {folder} is there already")
    else:
        say(f"checkpoint: making {folder}")
        run_alone(partial(make_checkpoint, root, arguments.size_gb))
        os.sync()  # or it would still be written to the disk while the first round runs
    files, size = len(weight_files(folder)), weight_bytes(folder)

    results: dict[str, _Results] = {}
    with tempfile.TemporaryDirectory(prefix="titanlite-bench-", dir=root) as scratch:
        tiny = Path(scratch)
        run_alone(partial(make_checkpoint, tiny, _WARM_UP_GB))
        output = tiny / "saved"
        parts: list[tuple[str, Callable[[Path], dict[str, Way]]]] = [("load", load_ways)]
        if arguments.save:
            parts.append(("save", partial(save_ways, output=output)))
        for part, ways_of in parts:
            warm_up(ways_of(checkpoint_path(tiny, _WARM_UP_GB)), arguments, output)
            read_all(folder)
            results[part] = run_rounds(part, ways_of(folder), arguments, output)

    for part, measured in results.items():
        print("\n" + table(part, measured))
    print("\n" + describe(size, files, arguments))
    if arguments.json:
        raw = {"machine": describe(size, files, arguments), "results": results}
        arguments.json.write_text(json.dumps(raw, default=vars, indent=1) + "\n")
    return 0 if any(runs for found in results.values() for runs in found.values()) else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(load_ways(Path()))
    parser.add_argument(
        "--size-gb", type=float, default=1.0, help="about this size, in 1e9 bytes (default 1.0)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes to shard over (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every way (default 3)")
    parser.add_argument(
        "--ways", help=f"comma-separated, in both parts (default all: {','.join(known)})"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "titanlite-bench",
        help="keeps the checkpoint; also holds what is saved, for a while (default %(default)s)",
    )
    parser.add_argument("--save", action="store_true", help="measure saving too")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    arguments = parser.parse_args()
    arguments.ways = arguments.ways.split(",") if arguments.ways else known
    if unknown := set(arguments.ways) - set(known):
        parser.error(
            f"--ways: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}"
        )
    if arguments.size_gb <= 0 or arguments.ranks < 2 or arguments.rounds < 1:
        parser.error("--size-gb must be above 0, --ranks at least 2, --rounds at least 1")
    return arguments


def warm_up(ways: Mapping[str, Way], arguments: argparse.Namespace, output: Path) -> None:
    """Run every way once on a tiny checkpoint and import here what it imports late: no run is to
    pay for imports.
    """
    for name, way in ways.items():
        if name not in arguments.ways:
            continue
        try:
            late = run_way(way, arguments.ranks).imported
        except WayFailed:
            continue  # it fails again below, and is reported there
        finally:
            shutil.rmtree(output, ignore_errors=True)
        for module in late:
            with suppress(ImportError):
                importlib.import_module(module)


def run_rounds(
    part: str, ways: Mapping[str, Way], arguments: argparse.Namespace, output: Path
) -> dict[str, list[Measurement]]:
    """Every way once per round; each round begins with another one. A way that failed is not run
    again.
    """
    results: _Results = {name: [] for name in ways if name in arguments.ways}
    names, failed = list(results), set()
    for number in range(arguments.rounds):
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            try:
                touch_memory()
                measured = run_way(ways[name], arguments.ranks)
            except WayFailed as error:
                say(
                    f"{part} round {number + 1}: {name} failed: "
                    f"{' '.join(str(error).split())[:300]}"
                )
                failed.add(name)
                results[name].clear()
                continue
            finally:
                shutil.rmtree(output, ignore_errors=True)
            late = f", late imports: {', '.join(measured.imported)}" if measured.imported else ""
            say(
                f"{part} round {number + 1}: {name} {measured.wall_s:.2f} s, {measured.cpu_s:.2f} "
                f"CPU s{late}"
            )
            results[name].append(measured)
    return results


def table(part: str, results: Mapping[str, Sequence[Measurement]]) -> str:
    """Medians over the rounds as a Markdown table."""
    rows = [[part, "wall s", "min - max", "x titanlite", "CPU s", "x titanlite", "above MB"]]
    ours = results.get("titanlite") or []
    for name, runs in results.items():
        if not runs:
            rows.append([name, "failed", *[""] * 5])
            continue
        row = [name]
        for key in ("wall_s", "cpu_s"):
            values = [getattr(run, key) for run in runs]
            middle = statistics.median(values)
            row.append(f"{middle:.2f}")
            row += [f"{min(values):.2f} - {max(values):.2f}"] if key == "wall_s" else []
            row.append(
                f"{middle / statistics.median(getattr(run, key) for run in ours):.2f}"
                if ours
                else ""
            )
        held = part == "load"
        above = [
            [p - h * held for p, h in zip(run.peak_bytes, run.held_bytes, strict=True)]
            for run in runs
        ]
        rows.append([*row, worst(above)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    lines = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def worst(runs: Sequence[Sequence[int]]) -> str:
    """Medians over the runs of bytes by rank, in MB: rank 0 / the worst other rank."""
    by_rank = [statistics.median(values) / 1e6 for values in zip(*runs, strict=True)]
    return f"{by_rank[0]:.0f} / {max(by_rank[1:]):.0f}"


def describe(size: int, files: int, arguments: argparse.Namespace) -> str:
    """Machine, versions, and what was run, in one line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in info.splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    versions = [f"python {platform.python_version()}"]
    for name in ("torch", "transformers", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}; "
        f"{', '.join(versions)}; checkpoint {size / 1e6:.0f} MB in {files} files, "
        f"{arguments.ranks} ranks, {arguments.rounds} rounds"
    )


def read_all(folder: Path) -> None:
    """Bring all weight files into the page cache."""
    for path in weight_files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.read(2**23):
                pass


def say(text: str) -> None:
    """A progress line, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
