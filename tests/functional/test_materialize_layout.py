"""Initialization does not depend on the layout, costs O(shard), and `verify` sees what goes wrong
on one rank.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from titanlite.base.errors import VerifyError
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.distributed.parallelize import parallelize
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize import (
    Init,
    Normal,
    Ones,
    allocate,
    build_plan,
    fill,
    materialize,
    verify,
)
from titanlite.models.decoder import build_decoder

SEED = 7


def build_sharded(checked):
    """Build on meta and shard; nothing is materialized yet. Collective: every rank must call."""
    dims = ParallelDims.build(checked.degrees, "cpu")
    model = build_decoder(checked.model_config)
    parallelize(model, checked.job, dims, "cpu")
    return model


def local_of(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


# 1027 rows of the vocabulary per tp rank; 66 / 4 is not whole; experts of odd width.
UNEVEN = {"vocab_size": 2054, "hidden_size": 66, "num_experts": 8, "moe_intermediate_size": 11}
# Fewer rows of the router than ranks, so that some hold nothing of it; each expert is split on dim
# 1.
FEW_EXPERTS = {
    "vocab_size": 514,
    "hidden_size": 36,
    "num_experts": 2,
    "top_k": 1,
    "moe_intermediate_size": 6,
}
LADDER = ["FSDP4", "HSDP2x2", "TP2xFSDP2", "EP2xFSDP2", "TP2xEP2", "EP4", "TP2xEP4"]


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [(mesh, UNEVEN) for mesh in LADDER]
    + [(mesh, FEW_EXPERTS) for mesh in LADDER if "EP4" not in mesh],
    ids=lambda value: value if isinstance(value, str) else f"vocabulary {value['vocab_size']}",
)
def test_uneven_shards_are_bit_identical_with_one_process(
    run_ranks, checked, meshes, gather_full, mesh, sizes
):
    if meshes[mesh].tp == 1:  # tp must divide the vocabulary; FSDP alone need not
        sizes = {**sizes, "vocab_size": sizes["vocab_size"] - 1}
    job = checked(
        meshes[mesh], *(f"--model.overrides.{name}={value}" for name, value in sizes.items())
    )
    one = materialize(build_decoder(job.model_config), "cpu", seed=SEED)

    def rank_main():
        plan = materialize(build_sharded(job), "cpu", seed=SEED)
        gathered = gather_full(plan.model)  # by torch, which has its own idea of who holds what
        wrong = [
            entry.fqn
            for entry in one.entries
            if not torch.equal(gathered[entry.fqn], entry.tensor.detach())
        ]
        return wrong, {
            entry.fqn: (entry.region.slices, local_of(entry.tensor)) for entry in plan.entries
        }

    results = run_ranks(4, rank_main)
    assert [wrong for wrong, _ in results] == [[]] * 4
    ranks = [held for _, held in results]
    uneven = 0
    for entry in one.entries:
        expected = entry.tensor.detach()
        covered = torch.zeros(expected.shape, dtype=torch.int64)
        for held in ranks:
            region, local = held[entry.fqn]
            assert torch.equal(local, expected[region]), f"{entry.fqn} at {region}"
            covered[region] += 1
        # Every element is held, and each by the same number of ranks.
        assert covered.unique().numel() == 1 and covered.min() > 0, entry.fqn
        uneven += len({held[entry.fqn][1].shape for held in ranks}) > 1
    assert uneven > 0, "all shards are of equal size, so nothing was tested"


@pytest.mark.parametrize(
    ("mesh", "ep_dim", "fsdp_dim"),
    [("FSDP4", None, 1), ("EP2xFSDP2", 0, 1), ("TP2xEP2", 0, 1), ("TP2xFSDP2", None, 1)],
)
def test_experts_are_sharded_on_dim_1_where_there_are_more_ranks_than_experts(
    run_ranks, checked, meshes, mesh, ep_dim, fsdp_dim
):
    job = checked(meshes[mesh], "--model.overrides.num_experts=2", "--model.overrides.top_k=1")

    def rank_main():
        model = build_sharded(job)
        materialize(model, "cpu", seed=SEED)
        experts = model.model.layers[0].mlp.experts
        return {
            name: (
                param.device_mesh.mesh_dim_names,
                [(type(p).__name__, p.dim) for p in param.placements],
            )
            for name, param in experts.named_parameters()
        }

    for placements in run_ranks(4, rank_main):
        for names, dims in placements.values():
            found = dict(zip(names, dims, strict=True))
            fsdp = [dim for name, dim in found.items() if name in ("dp_shard", "efsdp")]
            assert fsdp == [("Shard", fsdp_dim)], found
            assert [dim for name, dim in found.items() if name == "ep"] == (
                [("Shard", ep_dim)] if ep_dim == 0 else []
            )


def test_a_rank_draws_only_what_its_shard_needs(run_ranks, checked, meshes):
    """O(shard): tiles of 256 x 256 that a shard touches are drawn whole, so a rank may draw up to 3
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

    for mesh in ("FSDP4", "TP2xEP2", "EP2xFSDP2"):
        for drawn, shard, whole in run_ranks(4, rank_main, mesh):
            assert shard < 0.3 * whole
            assert shard <= drawn <= 3 * shard, mesh
            assert drawn < 0.6 * whole, mesh


