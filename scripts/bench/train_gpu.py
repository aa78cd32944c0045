#!/usr/bin/env python
"""Measure real training steps of Qwen3-30B-A3B on one GPU: titanlite in all its variants, and
transformers.

    python scripts/bench/train_gpu.py                  # under 8 minutes on an H200
    python scripts/bench/train_gpu.py --quick          # four variants, about 2 minutes

Full width, full vocabulary, fewer layers, random tokens, real routing. A step is
`TrainStep.train_step`: forward, backward, gradient norm and clipping, AdamW; weights, gradients and
states in float32, computation in bfloat16. transformers runs the same batch with grouped_mm experts
and sdpa: once all in bfloat16, weights and AdamW's states too (so its optimizer moves half the
bytes), once under FSDP2 with float32 states as titanlite does, and once with titanlite's experts in
the first of these.

step ms    median over the timed steps, between events that the device reaches
TFLOP/s    FLOPs of the model (`train_flops_per_token`, causal attention, no recomputation) over that time
MFU        over the data sheet's rate; dense: over that of cuBLAS (bfloat16 8192^3) measured in the same run
floor      over the step: matmuls at the measured rate, or the experts' bytes where they take longer, then 44 bytes per
           parameter at the measured bandwidth (cast, gradient, norm, AdamW), nothing overlapped
peak GiB   of the device's memory during the timed steps
plan       that peak over the one that `features.estimate` traced for the variant without a GPU; not for compiled and causal ones
load       rows of the most loaded expert over the mean, in the worst layer
causal: one document per row, plain causal attention. documents: packed, as the trainer's own data,
           with a mask, or with model.attention_backend = varlen.
Exit code 1: nothing could be measured, or a peak is more than 10 % off the planned one. 2: there is
no GPU.
"""  # noqa: E501

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from gpu_common import (
    Budget,
    CudaTimer,
    DeviceLostError,
    Machine,
    attempt,
    free_memory,
    inspect_machine,
    machine_data,
    markdown_table,
    missing_gpu,
    say,
    write_report,
)
from moe_gpu_cases import MoEShape, experts_flops, floor_s
from torch import nn

from titanlite.config import JobConfig, ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.config.schema import LoRASection
from titanlite.data.dataset import Batch
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import base_dtype
from titanlite.distributed.parallelize import parallelize, wrap_layers
from titanlite.features.estimate.estimate import get_memory
from titanlite.features.estimate.trace import trace_step
from titanlite.features.lora.layers import apply_lora
from titanlite.features.transformers.experts import use_titanlite_experts
from titanlite.launch.process_group import init_distributed
from titanlite.materialize import materialize
from titanlite.metrics.flops import peak_flops, train_flops_per_token
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, family_of
from titanlite.objective import NextToken
from titanlite.ops.attention import AttentionBackend, leave_out_cudnn
from titanlite.optim.optimizer import build_adamw
from titanlite.preflight import Checked
from titanlite.run import Run
from titanlite.train_step import TrainStep

