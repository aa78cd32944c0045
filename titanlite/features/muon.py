"""Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982): orthogonalized momentum steps
for the matrices of decoder layers, and AdamW for all other parameters.

A matrix that is split over ranks is gathered on one of them, and its step is sent back. The ranks
divide the matrices of several parameters among themselves, by cost; a matrix that is whole on a
rank, as most experts are, stays there. Each replica of a mesh does the same work.

Shape suffixes: N matrices of R rows and C columns.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.base.agree import get_rank_and_size
from titanlite.config.schema import OptimizerSection
from titanlite.materialize.layout import (
    Region,
    is_remote,
    local_of,
    num_replicas,
    region_at,
    region_of,
)
from titanlite.models.interface import Model
from titanlite.ops.kernels import kernel_device
from titanlite.optim.optimizer import LocalAdamW, group_parameters

# Number of elements of its shards that a rank handles at once, averaged over the ranks that share a
# parameter.
_ELEMENTS_AT_ONCE = 1 << 25


# For a parameter whose rows belong to several matrices: the number of consecutive rows of each
# matrix in turn. This pattern repeats.
Widths = tuple[int, ...]


# The ranks that hold a piece of a matrix, each with its region of the matrix's tensor.
Holders = dict[int, Region]


class _Matrix(NamedTuple):
    """A matrix of a split parameter, of which this rank holds a piece."""

    param: int  # number of the parameter
    place: tuple[int, ...]  # index of the piece in this rank's shard
    holders: Holders
    owner: int  # rank that assembles the matrix


class MatrixRedistribution:
    """Application of a function to every matrix of `params`, plain tensors or DTensors, regardless
    of the part that this rank holds.

    A parameter (..., R, C) is a stack of (R, C); `widths` tells which matrices the R rows belong
    to. Every rank of `group` (None: all) must build this object from the same parameters in the
    same order, and make the same calls.

    Attributes:
        buckets: numbers of the parameters that are changed together, in this order. Parameters
            whose matrices are whole on their ranks have separate buckets, which need no collective.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        widths: Sequence[Widths],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._params, self._widths = list(params), list(widths)
        # cached by layout: layers are alike, and there may be thousands of ranks
        known: dict[object, dict[tuple[int, ...], Holders]] = {}
        self._holders: list[dict[tuple[int, ...], Holders]] = []
        for param in self._params:
            layout = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
            if (layout, param.shape) not in known:
                known[layout, param.shape] = _find_holders(param)
            self._holders.append(known[layout, param.shape])
        is_split = [any(len(held) > 1 for held in found.values()) for found in self._holders]
        self._turns = Counter[tuple[int, ...]]()  # matrices given out, by the ranks that hold them
        self.buckets: list[list[int]] = []
        total = 0.0
        _, world_size = get_rank_and_size()
        for number in sorted(range(len(is_split)), key=is_split.__getitem__):
            # the size in one replica, per rank: the same on all ranks
            param = self._params[number]
            size = param.numel() * num_replicas(param, world_size) / world_size
            last = self.buckets[-1][-1] if self.buckets else None
            if (
                last is None
                or is_split[last] != is_split[number]
                or total + size > _ELEMENTS_AT_ONCE
            ):
                self.buckets.append([])
                total = 0.0
            self.buckets[-1].append(number)
            total += size
        self._routes = [
            self._find_route(some) if is_split[some[0]] else None for some in self.buckets
        ]

    def _find_route(self, bucket: list[int]) -> list[_Matrix]:
        """Assign each matrix of a bucket to one of the ranks that hold a piece of it, in turn,
        beginning with the costliest matrix; return those that this rank holds a piece of.
        """
        me = dist.get_rank()
        found = []
        for number in bucket:
            rows, columns = self._params[number].shape[-2:]
            repeats = rows // sum(self._widths[number])
            sizes = [repeats * width for width in self._widths[number]]
            cost = sum(min(size, columns) * size for size in sizes) * columns
            found += [
                (cost, number, index, holders)
                for index, holders in self._holders[number].items()
                if me in holders
            ]
        route = []
        # The sort is stable, so that all ranks have the same order.
        for _, number, index, holders in sorted(found, key=lambda item: -item[0]):
            ranks = tuple(holders)
            owner = ranks[self._turns[ranks] % len(ranks)]
            self._turns[ranks] += 1
            place = (i - first for i, first in zip(index, holders[me].starts, strict=False))
            route.append(_Matrix(number, tuple(place), holders, owner))
        return route

    def apply(
        self,
        bucket: int,
        tensors: dict[int, torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Replace every matrix in `tensors` by its `change`, in place. `tensors` are contiguous
        shards of one dtype, by the parameters' numbers.

        `change` maps (N, R, C) to (N, R, C), matrix by matrix, the same on all ranks.

        Collectives: two all-to-all over the group if the matrices of the bucket are split; every
        rank of it must call.
        """
        route = self._routes[bucket]
        if route is not None:
            self._exchange(route, tensors, change)
            return
        for number in self.buckets[bucket]:
            local = tensors[number]
            if local.numel():
                matrices = local.view(-1, *local.shape[-2:])
                matrices.copy_(_change_each(matrices, self._widths[number], change))

    def _exchange(
        self,
        route: list[_Matrix],
        tensors: dict[int, torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        me = dist.get_rank()
        ranks = dist.get_process_group_ranks(self._group)
        like = next(iter(tensors.values()))
        mine: dict[int, list[torch.Tensor]] = {rank: [] for rank in ranks}
        theirs: dict[int, list[torch.Tensor]] = {rank: [] for rank in ranks}
        # In a different replica, other ranks own the same matrices. All replicas must batch the
        # same matrices in one matmul, or rounding would make them differ.
        together: defaultdict[tuple[object, Widths, object], list[torch.Tensor]] = defaultdict(list)
        for number, place, holders, owner in route:
            mine[owner].append(tensors[number][place])
            if owner != me:
                continue
            shape = self._params[number].shape[-2:]
            matrix = like.new_empty(shape)
            together[shape, self._widths[number], tuple(holders)].append(matrix)
            for rank, region in holders.items():
                theirs[rank].append(matrix[region.slices[-2:]])
        self._send(like, mine, theirs)
        for (_, widths, _), matrices in together.items():
            changed = _change_each(torch.stack(matrices), widths, change)
            for matrix, values in zip(matrices, changed, strict=True):
                matrix.copy_(values)
        self._send(like, theirs, mine)

    def _send(
        self,
        like: torch.Tensor,
        pieces: dict[int, list[torch.Tensor]],
        places: dict[int, list[torch.Tensor]],
    ) -> None:
        """Send `pieces`, listed by the rank that receives them, and receive into `places`, listed
        by the rank that sends.
        """
        sent, received = (
            [sum(x.numel() for x in of_rank) for of_rank in by_rank.values()]
            for by_rank in (pieces, places)
        )
        flat = [piece.reshape(-1) for of_rank in pieces.values() for piece in of_rank]
        out = like.new_empty(sum(received))
        packed = torch.cat([like.new_empty(0), *flat])
        dist.all_to_all_single(out, packed, received, sent, group=self._group)
        targets = [place for of_rank in places.values() for place in of_rank]
        for place, values in zip(
            targets, out.split([place.numel() for place in targets]), strict=True
        ):
            place.copy_(values.view(place.shape))


def _change_each(
    x_NRC: torch.Tensor, widths: Widths, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the `change` of every matrix in the rows of `x_NRC`; one call changes all matrices of
    the same size.
    """
    parts = list(x_NRC.unflatten(1, (-1, sum(widths))).split(widths, dim=2))
    for width in dict.fromkeys(widths):
        places = [place for place, other in enumerate(widths) if other == width]
        alike = torch.stack([parts[place].flatten(1, 2) for place in places])
        changed = change(alike.flatten(0, 1)).view_as(alike)
        for place, part in zip(places, changed, strict=True):
            parts[place] = part.unflatten(1, (-1, width))
    return torch.cat(parts, dim=2).flatten(1, 2)


def _find_holders(param: torch.Tensor) -> dict[tuple[int, ...], Holders]:
    """Return the holders of each matrix of this replica of `param`, by its outer indices."""
    found: defaultdict[tuple[int, ...], Holders] = defaultdict(dict)
    for rank, region in _list_regions(param):
        if region.numel:
            outer = zip(region.starts[:-2], region.ends, strict=False)
            for index in product(*(range(start, end) for start, end in outer)):
                found[index][rank] = region
    return dict(found)


def _list_regions(param: torch.Tensor) -> Iterator[tuple[int, Region]]:
    """Yield the ranks that share this replica of `param`, each with its region; only this rank if
    `param` is not split.
    """
    if not isinstance(param, DTensor):
        rank, _ = get_rank_and_size()
        yield rank, region_of(param)
        return
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # every rank trains
    me = dist.get_rank()
    choices = []
    for axis, (placement, place) in enumerate(zip(param.placements, coordinate, strict=True)):
        # `mesh.mesh` is not used: it is a tensor, whose values cannot be read while a run is
        # planned without data.
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        places = [place] if placement.is_replicate() else range(len(ranks))
        choices.append([(place, ranks[place] - me) for place in places])
    for chosen in product(*choices):
        places, offsets = zip(*chosen, strict=True)
        yield me + sum(offsets), region_at(param, places)


MOMENTUM = "momentum_buffer"

# Iterations of an odd polynomial a x + b x^3 + c x^5 that drive every singular value to about 1
# (0.7 to 1.2).
_STEPS = 5
_A = 3.4445
_B = -4.7750
_C = 2.0315
# An orthogonal matrix of R x C has entries of 1 / sqrt(max(R, C)) in the quadratic mean; AdamW's
# steps have about 0.2, so that learning rate and weight decay are those of AdamW
# (arXiv:2502.16982, eq. 4).
_RMS = 0.2


def orthogonalize(x_NRC: torch.Tensor) -> torch.Tensor:
    """Return approximately U V^T for every matrix U S V^T, by Newton-Schulz steps in the dtype of
    `x_NRC`; zeros stay zeros.
    """
    x_NRC = x_NRC / (torch.linalg.matrix_norm(x_NRC, keepdim=True) + 1e-7)
    is_tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    if is_tall:
        x_NRC = x_NRC.mT
    for _ in range(_STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        poly_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=_B, alpha=_C)
        x_NRC = torch.baddbmm(x_NRC, poly_NRR, x_NRC, beta=_A)
    return x_NRC.mT if is_tall else x_NRC


def _make_step(x_NRC: torch.Tensor) -> torch.Tensor:
    return orthogonalize(x_NRC) * (_RMS * max(x_NRC.shape[-2:]) ** 0.5)


def build_muon(
    model: Model,
    section: OptimizerSection,
    group: dist.ProcessGroup | None = None,
) -> "Muon":
    """Build Muon for the matrices of `muon_matrices`, with AdamW for the other trained parameters.

    The ranks of `group` (None: all) exchange the matrices that are split over them. Every rank must
    make the same call; no collective. The groups include parameters of other pipeline stages, which
    are never stepped here. Raises ConfigError: `section.lr_multipliers` names nothing that is
    trained.
    """
    matrices = muon_matrices(model)
    groups, rest = group_parameters(model, section, matrices)
    return Muon(
        groups or [{"params": []}],
        LocalAdamW(rest, section),
        momentum=section.momentum,
        widths=matrices,
        group=group,
    )


def muon_matrices(model: Model) -> dict[nn.Parameter, Widths]:
    """Return the trained parameters that Muon steps, each with the matrices in its rows.

    AdamW steps the embedding, the output head, norms, biases and all parameters outside of layers
    (arXiv:2502.16982, 2.1).
    """
    found: dict[nn.Parameter, Widths] = {}
    for layer in model.all_layers():
        experts = {param for module in model.experts_in(layer) for param in module.parameters()}
        for module in layer.modules():
            if isinstance(module, nn.Embedding):
                continue
            for name, param in module.named_parameters(recurse=False):
                is_matrix = param.dim() == 2 and not name.endswith("bias")
                if param.requires_grad and (
                    is_matrix if param not in experts else param.dim() == 3
                ):
                    found[param] = _get_widths(module, name, param.shape[-2])
    return found


def _get_widths(module: nn.Module, name: str, rows: int) -> Widths:
    """Return the `Widths` of the matrices in the rows of a parameter."""
    if hasattr(module, "stacked_matrices"):
        return cast(dict[str, Widths], module.stacked_matrices).get(name, (rows,))
    # Attributes of transformers' experts.
    layout = [
        getattr(module, attribute, None)
        for attribute in ("has_gate", "is_concatenated", "is_transposed")
    ]
    is_stacked = name == "gate_up_proj" and layout == [True, True, False]
    return (rows // 2, rows // 2) if is_stacked else (rows,)


class Muon(torch.optim.Optimizer):
    """Two optimizers as one: Muon for the matrices in `groups`, and `adamw` for its own parameters.

    `param_groups` and `state` hold the groups and states of both. A matrix that is split over ranks
    is put together on one of them (`MatrixRedistribution`), so the step is that of one process on
    any mesh, up to rounding.

    Args:
        momentum: Nesterov momentum.
        widths: the matrices in the rows of each parameter, such as gate and up projection.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        adamw: LocalAdamW,
        *,
        momentum: float,
        widths: dict[nn.Parameter, Widths],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            groups,
            {
                "state_names": (MOMENTUM,),
                "lr": 0.0,
                "weight_decay": 0.0,
                "fused": adamw.defaults["fused"],
            },
        )
        self._adamw, self._momentum = adamw, momentum
        all_params = ((param, group) for group in self.param_groups for param in group["params"])
        self._params = [(param, group) for param, group in all_params if not is_remote(param)]
        # the same dictionaries: `Schedule` sets the rates of both
        self.param_groups += adamw.param_groups
        adamw.state = self.state
        stepped = [param for param, _ in self._params]
        self._exchange = MatrixRedistribution(stepped, [widths[p] for p in stepped], group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters that have a gradient; with `found_inf` = 1 nothing changes.
        Collectives: those of `MatrixRedistribution.apply` for each of its buckets.
        """
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        keep = None if found_inf is None else found_inf.to(torch.bool)
        dtype = _get_dtype([param for param, _ in self._params])
        for bucket, numbers in enumerate(self._exchange.buckets):
            steps = {
                number: self._take_momentum(self._params[number][0], keep, dtype)
                for number in numbers
            }
            self._exchange.apply(bucket, steps, _make_step)
            for number, step in steps.items():
                self._move(number, step, keep)

    def _take_momentum(
        self, param: nn.Parameter, keep: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        local = local_of(param)
        if param.grad is None and param not in self.state:
            # It never had a gradient, on any rank that holds a piece, but all take part.
            return torch.zeros_like(local, dtype=dtype)
        state = self.state[param]
        grad = torch.zeros_like(local) if param.grad is None else local_of(param.grad)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(param)
        buffer = local_of(state[MOMENTUM])
        new = torch.add(grad, buffer, alpha=self._momentum)
        buffer.copy_(new if keep is None else torch.where(keep, buffer, new))
        return torch.add(grad, new, alpha=self._momentum).to(dtype)

    def _move(self, number: int, step: torch.Tensor, keep: torch.Tensor | None) -> None:
        param, group = self._params[number]
        if param not in self.state:
            return
        local = local_of(param)
        lr = group["lr"]
        moved = torch.add(local * (1 - lr * group["weight_decay"]), step, alpha=-lr)
        local.copy_(moved if keep is None else torch.where(keep, local, moved))


def _get_dtype(params: list[nn.Parameter]) -> torch.dtype:
    """Return bfloat16 on CUDA, where it halves the time of computing and sending, and trains
    equally well; otherwise the parameters' dtype.
    """
    if any(kernel_device(param.device) == "cuda" for param in params):
        return torch.bfloat16
    return reduce(torch.promote_types, (param.dtype for param in params), torch.bfloat16)
