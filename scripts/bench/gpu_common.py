"""What the GPU benchmarks share: the device and its measured ceilings, timing, a time budget,
failures, reports.

Without a GPU the same code runs with a stand-in for `CudaTimer`, so that tests find its errors.
"""

import gc
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

_HEAD_START_CYCLES = 20_000_000  # 10 ms at 2 GHz


class Sample(NamedTuple):
    """Seconds of one call: median, lowest and highest over `runs`."""

    seconds: float
    lowest: float
    highest: float
    runs: int


class Timer(Protocol):
    """Measures calls; `call(i)` is the i-th run, so that it can take other inputs each time."""

    def measure(self, call: Callable[[int], object], seconds: float | None = None) -> Sample: ...


class CudaTimer:
    """Device time between two events around each call, after warm-up.

    The device sleeps for 10 ms first, so that the host gets ahead: the time of launches counts only
    where the host cannot keep up.

    Args:
        seconds: about as long as the timed runs take together.
        least, most: number of runs.
    """

    def __init__(self, seconds: float, least: int = 5, most: int = 50) -> None:
        self.seconds, self.least, self.most = seconds, least, most

    def measure(self, call: Callable[[int], object], seconds: float | None = None) -> Sample:
        """Median over many runs. Synchronizes."""
        for i in range(2):  # compiles, fills caches and the allocator's pool
            call(i)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(2)
        torch.cuda.synchronize()
        once = max(time.perf_counter() - start, 1e-6)
        runs = min(max(int((seconds or self.seconds) / once), self.least), self.most)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        torch.cuda._sleep(_HEAD_START_CYCLES)
        for i, (begin, end) in enumerate(events):
            begin.record()
            call(i)
            end.record()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) / 1e3 for begin, end in events)
        return Sample(statistics.median(times), times[0], times[-1], runs)


class Budget:
    """Seconds that a run may take. What finds nothing left is skipped and listed."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds
        self.skipped: list[str] = []

    def left(self) -> float:
        """Seconds that are left, 0 or more."""
        return max(self._end - self._clock(), 0.0)

    def allows(self, what: str, reserve: float = 0.0) -> bool:
        """Whether more than `reserve` seconds are left; if not, `what` is noted as skipped."""
        if self.left() > reserve:
            return True
        if what not in self.skipped:
            self.skipped.append(what)
        return False


# As the driver says it, whoever passes it on: torch's "CUDA error: ...", Triton's "Triton Error
# [CUDA]: ...".
_LOSES_THE_DEVICE = re.compile(
    "illegal memory access|misaligned address|device-side assert|unspecified launch "
    "failure|illegal instruction|invalid program counter|invalid address space|hardware stack "
    "error|ECC error"
)


class DeviceLostError(RuntimeError):
    """The CUDA context is broken; nothing that follows can be measured."""


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(result of `call`, None) or (None, what went wrong). Memory of a failed call is given back.

    Raises:
        DeviceLostError: after an error of the device that no later call survives.
    """
    from triton.errors import TritonError

    try:
        return call(), None
    except torch.OutOfMemoryError:
        problem = "out of memory"
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        ImportError,
        TritonError,
    ) as error:
        problem = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if _LOSES_THE_DEVICE.search(str(error)):
            raise DeviceLostError(problem) from error
    free_memory()  # outside of `except`: the traceback held the call's tensors
    return None, problem


def free_memory() -> None:
    """Give unreferenced tensors' memory back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Memory(NamedTuple):
    """Bytes above those held at the start: `kept` after the forward, `peak` over forward and
    backward.
    """

    kept: int
    peak: int


def measure_memory(
    forward: Callable[[], torch.Tensor], backward: Callable[[torch.Tensor], object]
) -> Memory:
    """Memory of one forward and backward; without a GPU, zeros. The output is not counted as
    kept.
    """
    free_memory()
    if not torch.cuda.is_available():
        backward(forward())
        return Memory(0, 0)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    kept = torch.cuda.memory_allocated() - base - out.numel() * out.element_size()
    grads = backward(out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    del out, grads
    return Memory(kept, peak)


@dataclass(frozen=True)
class Machine:
    """What the numbers were measured on; the rates are measured in the same run.

    Attributes:
        flops: bfloat16 8192 x 8192 x 8192 matmul of cuBLAS, FLOP/s.
        bandwidth: device-to-device copy, bytes read and written per second.
    """

    device: str
    driver: str
    memory_bytes: int
    l2_bytes: int
    versions: dict[str, str]
    date: str
    flops: float
    bandwidth: float

    def describe(self) -> str:
        """One line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.device}, {self.memory_bytes / 2**30:.0f} GiB, L2 {self.l2_bytes / 2**20:.0f} "
            f"MiB, driver {self.driver}; {versions}; {self.date}; measured ceilings: "
            f"{self.flops / 1e12:.0f} TFLOP/s (cuBLAS bfloat16 8192^3), "
            f"{self.bandwidth / 1e12:.2f} TB/s (copy)"
        )


def missing_gpu() -> str | None:
    """Why the GPU benchmarks cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device was found. Run this on a machine with an NVIDIA GPU."
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is 1, so the kernels would run on the CPU. Unset it."
    return None


def inspect_machine(timer: Timer) -> Machine:
    """Facts and measured ceilings of the current CUDA device."""
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        device=properties.name,
        driver=_driver(),
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", 60 << 20),
        versions=versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        flops=measure_flops(timer),
        bandwidth=measure_bandwidth(timer),
    )


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }
    for name in ("triton", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _driver() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.split()
        return lines[0] if lines else "?"
    return "?"


def measure_flops(
    timer: Timer, size: int = 8192, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> float:
    """FLOP/s of a dense matmul on random numbers (zeros would be faster: they take less power)."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / timer.measure(lambda _: torch.mm(a, b, out=out)).seconds


def measure_bandwidth(timer: Timer, nbytes: int = 4 << 30, device: str = "cuda") -> float:
    """Bytes per second, read and written, of a copy."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * nbytes / timer.measure(lambda _: target.copy_(source)).seconds


def num_copies(nbytes: int, l2_bytes: int, free_bytes: int, most: int = 8) -> int:
    """Sets of inputs to rotate so that none is in the L2 cache when its turn comes; 1 if memory
    allows no more.
    """
    wanted = min(max(2, -(-4 * l2_bytes // max(nbytes, 1))), most)
    return max(1, min(wanted, int(free_bytes // 4 // max(nbytes, 1))))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned, the first column to the left and the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    texts = [
        [
            t.ljust(w) if i == 0 else t.rjust(w)
            for i, (t, w) in enumerate(zip(ln, widths, strict=True))
        ]
        for ln in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in texts)


def write_report(folder: Path, name: str, markdown: str, data: dict[str, Any]) -> list[Path]:
    """Write `name`.md and `name`.json, in one piece each, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    for path, text in zip(paths, (markdown, json.dumps(data, indent=1)), strict=True):
        new = path.with_name(f"{path.name}.new")
        new.write_text(text + "\n", encoding="utf-8")
        new.replace(path)
    return paths


def machine_data(machine: Machine) -> dict[str, Any]:
    """The machine as plain data."""
    return asdict(machine)


def say(text: str) -> None:
    """A progress line, at once."""
    print(text, flush=True)
