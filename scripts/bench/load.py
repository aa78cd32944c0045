#!/usr/bin/env python
"""Compare ways to load (and, with --save, to save) a Hugging Face checkpoint sharded over several
CPU ranks.

    python scripts/bench/load.py --size-gb 1.0 --ranks 4 --rounds 3 --save

Makes a random Qwen3-MoE checkpoint in TMPDIR, then runs every way in every round, in rotating order,
each time in freshly forked processes, model build included, with the files in the page cache. In a
virtual machine the first runs may pay for memory that comes from the host: take several rounds.
After each run, outside the clock, every parameter is compared with the checkpoint bit for bit, so
that a way that loads garbage fails.

wall s     from the first rank's start to the last rank's end: median over the rounds, then lowest and highest
CPU s      user and system time of all threads of all ranks
above MB   highest memory that no file backs (anonymous, not RSS, for mapped files count there), above the start and the
           rank's shards, which it has to hold; on a save they are there before the start
MB are 1e6 bytes; "a / b" is rank 0 / the worst other rank. titanlite alone flushes what it saved.
"""  # noqa: E501

import argparse
import ctypes
import gc
import importlib
import multiprocessing
import os
import platform
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Before torch is imported: one thread per rank, and nothing that talks to the network or draws
# progress bars.
os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_VERBOSITY="error",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
import torch.distributed as dist
from cluster import Forked
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WARM_UP_GB = 0.001
# Imported by every way, or once per process by someone: forked ranks find them there.
_MODULES = (
    "torch.distributed.checkpoint",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "titanlite.checkpoint",
    "titanlite.distributed",
    "titanlite.materialize",
    "titanlite.models.decoder",
)
# Several files, and so an index, whatever the size.
_FILES, _MAX_FILE_BYTES = 3, 400_000_000
# (from this many GB on, hidden size, expert width, experts, vocabulary): the number of layers
# follows from the size. Qwen3-30B-A3B's own, and half as wide with as many experts.
_SHAPES = (
    (8.0, 2048, 768, 128, 65536),
    (0.5, 1024, 384, 128, 32768),
    (0.05, 512, 192, 32, 16384),
    (0.0, 64, 32, 8, 512),
)
_SAMPLE_EVERY_S = 0.005
_TIMEOUT_S = 600
# RssAnon of /proc/<pid>/status is the counter behind "Anonymous:" of smaps_rollup (equal to the
# byte), read in 0.02 ms. smaps_rollup took 3 ms for 0.7 GB, and holds up the page faults of the
# measured process, whose tables it walks. The other two count memory that no file backs either: a
# way could hide shards in them.
_MEMORY = re.compile(r"^(?:RssAnon|RssShmem|HugetlbPages):\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class Way:
    """One way to load or save.

    Attributes:
        act: what is timed; gets what `prepare` returned.
        check: raises ValueError if the result of `act` is wrong, and returns the bytes that the
            rank has to hold.
        prepare: runs before the clock starts.
    """

    act: Callable[[Any], Any]
    check: Callable[[Any], int]
    prepare: Callable[[], Any] = lambda: None


@dataclass
class Result:
    """What one rank measured of itself. Times are seconds of the monotonic clock, which all
    processes share; `peak_bytes` is above the memory at the start.
    """

    start: float
    end: float
    cpu_s: float
    base_bytes: int
    peak_bytes: int
    held_bytes: int
    imported: list[str]


class WayFailed(Exception):  # noqa: N818 - the way failed, not this script
    """A way raised on some rank, or did not end."""


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    # before any parallel region: forked ranks must not inherit a pool without its threads
    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(name)
    importlib.import_module("transformers").utils.logging.disable_progress_bar()

    results = {}
    with tempfile.TemporaryDirectory(prefix="titanlite-bench-") as scratch:
        folder = make_checkpoint(Path(scratch), arguments.size_gb)
        tiny = make_checkpoint(Path(scratch), _WARM_UP_GB)
        output = tiny.with_name("saved")
        for part, ways_of in {"load": load_ways, "save": save_ways}.items():
            if part == "save" and not arguments.save:
                continue
            small, large = (
                {name: ways_of(checkpoint, output)[name] for name in arguments.ways}
                for checkpoint in (tiny, folder)
            )
            warm_up(small, arguments.ranks, output)
            for path in weight_files(folder):  # into the page cache
                path.read_bytes()
            results[part] = run_rounds(part, large, arguments, output)

        machine = describe(folder, arguments)
    for part, measured in results.items():
        print("\n" + table(part, measured))
    print("\n" + machine)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = list(LOADS)
    parser.add_argument(
        "--size-gb", type=float, default=1.0, help="about this size, in 1e9 bytes (default 1.0)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="at least 2 (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every way (default 3)")
    parser.add_argument(
        "--ways", nargs="+", choices=known, default=known, help="in both parts (default all)"
    )
    parser.add_argument("--save", action="store_true", help="measure saving too")
    return parser.parse_args()


def warm_up(ways: Mapping[str, Way], ranks: int, output: Path) -> None:
    """Run every way once on a tiny checkpoint and import here what it imports late: no run is to
    pay for imports.
    """
    for way in ways.values():
        with suppress(WayFailed):  # it fails again later, and is reported there
            for module in run_way(way, ranks)[0].imported:
                with suppress(ImportError):
                    importlib.import_module(module)
        shutil.rmtree(output, ignore_errors=True)


def run_rounds(
    part: str, ways: Mapping[str, Way], arguments: argparse.Namespace, output: Path
) -> dict[str, list[list[Result]]]:
    """Every way once per round; each round begins with another one. A way that failed is not run
    again.
    """
    results: dict[str, list[list[Result]]] = {name: [] for name in ways}
    names, failed = list(ways), set()
    for number in range(arguments.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in failed:
                continue
            said = f"{part} round {number + 1}: {name}"
            try:
                ranks = run_way(ways[name], arguments.ranks)
            except WayFailed as error:
                print(f"{said} failed: {' '.join(str(error).split())[-300:]}", flush=True)
                failed.add(name)
                results[name].clear()
                continue
            finally:
                shutil.rmtree(output, ignore_errors=True)
            print(f"{said} {wall_s(ranks):.2f} s, {cpu_s(ranks):.2f} CPU s", flush=True)
            results[name].append(ranks)
    return results


def wall_s(ranks: Sequence[Result]) -> float:
    """Seconds from the first rank's start to the last rank's end."""
    return max(rank.end for rank in ranks) - min(rank.start for rank in ranks)


def cpu_s(ranks: Sequence[Result]) -> float:
    """User and system time of all threads of all ranks."""
    return sum(rank.cpu_s for rank in ranks)


def table(part: str, results: Mapping[str, Sequence[Sequence[Result]]]) -> str:
    """Medians over the rounds as a Markdown table."""
    lines = [
        f"| {part} | wall s | min - max | x titanlite | CPU s | x titanlite | above MB |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = results.get("titanlite") or []
    for name, runs in results.items():
        if not runs:
            lines.append(f"| {name} | failed | | | | | |")
            continue
        cells = [name]
        for measure in (wall_s, cpu_s):
            values = [measure(ranks) for ranks in runs]
            middle = statistics.median(values)
            cells.append(f"{middle:.2f}")
            if measure is wall_s:
                cells.append(f"{min(values):.2f} - {max(values):.2f}")
            ratio = middle / statistics.median(map(measure, ours)) if ours else 0.0
            cells.append(f"{ratio:.2f}" if ours else "")
        held = part == "load"
        above = [
            statistics.median(rank.peak_bytes - rank.held_bytes * held for rank in of_rank) / 1e6
            for of_rank in zip(*runs, strict=True)
        ]
        lines.append(f"| {' | '.join([*cells, f'{above[0]:.0f} / {max(above[1:]):.0f}'])} |")
    return "\n".join(lines)


def describe(folder: Path, arguments: argparse.Namespace) -> str:
    """Machine, versions, and what was run, in one line."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    packages = ("torch", "transformers", "safetensors")
    versions = [f"{name} {metadata.version(name)}" for name in packages]
    return (
        f"{cpu[1] if cpu else '?'}, {len(os.sched_getaffinity(0))} cores, "
        f"Linux {platform.release()}; {', '.join(versions)}; checkpoint "
        f"{weight_bytes(folder) / 1e6:.0f} MB in {len(weight_files(folder))} files, "
        f"{arguments.ranks} ranks, {arguments.rounds} rounds"
    )


# --- one run


def run_way(way: Way, count: int) -> list[Result]:
    """Run `way` on `count` freshly forked ranks, and measure.

    Raises:
        WayFailed: with the first rank's reason; the others are killed.
    """
    ranks, results = Forked(count, partial(measure, way)), {}
    samples: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while len(results) < count:
            waiting = [pipe for rank, pipe in enumerate(ranks.pipes) if rank not in results]
            for pipe in wait(waiting, timeout=_SAMPLE_EVERY_S):
                rank = ranks.pipes.index(pipe)
                try:
                    message = pipe.recv()
                except EOFError:
                    raise WayFailed(f"rank {rank} died") from None
                if not isinstance(message, Result):
                    raise WayFailed(f"rank {rank}: {message[1]}")
                results[rank] = message
            for seen, process in zip(samples, ranks.processes, strict=True):
                seen.append((time.monotonic(), memory_bytes(process.pid)))
            if time.monotonic() > deadline:
                raise WayFailed(f"no end after {_TIMEOUT_S} s")
    finally:
        ranks.end()
    for rank, result in results.items():
        sampled = [used for at, used in samples[rank] if result.start <= at <= result.end]
        result.peak_bytes = max([result.peak_bytes, *(x - result.base_bytes for x in sampled)])
    return [results[rank] for rank in range(count)]


def measure(way: Way, pipe: Connection) -> None:
    """Run and measure `way` on this rank; send the result."""
    state = way.prepare()
    gc.collect()
    # or the way would fill free memory of the heap, its own or the parent's, unseen
    ctypes.CDLL(None).malloc_trim(0)
    dist.all_reduce(torch.zeros(1))  # opens the connections
    modules = set(sys.modules)
    dist.barrier()
    base_bytes, cpu = memory_bytes(), own_cpu_s()
    start = time.monotonic()
    outcome = way.act(state)
    dist.barrier()
    result = Result(
        start=start,
        end=time.monotonic(),
        cpu_s=own_cpu_s() - cpu,
        base_bytes=base_bytes,
        peak_bytes=memory_bytes() - base_bytes,
        held_bytes=0,
        imported=sorted(set(sys.modules) - modules),
    )
    result.held_bytes = way.check(outcome)
    dist.barrier()  # the rendezvous must outlive the slowest check
    pipe.send(result)


def own_cpu_s() -> float:
    """User and system time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory_bytes(pid: int | str = "self") -> int:
    """Memory of a process that no file backs; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(int(kib) for kib in _MEMORY.findall(status))


def run_alone(function: Callable[[], None]) -> None:
    """Run `function` in a forked process, so that this one's heap stays as small as it is.

    Raises:
        WayFailed: it raised.
    """
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    if process.exitcode:
        raise WayFailed(f"exit code {process.exitcode}")


# --- the checkpoint


def model_settings(size_gb: float) -> dict[str, Any]:
    """Settings of a Qwen3-MoE whose bf16 checkpoint has about `size_gb` * 1e9 bytes, at least one
    layer.
    """
    hidden, width, experts, vocab = next(shape[1:] for shape in _SHAPES if size_gb >= shape[0])
    heads, kv_heads, head_dim = hidden // 64, hidden // 256 or 1, 64
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer_bytes = 2 * (3 * hidden * width * experts + attention + hidden * experts)
    layers = max(1, round((size_gb * 1e9 - 2 * 2 * hidden * vocab) / layer_bytes))
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 8 if experts >= 32 else 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        # Explicit, so that no way warns about them.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def make_checkpoint(root: Path, size_gb: float) -> Path:
    """Make the checkpoint of this size in `root`, with random bf16 weights; return its folder."""
    settings = model_settings(size_gb)
    folder = root / f"qwen3_moe-{size_gb:g}gb"

    def make() -> None:  # needs about twice its size in memory
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(**settings)
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for param in model.parameters():
            param.data.normal_(std=0.02)
        largest = min(_MAX_FILE_BYTES, int(size_gb * 1e9) // _FILES)
        model.save_pretrained(folder, max_shard_size=largest)

    run_alone(make)
    os.sync()  # or it would still be written to the disk while the first round runs
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's weight files, in order of their names."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Size of all weight files, headers included."""
    return sum(path.stat().st_size for path in weight_files(folder))


class Reference:
    """Reads any part of a model's parameter from a checkpoint, whether its experts are stored
    singly or fused.
    """

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in weight_files(folder)]
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118 - not a dict
        self.keys = frozenset(self._file_of)

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor under `key`."""
        return self._file_of[key].get_tensor(key)

    def _read(self, key: str, index: tuple[slice, ...]) -> torch.Tensor:
        if key not in self._file_of:
            raise ValueError(f"there is no {key}")
        return self._file_of[key].get_slice(key)[index]

    def compare(self, fqn: str, local: torch.Tensor, starts: Sequence[int]) -> None:
        """Compare `local`, which begins at `starts` in parameter `fqn`, bit for bit.

        Raises:
            ValueError: it differs.
        """
        index = tuple(
            slice(start, start + length) for start, length in zip(starts, local.shape, strict=True)
        )
        if fqn in self._file_of:
            pairs = [(fqn, self._read(fqn, index), local)]
        else:
            pairs = []
            for row in range(local.shape[0]):
                for key, part, view in expert_views(fqn, local[row], starts[0] + row):
                    pairs.append((key, self._read(key, (slice(0, part), index[2])), view))
        for key, expected, found in pairs:
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                raise ValueError(f"{key} differs from the checkpoint")


def expert_views(
    fqn: str, expert: torch.Tensor, number: int
) -> list[tuple[str, int, torch.Tensor]]:
    """(key on disk, rows, view) of the parts of one expert of a fused parameter; `expert` has whole
    rows.
    """
    prefix, _, leaf = fqn.rpartition(".")
    if leaf == "gate_up_proj":
        half = expert.shape[0] // 2
        return [
            (f"{prefix}.{number}.gate_proj.weight", half, expert[:half]),
            (f"{prefix}.{number}.up_proj.weight", half, expert[half:]),
        ]
    return [(f"{prefix}.{number}.{leaf}.weight", expert.shape[0], expert)]


def local_region(param: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of a sharded parameter, and where in the parameter it begins."""
    if not isinstance(param, DTensor):
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not sharded")
    local = param.to_local()
    shape, starts = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    assert tuple(shape) == tuple(local.shape)
    return local, tuple(starts)


def shard_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards of all parameters."""
    return sum(local_region(param)[0].nbytes for param in model.parameters())


@torch.no_grad()
def check_model(model: nn.Module, folder: Path) -> None:
    """Compare every parameter of the sharded bf16 model with the checkpoint, this rank's part, bit
    for bit.

    Raises:
        ValueError: one differs, is not sharded, or a buffer holds no numbers.
    """
    reference = Reference(folder)
    for fqn, param in model.named_parameters():
        local, starts = local_region(param)
        if local.numel():
            reference.compare(fqn, local, starts)
    for name, buffer in model.named_buffers():
        if buffer.is_meta or not buffer.isfinite().all():
            raise ValueError(f"buffer {name} was not written")


# --- the ways; each function runs on every rank


def load_ways(folder: Path, _: Path) -> dict[str, Way]:
    """Ways to load the checkpoint in `folder` into bf16 parameters sharded over all ranks, by
    name.
    """

    def check(model: nn.Module) -> int:
        check_model(model, folder)
        return shard_bytes(model)

    return {name: Way(lambda _, load=load: load(folder), check) for name, load in LOADS.items()}


def save_ways(folder: Path, output: Path) -> dict[str, Way]:
    """Ways to save a sharded model, loaded from `folder` before the clock starts, into `output`, by
    name.
    """

    def prepare(load: Callable[[Path], nn.Module]) -> nn.Module:
        model = load(folder)
        if dist.get_rank() == 0:
            os.sync()  # what earlier runs wrote must not be flushed on this one's time
        return model

    def check(model: nn.Module) -> int:
        check_saved(folder, output)
        return shard_bytes(model)

    return {
        name: Way(partial(save, output=output), check, partial(prepare, LOADS[name]))
        for name, save in SAVES.items()
    }


def load_titanlite(folder: Path) -> nn.Module:
    """Meta model, sharded on meta, and every shard read straight into place."""
    from titanlite.checkpoint.hf_model import weights_of
    from titanlite.config import JobConfig
    from titanlite.config.parallelism import Degrees
    from titanlite.distributed import ParallelDims
    from titanlite.distributed.parallelize import parallelize
    from titanlite.materialize import materialize
    from titanlite.models.decoder import build_decoder
    from titanlite.models.families import model_config_from_hf

    config, job = model_config_from_hf(folder), JobConfig()
    job.training.dtype = "bfloat16"
    model = build_decoder(config, torch.bfloat16)
    parallelize(
        model, job, ParallelDims.build(Degrees(dp_shard=dist.get_world_size()), "cpu"), "cpu"
    )
    plan = materialize(model, "cpu", [weights_of(folder, model)])
    object.__setattr__(model, "_bench_plan", plan)  # save_titanlite needs it
    return model


def load_transformers_sharded(folder: Path) -> nn.Module:
    """FSDP2 by transformers itself: each rank reads only its shards."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
    )


def load_dcp(folder: Path) -> nn.Module:
    """DCP, told by hand which views of the local shards are which keys on disk."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    model.to_empty(device="cpu")
    # its buffers are in no checkpoint
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    entries: dict[str, Any] = {}
    for fqn, param in model.named_parameters():
        param = param.detach()
        if ".experts." not in fqn:
            entries[fqn] = param
            continue
        local, starts = local_region(param)
        for row in range(local.shape[0]):
            entries.update(
                (key, view) for key, _, view in expert_views(fqn, local[row], starts[0] + row)
            )
    dcp.load(entries, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    return model


def save_titanlite(model: Any, output: Path) -> nn.Module:
    """Every rank writes its shards in place."""
    from tests.saving import save_hf_model

    save_hf_model(model, model._bench_plan, None, output, torch.bfloat16)
    return model


def save_transformers(model: Any, output: Path) -> nn.Module:
    """`save_pretrained` on every rank; it gathers the model on rank 0, which writes."""
    model.save_pretrained(output)
    return model


def save_dcp(model: nn.Module, output: Path) -> nn.Module:
    """Every rank writes its shards into a file, then rank 0 makes whole tensors of them. Keys are
    the fused ones.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    writer = dcp.HuggingFaceStorageWriter(
        str(output), save_distributed=True, enable_consolidation=True
    )
    dcp.save(get_model_state_dict(model), storage_writer=writer)
    return model


@torch.no_grad()
def check_saved(folder: Path, output: Path) -> None:
    """Compare what was saved with the checkpoint that the model came from, each rank some of the
    tensors.

    Raises:
        ValueError: a tensor differs or is missing.
    """
    before, after = Reference(folder), Reference(output)
    same = sorted(before.keys & after.keys)
    fused = sorted(after.keys - before.keys)
    missing = (
        before.keys - after.keys
        if not fused
        else {key for key in before.keys - after.keys if "expert" not in key}
    )
    if missing:
        raise ValueError(f"{len(missing)} tensors were not saved, among them {min(missing)}")
    for key in [*same, *fused][dist.get_rank() :: dist.get_world_size()]:
        tensor = after.read(key)
        before.compare(key, tensor, [0] * tensor.dim())


LOADS = {
    "titanlite": load_titanlite,
    "transformers": load_transformers_sharded,
    "dcp": load_dcp,
}
SAVES = {"titanlite": save_titanlite, "transformers": save_transformers, "dcp": save_dcp}

if __name__ == "__main__":
    main()
