"""Which modules become FSDP units, on ranks that are not there."""

import gc
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.config import JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import WeightCopies
from titanlite.distributed.parallelize import parallelize
from titanlite.features.pipeline import apply_pipeline_parallel
from titanlite.launch.process_group import fake_ranks
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

CONFIG = families()["qwen3_moe"].presets["debug"]


@pytest.mark.parametrize(
    ("degrees", "param_dtype", "expected"),
    [
        # whole on their ranks: one rank has nothing to gather
        (Degrees(dp_shard=4, ep=4), "bfloat16", False),  # `WeightCopies` cast
        (Degrees(dp_shard=4, ep=2), "float32", True),
        (Degrees(dp_replicate=2, dp_shard=2, ep=2), "float32", True),  # FSDP reduces over replicas
        (Degrees(dp_shard=2, tp=2, ep=4), "float32", False),
    ],
)
def test_experts_are_units_where_that_changes_anything(degrees, param_dtype, expected):
    job = JobConfig()
    job.training.mixed_precision_param = param_dtype  # type: ignore[assignment]
    with fake_ranks(4):
        model = build_decoder(CONFIG)
        parallelize(model, job, ParallelDims.build(degrees, "cpu"), "cpu")
        experts = [moe.experts for moe in model.moe_layers().values()]
        assert {isinstance(module, FSDPModule) for module in experts} == {expected}
        axes = {len(param.device_mesh.shape) for module in experts for param in module.parameters()}
        assert (axes == {1}) == (not expected), "split by expert parallelism alone, or by FSDP too"


@pytest.mark.parametrize(
    ("changes", "has_units", "has_copies"),
    [
        ({"param": "float32"}, False, False),
        ({"param": "bfloat16"}, False, True),
        ({"param": "bfloat16", "reshard": "always"}, True, False),
        ({"param": "bfloat16", "compile": True}, True, False),
        ({"param": "bfloat16", "tp": 2}, True, False),  # the experts are split by FSDP
        ({"param": "bfloat16", "tp": 2, "ep": 2}, False, True),
        ({"param": "bfloat16", "pp": 2}, False, True),
    ],
)
def test_what_no_other_rank_shares_is_outside_of_fsdp(changes, has_units, has_copies):
    job = JobConfig()
    job.training.mixed_precision_param = changes.pop("param")
    job.parallelism.fsdp_reshard_after_forward = changes.pop("reshard", "default")
    job.compile.enable = changes.pop("compile", False)
    degrees = Degrees(**changes)
    with fake_ranks(degrees.world_size):
        model = build_decoder(CONFIG)
        dims = ParallelDims.build(degrees, "cpu")
        if degrees.pp > 1:
            apply_pipeline_parallel(model, dims, torch.bfloat16)
        parallelize(model, job, dims, "cpu")
        assert any(isinstance(module, FSDPModule) for module in model.modules()) == has_units
        copied = {hasattr(param, "copies") for param in model.parameters()}
        assert copied == {has_copies}


@pytest.mark.parametrize(
    ("degrees", "name"), [(Degrees(), "q_proj"), (Degrees(tp=2, ep=2), "experts")], ids=str
)
def test_fsdp_casts_no_parameter_that_needs_no_cast_or_is_read_as_a_copy(degrees, name):
    """Without copies of dense parameters; `q_proj` is stored in the matmuls' dtype."""
    job = JobConfig()
    job.training.mixed_precision_param = "bfloat16"
    job.parallelism.fsdp_reshard_after_forward = "always"
    with fake_ranks(degrees.world_size):
        model = build_decoder(CONFIG)
        for layer in model.model.layers:
            layer.self_attn.q_proj.to(torch.bfloat16)
        parallelize(model, job, ParallelDims.build(degrees, "cpu"), "cpu")
        outside = {n for n, p in model.named_parameters() if not is_of_fsdp(p)}
        assert {n for n, _ in model.named_parameters() if name in n} <= outside
        assert "lm_head.weight" not in outside


def is_of_fsdp(param):
    axes = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
    return not {"dp_shard", "efsdp"}.isdisjoint(axes)


