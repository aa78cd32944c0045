"""Traces of steps on fake ranks: few layers stand for all, and the kernels are the GPU's."""

from collections import Counter
from dataclasses import replace

import pytest
from planned import checked
from tiny_transformers import TEXT_SIZES
from torch import nn
from transformers import Gemma2Config

from titanlite.config.parallelism import Degrees
from titanlite.features.estimate.estimate import get_memory, stages_to_trace
from titanlite.features.estimate.stand_in import StandInTrainer
from titanlite.features.estimate.trace import find_repetition, trace_step
from titanlite.features.estimate.tracker import ACTIVATIONS
from titanlite.launch.process_group import fake_ranks

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
def test_few_layers_stand_for_all(world_size, num_layers, overrides, rank):
    stages = (PP + "2", *OPEN) if rank else ()
    job = checked(world_size, num_layers, *overrides, *stages)
    few = trace_step(job, rank=rank)
    every = trace_step(job, every_layer=True, rank=rank)
    assert few.layers == every.layers
    assert few.traced_layers < every.traced_layers, "or the one is the other"
    for name in ("work", "repeats", "model_flops_per_token", "padding", "micro_batches"):
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
    layers = {
        "num_hidden_layers": 9,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4 + ["sliding_attention"],
    }
    config = Gemma2Config(**TEXT_SIZES | layers, head_dim=16, architectures=["Gemma2ForCausalLM"])
    config.save_pretrained(tmp_path)
    settings = (
        "--model.flavor=",
        f"--model.path={tmp_path}",
        "--model.attention_backend=sdpa",
        "--model.overrides.vocab_size=none",
        "--model.overrides.initializer_range=none",
        "--moe.aux_loss_coeff=none",
    )
    job = checked(3, "none", *settings)
    few = trace_step(job, rank=2)
    every = trace_step(job, every_layer=True, rank=2)
    assert few.padding > 0, "the last of 3 ranks has fewer rows than the others"
    assert (few.traced_layers, every.traced_layers) == (3 + 5, 9)
    for name in ("work", "padding", "layers", "model_flops_per_token"):
        assert getattr(few, name) == getattr(every, name), name
    assert get_memory(few) == get_memory(every)


@pytest.mark.parametrize(
    ("layers", "traced"), [((2, 2, 2, 2), [0, 1, 3]), ((2, 2, 3, 1), [0, 1, 2, 3])]
)
def test_stages_are_alike_if_their_layers_are(layers, traced):
    config = checked(1, sum(layers)).model_config
    assert stages_to_trace(config, Degrees(pp=4, layers=layers)) == traced


def test_offload_takes_weights_states_and_gradients_off_the_gpu():
    """The optimizer's step, which holds all gradients, is then not the fullest moment."""
    trace = trace_step(checked(2, 2))
    away = ("weights", "optimizer states", "gradients")
    left = [
        sum(nbytes for name, nbytes in peak.items() if name not in away)
        for peak in trace.peaks.values()
    ]
    memory = get_memory(trace, offload=True)
    assert memory.total == max(left) < get_memory(trace).total
    assert set(memory.on_host) == {*away}


def test_parameters_without_data_keep_their_class_and_attributes():
    """Copies of weights are found by an attribute, and torch finds parameters by their class."""
    with fake_ranks(1, 0):
        model = StandInTrainer(checked(1, 2), "cuda").model
        assert all(isinstance(param, nn.Parameter) for param in model.parameters())
        assert any(hasattr(param, "copies") for param in model.parameters())


def test_layers_named_by_number_are_all_traced():
    for patterns, is_traced_whole in (("*.layers.3.*", True), ("*.mlp.*", False)):
        job = checked(2, 10, f"--optimizer.freeze={patterns}")
        found = find_repetition(job, 0)
        assert (found is None) == is_traced_whole


def most_activations(trace):
    """Before the loss, which keeps the gradient of the head's weight for backward."""
    return max(
        peak[ACTIVATIONS] for moment, peak in trace.peaks.items() if moment.phase == "forward"
    )


def test_no_scores_are_kept_on_a_gpu():
    """Activations grow in proportion to the sequence, but for one mask in bfloat16, which all
    layers share.
    """
    kept = {}
    for length in (256, 512):
        job = checked(1, 2, f"--training.seq_len={length}", "--model.attention_backend=sdpa")
        kept[length] = most_activations(trace_step(job)) - 2 * length**2 * 2
        other = replace(
            job, job=replace(job.job, model=replace(job.job.model, attention_backend="varlen"))
        )
        assert most_activations(trace_step(other)) <= kept[length]
    # Casts of weights, which a forward makes, do not grow.
    assert kept[512] == pytest.approx(2 * kept[256], rel=0.04)


def test_experts_of_transformers_have_the_flops_of_the_native_ones():
    """With experts split over ranks on titanlite's grouped GEMM, and without on torch's."""
    for overrides in ((), (EP + "2",)):
        options = ("--training.mixed_precision_param=float32", "--moe.aux_loss_coeff=0")
        options += ("--model.attention_backend=sdpa", *overrides)
        jobs = [
            checked(2, 2, f"--model.implementation={name}", *options)
            for name in ("native", "transformers")
        ]
        native, other = map(trace_step, jobs)
        # transformers 5.17 makes the angles of 32 positions by a matmul with the 16 frequencies,
        # 5.23 does not.
        assert other.total.flops - native.total.flops in (0, 2 * 32 * 16)
        assert other.model_flops_per_token == native.model_flops_per_token
