"""Sharding of parameters over an axis of a mesh."""

from collections import defaultdict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from titanlite.materialize.layout import is_remote

ParameterPlacements = dict[nn.Parameter, Placement]


def shard_parameters(model: nn.Module, mesh: DeviceMesh, placements: ParameterPlacements) -> None:
    """Replace each given parameter of `model` by a DTensor on the one-axis `mesh` that holds this
    rank's part of it, without collectives.

    Parts have `torch.chunk` sizes. Ties stay tied, and the new parameters get the attributes of the
    old ones. A plain parameter cannot become a DTensor in place (their slots differ), so call this
    before anything is keyed by parameter objects. A replicated parameter must already have the same
    value on all ranks of the axis. Parameters of other pipeline stages are not changed.
    """
    holders: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            holders[param].append((module, name))
    for param, placement in placements.items():
        if is_remote(param):
            continue
        local = param.detach()
        if isinstance(placement, Shard):
            size = local.shape[placement.dim]
            chunk = -(-size // mesh.size())
            start = min(mesh.get_local_rank() * chunk, size)
            local = local.narrow(placement.dim, start, min(chunk, size - start)).contiguous()
        sharded = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=param.shape, stride=param.stride()
        )
        new = nn.Parameter(sharded, requires_grad=param.requires_grad)
        vars(new).update(vars(param))
        for module, name in holders[param]:
            setattr(module, name, new)
