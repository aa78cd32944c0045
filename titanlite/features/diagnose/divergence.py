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
from titanlite.materialize.layout import local_of, num_replicas
from titanlite.materialize.verify import bit_digest

# Which shard of which layout: the ranks with the same one hold the same bits.
_Place = tuple[tuple[str, int], ...]


class DivergenceCheck:
    """Compares what ranks must have in common, every `training.divergence_check_freq` steps.

    Args:
        job: the configuration; that ranks have the same one, `titanlite.launch.machines` sees to at the start.
        plan: of the model's tensors.
        optimizer: whose states are compared.
        dims: ranks with the same `dp_rank` must read the same batches, those of a stage may hold the same tensors.
        step: steps done so far.
    """

    def __init__(
        self, job: JobConfig, plan: Plan, optimizer: torch.optim.Optimizer, dims: ParallelDims, step: int
    ) -> None:
        self._freq = job.training.divergence_check_freq
        self._plan, self._optimizer, self._dims = plan, optimizer, dims
        self._agreed_step = step

    def is_due(self, step: int) -> bool:
        """Return True if the ranks are to be compared after `step`."""
        return self._freq > 0 and step % self._freq == 0

    @torch.no_grad()
    def check(self, step: int, data: str, samples: int, batches: Sequence[Batch]) -> None:
        """Compare all ranks after `step`. Synchronizes.

        Args:
            step: optimizer steps done.
            data: description of the data order.
            samples: sequences of it that were trained on.
            batches: this rank's micro-batches of the step.

        Raises:
            DivergenceError: on all ranks; names the tensors, and which ranks differ, and since when.

        Collectives: one all-gather of small objects over the default process group, a second one where ranks differ;
        every rank must call.
        """
        held = dict(self._held())
        # Some states are on the CPU where others are not: `step` of AdamW unless it is fused, and what is offloaded.
        device = batches[0].tokens.device
        digests = [bit_digest(local_of(tensor)).to(device, non_blocking=True) for _, tensor in held.values()]
        digests = torch.stack(digests).tolist() if digests else []
        by_place: defaultdict[_Place, list[tuple[int, int]]] = defaultdict(list)
        for (place, _), digest in zip(held.values(), digests, strict=True):
            by_place[place].append(tuple(digest))
        batch = torch.stack([bit_digest(batch.tokens) for batch in batches]).tolist()
        mine: dict[Any, Any] = {place: hash(tuple(found)) for place, found in by_place.items()}
        mine["step"], mine["samples of the data order"] = step, samples
        mine["data order"] = data
        mine["batch of data-parallel rank", self._dims.dp_rank] = batch
        problems = self._compare(gather_objects(mine), held, digests)
        if problems:
            since = f"between step {self._agreed_step} and step {step}"
            problems[-1] += (
                f" It happened {since}; a faulty machine is the usual cause, then a change of the code that not all "
                "ranks have. Start again from a checkpoint of before, without that machine."
            )
        raise_problems(DivergenceError, f"ranks differ after step {step}", problems)
        self._agreed_step = step

    def _held(self) -> Iterator[tuple[str, tuple[_Place, torch.Tensor]]]:
        """(name, (place, tensor)) of everything that another rank must hold, too."""
        sharing, stage = self._dims.degrees.stage_size, (("pp", self._dims.stage),)
        for entry in self._plan.entries:
            if entry.is_elsewhere:
                continue
            # What is not persistent may belong to this rank, such as the tokens that its experts got.
            if entry.info.persistent and num_replicas(entry.tensor, sharing) > 1:
                yield entry.fqn, (stage + _place(entry.tensor), entry.tensor)
            for name, state in sorted(self._optimizer.state.get(entry.tensor, {}).items()):
                if isinstance(state, torch.Tensor) and num_replicas(state, sharing) > 1:
                    yield f"{name} of {entry.fqn}", (stage + _place(state), state)

    def _compare(
        self, gathered: list[dict[Any, Any]], held: dict[str, tuple[_Place, torch.Tensor]], digests: list[list[int]]
    ) -> list[str]:
        """Problems, the same on all ranks."""
        differing = _differing(gathered)
        problems = [
            f"the {' '.join(map(str, key)) if isinstance(key, tuple) else key} is not the same on {ranks}."
            for key, ranks in differing.items()
            if not _is_place(key)
        ]
        if any(_is_place(key) for key in differing):
            by_name = {(name, place): tuple(d) for (name, (place, _)), d in zip(held.items(), digests, strict=True)}
            problems += [
                f"{name}: replicas differ between {ranks}."
                for (name, _), ranks in _differing(gather_objects(by_name)).items()
            ]
        return problems


def _place(tensor: torch.Tensor) -> _Place:
    if not isinstance(tensor, DTensor):
        return ()
    coordinate, names = tensor.device_mesh.get_coordinate(), tensor.device_mesh.mesh_dim_names
    assert coordinate is not None and names is not None
    split = [name for name, placement in zip(names, tensor.placements, strict=True) if hasattr(placement, "dim")]
    return tuple((name, at) for name, at in zip(names, coordinate, strict=True) if name in split)


def _is_place(key: Any) -> bool:
    return isinstance(key, tuple) and all(isinstance(axis, tuple) for axis in key)


def _differing(gathered: list[dict[Any, Any]]) -> dict[Any, str]:
    """Return the keys whose values are not the same on all ranks that have them, with the ranks, the most first."""
    ranks_of: defaultdict[Any, defaultdict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(gathered):
        for key, value in found.items():
            ranks_of[key][repr(value)].append(rank)
    return {
        key: " and ".join(
            f"ranks {list_ranks(ranks)}" for ranks in sorted(by_value.values(), key=lambda r: (-len(r), r))
        )
        for key, by_value in ranks_of.items()
        if len(by_value) > 1
    }
