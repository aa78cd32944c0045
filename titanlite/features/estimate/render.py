"""The plan as text. The verdict has at most 12 lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from titanlite.base.text import format_memory, format_table
from titanlite.features.estimate.estimate import Estimate
from titanlite.features.estimate.proposals import Planned
from titanlite.features.estimate.tracker import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    STATES,
    TEMPORARIES,
    UNITS,
    WEIGHTS,
)

_MOST_SWEPT = 15
_WORTH = 1.05  # smallest speedup for which the best choice is named
_ROW = "{:<10}  {:<16}  {:<6}  {}"
_EXPLAINED = {
    WEIGHTS: "exact",
    STATES: "exact",
    BUFFERS: "exact",
    GRADIENTS: "sharded, as far as they exist at that moment",
    ACTIVATIONS: "made by forwards: saved for backward, or in use by the running layer or head",
    UNITS: "gathered weights, gradients before the reduce-scatter, and buffers of both",
    TEMPORARIES: "made by backwards, recomputed activations among them, or inside a kernel",
}


def render_verdict(base: Planned, weights: str, tokens: float | None) -> str:
    """Render whether the run fits, its bound, speed and duration, the chosen settings, and the best
    ones.
    """
    estimate = base.estimate
    job = base.checked.job
    hardware, time, training = estimate.hardware, estimate.time, job.training
    model = job.model
    sizes = f"preset {model.name} {model.flavor}" if model.flavor else "config.json"
    what = f"adapters of rank {job.lora.rank}" if job.lora.rank else "all weights"
    start = (
        f"{what} of {weights}" if weights else f"{what} of a new {base.checked.model_config.family}"
    )
    objective = "sft" if job.data.dataset in ("examples", "images") else "pretrain"
    objective = "dpo" if training.objective == "dpo" else objective
    verdict = _verdict(estimate)
    held = (
        f"{format_memory(estimate.memory.total)} of {format_memory(hardware.usable_bytes)} per GPU"
    )
    expected_s = time.expected_s * (1 - time.waiting)
    exposed = sorted(
        ((part.exposed_s / expected_s, name) for name, part in time.parts.items()), reverse=True
    )
    bounds = ", ".join(f"{name} {share:.0%}" for share, name in exposed[:4])
    waiting = f"; waiting for other stages {time.waiting:.0%}" if time.waiting else ""
    mfu = estimate.trace.model_flops_per_token / hardware.flops
    lines = [
        f"{objective} of {start} ({sizes}) on {estimate.degrees.world_size} x {hardware.name}: "
        f"{estimate.degrees}",
        f"memory    {verdict}: {held}, fullest in {estimate.memory.where}",
        f"bound by  {bounds} of an expected step{waiting}",
        f"speed     {_rate(estimate.expected_rate)} per GPU expected (MFU "
        f"{mfu * estimate.expected_rate:.1%}); at best {_rate(estimate.best_rate)} "
        f"({mfu * estimate.best_rate:.1%})",
        _length(estimate, training.steps if not training.epochs else 0, tokens),
        *_choices(base, tokens or float(training.steps * estimate.tokens)),
    ]
    return "\n".join(lines)


def _choices(base: Planned, tokens: float) -> Iterator[str]:
    """Yield a line with the chosen settings, and a line with the best settings, chosen as if all
    were left open, if they are much faster or only they fit.
    """
    given = base.choice
    best = base.best
    if given.values:
        yield f"chosen    {given}"
    rate = base.rate * best.rate / given.rate if given.rate else 0.0
    if best.fits and (rate > _WORTH * base.rate or not base.fits):
        hours = _hours(tokens / rate / base.estimate.degrees.world_size / 3600)
        yield f"best      about {_rate(rate)} per GPU, {hours}: {best}"


def render_proposals(base: Planned, proposals: Iterable[Planned] | None) -> Iterator[str]:
    """Yield the lines of proposals, each as soon as it is found."""
    estimate = base.estimate
    if proposals is None:
        yield "to change: not searched, because that takes minutes here; --proposals does it"
        return
    found = 0
    for found, one in enumerate(proposals, start=1):
        if found == 1:
            yield _ROW.format("memory", "expected", "", "to change")
        faster = f"{one.rate / estimate.expected_rate - 1:+.0%}" if estimate.fits else "fits"
        settings = " ".join(one.arguments)
        if one.estimate.tokens != estimate.tokens:
            settings += f"  (steps of {one.estimate.tokens:,} tokens)"
        memory = format_memory(one.estimate.memory.total)
        yield _ROW.format(memory, _rate(one.rate), faster, settings)
    if not found:
        what = "nothing that is faster by 2%" if estimate.fits else "nothing that fits"
        more = "--sweep tries all degrees" if estimate.fits else "take more GPUs"
        yield f"to change: {what}; {more}"


def _verdict(estimate: Estimate) -> str:
    room = format_memory(abs(estimate.room))
    return f"fits, {room} free" if estimate.fits else f"DOES NOT FIT, {room} too much"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f} tokens/s"


def _count(number: float) -> str:
    scale, unit = next(
        (pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if number >= pair[0]), (1e3, "k")
    )
    return f"{number / scale:.3g} {unit}"


def _length(estimate: Estimate, steps: int, tokens: float | None) -> str:
    if tokens is None and not steps:
        tokens = 1e9
        name = "1 B tokens; the size of an epoch depends on the data"
    else:
        tokens = float(steps * estimate.tokens) if tokens is None else tokens
        name = (
            f"{_count(tokens)} tokens in {-(-tokens // estimate.tokens):,.0f} steps of "
            f"{estimate.tokens:,}"
        )
    ranks = estimate.degrees.world_size
    expected, best = (
        tokens / rate / ranks / 3600 for rate in (estimate.expected_rate, estimate.best_rate)
    )
    return (
        f"time      {_hours(expected)} expected, {_hours(expected * ranks)} of GPUs; at best "
        f"{_hours(best)}: {name}"
    )


def _hours(hours: float) -> str:
    return (
        f"{hours:,.0f} h"
        if hours >= 100
        else f"{hours:.2g} h"
        if hours >= 1
        else f"{hours * 60:.2g} min"
    )


def render_memory(estimate: Estimate, rank: int) -> str:
    """Render the memory of `rank` at the step's peak, against the GPU's memory."""
    memory = estimate.memory
    hardware = estimate.hardware
    padding = estimate.trace.padding
    rows = list[tuple[str, ...]]()
    for name, nbytes in memory.by_purpose.items():
        host = " on the host" if name in memory.on_host else ""
        text = _EXPLAINED[name]
        if name == WEIGHTS and padding:
            text += f", {format_memory(padding)} of it padding of uneven shards"
        rows.append((f"{name}{host}", format_memory(nbytes), text))
    rows.append(("total on the GPU", format_memory(memory.total), f"fullest: {memory.where}"))
    reserved = (
        f"of {format_memory(hardware.memory_bytes)}, {format_memory(hardware.reserved_bytes)} left "
        "to the CUDA context, NCCL, cuBLAS and fragmentation"
    )
    rows.append((hardware.name, format_memory(hardware.usable_bytes), reserved))
    return f"memory of rank {rank}: {_verdict(estimate)}\n{format_table(rows)}"


def render_stages(stages: Mapping[int, Estimate]) -> str:
    """Render memory and time of the pipeline stages; a step takes as long as the slowest."""
    rows = [("stage", "ranks", "layers", "micro-batches open", "memory", "", "expected")]
    for stage, estimate in sorted(stages.items()):
        degrees = estimate.degrees
        trace = estimate.trace
        first = stage * degrees.stage_size
        ranks = (
            f"{first}-{first + degrees.stage_size - 1}" if degrees.stage_size > 1 else str(first)
        )
        layers = f"{trace.layers[0]}-{trace.layers[-1]}"
        turns_open = min(degrees.turns_ahead(stage) + 1, trace.micro_batches)
        fits = "fits" if estimate.fits else "does not fit"
        memory, expected = format_memory(estimate.memory.total), _ms(estimate.time.expected_s)
        rows.append((str(stage), ranks, layers, str(turns_open), memory, fits, expected))
    some = next(iter(stages.values()))
    count = f"{some.degrees.pp} stages, {some.trace.micro_batches} micro-batches"
    lines = [f"pipeline: {count} a step, {some.time.waiting:.0%} of it waiting", format_table(rows)]
    if left_out := some.degrees.pp - len(stages):
        lines.append(
            f"  {left_out} more have as many layers as the one before, and fewer micro-batches open"
        )
    return "\n".join(lines)


def render_parts(estimate: Estimate) -> str:
    """Render the parts of the time of an average micro-batch of this rank, with its share of
    once-per-step work.
    """
    time = estimate.time
    trace = estimate.trace
    peak = estimate.hardware.flops / 1e12
    count = trace.micro_batches
    rows = [("per micro-batch", "TFLOP", "GB", "calls", "exposed ms", "hidden ms")]
    for name, part in sorted(time.parts.items(), key=lambda item: -item[1].exposed_s):
        work = part.work
        amounts = (work.flops / 1e12, work.nbytes / 1e9, part.exposed_s * 1e3, part.hidden_s * 1e3)
        flops, nbytes, exposed, hidden = (
            f"{amount / count:,.2f}" if amount else "" for amount in amounts
        )
        calls = f"{work.launches / count:,.0f}" if work.launches else ""
        rows.append((name, flops, nbytes, calls, exposed, hidden))
    if time.waiting:
        waited = f"{time.expected_s * time.waiting * 1e3 / count:,.2f}"
        rows.append(("waiting for other stages", "", "", "", waited, ""))
    done = trace.total.flops * estimate.degrees.stage_size / estimate.tokens
    where = f" in layers {trace.layers[0]} to {trace.layers[-1]}" if estimate.degrees.pp > 1 else ""
    return "\n".join(
        [
            format_table(rows),
            f"  {trace.model_flops_per_token / 1e9:.2f} GFLOP per token (model, as MFU counts), "
            f"{done / 1e9:.2f} done{where} (recomputation included); {count} micro-batches in a "
            f"step of {estimate.tokens:,} tokens",
            f"  at best {_ms(time.best_s)} a step: matmuls {_ms(time.compute_s)} at {peak:.0f} "
            f"TFLOP/s, links inside nodes {_ms(time.intra_node_s)}, between nodes "
            f"{_ms(time.inter_node_s)}",
            f"total: {time.expected_s * 1e3 / count:,.1f} ms per micro-batch",
        ]
    )


def render_sweep(found: Sequence[Planned]) -> str:
    """Return a table of the best combinations of degrees."""
    gpu = found[0].estimate.hardware.name
    rows = [("degrees", "checkpointing", "memory", "expected", "at best")]
    fitting = [one for one in found if one.fits]
    for one in (fitting or found)[:_MOST_SWEPT]:
        estimate = one.estimate
        mode = one.checked.job.activation_checkpoint.mode
        memory = format_memory(estimate.memory.total)
        best = f"{estimate.best_rate:,.0f}"
        rows.append((str(estimate.degrees), mode, memory, f"{_rate(one.rate)} per GPU", best))
    title = f"{len(fitting)} of {len(found)} legal combinations of degrees fit {gpu}; the fastest:"
    if not fitting:
        title = f"none of {len(found)} legal combinations of degrees fits {gpu}; the smallest:"
    return f"sweep: {title}\n{format_table(rows)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
