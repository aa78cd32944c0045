"""Plans against real runs on 4 gloo ranks: bytes, collectives, FLOPs and live memory, on every
rank.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from tests.functional.conftest import NO_PRESET, take_step, weekly
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.distributed import collectives
from titanlite.features.estimate.stand_in import observed
from titanlite.features.estimate.trace import list_groups, trace_step
from titanlite.features.estimate.tracker import StepRecorder
from titanlite.materialize.layout import is_remote, local_of

_KINDS = {
    "all_gather_single": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "isend": ("send", 0),
}
_NAMES = {"output": 0, "output_tensor": 0, "input": 1, "input_tensor": 1}


@contextmanager
def calls_of(trainer):
    """Count the calls of functions of `torch.distributed` in this context by (kind, axis, "count"
    or "bytes").
    """
    found = Counter()
    groups, depth = list_groups(trainer.parts.stepper.dims), 0
    axes = {group.group_name: axis for axis, group in groups}

    def counting(name, function):
        kind, place = _KINDS[name]

        def call(*args, **kwargs):
            nonlocal depth
            by_name = {_NAMES[key]: value for key, value in kwargs.items() if key in _NAMES}
            tensor = args[place] if len(args) > place else by_name[place]
            group = kwargs.get("group") or dist.group.WORLD
            if depth == 0:  # the old names may call the new ones
                axis = axes[group.group_name] if group.size() < dist.get_world_size() else "all"
                found[kind, axis, "count"] += 1
                found[kind, axis, "bytes"] += tensor.nbytes
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _KINDS:
            if hasattr(dist, name):
                patch.setattr(dist, name, counting(name, getattr(dist, name)))
        for name in ("all_gather_single", "reduce_scatter_single"):
            patch.setattr(
                collectives, name, getattr(dist, name, counting(name, getattr(collectives, name)))
            )
        patch.setattr(trainer.parts.stepper.balancer, "_sum_over_ranks", dist.all_reduce)
        yield found


def measure(checked):
    """Run two real steps on this rank; return memory, calls and FLOPs."""
    trainer = assemble(checked)
    trainer.parts.stepper.unreached = []  # otherwise the first step asks all ranks, once in a run
    with calls_of(trainer) as calls, FlopCounterMode(display=False) as flops:
        take_step(trainer, 0)
    states = [
        value
        for state in trainer.parts.stepper.optimizer.state.values()
        for value in state.values()
    ]
    params = [param for param in trainer.model.parameters() if not is_remote(param)]
    buffers = [buffer for buffer in trainer.model.buffers() if not is_remote(buffer)]

    batches = trainer.parts.loader.micro_batches(1)
    held = [*params, *buffers, *states, trainer.parts.stepper.finite_guard.in_a_row]
    held += [value for batch in batches for value in vars(batch).values()]
    held += (
        [trainer.parts.stepper.balancer.counts]
        if hasattr(trainer.parts.stepper.balancer, "counts")
        else []
    )
    recorder = StepRecorder(held)
    with observed(trainer.parts.stepper, recorder):
        trainer.parts.stepper.train_step(batches)
    return {
        "weights": sum(local_of(p).nbytes for p in params),
        "held": {
            "weights": sum(local_of(p).untyped_storage().nbytes() for p in params),
            "optimizer states": sum(local_of(state).nbytes for state in states),
            "buffers": sum(buffer.nbytes for buffer in buffers),
        },
        "calls": calls,
        "torch_flops": flops.get_total_flops(),
        "flops": sum(work.flops for kind, work in recorder.work.items() if not kind.group),
        "peak": max(recorder.peaks.values(), key=lambda peak: sum(peak.values())),
    }


def compare(checked, ranks, *, balanced):
    """Compare the figures of two ranks with their plans; return the traces of both."""
    traces = []
    for rank, real in enumerate(ranks):
        if rank not in (0, len(ranks) - 1):
            continue
        trace = trace_step(checked, rank=rank, device_type="cpu")
        for peak in trace.peaks.values():
            assert {name: peak[name] for name in real["held"]} == real["held"]
        assert trace.padding == real["held"]["weights"] - real["weights"]
        called = Counter()
        for kind, work in trace.step_work():
            if kind.group:  # a collective
                assert rank in trace.ranks[kind.group]
                is_whole = len(trace.ranks[kind.group]) == checked.degrees.world_size
                axis = "all" if is_whole else kind.group
                called[kind.call.rate, axis, "count"] += work.launches
                called[kind.call.rate, axis, "bytes"] += work.nbytes
        if balanced:
            assert called == real["calls"]
            assert trace.total.flops == real["flops"]
            # Tensors with and without data go through the same operators; real routing changes only
            # values.
            peak = max(trace.peaks.values(), key=lambda peak: sum(peak.values()))
            # Each micro-batch has one byte, which says whether its loss is finite.
            assert peak == pytest.approx(real["held"] | real["peak"], rel=0.02, abs=16)
        else:
            exact = {
                key: value
                for key, value in called.items()
                if key[0] != "all_to_all" or key[2] == "count"
            }
            assert exact == {key: value for key, value in real["calls"].items() if key in exact}
        traces.append(trace)
    return traces


def test_plan_of_pieces_of_sequences_with_uneven_shards(checked, run_ranks):
    overrides = ["--activation_checkpoint.mode=selective", "--moe.aux_loss_coeff=1e-3"]
    job = checked(
        Degrees(dp_shard=1, cp=2, tp=2, ep=2), *overrides, "--training.global_batch_size=2"
    )
    ranks = run_ranks(4, lambda: measure(job))
    traces = compare(job, ranks, balanced=False)
    assert traces[0].padding != traces[-1].padding  # 155 rows of vocabulary over two ranks


@pytest.mark.parametrize(
    ("degrees", "overrides"),
    [
        weekly(Degrees(dp_shard=2, pp=2), []),
        (
            Degrees(pp=2),
            ["--activation_checkpoint.mode=full", "--training.global_batch_size=4"],
        ),
        weekly(Degrees(tp=2, ep=2, pp=2), ["--parallelism.fsdp_once_per_step=true"]),
        (
            Degrees(dp_replicate=2, dp_shard=2),
            ["--parallelism.fsdp_once_per_step=true", "--training.global_batch_size=16"],
        ),
    ],
    ids=str,
)
def test_plan_of_several_micro_batches(checked, run_ranks, degrees, overrides):
    """A step has 4 sequences or more one by one. The plan includes the work that the last one does
    for all, and the memory of micro-batches that are open in pipeline stages.
    """
    layers = 4 if degrees.pp > 1 else 2
    job = checked(
        degrees,
        f"--model.overrides.num_layers={layers}",
        "--training.local_batch_size=1",
        *overrides,
    )
    assert job.job.training.global_batch_size // degrees.dp > 3
    ranks = run_ranks(degrees.world_size, lambda: measure(job))
    compare(job, ranks, balanced=degrees.ep == 1)


def test_plan_of_bfloat16_states_with_a_frozen_tied_embedding(checked, run_ranks):
    overrides = (
        "--model.name=qwen3",
        "--model.overrides.tie_word_embeddings=true",
        "--training.dtype=bfloat16",
        "--optimizer.freeze=model.embed_tokens.weight",
        "--activation_checkpoint.mode=keep_attention",
    )
    job = checked(Degrees(dp_shard=2), *overrides)
    ranks = run_ranks(2, lambda: measure(job))
    traces = compare(job, ranks, balanced=True)
    # No operator of titanlite multiplies here, so torch's counter sees everything except the CPU's
    # attention: two matmuls in forward, whose result is saved, and five in backward.
    sizes = job.model_config
    training = job.job.training
    scores = sizes.num_heads * sizes.head_dim * training.seq_len**2
    rows = training.local_batch_size * traces[0].micro_batches
    attention = 2 * (2 + 5) * scores * sizes.num_layers * rows
    assert ranks[0]["flops"] == ranks[0]["torch_flops"] + attention
    assert traces[0].micro_batches == 2


def test_plan_of_adapters_on_a_checkpoint(checked, run_ranks, pretrained):
    """Weights that are stored quantized are read and encoded; the other weights are read
    unchanged.
    """
    path = f"--checkpoint.initial_load_path={pretrained('base', 0.1)}"
    lora = ("--lora.rank=4", "--moe.expert_bias_update_rate=none", "--lora.base_dtype=nf4", path)
    job = checked(Degrees(dp_shard=2), *NO_PRESET, *lora, "--training.global_batch_size=4")
    ranks = run_ranks(2, lambda: measure(job))
    compare(job, ranks, balanced=True)
