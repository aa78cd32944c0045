"""Degrees: resolution, derived sizes, and the text of every refusal."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titanlite.config import JobConfig, ModelConfig
from titanlite.config.parallelism import (
    Degrees,
    check_parallelism,
    resolve_degrees,
    resolve_global_batch_size,
)
from titanlite.config.schema import ParallelismSection
from titanlite.models.families import families, part_sizes

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=128,
    num_experts=8,
    moe_intermediate_size=32,
    max_position_embeddings=512,
)


def section(replicate=1, shard=-1, tp=1, ep=1, cp=1, pp=1, layers=""):
    return ParallelismSection(
        pipeline_parallel_degree=pp,
        pipeline_parallel_layers=layers,
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        expert_parallel_degree=ep,
    )


def problems(model=MODEL, degrees=None, **training):
    job = JobConfig()
    job.training.seq_len = 128
    for name, value in training.items():
        setattr(job.training, name, value)
    return check_parallelism(job, model, degrees or Degrees(), part_sizes(model))


@given(
    replicate=st.integers(1, 4),
    shard=st.integers(1, 8),
    cp=st.integers(1, 4),
    tp=st.integers(1, 8),
    ep=st.integers(1, 16),
    pp=st.integers(1, 4),
    rest=st.booleans(),
)
def test_any_degrees_that_fit_are_resolved(replicate, shard, cp, tp, ep, pp, rest):
    assume(shard * cp * tp % ep == 0)
    world_size = pp * replicate * shard * cp * tp
    degrees = resolve_degrees(section(replicate, -1 if rest else shard, tp, ep, cp, pp), world_size)
    assert degrees == Degrees(replicate, shard, tp, ep, cp, pp)
    assert degrees.world_size == world_size
    assert degrees.dp == replicate * shard
    assert degrees.dp * degrees.ranks_per_sequence == degrees.stage_size == world_size // pp
    assert [degrees.stage_of(rank) for rank in (0, world_size - 1)] == [0, pp - 1]
    assert degrees.efsdp * degrees.ep == degrees.fsdp * tp == shard * cp * tp
    assert degrees.experts_on_own_mesh == (tp > 1 or ep > 1)
    assert degrees.expert_shard_dim(shard * cp * tp) == 0
    assert degrees.expert_shard_dim(shard * cp * tp - 1) == 1


@given(pp=st.integers(1, 16), num_layers=st.integers(1, 100))
def test_stages_have_all_layers_once_and_about_equally_many(pp, num_layers):
    assume(num_layers >= pp)
    stages = [Degrees(pp=pp).stage_layers(num_layers, stage) for stage in range(pp)]
    assert [layer for layers in stages for layer in layers] == [*range(num_layers)]
    sizes = [len(layers) for layers in stages]
    assert min(sizes) >= 1 and max(sizes) <= min(sizes) + 1
    assert sizes[-1] == min(sizes), "the last has the output head"


def test_layers_of_stages_as_they_are_given():
    degrees = resolve_degrees(section(pp=3, layers=" 1,5, 2"), 6)
    assert degrees.layers == (1, 5, 2) and degrees.dp_shard == 2
    assert [degrees.stage_layers(8, stage) for stage in range(3)] == [
        range(1),
        range(1, 6),
        range(6, 8),
    ]


def test_all_problems_are_listed():
    found = problems(
        replace(MODEL, num_kv_heads=1), Degrees(tp=2, ep=16), seq_len=601, global_batch_size=1
    )
    assert len(found) == 4


# 16 examples or 32 pairs, a 32nd of the data at most, whole micro-batches, one on each rank at
# least.
@pytest.mark.parametrize(
    ("objective", "examples", "num_sequences", "of_ranks"),
    [
        ("next_token", 1.0, 100, {1: 3, 4: 4, 8: 8}),
        ("next_token", 1.0, 10_000, {1: 16, 8: 16, 3: 15, 64: 64}),
        ("next_token", 1.5, 10_000, {1: 10, 4: 8, 8: 8}),
        ("dpo", 4.0, 10_000, {1: 8, 4: 8, 8: 8}),
        ("module:function", 1.0, 10_000, {1: 16}),
    ],
)
def test_a_batch_that_is_not_set(objective, examples, num_sequences, of_ranks):
    job = JobConfig()
    job.training.global_batch_size, job.training.objective = None, objective
    assert {
        dp: resolve_global_batch_size(job, dp, examples, num_sequences) for dp in of_ranks
    } == of_ranks


@pytest.mark.parametrize(
    ("before", "of_ranks"),
    [
        (12, {1: 12, 4: 12, 6: 12, 5: 10, 24: 24}),  # as before where ranks share it evenly
        (1, {1: 1, 4: 4}),
        (-1, {1: 1, 4: 4, 8: 8}),  # no accumulation, as all runs without a batch once had
    ],
)
def test_a_resumed_run_keeps_its_batch(before, of_ranks):
    job = JobConfig()
    job.training.global_batch_size = None
    assert {
        dp: resolve_global_batch_size(job, dp, 2.0, 10_000, before) for dp in of_ranks
    } == of_ranks


def test_each_part_says_which_heads_cannot_be_exchanged():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = replace(families()["qwen3_next"].presets["debug"], **sizes)
    assert problems(model, Degrees(cp=2)) == problems(model, Degrees(tp=2)) == []
    assert problems(model, Degrees(cp=2, tp=2)) == [
        "parallelism: context_parallel_degree (2) does not divide the 1 key heads of the gated "
        "delta net that tensor_parallel_degree (2) leaves to a rank: context parallelism splits "
        "these heads. Lower one of the degrees."
    ]
    assert problems(model, Degrees(tp=4)) == [
        "parallelism: tensor_parallel_degree (4) does not divide linear_num_key_heads (2).",
        "parallelism: tensor_parallel_degree (4) does not divide num_kv_heads (2).",
    ]
