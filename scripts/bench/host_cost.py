#!/usr/bin/env python
"""Count the instructions that the host executes per MoE layer and optimizer step, as on CUDA.

    python scripts/bench/host_cost.py

Needs valgrind, and takes about ten minutes. The trainer's step runs with CUDA's choice of kernels on tiny CPU tensors: 16 tokens,
hidden size 32, 4 experts. Triton kernels are replaced by nothing, and RMSNorm by torch's layer norm,
which is one operator as RMSNorm is on CUDA. What is inside of CPU kernels is not counted; what is left
is Python, autograd and the dispatcher. The count of a model of three layers less the count of one
layer is that of two layers; it does not depend on the load of the machine.
"""  # noqa: E501

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

from titanlite.config import JobConfig
from titanlite.config.model import ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.dataset import Batch
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.objective import NextToken
from titanlite.ops import elementwise
from titanlite.ops.kernels import plan_for_device
from titanlite.optim.optimizer import build_adamw
from titanlite.run import Run
from titanlite.train_step import TrainStep

_WARM_UP, _STEPS = 3, 4
_LAYERS = 1, 3
_TOKENS = 16
_CASES = {
    "whole": {},
    "whole, full recomputation": {"recompute": "full"},
    "FSDP2": {"reshard": "always"},
    "FSDP2, full recomputation": {"reshard": "always", "recompute": "full"},
}


class _NoKernel:
    """Stands in for a Triton kernel; takes any grid and arguments."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


def _zeros(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: tuple(tensor.zero_() for tensor in make(*operands))


def run_steps(layers: int, reshard: str, recompute: str) -> None:
    """Make the steps; valgrind counts those after the warm-up."""
    for kernels in ("kernels_triton", "elementwise_triton", "routing_triton"):
        module = import_module(f"titanlite.ops.{kernels}")  # the launchers see what is in the first
        for name in vars(module):
            if name.endswith("_kernel"):
                setattr(module, name, _NoKernel())
    routing: Any = import_module("titanlite.ops.routing_triton")
    for name in ("empty_choice", "empty_order"):  # numbers of experts and rows must exist
        setattr(routing, name, _zeros(getattr(routing, name)))
    # products of bfloat16 with float32 results are CUDA's
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    aten.impl("addmm.dtype_out", lambda c, a, b, dtype, **_: c, "CPU")
    elementwise.F.rms_norm = lambda x, shape, weight, eps: F.layer_norm(x, shape, weight, None, eps)
    job = JobConfig()
    job.training.mixed_precision_param = "bfloat16"
    job.activation_checkpoint.mode = recompute  # type: ignore[assignment]
    job.parallelism.fsdp_reshard_after_forward = reshard  # type: ignore[assignment]
    config = ModelConfig(
        family="qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=4,
        top_k=2,
        moe_intermediate_size=16,
        qk_norm=True,
    )
    device = torch.device("cpu")
    tokens = torch.arange(_TOKENS)[None]
    batch = Batch(tokens, tokens, None, None)
    with fake_ranks(1), plan_for_device("cuda"):
        dims = ParallelDims.build(Degrees(), "cpu")
        model = build_decoder(config)
        model.configure("sdpa", job.moe, job.training.loss_chunk_tokens, device)
        parallelize(model, job, dims, "cpu")
        materialize(model, device)
        optimizer = build_adamw(model, job.optimizer)
        trainer = TrainStep(Run(job, config, dims, device), model, optimizer, NextToken())
        for _ in range(_WARM_UP):
            trainer.train_step([batch])
        _instrument("on")
        for _ in range(_STEPS):
            trainer.train_step([batch])
        _instrument("off")


def _instrument(state: str) -> None:
    """Begin or end counting, where valgrind runs this process."""
    command = ["callgrind_control", f"--instr={state}", str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def count(layers: int, reshard: str, recompute: str) -> int:
    """Return the instructions of the counted steps of a model of `layers` layers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "callgrind.out")
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={out}",
            sys.executable,
            __file__,
            f"--layers={layers}",
            f"--reshard={reshard}",
            f"--recompute={recompute}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return _count_outside_kernels(out.read_text())


_KERNELS = re.compile(r"at::native::(cpublas|AVX2|AVX512|DEFAULT)::")


def _count_outside_kernels(text: str) -> int:
    """Return the instructions of all functions but CPU kernels of a profile of callgrind, in which
    the line after that of a call has the instructions of what was called.
    """
    names: dict[str, str] = {}
    total = 0
    here = ""
    is_call = False
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key in ("fn", "cfn"):
            number, _, name = value.partition(" ")
            name = names.setdefault(number, name)
            here = name if key == "fn" else here
        elif re.match(r"[-+*\d]", line) and not is_call and not _KERNELS.search(here):
            total += int(line.split()[1])
        is_call = key == "calls"
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--reshard", default="default", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", default="none", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layers:
        run_steps(args.layers, args.reshard, args.recompute)
        return
    print("parameters                 million instructions per layer and step")
    for name, changes in _CASES.items():
        options = {"reshard": "default", "recompute": "none"} | changes
        few, many = (count(layers, **options) for layers in _LAYERS)
        per_layer = (many - few) / (_LAYERS[1] - _LAYERS[0]) / _STEPS
        print(f"{name:<26} {per_layer / 1e6:.2f}", flush=True)


if __name__ == "__main__":
    main()