def test_copies_of_weights_add_gradients_in_float32():
    """As FSDP over one rank would: products see bfloat16, sums of micro-batches are float32."""
    weight = torch.nn.Parameter(torch.randn(3, 5, 4))
    frozen = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    copies = WeightCopies(torch.bfloat16)
    read = copies.read
    for _ in range(2):
        total, address = torch.zeros(3, 5, 4), None
        for _ in range(3):
            copy = read(weight)
            assert torch.equal(copy, weight.detach().bfloat16()) and copy.requires_grad
            assert address in (None, copy.data_ptr()) and not read(frozen).requires_grad
            address = copy.data_ptr()
            factor = torch.randn(3, 5, 4).bfloat16()
            (copy * factor).sum().backward()
            total += factor.float()
            assert weight.grad.dtype == torch.float32
            assert torch.equal(weight.grad, total), "bfloat16 sums would be rounded"
        optimizer.step()
        optimizer.zero_grad()
    assert len(copies.by_param) == 2
    with torch.no_grad():
        weight.mul_(2)  # as a checkpoint that is loaded
    with torch.no_grad():
        assert torch.equal(read(weight), weight.bfloat16())


def test_tokens_do_not_share_a_group_with_parameters():
    """NCCL serves a communicator in order, so that they would wait for each other."""
    with fake_ranks(4):
        dims = ParallelDims.build(Degrees(dp_shard=4, ep=4), "cpu")
        others = [dims.dense["dp_shard"].get_group(), dist.distributed_c10d.GroupMember.WORLD]
        assert dims.ep_mesh.size() == 4 and dims.ep_mesh.get_group() not in others


@pytest.mark.parametrize(
    ("degrees", "dense", "sparse"),
    [
        (Degrees(dp_replicate=2, dp_shard=2), ("dp_replicate", "dp_shard"), None),
        (Degrees(tp=4), ("dp_shard", "tp"), ("efsdp",)),
        (Degrees(dp_shard=4, ep=4), ("dp_shard",), ("efsdp", "ep")),
        (
            Degrees(dp_replicate=2, dp_shard=1, tp=2, ep=2),
            ("dp_replicate", "dp_shard", "tp"),
            ("dp_replicate", "efsdp", "ep"),
        ),
        (Degrees(tp=2, cp=2), ("dp_shard_cp", "tp"), ("efsdp",)),
        (Degrees(dp_replicate=2, cp=2), ("dp_replicate", "dp_shard_cp"), None),
        (Degrees(pp=2, dp_shard=2, ep=2), ("pp", "dp_shard"), ("pp", "efsdp", "ep")),
    ],
)
def test_an_axis_of_one_rank_has_no_group(degrees, dense, sparse):
    """But for those that FSDP units are split over."""
    for rank in range(4):
        with fake_ranks(4, rank):
            dims = ParallelDims.build(degrees, "cpu")
            assert dims.dense.mesh_dim_names == dense
            assert (dims.sparse and dims.sparse.mesh_dim_names) == sparse
            assert dims.dp_rank == rank % degrees.stage_size // (degrees.cp * degrees.tp)
            assert dims.stage == rank // degrees.stage_size
            assert dims.dropout_rank == rank // degrees.tp


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [
        (Degrees(cp=8), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (Degrees(dp_shard=2, cp=2, tp=2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Degrees(dp_replicate=2, dp_shard=2, cp=2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_pieces_of_sequences_lie_on_neighbours(degrees, groups):
    """Those that read the same data, with the same place among the tp ranks; the group is no other
    group.
    """
    for rank in range(8):
        with fake_ranks(8, rank):
            dims = ParallelDims.build(degrees, "cpu")
            assert dims.cp_group is not None and dims.cp_group is not dist.group.WORLD
            assert dist.get_process_group_ranks(dims.cp_group) in groups
            assert dist.get_process_group_ranks(dims.cp_group)[dims.cp_group.rank()] == rank


def test_copies_leave_with_their_parameter():
    def train():
        weight = torch.nn.Parameter(torch.randn(3, 4))
        copies = WeightCopies(torch.bfloat16)
        vars(weight)["copies"] = copies
        copies.read(weight).sum().backward()
        return ref(weight), ref(copies)

    remaining = train()
    gc.collect()
    assert [find() for find in remaining] == [None, None]
