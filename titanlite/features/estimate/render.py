"""The plan as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titanlite.base.tables import format_memory, format_size, format_table
from titanlite.features.estimate.estimate import STAGING_BYTES, Estimate, axis_ranks
from titanlite.features.estimate.hardware import Hardware
from titanlite.features.estimate.sweep import Sweep
from titanlite.features.estimate.tracker import EXCHANGED, GATHERED, GRADIENTS, LOGITS, TEMPORARIES, UNREDUCED
from titanlite.features.record.plan_file import RunPlan

_MOST_SWEPT = 15
_EXPLAINED = {
    GRADIENTS: "sharded, as many as are there at that moment",
    EXCHANGED: "all-to-all and sequence gathers, kept for backward or in use",
    LOGITS: "a chunk of logits, gradients of the head and of its input",
    GATHERED: "by FSDP2: units in use or prefetched, and its all-gather buffers",
    UNREDUCED: "of whole units before the reduce-scatter, and its buffers",
    "activations": "kept for backward",
    TEMPORARIES: "inside a layer or kernel at work",
}


def render_tensors(plan: RunPlan) -> str:
    """A table of tensors or groups of them."""
    rows = [("tensor", "count", "shape", "dtype", "placement", "source", "bytes here")]
    for tensor in plan.tensors:
        size = format_memory(tensor.local_bytes)
        shape = str(tensor.shape)
        rows.append((tensor.name, str(tensor.count), shape, tensor.dtype, tensor.placement, tensor.source, size))
    return f"tensors on rank {plan.rank} of {plan.world_size}\n" + format_table(rows)


def render_memory(plan: RunPlan, estimate: Estimate, hardware: Hardware) -> str:
    """What a rank holds at the fullest moment of a step, against the GPU's memory."""
    memory = estimate.memory
    padding = estimate.trace.padding
    padded = f", {format_memory(padding)} of it padding of uneven shards" if padding else ""
    host = " on the host" if memory.on_host else ""
    rows = [
        ("", "", ""),
        (f"weights{host}", format_memory(memory.weights), f"exact{padded}"),
        (f"optimizer states{host}", format_memory(memory.optimizer), "exact"),
        ("buffers", format_memory(memory.buffers), "exact"),
    ]
    for name, nbytes in memory.working.items():
        where = host if name == GRADIENTS else ""
        note = _EXPLAINED[name]
        if name == GRADIENTS:
            note += f"; all of them {format_memory(plan.gradients)}, exact"
        rows.append((f"{name}{where}", format_memory(nbytes), note))
    rows.append(("total on the GPU", format_memory(memory.total), f"fullest: {memory.where}"))
    room = hardware.usable_bytes - memory.total
    verdict = f"fits, {format_memory(room)} free" if room >= 0 else f"does not fit, {format_memory(-room)} too much"
    reserved = (
        f"of {format_memory(hardware.memory_bytes)}, {format_memory(hardware.reserved_bytes)} left to the "
        "CUDA context, NCCL, cuBLAS and fragmentation"
    )
    rows.append((f"{hardware.name}", format_memory(hardware.usable_bytes), reserved))
    lines = format_table(rows).splitlines()[1:]
    return "\n".join([f"memory of rank {plan.rank}: {verdict}", *lines])