# per parameter: cast 4 + 2, gradient 2 + 4, norm 4, AdamW reads 4 x 4 and writes 3 x 4
STATE_BYTES = 44
PLAN_TOLERANCE = 0.1  # of the planned peak, by which the measured one may differ
_Row = dict[str, Any]
_Step = Callable[[int], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Variant:
    """A way to train. `backend` is moe.grouped_gemm, `attention` causal, documents or "documents,
    varlen".
    """

    backend: str
    checkpointing: str = "none"
    compiled: bool = False
    attention: str = "causal"

    @property
    def attention_backend(self) -> AttentionBackend:
        """As in the configuration."""
        _, _, named = self.attention.partition(", ")
        return cast(AttentionBackend, named or "sdpa")

    def __str__(self) -> str:
        words = [self.backend, f"checkpointing {self.checkpointing}", self.attention]
        return ", ".join(["titanlite", *words, *(["compiled"] if self.compiled else [])])


VARIANTS = (
    *(
        Variant(backend, mode)
        for mode in ("none", "selective", "keep_attention", "full")
        for backend in ("triton", "torch")
    ),
    Variant("triton", attention="documents"),
    Variant("triton", attention="documents, varlen"),
    *(
        Variant(backend, mode, True)
        for mode in ("none", "selective", "keep_attention", "full")
        for backend in ("triton", "torch")
    ),
)
QUICK = (
    Variant("triton"),
    Variant("torch"),
    Variant("triton", "full"),
    Variant("triton", compiled=True),
)
HF_VARIANTS = (
    "transformers, bfloat16 states",
    "transformers, FSDP2, float32 states",
    "transformers, bfloat16 states, titanlite experts",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="decoder layers; 4 take about 50 GiB (default 4)"
    )
    parser.add_argument(
        "--seq-len", type=int, default=4096, help="tokens per sequence (default %(default)s)"
    )
    parser.add_argument(
        "--sequences", type=int, default=4, help="sequences per step (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps of each variant, after 3 more (default 8)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="four of titanlite's variants, one of transformers"
    )
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument(
        "--budget-s", type=float, default=450, help="seconds; the rest is skipped (default 450)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/bench"), help="folder of the report (%(default)s)"
    )
    arguments = parser.parse_args(argv)
    if min(arguments.layers, arguments.seq_len, arguments.sequences, arguments.steps) < 1:
        parser.error("--layers, --seq-len, --sequences and --steps must be at least 1")
    return arguments


def main() -> int:
    """Measure what fits into the budget."""
    arguments = parse_arguments()
    if problem := missing_gpu():
        print(f"train_gpu.py: {problem}", file=sys.stderr)
        return 2
    budget = Budget(arguments.budget_s)
    machine = inspect_machine(CudaTimer(0.2))
    say(machine.describe())
    config = replace(families()["qwen3_moe"].presets["30B-A3B"], num_layers=arguments.layers)
    hf_variants, variants = (HF_VARIANTS[:1], QUICK) if arguments.quick else (HF_VARIANTS, VARIANTS)
    rows: list[_Row] = []
    variants = tuple(variant for variant in variants if arguments.only in str(variant))
    # before there is a process group
    planned = plan_peaks(variants, config, arguments.seq_len, arguments.sequences)
    device = init_distributed(300)

    def add(row: _Row) -> None:
        row["planned_bytes"] = planned.get(row["name"])
        rows.append(complete(row, config, arguments, machine))
        say(f"{row['name']}: {row['problem'] or ', '.join(cells(row)[1:])}")
        save(arguments, config, machine, rows, budget)

    try:
        measure_transformers(
            [v for v in hf_variants if arguments.only in v], config, arguments, device, budget, add
        )
        measure_titanlite(list(variants), config, arguments, device, budget, add)
    except DeviceLostError as error:
        budget.skipped.append(f"everything after this: {error}")
    paths, text = save(arguments, config, machine, rows, budget)
    say(f"\n{text}\nwrote {paths[0]} and {paths[1]}")
    dist.destroy_process_group()
    if wrong := misplanned(rows):
        print(f"train_gpu.py: peak memory is not as planned: {'; '.join(wrong)}", file=sys.stderr)
    return 1 if wrong or all(row["problem"] is not None for row in rows) else 0


# --- what is measured


