#!/usr/bin/env python
"""Compare `titanlite verify` with reading the same folder and checksumming it once.

    python scripts/bench/verify.py --size-gb 2 --rounds 3

Makes a random Qwen3-MoE checkpoint in bfloat16, with a certificate, and reads it in both ways in
every round, in alternating order, with its files in the page cache. `checksum` is the Adler-32 of
each file, as `inspect --checksums` computes it, with one file per thread. `verify` has all checks,
the certificate's digests included. Prints the wall time of each (median, lowest, highest), their
ratio, and the highest memory of the process that verifies, imports included.
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
began = time.perf_counter()
report = verify_folder(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
seconds = time.perf_counter() - began
assert not report.problems, report.problems[:3]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([seconds, int(status["VmHWM"].split()[0]) * 1024 / 1e6]))
"""


def make(folder: Path, size_gb: float) -> None:
    """Write random experts until the folder has its size, and the certificate of them."""
    import torch
    from safetensors.torch import save_file

    from titanlite.features.verify.certificate import CERTIFICATE_FILE, digest_base, render

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    count = max(int(size_gb * 1e9 / (768 * 2048 * 2)), 4)
    keys = [f"model.layers.{i // 96}.mlp.experts.{i % 96}.up_proj.weight" for i in range(count)]
    places = {}
    for number, start in enumerate(range(0, count, 150)):
        name = f"model-{number:05d}.safetensors"
        part = keys[start : start + 150]
        drawn = {key: torch.randn(768, 2048).mul_(0.03).bfloat16() for key in part}
        save_file(drawn, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    text = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)
    rows = {
        key: {"state": "frozen", "source": "init", "digest": digest}
        for key, digest in digest_base(folder).items()
    }
    (folder / CERTIFICATE_FILE).parent.mkdir()
    (folder / CERTIFICATE_FILE).write_bytes(render({}, {}, rows))


def checksum(folder: Path) -> float:
    """Seconds to read and checksum every file once."""
    from titanlite.checkpoint.commit import _checksum_of

    began = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_checksum_of, sorted(folder.glob("*.safetensors"))))
    return time.perf_counter() - began


def verify(folder: Path, *base: str) -> tuple[float, float]:
    """Seconds, and MB of memory at most, of a new process."""
    command = [sys.executable, "-c", CHILD, str(folder), *base]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return json.loads(done.stdout)


def shown(seconds: list[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    known = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="verify-"))
    try:
        folder = root / "model"
        make(folder, known.size_gb)
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        times: dict[str, list[float]] = {"checksum": [], "verify": [], "verify --base": []}
        memory = 0.0
        for number in range(known.rounds):
            for name in list(times)[:: 1 if number % 2 else -1]:
                if name == "checksum":
                    times[name].append(checksum(folder))
                    continue
                more = [str(folder)] if name.endswith("base") else []
                seconds, peak = verify(folder, *more)
                times[name].append(seconds)
                memory = max(memory, peak)
        print(f"{nbytes / 1e9:.2f} GB, {len(os.sched_getaffinity(0))} cores")
        for name, seconds in times.items():
            ratio = statistics.median(seconds) / statistics.median(times["checksum"])
            print(f"{name:14} {shown(seconds)} s, {ratio:.2f} times the checksum")
        print(f"most memory of verify: {memory:.0f} MB")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
