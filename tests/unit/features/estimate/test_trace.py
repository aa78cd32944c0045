"""Traces of steps on fake ranks: few layers stand for all, and the kernels are the GPU's."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from files import write_json

from titanlite.config import load_config
from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.estimate import get_memory, stages_to_trace
from titanlite.features.estimate.trace import find_repetition, trace_step
from titanlite.features.estimate.tracker import ACTIVATIONS
from titanlite.preflight import check

CONFIG = Path(__file__).parents[4] / "configs" / "qwen3_moe.toml"
CP, TP, EP, REPLICATE = (
    "--parallelism.context_parallel_degree=",
    "--parallelism.tensor_parallel_degree=",
    "--parallelism.expert_parallel_degree=",
    "--parallelism.data_parallel_replicate_degree=",
)
MODE = "--activation_checkpoint.mode="
EVERY_SECOND = (MODE + "selective", "--activation_checkpoint.selective_ac_option=2")
DENSE_FIRST = ("--model.name=dots1", "--model.overrides.num_dense_layers=3")
PP, ONCE = "--parallelism.pipeline_parallel_degree=", "--parallelism.fsdp_once_per_step=true"
OPEN = ("--training.local_batch_size=1", "--training.global_batch_size=4")


@pytest.fixture
def checked():
    def build(world_size, num_layers, *overrides):
        sizes = [
            "--model.overrides.vocab_size=310",
            f"--model.overrides.num_layers={num_layers}",
            TP + "1",
            EP + "1",
        ]
        batch = [
            "--training.seq_len=32",
            "--training.local_batch_size=2",
            "--training.global_batch_size=-1",
        ]
        argv = ["--config", str(CONFIG), "--model.flavor=debug", *sizes, *batch, *overrides]
        return check(load_config(argv), world_size)

    return build


def traced(checked, *, every_layer=False, rank=0):
    return trace_step(checked, every_layer=every_layer, rank=rank)


def collectives(trace):
    """Calls in the whole step, by kind, axis, and whether they are made once per step, not per
    micro-batch.
    """
    counts = Counter()
    for kind, work in trace.step_work():
        if kind.group:
            counts[kind.call.rate, kind.group, kind.micro_batch < 0] += work.launches
    return counts


@pytest.mark.parametrize(
    ("world_size", "num_layers", "overrides", "rank"),
    [
        (8, 8, (CP + "2", TP + "2", EP + "2", MODE + "selective"), 0),
        (4, 17, (*DENSE_FIRST, MODE + "full", ONCE), 2),
        *(
            pytest.param(*case, 0, marks=pytest.mark.full)
            for case in (
                # fullest in the last layer but one
                (4, 10, ("--training.global_batch_size=16", MODE + "full")),
                (4, 17, ("--model.name=qwen3", "--moe.aux_loss_coeff=0", *EVERY_SECOND)),
            )
        ),
    ],
)
def test_few_layers_stand_for_all(checked, world_size, num_layers, overrides, rank):
    stages = (PP + "2", *OPEN) if rank else ()
    job = checked(world_size, num_layers, *overrides, *stages)
    few, every = traced(job, rank=rank), traced(job, every_layer=True, rank=rank)
    assert few.layers == every.layers
    assert few.traced_layers < every.traced_layers, "or the one is the other"
    sizes = ("weights", "optimizer", "buffers", "padding")
    for name in ("work", "repeats", "model_flops_per_token", *sizes, "micro_batches"):
        assert getattr(few, name) == getattr(every, name), name
    assert get_memory(few) == get_memory(every)
    if job.degrees.pp > 1:
        cut = (num_layers + 1) // 2
        assert few.layers == (range(cut) if rank < 2 else range(cut, num_layers))
        sent = {
            (kind, count) for (kind, axis, _), count in collectives(few).items() if axis == "pp"
        }
        assert sent == {("send", few.micro_batches)}
        return
    # The optimizer's own moment holds some bytes per tensor, for norms, which are not extrapolated.
    differ = {
        moment: (peak, every.peaks[moment])
        for moment, peak in few.peaks.items()
        if every.peaks[moment] != peak
    }
    assert {moment.phase for moment in differ} <= {"optimizer"}


def test_layers_of_transformers_that_repeat_are_traced_by_periods(tmp_path):
    """Sliding and full attention by turns."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 310,
        "num_hidden_layers": 9,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4 + ["sliding_attention"],
    }
    hf = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **sizes}
    write_json(tmp_path / "config.json", hf)
    overrides = ["--training.seq_len=32", "--training.global_batch_size=-1"]
    overrides += [
        "--model.flavor=",
        "--model.overrides.initializer_range=none",
        "--moe.aux_loss_coeff=none",
    ]
    argv = ["--config", str(CONFIG), f"--model.path={tmp_path}", *overrides]
    job = check(load_config([*argv, TP + "1", EP + "1", "--model.attention_backend=sdpa"]), 2)
    few, every = traced(job), traced(job, every_layer=True)
    assert (few.traced_layers, every.traced_layers) == (3 + 5, 9)
    sizes = ("weights", "optimizer", "buffers", "padding", "layers", "model_flops_per_token")
    for name in ("work", *sizes):
        assert getattr(few, name) == getattr(every, name), name
    assert get_memory(few) == get_memory(every)


@pytest.mark.parametrize(
    ("layers", "traced"), [((2, 2, 2, 2), [0, 1, 3]), ((2, 2, 3, 1), [0, 1, 2, 3])]
)
def test_stages_are_alike_if_their_layers_are(checked, layers, traced):
    config = checked(1, sum(layers)).model_config
    assert stages_to_trace(config, Degrees(pp=4, layers=layers)) == traced


def test_layers_named_by_number_are_all_traced(checked):
    for patterns, is_traced_whole in (("*.layers.3.*", True), ("*.mlp.*", False)):
        job = checked(2, 10, f"--optimizer.freeze={patterns}")
        found = find_repetition(job, 0)
        assert (found is None) == is_traced_whole


def most_activations(trace):
    """Before the loss, which keeps the gradient of the head's weight for backward."""
    return max(
        peak[ACTIVATIONS] for moment, peak in trace.peaks.items() if moment.phase == "forward"
    )


def test_no_scores_are_kept_on_a_gpu(checked):
    """Activations grow in proportion to the sequence, but for one mask in bfloat16, which all
    layers share.
    """
    kept = {}
    for length in (256, 512):
        job = checked(1, 2, f"--training.seq_len={length}", "--model.attention_backend=sdpa")
        kept[length] = most_activations(traced(job)) - 2 * length**2 * 2
        other = replace(
            job, job=replace(job.job, model=replace(job.job.model, attention_backend="varlen"))
        )
        assert most_activations(traced(other)) <= kept[length]
    # Casts of weights, which a forward makes, do not grow.
    assert kept[512] == pytest.approx(2 * kept[256], rel=0.04)


def test_experts_of_transformers_have_the_flops_of_the_native_ones(checked):
    """With experts split over ranks on titanlite's grouped GEMM, and without on torch's."""
    for overrides in ((), (EP + "2",)):
        options = ("--training.mixed_precision_param=float32", "--moe.aux_loss_coeff=0")
        options += ("--model.attention_backend=sdpa", *overrides)
        jobs = [
            checked(2, 2, f"--model.implementation={name}", *options)
            for name in ("native", "transformers")
        ]
        native, other = map(traced, jobs)
        # transformers 5.17 makes the angles of 32 positions by a matmul with the 16 frequencies,
        # 5.23 does not.
        assert other.total.flops - native.total.flops in (0, 2 * 32 * 16)
        assert other.model_flops_per_token == native.model_flops_per_token