def make_batches(
    config: ModelConfig,
    seq_len: int,
    sequences: int,
    device: torch.device,
    documents: bool,
    count: int = 2,
) -> list[Batch]:
    """Random tokens; with `documents`, packed ones of random lengths, a quarter of a row on
    average.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, config.vocab_size, (sequences, seq_len + 1), generator=generator)
        ids = positions = None
        if documents:
            starts = torch.rand(sequences, seq_len, generator=generator) < 4 / seq_len
            starts[:, 0] = True
            ids = starts.cumsum(1) - 1
            places = torch.arange(seq_len).expand_as(ids)
            positions = places - (places * starts).cummax(dim=1).values
            ids, positions = ids.to(device), positions.to(device)
        parts: Any = (tokens[:, :-1].to(device), tokens[:, 1:].to(device), positions, ids)
        batches.append(Batch(*parts))
    return batches


def build_job(seq_len: int, sequences: int, device_type: str) -> JobConfig:
    """The settings of a run, before a variant is chosen."""
    job = JobConfig()
    job.training.seq_len, job.training.local_batch_size = seq_len, sequences
    job.training.mixed_precision_param = "bfloat16" if device_type == "cuda" else "float32"
    job.moe.grouped_gemm = "torch"
    # So low that routing stays as it was when variants come one after the other.
    job.optimizer.lr, job.lr_scheduler.warmup_steps, job.training.steps = 1e-7, 1, 1_000_000
    return job


def plan_job(variant: Variant, seq_len: int, sequences: int) -> JobConfig:
    """The settings that a run of `variant` on a GPU is planned with."""
    job = build_job(seq_len, sequences, "cuda")
    job.moe.grouped_gemm = variant.backend  # type: ignore[assignment]
    job.activation_checkpoint.mode = variant.checkpointing  # type: ignore[assignment]
    job.model.attention_backend = variant.attention_backend
    return job


def plan_peaks(
    variants: Sequence[Variant], config: ModelConfig, seq_len: int, sequences: int
) -> dict[str, int]:
    """Peak bytes of each variant with documents that is not compiled, as planned without a GPU;
    there must be no process group.
    """
    found = {}
    for variant in variants:
        if not variant.compiled and variant.attention != "causal":
            job = plan_job(variant, seq_len, sequences)
            found[str(variant)] = get_memory(trace_step(Checked(job, config, Degrees()))).total
    return found


class BenchTrainer(TrainStep):
    """The trainer's steps, without its data, files and checkpoints."""

    def __init__(
        self,
        config: ModelConfig,
        seq_len: int,
        sequences: int,
        device: torch.device,
        lora: LoRASection | None = None,
    ) -> None:
        job, dims = (
            build_job(seq_len, sequences, device.type),
            ParallelDims.build(Degrees(), device.type),
        )
        job.lora = lora or job.lora
        model = build_decoder(config, base_dtype(job.training, job.lora, device.type))
        apply_lora(model, job.lora, getattr(torch, job.training.dtype))
        model.configure("sdpa", job.moe, job.training.loss_chunk_tokens, device)
        parallelize(model, job, dims, device.type)
        self.plan = materialize(model, device, seed=job.training.seed, buffer_device=device)
        run = Run(job, config, dims, device)
        super().__init__(run, model, build_adamw(model, job.optimizer), NextToken())

    def choose(self, variant: Variant) -> None:
        """Switch to `variant`; FSDP's hooks are outside of `forward`, so the model need not be
        built again.
        """
        for module in self.model.modules():
            for wrapped in ("forward", "recompute"):
                vars(module).pop(wrapped, None)
        torch.compiler.reset()
        for moe in self.model.moe_layers().values():
            moe.experts.grouped_gemm_backend = variant.backend  # type: ignore[assignment]
        self.model.model.attention_backend = variant.attention_backend
        self.job.activation_checkpoint.mode = variant.checkpointing  # type: ignore[assignment]
        self.job.compile.enable = variant.compiled
        wrap_layers(self.model, self.job, experts_on_own_mesh=False)

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step; loss and rows per expert."""
        result = self.train_step([batch])
        return result.loss, result.tokens_per_expert


def measure_titanlite(
    variants: list[Variant],
    config: ModelConfig,
    arguments: argparse.Namespace,
    device: torch.device,
    budget: Budget,
    add: Callable[[_Row], None],
) -> None:
    """All variants on one model, which is built anew only after one failed."""
    trainer: BenchTrainer | None = None
    sizes = (config, arguments.seq_len, arguments.sequences, device)
    of_kind = {kind: make_batches(*sizes, documents=kind) for kind in (False, True)}
    for variant in variants:
        if not budget.allows(str(variant)):
            continue
        if trainer is None:
            trainer, problem = attempt(lambda: BenchTrainer(*sizes))
            if trainer is None:
                add({"name": str(variant), "problem": problem})
                return
        batches = of_kind[variant.attention != "causal"]

        def run(
            variant: Variant = variant,
            trainer: BenchTrainer = trainer,
            batches: list[Batch] = batches,
        ) -> Any:
            trainer.choose(variant)
            return measure_steps(
                lambda i: trainer.run(batches[i % len(batches)]), arguments.steps, device
            )

        found, problem = attempt(run)
        add({"name": str(variant), "problem": problem, **(found or {})})
        if problem is not None:
            trainer = run = None  # type: ignore[assignment]
            free_memory()


def measure_transformers(
    variants: list[str],
    config: ModelConfig,
    arguments: argparse.Namespace,
    device: torch.device,
    budget: Budget,
    add: Callable[[_Row], None],
) -> None:
    """The Hugging Face model; each variant builds its own."""
    batches = make_batches(config, arguments.seq_len, arguments.sequences, device, documents=False)
    # torch's own choice of a kernel, which titanlite restricts
    torch.backends.cuda.enable_cudnn_sdp(True)
    for name in variants:
        if budget.allows(name):
            found, problem = attempt(
                lambda name=name: measure_steps(
                    build_hf_step(name, config, batches, device), arguments.steps, device
                )
            )
            add({"name": name, "problem": problem, **(found or {})})
            free_memory()
    leave_out_cudnn()


def build_hf_step(
    name: str, config: ModelConfig, batches: list[Batch], device: torch.device
) -> _Step:
    """A training step of transformers' model with the sizes of `config`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sharded, low = "FSDP2" in name, torch.bfloat16 if device.type == "cuda" else torch.float32
    hf_config = Qwen3MoeConfig(**family_of(config).to_hf(config), use_cache=False)
    with device:
        model: nn.Module = Qwen3MoeForCausalLM._from_config(
            hf_config,
            dtype=torch.float32 if sharded else low,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
    if "titanlite" in name:
        use_titanlite_experts(model)
    if sharded:
        mesh = ParallelDims.build(Degrees(), device.type).fsdp_mesh
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-7, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(i: int) -> tuple[torch.Tensor, None]:
        tokens = batches[i % len(batches)].tokens
        loss = model(input_ids=tokens, labels=tokens).loss  # it shifts the labels itself
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), None

    return step


