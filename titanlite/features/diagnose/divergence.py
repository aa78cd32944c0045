"""Ranks that must hold the same still do: replicas of weights, biases and optimizer states, and the data order.

A bit that flips on one replica is reduced into no gradient and shows in no loss for long; then the replicas train
different models. Each rank sums the bits of what others hold too (`bit_digest`, one pass over the memory), and the
ranks compare a few numbers; only where those differ, the digests of the single tensors are exchanged.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titanlite.base.agree import gather_objects, list_ranks
from titanlite.base.errors import DivergenceError, raise_problems
from titanlite.config import JobConfig
from titanlite.data.dataset import Batch
from titanlite.distributed import ParallelDims
from titanlite.materialize import Plan
from titanlite.materialize.execute import bit_digest
from titanlite.materialize.layout import local_of, num_replicas

# Which shard of which layout: the ranks with the same one hold the same bits.
_Place = tuple[tuple[str, int], ...]


class DivergenceCheck:
    """Comparison of what ranks must have in common, every `training.divergence_check_freq` steps.

    Ranks with the same `dims.dp_rank` must read the same batches, and those of a stage may hold the same tensors. The
    comparison is with `step` and later ones. That ranks have the same configuration is seen to at the start.
    """

    def __init__(
        self, job: JobConfig, plan: Plan, optimizer: torch.optim.Optimizer, dims: ParallelDims, step: int
    ) -> None:
        self._freq = job.training.divergence_check_freq
        self._plan, self._optimizer, self._dims = plan, optimizer, dims
        self._agreed_step = step

    def is_due(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    @torch.no_grad()
    def check(self, step: int, data: str, samples: int, batches: Sequence[Batch]) -> None:
        """Compare all ranks after `step`: what they hold, the order of the data, and the `samples` read of it.

        Synchronizes.

        Raises:
            DivergenceError: on all ranks; names the tensors, and which ranks differ, and since when.

        Collectives: one all-gather of small objects over the default process group, a second one where ranks differ;
        every rank must call.
        """
        held = list(self._held())
        # Some states are on the CPU where others are not: `step` of AdamW unless it is fused, and what is offloaded.
        device = batches[0].tokens.device
        sums = [bit_digest(local_of(tensor)).to(device, non_blocking=True) for _, _, tensor in held]
        digests = [tuple(found) for found in torch.stack(sums).tolist()] if sums else []
        by_place: defaultdict[_Place, list[tuple[int, ...]]] = defaultdict(list)
        for (_, place, _), digest in zip(held, digests, strict=True):
            by_place[place].append(digest)
        facts = {
            "step": step,
            "samples of the data order": samples,
            "data order": data,
            f"batch of data-parallel rank {self._dims.dp_rank}": [bit_digest(b.tokens).tolist() for b in batches],
        }
        gathered = gather_objects((facts, {place: hash(tuple(found)) for place, found in by_place.items()}))
        differing = _differing([found for found, _ in gathered])
        problems = [f"the {name} is not the same on {ranks}." for name, ranks in differing.items()]
        if _differing([found for _, found in gathered]):
            by_name = {(name, place): digest for (name, place, _), digest in zip(held, digests, strict=True)}
            named = _differing(gather_objects(by_name))
            problems += [f"{name}: replicas differ between {ranks}." for (name, _), ranks in named.items()]
        if problems:
            since = f"between step {self._agreed_step} and step {step}"
            problems[-1] += (
                f" It happened {since}; a faulty machine is the usual cause, then a change of the code that not all "
                "ranks have. Start again from a checkpoint of before, without that machine."
            )
        raise_problems(DivergenceError, f"ranks differ after step {step}", problems)
        self._agreed_step = step

    def _held(self) -> Iterator[tuple[str, _Place, torch.Tensor]]:
        """Yield the name, place and tensor of everything that another rank must hold, too."""
        sharing, stage = self._dims.degrees.stage_size, (("pp", self._dims.stage),)
        for entry in self._plan.entries:
            if entry.is_elsewhere:
                continue
            # What is not persistent may belong to this rank, such as the tokens that its experts got.
            found = [(entry.fqn, entry.tensor)] if entry.info.persistent else []
            states = sorted(self._optimizer.state.get(entry.tensor, {}).items())
            found += [(f"{name} of {entry.fqn}", state) for name, state in states if isinstance(state, torch.Tensor)]
            for name, tensor in found:
                if num_replicas(tensor, sharing) > 1:
                    yield name, stage + _place(tensor), tensor


def _place(tensor: torch.Tensor) -> _Place:
    if not isinstance(tensor, DTensor):
        return ()
    coordinate, names = tensor.device_mesh.get_coordinate(), tensor.device_mesh.mesh_dim_names
    assert coordinate is not None and names is not None
    axes = zip(names, coordinate, tensor.placements, strict=True)
    return tuple((name, at) for name, at, placement in axes if hasattr(placement, "dim"))


def _differing(gathered: Sequence[dict[Any, Any]]) -> dict[Any, str]:
    """Return the keys whose values are not the same on all ranks that have them, with the ranks, the most first."""
    ranks_of: defaultdict[Any, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(gathered):
        for key, value in found.items():
            ranks_of[key][repr(value)].append(rank)
    differing = {}
    for key, by_value in ranks_of.items():
        if len(by_value) > 1:
            groups = sorted(by_value.values(), key=lambda ranks: (-len(ranks), ranks))
            differing[key] = " and ".join(f"ranks {list_ranks(ranks)}" for ranks in groups)
    return differing
