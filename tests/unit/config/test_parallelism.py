"""Degrees: resolution, derived sizes, and the text of every refusal."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig, ModelConfig, RopeScaling
from titanlite.config.parallelism import (
    Degrees,
    check_parallelism,
    resolve_degrees,
    resolve_global_batch_size,
)
from titanlite.config.schema import ParallelismSection
from titanlite.models.families import part_sizes

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


def section(replicate=1, shard=-1, tp=1, ep=1, cp=1, pp=1, layers="") -> ParallelismSection:
    return ParallelismSection(
        pipeline_parallel_degree=pp,
        pipeline_parallel_layers=layers,
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        expert_parallel_degree=ep,
    )


def problems(model: ModelConfig = MODEL, degrees: Degrees | None = None, **training) -> list[str]:
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


def test_a_stage_is_ahead_of_those_behind_it():
    assert [Degrees(pp=4).turns_ahead(stage) for stage in range(4)] == [3, 2, 1, 0]
    assert Degrees(pp=4).waiting(8) == 3 / 11


@pytest.mark.parametrize(
    ("given", "world_size", "text"),
    [
        (
            section(replicate=1, shard=4, tp=4),
            8,
            "parallelism: dp_replicate (1) * dp_shard (4) * tp (4) = 16, but the world size is 8. "
            "Set data_parallel_shard_degree = -1 to use the rest, or change a degree.",
        ),
        (
            section(replicate=3),
            4,
            "dp_replicate (3) * tp (1) = 3 does not divide the world size (4).",
        ),
        (
            section(ep=3),
            4,
            "ep (3) does not divide dp_shard (4) * tp (1) = 4. Lower expert_parallel_degree;",
        ),
        (
            section(shard=2, cp=4),
            4,
            "* dp_shard (2) * cp (4) * tp (1) = 8, but the world size is 4.",
        ),
        (
            section(pp=2, shard=4),
            4,
            "pp (2) * dp_replicate (1) * dp_shard (4) * tp (1) = 8, but the world size is 4.",
        ),
        *(
            (
                section(pp=2, layers=layers),
                4,
                f"pipeline_parallel_layers = '{layers}' is not one number of layers for each",
            )
            for layers in ("4", "2,2,2", "2,-2", "2,x")
        ),
        (section(cp=2, ep=3), 4, "ep (3) does not divide dp_shard (2) * cp (2) * tp (1) = 4."),
    ],
)
def test_degrees_that_do_not_fit(given, world_size, text):
    with pytest.raises(ConfigError) as error:
        resolve_degrees(given, world_size)
    assert text in str(error.value)


def test_a_good_job_has_no_problems():
    assert problems() == []
    assert problems(degrees=Degrees(1, 2, 2, 4), global_batch_size=6) == []


@pytest.mark.parametrize(
    ("changes", "degrees", "training", "text"),
    [
        ({"num_kv_heads": 2}, Degrees(tp=4), {}, "num_kv_heads (2)"),
        (
            {"vocab_size": 97},
            Degrees(tp=2),
            {},
            "tensor_parallel_degree (2) does not divide vocab_size (97).",
        ),
        (
            {"num_experts": 0, "intermediate_size": 130},
            Degrees(tp=4),
            {},
            "does not divide intermediate_size (130).",
        ),
        (
            {"num_shared_experts": 1, "moe_intermediate_size": 33},
            Degrees(tp=2),
            {},
            "does not divide num_shared_experts * moe_intermediate_size (33).",
        ),
        (
            {},
            Degrees(cp=4, tp=2),
            {"seq_len": 124},
            "training.seq_len (124) is not a multiple of context_parallel_degree (4) * "
            "tensor_parallel_degree (2)",
        ),
        (
            {},
            Degrees(cp=8, tp=2),
            {},
            "context_parallel_degree (8) does not divide the 4 attention heads, or",
        ),
        (
            {"num_heads": 12, "num_kv_heads": 4},
            Degrees(cp=6),
            {"seq_len": 126},
            "neither a divisor nor a multiple of the 4 key/value heads, that "
            "tensor_parallel_degree (1) leaves",
        ),
        (
            {"tie_word_embeddings": True},
            Degrees(pp=2),
            {},
            "is 2, but the model's output head is its embedding (tied)",
        ),
        (
            {"num_layers": 4},
            Degrees(pp=5),
            {},
            "pipeline_parallel_degree (5) is more than the model's 4 layers. Lower it.",
        ),
        (
            {"num_layers": 4},
            Degrees(pp=3, layers=(1, 3, 0)),
            {},
            "1 + 3 + 0 = 4, but the model has 4 layers, and each stage needs one or more.",
        ),
        (
            {"num_experts": 0},
            Degrees(dp_shard=2, ep=2),
            {},
            "expert_parallel_degree is 2, but the model has no experts",
        ),
        (
            {"num_experts": 6},
            Degrees(dp_shard=4, ep=4),
            {},
            "(4) does not divide the model's num_experts (6).",
        ),
        (
            {"moe_intermediate_size": 33},
            Degrees(dp_shard=16, ep=4),
            {},
            "16 ranks share 8 experts, so each is split in 4, but that does not divide 2 * "
            "moe_intermediate_size (66).",
        ),
        (
            {},
            Degrees(dp_replicate=2, dp_shard=2),
            {"global_batch_size": 6, "local_batch_size": 2},
            "training.global_batch_size (6) is not a multiple of local_batch_size (2) * "
            "data-parallel degree (4) = 8.",
        ),
        (
            {"rope_scaling": RopeScaling("yarn", factor=2.0, original_max_position_embeddings=100)},
            Degrees(),
            {"seq_len": 201},
            "training.seq_len (201) exceeds the 200 tokens that YaRN reaches here, its factor * "
            "original_",
        ),
        (
            {},
            Degrees(),
            {"seq_len": 513},
            "training.seq_len (513) exceeds the model's max_position_embeddings (512).",
        ),
    ],
)
def test_each_problem_is_named(changes, degrees, training, text):
    found = problems(replace(MODEL, **changes), degrees, **training)
    assert len(found) == 1
    assert text in found[0]


def test_what_is_kept_for_a_step_cannot_be_freed_before():
    job = JobConfig()
    job.training.seq_len = 128
    job.parallelism.fsdp_once_per_step = True
    assert check_parallelism(job, MODEL, Degrees(), []) == []
    job.parallelism.fsdp_reshard_after_forward = "always"
    assert check_parallelism(job, MODEL, Degrees(), []) == [
        "parallelism.fsdp_once_per_step keeps gathered parameters for a whole step, and "
        "fsdp_reshard_after_forward = 'always' frees them after each forward. Leave one of the two "
        "out."
    ]


def test_pieces_of_sequences_may_be_more_than_key_value_heads():
    assert problems(degrees=Degrees(cp=8)) == problems(degrees=Degrees(cp=4, tp=2)) == []


def test_width_of_dense_layers_does_not_matter_where_there_are_none():
    assert problems(replace(MODEL, intermediate_size=130), Degrees(tp=4)) == []


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
        ("next_token", 1.0, 10_000, {1: 16, 4: 16, 8: 16, 3: 15, 16: 16, 64: 64}),
        ("next_token", 3.0, 10_000, {1: 5, 4: 4, 8: 8}),
        ("next_token", 1.5, 10_000, {1: 10, 4: 8, 8: 8}),
        ("dpo", 1.0, 10_000, {1: 32, 4: 32, 8: 32}),
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