def measure_steps(step: _Step, steps: int, device: torch.device, warm_up: int = 3) -> _Row:
    """Median seconds of a step, peak memory, and what the last step returned."""
    cuda = device.type == "cuda"
    for i in range(warm_up):
        step(i)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def mark() -> Any:
        return (
            torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
            if cuda
            else time.time()
        )

    marks = [mark()]
    for i in range(steps):
        loss, tokens_per_expert = step(warm_up + i)
        marks.append(mark())
    if cuda:
        torch.cuda.synchronize()
    seconds = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in pairwise(marks)]
    load = None
    if tokens_per_expert is not None:
        counts = tokens_per_expert.double()
        load = (counts.amax(dim=1) / counts.mean(dim=1)).max().item()
    return {
        "step_s": statistics.median(seconds),
        "range_s": [min(seconds), max(seconds)],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "loss": loss.item(),
        "load": load,
    }


# --- arithmetic and report


def num_parameters(config: ModelConfig) -> int:
    """All parameters of the model."""
    return sum(param.numel() for param in build_decoder(config).parameters())


def floors(
    config: ModelConfig, seq_len: int, tokens: int, flops: float, bandwidth: float
) -> dict[str, float]:
    """Seconds that a step takes at least: the experts, all other matmuls, and the states' bytes."""
    shape = MoEShape(
        "", config.hidden_size, config.moe_intermediate_size, config.num_experts, config.top_k
    )
    layers = config.num_layers - config.num_dense_layers
    others = train_flops_per_token(
        build_decoder(config), seq_len
    ) * tokens - layers * experts_flops(shape, tokens, backward=True)
    found = {
        "experts_s": layers * floor_s(shape, tokens, flops, bandwidth, fused=True, backward=True),
        "others_s": others / flops,
        "states_s": STATE_BYTES * num_parameters(config) / bandwidth,
    }
    return found | {"floor_s": sum(found.values())}