def render_stages(stages: Mapping[int, Estimate], hardware: Hardware) -> str:
    """Memory and work of pipeline stages; a step takes as long as the slowest."""
    rows = [("stage", "ranks", "layers", "micro-batches open", "memory", "", "compute")]
    for stage, estimate in sorted(stages.items()):
        degrees, trace = estimate.degrees, estimate.trace
        first = stage * degrees.stage_size
        ranks = f"{first}-{first + degrees.stage_size - 1}" if degrees.stage_size > 1 else str(first)
        layers = ", ".join(f"{part.start}-{part.stop - 1}" for part in trace.layers)
        turns_open = min(degrees.turns_ahead(stage) + 1, trace.micro_batches * degrees.chunks)
        fits = "fits" if estimate.fits(hardware) else "does not fit"
        memory, compute = format_memory(estimate.memory.total), _ms(estimate.time.compute_s)
        rows.append((str(stage), ranks, layers, f"{turns_open / degrees.chunks:.3g}", memory, fits, compute))
    some = next(iter(stages.values()))
    chunks = f" of {some.degrees.chunks} chunks" if some.degrees.chunks > 1 else ""
    count = f"{some.degrees.pp} stages{chunks}, {some.trace.micro_batches} micro-batches"
    title = f"pipeline: {count} a step, {some.time.waiting:.0%} of it waiting"
    left_out = some.degrees.pp - len(stages)
    note = (
        f"\n  {left_out} more have as many layers as the one before, and fewer micro-batches open" if left_out else ""
    )
    return f"{title}\n{format_table(rows)}{note}"


def render_reads(plan: RunPlan, source: str) -> str:
    """Bytes from the checkpoint."""
    if not source:
        return "checkpoint: none, weights are random"
    staging = f"staging on the GPU {format_memory(STAGING_BYTES)}, before training"
    return f"checkpoint: rank {plan.rank} reads {format_size(plan.read_bytes)} of {source}; {staging}"


