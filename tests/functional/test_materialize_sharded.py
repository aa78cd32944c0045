"""Initialization does not depend on the layout and costs O(shard), and `verify` finds an error of a
single rank.
"""

import math

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.functional.conftest import weekly
from titanlite.base.errors import VerifyError
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize import (
    Normal,
    allocate,
    build_plan,
    fill,
    materialize,
    verify,
)
from titanlite.materialize.layout import local_of
from titanlite.models.decoder import build_decoder

SEED = 7


def build_sharded(checked):
    """Build on meta and shard; nothing is materialized yet. Collective: every rank must call."""
    dims = ParallelDims.build(checked.degrees, "cpu")
    model = build_decoder(checked.model_config)
    parallelize(model, checked.job, dims, "cpu")
    return model


# 1027 rows of the vocabulary per tp rank; 66 / 4 is not whole; experts of odd width.
UNEVEN = {"vocab_size": 2054, "hidden_size": 66, "num_experts": 8, "moe_intermediate_size": 11}


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [("FSDP4", {"dp_shard": Shard(1)}), ("EP2xFSDP2", {"efsdp": Shard(1), "ep": Shard(0)})],
)
def test_experts_are_sharded_on_dim_1_where_there_are_more_ranks_than_experts(
    run_ranks, checked, meshes, mesh, expected
):
    job = checked(meshes[mesh], "--model.overrides.num_experts=2", "--model.overrides.top_k=1")

    def rank_main():
        experts = build_sharded(job).model.layers[0].mlp.experts
        return [
            dict(zip(param.device_mesh.mesh_dim_names, param.placements, strict=True))
            for param in experts.parameters()
        ]

    assert run_ranks(4, rank_main) == [[expected] * 2] * 4


def test_a_rank_draws_only_what_its_shard_needs(run_ranks, checked, meshes):
    """O(shard): a tile of 256 x 256 that a shard touches is drawn whole, so a rank may draw up to 3
    times its shard.
    """
    sizes = {
        "vocab_size": 4100,
        "hidden_size": 512,
        "head_dim": 128,
        "num_kv_heads": 4,
        "moe_intermediate_size": 256,
        "num_layers": 1,
    }
    overrides = [f"--model.overrides.{name}={value}" for name, value in sizes.items()]

    def rank_main(mesh):
        drawn = 0
        original = Normal.tile

        def tile(self, generator, rows, cols):
            nonlocal drawn
            drawn += rows * cols
            return original(self, generator, rows, cols)

        Normal.tile = tile
        plan = materialize(build_sharded(checked(meshes[mesh], *overrides)), "cpu", seed=SEED)
        randoms = [e for e in plan.entries if isinstance(getattr(e.source, "recipe", None), Normal)]
        return (
            drawn,
            sum(e.region.numel for e in randoms),
            sum(math.prod(e.info.shape) for e in randoms),
        )

    for mesh in ("FSDP4", "TP2xEP2"):
        for drawn, shard, whole in run_ranks(4, rank_main, mesh):
            assert shard < 0.3 * whole
            assert shard <= drawn <= 3 * shard, mesh
            assert drawn < 0.6 * whole, mesh


def broken_after_fill(run_ranks, checked, fqn, rank, value):
    """Materialize step by step, change one element of `fqn` on one rank before `verify`; the error
    of each rank.
    """

    def rank_main():
        plan = build_plan(build_sharded(checked))
        allocate(plan, torch.device("cpu"))
        fill(plan, SEED)
        if torch.distributed.get_rank() == rank:
            entry = next(entry for entry in plan.entries if entry.fqn == fqn)
            local_of(entry.tensor).view(-1)[-1] = value
        with pytest.raises(VerifyError) as raised:
            verify(plan)
        return str(raised.value)

    return run_ranks(checked.degrees.world_size, rank_main)


@pytest.mark.parametrize(
    ("mesh", "fqn", "rank", "holders"),
    [
        ("HSDP2x2", "model.layers.1.self_attn.q_proj.weight", 3, "ranks 1 and 3"),
        weekly("TP2xFSDP2", "model.layers.0.input_layernorm.weight", 2, "ranks 2 and 3"),
        ("TP2xEP2", "model.layers.0.mlp.gate.expert_bias", 2, "ranks 0, 1, 3 and 2"),
    ],
)
def test_replica_that_differs_on_one_rank_fails_on_all_ranks(
    run_ranks, checked, meshes, mesh, fqn, rank, holders
):
    (message,) = set(broken_after_fill(run_ranks, checked(meshes[mesh]), fqn, rank, 0.123))
    assert message == f"materialize: {fqn}: replicas differ, between {holders}."


def test_nan_on_one_rank_fails_on_all_ranks_with_tensor_and_rank(run_ranks, checked, meshes):
    fqn = "model.layers.1.mlp.experts.down_proj"
    (message,) = set(broken_after_fill(run_ranks, checked(meshes["FSDP4"]), fqn, 3, float("nan")))
    assert message.startswith(f"materialize: {fqn}: not filled, or NaN, in 1 of ")
    assert message.endswith("elements. (rank 3)")


def test_a_layout_looked_at_with_fake_ranks_is_not_taken_for_that_of_a_real_rank(
    run_ranks, checked, meshes
):
    """DTensor caches results of operations by mesh, and equal meshes may have other coordinates."""
    job = checked(
        meshes["FSDP4"], *(f"--model.overrides.{name}={value}" for name, value in UNEVEN.items())
    )
    with fake_ranks(4):
        build_plan(build_sharded(job), [])

    def rank_main():
        return [
            entry.region.starts
            for entry in build_plan(build_sharded(job), []).entries
            if entry.region.starts
        ]

    ranks = run_ranks(4, rank_main)
    assert len({str(starts) for starts in ranks}) == 4