def complete(
    row: _Row, config: ModelConfig, arguments: argparse.Namespace, machine: Machine
) -> _Row:
    """Add what follows from the measured time, in place; returns the row."""
    tokens = arguments.sequences * arguments.seq_len
    if row["problem"] is None:
        rate = (
            train_flops_per_token(build_decoder(config), arguments.seq_len) * tokens / row["step_s"]
        )
        peak = peak_flops(machine.device, torch.bfloat16)
        floor = floors(config, arguments.seq_len, tokens, machine.flops, machine.bandwidth)[
            "floor_s"
        ]
        row |= {
            "tokens_per_s": tokens / row["step_s"],
            "flops": rate,
            "mfu": rate / peak if peak else None,
        }
        row |= {"of_dense": rate / machine.flops, "of_floor": floor / row["step_s"]}
        row["of_plan"] = (
            row["peak_bytes"] / row["planned_bytes"] if row.get("planned_bytes") else None
        )
    return row


def misplanned(rows: Sequence[_Row]) -> list[str]:
    """Variants whose peak is further from the planned one than `PLAN_TOLERANCE`; only on CUDA has a
    row a peak.
    """
    compared = [
        row
        for row in rows
        if row["problem"] is None and row["peak_bytes"] and row["of_plan"] is not None
    ]
    return [
        f"{row['name']}: measured {row['peak_bytes'] / 2**30:.2f} GiB, planned "
        f"{row['planned_bytes'] / 2**30:.2f} GiB"
        for row in compared
        if abs(row["of_plan"] - 1) > PLAN_TOLERANCE
    ]


def cells(row: _Row) -> list[str]:
    """A line of the table."""
    if row["problem"] is not None:
        return [row["name"], row["problem"], *[""] * 9]
    return [
        row["name"],
        f"{row['step_s'] * 1e3:.1f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['flops'] / 1e12:.0f}",
        "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['of_dense']:.1%}",
        f"{row['of_floor']:.0%}",
        f"{row['peak_bytes'] / 2**30:.1f}",
        "" if row["of_plan"] is None else f"{row['of_plan']:.2f}",
        f"{row['loss']:.3f}",
        "" if row["load"] is None else f"{row['load']:.1f}",
    ]


def save(
    arguments: argparse.Namespace,
    config: ModelConfig,
    machine: Machine,
    rows: list[_Row],
    budget: Budget,
) -> tuple[list[Path], str]:
    """Write the report as far as it goes; (paths, Markdown)."""
    tokens = arguments.sequences * arguments.seq_len
    floor = floors(config, arguments.seq_len, tokens, machine.flops, machine.bandwidth)
    head = [
        "",
        "step ms",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "dense",
        "floor",
        "peak GiB",
        "plan",
        "loss",
        "load",
    ]
    parts = ", ".join(
        f"{key.removesuffix('_s')} {value * 1e3:.1f} ms" for key, value in floor.items()
    )
    lines = [
        f"# Training steps of Qwen3-30B-A3B, {config.num_layers} layers",
        "",
        machine.describe(),
        f"{num_parameters(config) / 1e9:.2f} B parameters, {arguments.sequences} x "
        f"{arguments.seq_len} tokens a step; least time of a step: {parts}. Columns are explained "
        "at the top of scripts/bench/train_gpu.py.",
        "",
        markdown_table(head, [cells(row) for row in rows]),
    ]
    if budget.skipped:
        lines += ["", "Skipped, no time left:", *(f"- {what}" for what in budget.skipped)]
    text = "\n".join(lines)
    data = {
        "machine": machine_data(machine),
        "layers": config.num_layers,
        "sequences": arguments.sequences,
    }
    data |= {"seq_len": arguments.seq_len, "floors": floor, "rows": rows, "skipped": budget.skipped}
    return write_report(arguments.out, "train_gpu", text, data), text


if __name__ == "__main__":
    sys.exit(main())
