#!/usr/bin/env python
"""Compare `titanlite verify` with reading the same folder and checksumming it once.

    python scripts/bench/verify.py --size-gb 2 --rounds 5

Makes a random Qwen3-MoE checkpoint in bfloat16, with a certificate, and one that differs from it in
every element, as its base. Each round reads them in all ways, in alternating order, with the files
in the page cache: `checksum` is the Adler-32 of each file, as the manifest of a checkpoint has it
and `inspect --checksums` computes it, with one file per thread; `verify` has all checks, the
certificate's digests included; `verify --base` reads both folders. Prints wall and CPU seconds of
each (median, lowest, highest), their ratios, and the highest memory (VmHWM) of the process that
verifies, imports included; that also of a folder with a single tensor of 1.2 GB.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CHILD = """
import json, sys, time
from pathlib import Path
import torch
from titanlite.features.verify import verify_folder
torch.set_num_threads(1)
began = time.perf_counter(), time.process_time()
report = verify_folder(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
seconds = time.perf_counter() - began[0], time.process_time() - began[1]
assert not report.problems, report.problems[:3]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([*seconds, int(status["VmHWM"].split()[0]) * 1024 / 1e6]))
"""


def make(folder: Path, size_gb: float, rows: int = 768, base: Path | None = None) -> None:
    """Write random experts until the folder has its size, and the certificate of them."""
    import torch
    from safetensors.torch import save_file

    from titanlite.checkpoint.folder import CERTIFICATE_FILE
    from titanlite.features.verify.certificate import digest_base, render

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    count = max(int(size_gb * 1e9 / (rows * 2048 * 2)), 1)
    keys = [f"model.layers.{i // 96}.mlp.experts.{i % 96}.up_proj.weight" for i in range(count)]
    places = {}
    for number, start in enumerate(range(0, count, 150)):
        name = f"model-{number:05d}.safetensors"
        part = keys[start : start + 150]
        drawn = {key: torch.randn(rows, 2048).mul_(0.03).bfloat16() for key in part}
        save_file(drawn, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
        if base is not None:  # an ulp or more away
            moved = {key: value * 1.01 for key, value in drawn.items()}
            save_file(moved, base / name, {"format": "pt"})
    text = json.dumps({"weight_map": places})
    for each in (folder, base or folder):
        (each / "model.safetensors.index.json").write_text(text)
    table = {
        key: {"state": "trained", "source": "base", "digest": digest}
        for key, digest in digest_base(folder).items()
    }
    (folder / CERTIFICATE_FILE).parent.mkdir()
    origin = {} if base is None else digest_base(base)
    (folder / CERTIFICATE_FILE).write_bytes(render({"tensors": table, "base": origin}))


def checksum(folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds to read and checksum every file once."""
    from titanlite.checkpoint.commit import _checksum_of

    began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_checksum_of, sorted(folder.glob("*.safetensors"))))
    return time.perf_counter() - began[0], time.process_time() - began[1]


def verify(*folders: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds, and MB of memory at most, of a new process."""
    command = [sys.executable, "-c", CHILD, *map(str, folders)]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return json.loads(done.stdout)


def shown(seconds: list[float], of: list[float]) -> str:
    """Median, lowest and highest, and the ratio of the median to that of the checksum."""
    middle = statistics.median(seconds)
    spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
    return f"{middle:.2f} {spread}, {middle / statistics.median(of):.2f} times"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    known = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="verify-"))
    try:
        folder, base, single = root / "model", root / "base", root / "single"
        base.mkdir()
        make(folder, known.size_gb, base=base)
        make(single, known.size_gb * 0.6, rows=int(known.size_gb * 0.6e9 / 4096))
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        ways = {
            "checksum": lambda: (*checksum(folder), 0.0),
            "verify": lambda: verify(folder),
            "verify --base": lambda: verify(folder, base),
        }
        figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        for number in range(known.rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                figures[name].append(ways[name]())
        print(f"{nbytes / 1e9:.2f} GB, {len(os.sched_getaffinity(0))} cores")
        reference = list(zip(*figures["checksum"], strict=True))
        for name, found in figures.items():
            wall, cpu, memory = map(list, zip(*found, strict=True))
            print(f"{name:14} wall s {shown(wall, reference[0])}; CPU s {shown(cpu, reference[1])}")
            if any(memory):
                print(f"{name:14} at most {max(memory):.0f} MB of memory")
        nbytes = max(path.stat().st_size for path in single.glob("*.safetensors"))
        print(f"one tensor of {nbytes / 1e9:.2f} GB: at most {verify(single)[2]:.0f} MB of memory")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