DRAWN = {
    "embedding.weight": Init(Normal(zero_row=50)),
    "linear.*": Init(Normal()),
    "norm.*": Init(Normal()),
}


class Plain(nn.Module):
    """A module that titanlite knows nothing about."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(103, 20, padding_idx=50)
        self.linear = nn.Linear(20, 33)
        self.norm = nn.LayerNorm(33)


def test_padding_idx_embedding_of_any_module_initializes_on_shards(run_ranks):
    """An embedding with padding_idx once skipped the whole initialization: five months of an
    all-zero model.
    """

    def build():
        with torch.device("meta"):
            return Plain()

    def rank_main():
        model = build()
        for module in (*model.children(), model):
            fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
        plan = materialize(model, "cpu", [DRAWN], seed=SEED)
        return {entry.fqn: (entry.region.slices, local_of(entry.tensor)) for entry in plan.entries}

    plan = materialize(build(), "cpu", [DRAWN], seed=SEED)
    one = {entry.fqn: entry.tensor.detach() for entry in plan.entries}
    zero_rows = (one["embedding.weight"] == 0).all(dim=1).nonzero().flatten().tolist()
    assert zero_rows == [50]
    assert 0.9 < one["embedding.weight"].std() < 1.1
    for held in run_ranks(4, rank_main):
        for fqn, (region, local) in held.items():
            assert torch.equal(local, one[fqn][region]), fqn


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
        ("HSDP2x2", "model.layers.0.mlp.experts.gate_up_proj", 0, "ranks 0 and 2"),
        ("TP2xFSDP2", "model.layers.0.input_layernorm.weight", 2, "ranks 2 and 3"),
        ("FSDP4", "model.rotary_emb.inv_freq", 1, "ranks 0, 2, 3 and 1"),
        ("TP2xEP2", "model.layers.0.mlp.gate.expert_bias", 2, "ranks 0, 1, 3 and 2"),
    ],
)
def test_replica_that_differs_on_one_rank_fails_on_all_ranks(
    run_ranks, checked, meshes, mesh, fqn, rank, holders
):
    (message,) = set(broken_after_fill(run_ranks, checked(meshes[mesh]), fqn, rank, 0.123))
    assert message == f"materialize: {fqn}: replicas differ, between {holders}."


@pytest.mark.parametrize(("mesh", "rank"), [("FSDP4", 3), ("TP2xEP2", 0)])
def test_nan_on_one_rank_fails_on_all_ranks_with_tensor_and_rank(
    run_ranks, checked, meshes, mesh, rank
):
    fqn = "model.layers.1.mlp.experts.down_proj"
    (message,) = set(broken_after_fill(run_ranks, checked(meshes[mesh]), fqn, rank, float("nan")))
    assert message.startswith(f"materialize: {fqn}: not filled, or NaN, in 1 of ")
    assert message.endswith(f"elements. (rank {rank})")


def test_tensor_that_one_rank_did_not_fill_fails_on_all_ranks(run_ranks, checked, meshes):
    def rank_main():
        plan = build_plan(build_sharded(checked(meshes["TP2xEP2"])))
        allocate(plan, torch.device("cpu"))
        if torch.distributed.get_rank() != 1:
            fill(plan, SEED)
        with pytest.raises(VerifyError) as raised:
            verify(plan)
        return str(raised.value)

    (message,) = set(run_ranks(4, rank_main))
    plan = build_plan(build_decoder(checked(Degrees()).model_config))
    for entry in plan.entries:  # every one of them, integer buffers included
        assert f"{entry.fqn}: not filled" in message
    assert "(rank 1)" in message and "(ranks 0" not in message


def test_a_layout_looked_at_with_fake_ranks_is_not_taken_for_that_of_a_real_rank(
    run_ranks, checked, meshes
):
    """DTensor keeps results of operations with the mesh they were computed on; equal meshes have
    other coordinates.
    """
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


def test_dtypes_of_all_sizes_are_compared_between_ranks(run_ranks):
    """A digest of 16 bytes per element, of float8, and of nothing; a difference is found in
    each.
    """
    dtypes = (
        torch.complex128,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.uint64,
        torch.bool,
    )

    def rank_main():
        said = []
        for spoiled in (False, True):
            model = nn.Module()
            for dtype in dtypes:
                name = str(dtype).removeprefix("torch.")
                model.register_buffer(name, torch.empty(3, dtype=dtype, device="meta"))
                model.register_buffer(
                    f"{name}_empty", torch.empty(0, 2, dtype=dtype, device="meta")
                )
            plan = build_plan(model, [{"*": Init(Ones())}])
            allocate(plan, torch.device("cpu"))
            fill(plan, 0)
            if spoiled and dist.get_rank() == 1:
                for buffer in model.buffers():
                    buffer.view(-1).view(torch.uint8)[:1] ^= 1
            try:
                verify(plan)
                said.append("")
            except VerifyError as error:
                said.append(str(error))
        return tuple(said)

    for equal, different in run_ranks(2, rank_main):
        assert equal == ""
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        assert all(
            f"{name}: replicas differ, between ranks 0 and 1." in different for name in names
        )
        assert "_empty" not in different
