"""The state of a run in addition to the model: optimizer states, and the numbers in
train_state.json.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import gather_objects, on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import OWN_FOLDER, StoredTensor, read_headers, read_json
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.checkpoint.writer import FileLayout, Item, lay_out
from titanlite.materialize import Plan, Read, assign_owners, region_of
from titanlite.materialize.execute import read_tensors, sharded_like
from titanlite.materialize.layout import is_remote, local_of, mark_remote

STATE_FILE = f"{OWN_FOLDER}/train_state.json"
_OPTIMIZER = f"{OWN_FOLDER}/optimizer"
# name of a mark in place of states, for a trained parameter that had no gradient in any step
_UNSTEPPED = "unstepped"


@dataclass(frozen=True)
class Progress:
    """Position and results of a run; the content of train_state.json."""

    step: int  # optimizer steps completed
    samples: int  # sequences of the data order that all ranks together trained on, or skipped
    data: str  # describes the data order; if it changed, a resumed run trains on different data
    world_size: int  # ranks that wrote the checkpoint
    versions: Mapping[str, str]  # versions of titanlite and torch, for information
    results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # see `metrics.point`
    # sequences used from each source of a mixture, by name
    taken: Mapping[str, int] = field(default_factory=dict)
    chat_date: str = ""  # the date given to chat templates, in ISO format
    # identifies the run: see `metrics.run_folder`
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return int(self.identity["training.global_batch_size"])

    def to_json(self) -> bytes:
        return (json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """Read train_state.json in `folder`.

        Raises CheckpointError: the file is missing, damaged, or in a different format.
        """
        where = f"checkpoint {folder}"
        table = read_json(folder / STATE_FILE, where)
        if table.pop("format", None) != 1:
            raise CheckpointError(
                f"{where}: {STATE_FILE} is of a format that this version does not know."
            )
        try:
            return cls(**table)
        except TypeError:  # values need no check: the manifest has their checksum
            raise CheckpointError(
                f"{where}: {STATE_FILE} is damaged. Resume from an earlier step: "
                "checkpoint.load_step."
            ) from None


def state_files(plan: Plan, optimizer: torch.optim.Optimizer) -> list[FileLayout]:
    """Lay out the files with optimizer states. Every rank must call with the same arguments.

    Collectives: with pipeline stages one gather of small objects.
    """
    states = [*_named_states(plan, optimizer)]
    items = []
    for (key, value), replica in zip(
        states, assign_owners((value for _, value in states), plan.group), strict=True
    ):
        piece = whole(key, tuple(value.shape))
        items.append(Item(piece, value.dtype, local_of(value), region_of(value), replica.is_owner))
    return lay_out(items, _OPTIMIZER) if items else []


def _named_states(
    plan: Plan, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield key and tensor of every state, in the plan's order. States on other pipeline stages are
    meta tensors. If a parameter has no states while others have some, a mark is yielded in their
    place.
    """
    names_of = {
        param: group["state_names"] for group in optimizer.param_groups for param in group["params"]
    }
    stepped = {entry.fqn for entry in plan.entries if entry.tensor in optimizer.state}
    if plan.group is not None:  # each stage knows only its own states
        stepped = set().union(*gather_objects(stepped))
    state_dtype = optimizer.defaults.get("state_dtype")
    for entry in plan.entries:
        if entry.tensor not in names_of or not stepped:
            continue
        if entry.fqn not in stepped:
            yield f"{_UNSTEPPED}.{entry.fqn}", torch.zeros(())
            continue
        for name in sorted(names_of[entry.tensor]):
            if entry.is_remote:
                value = _remote_state(entry.tensor, name, state_dtype)
            else:
                value = optimizer.state[entry.tensor][name]
            yield f"{name}.{entry.fqn}", value


def _remote_state(param: torch.Tensor, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    shape, dtype = ((), torch.float32) if name == "step" else (param.shape, dtype or param.dtype)
    state = torch.empty(shape, dtype=dtype, device="meta")
    mark_remote(state)
    return state


def load_state(folder: Path, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Load the states of the checkpoint in `folder` into `optimizer`.

    Raises CheckpointError, on all ranks: files are missing or damaged, or hold states of a
    different model.

    Collectives: a broadcast of the headers, and the collectives of `read_tensors`; every rank must
    call.
    """
    where = f"checkpoint {folder}"
    files = sorted((folder / OWN_FOLDER).glob("optimizer*.safetensors"))
    stored = on_first_rank(lambda: read_headers(files, where))
    what = f"optimizer states of {folder}"
    reader = SafetensorsReader.of_keys(what, stored, stored.tensors)
    reads: list[tuple[torch.Tensor, Read]] = []
    for param, name, key in _match(where, stored.tensors, plan, optimizer):
        value = param
        if not is_remote(param):
            value = optimizer.state[param][name] = _empty_state(
                param, name, stored.tensors[key], optimizer
            )
        reads.append((value, Read(reader, key, stored.tensors[key].shape)))
    read_tensors(reads, plan)


def _match(
    where: str, states: Mapping[str, StoredTensor], plan: Plan, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.Tensor, str, str]]:
    """Yield (parameter, state name, key) of every stored state, in the order of the model, the same
    on all ranks.

    Raises CheckpointError: a state has no trained parameter or a different shape, or some states of
    a parameter are missing.
    """
    names = {
        id(param): group["state_names"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    trained = [entry for entry in plan.entries if id(entry.tensor) in names]
    wanted = {
        f"{name}.{entry.fqn}": (entry.tensor, name)
        for entry in trained
        if f"{_UNSTEPPED}.{entry.fqn}" not in states
        for name in sorted(names[id(entry.tensor)])
    }
    # A parameter without states may be trained or not: it may have been frozen since.
    states = {key: tensor for key, tensor in states.items() if not key.startswith(f"{_UNSTEPPED}.")}
    remedy = (
        "Set optimizer.name, optimizer.freeze and the other settings that choose them as before."
    )
    problems = [
        f"{key}: the optimizer trains no parameter with this state. {remedy}"
        for key in states
        if key not in wanted
    ]
    problems += [
        f"{key}: missing, but the optimizer needs it. {remedy}"
        for key in wanted
        if states and key not in states
    ]
    for key, (param, name) in wanted.items():
        if key in states and name != "step" and states[key].shape != tuple(param.shape):
            problems.append(
                f"{key}: has shape {states[key].shape}, the parameter {tuple(param.shape)}."
            )
    raise_problems(CheckpointError, where, problems)
    yield from ((param, name, key) for key, (param, name) in wanted.items() if key in states)


def _empty_state(
    param: torch.Tensor, name: str, stored: StoredTensor, optimizer: torch.optim.Optimizer
) -> torch.Tensor:
    if name != "step":
        local = local_of(param)
        dtype = optimizer.defaults.get("state_dtype") or local.dtype
        return sharded_like(param, torch.empty(local.shape, dtype=dtype, device=local.device))
    # torch keeps the step counter on the host unless a kernel reads it.
    on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
    return torch.empty(
        stored.shape, dtype=stored.dtype, device=local_of(param).device if on_device else "cpu"
    )