def render_collectives(estimate: Estimate, hardware: Hardware, rank: int) -> str:
    """Collectives of an optimizer step, by axis and kind."""
    rows = [("axis", "ranks", "links", "collective", "count", "bytes", "at least")]
    for traffic, count in sorted(estimate.trace.counts.items(), key=lambda item: (item[0].axis, item[0].kind)):
        ranks = axis_ranks(estimate.degrees, traffic.axis, rank)
        nbytes = estimate.trace.nbytes[traffic]
        if len(ranks) < 2:
            continue
        seconds = sum(hardware.collective_s(traffic.kind, ranks, nbytes))
        nodes = len({r // hardware.gpus_per_node for r in ranks})
        links = "inside a node" if nodes == 1 else f"{nodes} nodes"
        often = f"{count}" + (" per step" if traffic.per_step else "")
        rows.append(
            (traffic.axis, str(len(ranks)), links, traffic.kind, often, format_size(nbytes), f"{seconds * 1e3:.1f} ms")
        )
    title = "collectives of a rank per optimizer step; bytes of whole tensors, of an all-to-all those sent"
    return title + "\n" + (format_table(rows) if len(rows) > 1 else "  none")


def render_time(estimate: Estimate, hardware: Hardware) -> str:
    """FLOPs, and the floor of a step, of the rank that was traced or of its pipeline stage."""
    time, trace = estimate.time, estimate.trace
    ranks = estimate.degrees.world_size
    done = trace.flops.done * estimate.degrees.stage_size / estimate.tokens
    parts = " and ".join(f"{part.start} to {part.stop - 1}" for part in trace.layers)
    where = f" in layers {parts}" if estimate.degrees.pp > 1 else ""
    lines = [
        f"compute: {trace.model_flops_per_token / 1e9:.2f} GFLOP per token (model, as MFU counts), "
        f"{done / 1e9:.2f} done{where} (recomputation included)",
        f"step of {estimate.tokens:,} tokens ({trace.micro_batches} micro-batches): "
        f"compute {_ms(time.compute_s)} at {hardware.flops / 1e12:.0f} TFLOP/s, "
        f"links inside nodes {_ms(time.intra_node_s)}, between nodes {_ms(time.inter_node_s)}",
    ]
    for name, seconds in (("full overlap", time.overlapped_s), ("no overlap", time.serial_s)):
        rate = estimate.tokens / seconds / ranks if seconds else 0.0
        mfu = trace.model_flops_per_token * rate / hardware.flops
        lines.append(f"  floor with {name}: {_ms(seconds)}, {rate:,.0f} tokens/s per GPU, MFU {mfu:.1%}")
    return "\n".join(lines)


def render_sweep(found: Sweep, hardware: Hardware) -> str:
    """The best that fit, and why others are not there."""
    rows = [
        (
            "dp_replicate",
            "dp_shard",
            "cp",
            "tp",
            "ep",
            "checkpointing",
            "memory",
            "full overlap",
            "no overlap",
            "tokens/s GPU",
        )
    ]
    for tried in (found.fitting or found.too_large)[:_MOST_SWEPT]:
        d, time = tried.degrees, tried.estimate.time
        sizes = (str(d.dp_replicate), str(d.dp_shard), str(d.cp), str(d.tp), str(d.ep), tried.mode)
        memory = format_memory(tried.estimate.memory.total)
        rate = f"{1 / tried.seconds_per_token[0] / d.world_size:,.0f}"
        rows.append((*sizes, memory, _ms(time.overlapped_s), _ms(time.serial_s), rate))
    head = (
        f"sweep: {len(found.fitting)} legal combinations fit {hardware.name}; the fastest:"
        if found.fitting
        else f"sweep: no legal combination fits {hardware.name}; the smallest:"
    )
    lines = [head, format_table(rows), f"  does not fit: {len(found.too_large)}"]
    lines += [f"  not legal: {count}: {reason}" for reason, count in sorted(found.refused.items())]
    return "\n".join(lines)


def to_json(
    plan: RunPlan,
    estimate: Estimate,
    hardware: Hardware,
    stages: Mapping[int, Estimate],
) -> dict[str, Any]:
    """Everything, bytes and seconds. Begins like `plan.json` of a real run; all but `stages` is of one rank."""
    memory, time, trace = estimate.memory, estimate.time, estimate.trace
    data = plan.to_json()
    data["memory"] |= {
        "padding": trace.padding,
        "at_peak": {**memory.working, "where": memory.where},
        "on_host": memory.on_host,
        "total": memory.total,
        "usable": hardware.usable_bytes,
        "fits": estimate.fits(hardware),
    }
    data["collectives"] = [
        {**traffic._asdict(), "count": count, "bytes": trace.nbytes[traffic]} for traffic, count in trace.counts.items()
    ]
    data["flops"] = {
        "per_step": trace.flops.done,
        "per_step_as_torch_counts": trace.flops.counted,
        "model_per_token": trace.model_flops_per_token,
    }
    data["step"] = {
        "tokens": estimate.tokens,
        "micro_batches": trace.micro_batches,
        "compute_s": time.compute_s,
        "intra_node_s": time.intra_node_s,
        "inter_node_s": time.inter_node_s,
        "floor_overlapped_s": time.overlapped_s,
        "floor_serial_s": time.serial_s,
    }
    if len(stages) > 1:
        data["stages"] = [
            {
                "stage": stage,
                "first_layer": of_stage.trace.layers[0].start,
                "layers": sum(of_stage.trace.num_layers),
                "chunks": [[part.start, part.stop] for part in of_stage.trace.layers],
                "total": of_stage.memory.total,
                "fits": of_stage.fits(hardware),
                "compute_s": of_stage.time.compute_s,
                "floor_overlapped_s": of_stage.time.overlapped_s,
            }
            for stage, of_stage in sorted(stages.items())
        ]
    data["hardware"] = vars(hardware)
    return data


def sweep_to_json(found: Sweep) -> dict[str, Any]:
    """All combinations."""

    def rows(tried: Sequence[Any]) -> Iterator[dict[str, Any]]:
        for one in tried:
            time = one.estimate.time
            yield {
                **vars(one.degrees),
                "activation_checkpoint": one.mode,
                "total": one.estimate.memory.total,
                "floor_overlapped_s": time.overlapped_s,
                "floor_serial_s": time.serial_s,
                "tokens": one.estimate.tokens,
            }

    return {
        "fitting": list(rows(found.fitting)),
        "too_large": list(rows(found.too_large)),
        "refused": found.refused,
        "traced": found.traced,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
