"""The state of a run in addition to the model: optimizer states, and the numbers in
train_state.json.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import CheckpointError, raise_problems
from titanlite.checkpoint.folder import OWN_FOLDER, Stored, read_headers, read_json
from titanlite.checkpoint.reader import SafetensorsReader
from titanlite.checkpoint.writer import FileLayout, lay_out_tensors
from titanlite.materialize import Plan, Read, TensorEntry
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
    return lay_out_tensors([*_named_states(plan, optimizer)], _OPTIMIZER, plan.group)


def _named_states(
    plan: Plan, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield key and tensor of every state, in the plan's order. States on other pipeline stages are
    meta tensors. If a parameter has no states while other parameters have some, a marker is yielded
    in place of its states.
    """
    trained = _trained(plan, optimizer)
    stepped = {entry.fqn for entry, _ in trained if entry.tensor in optimizer.state}
    stepped = plan.names_on_any_stage(stepped)
    for entry, names in trained if stepped else ():
        if entry.fqn not in stepped:
            yield f"{_UNSTEPPED}.{entry.fqn}", torch.zeros(())
            continue
        param = entry.tensor
        for name in names:
            is_here = not entry.is_remote
            state = (
                optimizer.state[param][name] if is_here else _empty_state(param, name, optimizer)
            )
            yield f"{name}.{entry.fqn}", state


def _trained(
    plan: Plan, optimizer: torch.optim.Optimizer
) -> list[tuple[TensorEntry, Sequence[str]]]:
    """Return the trained parameters in the plan's order, each with the names of its states."""
    names = {
        param: sorted(group["state_names"])
        for group in optimizer.param_groups
        for param in group["params"]
    }
    return [(entry, names[entry.tensor]) for entry in plan.entries if entry.tensor in names]


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
    reader = SafetensorsReader.of_tensors(what, stored.values())
    reads: list[tuple[torch.Tensor, Read]] = []
    for param, name, key in _match(where, stored, plan, optimizer):
        tensor = stored[key]
        value = _empty_state(param, name, optimizer, tensor.dtype)
        if not is_remote(param):
            optimizer.state[param][name] = value
        reads.append((value, Read(reader, key, tensor.shape)))
    read_tensors(reads, plan)


def _match(
    where: str, states: Stored, plan: Plan, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[torch.Tensor, str, str]]:
    """Yield (parameter, state name, key) of every stored state, in the order of the model, the same
    on all ranks.

    Raises CheckpointError: a state has no trained parameter or a different shape, or some states of
    a parameter are missing.
    """
    wanted = {
        f"{name}.{entry.fqn}": (entry.tensor, name)
        for entry, names in _trained(plan, optimizer)
        if f"{_UNSTEPPED}.{entry.fqn}" not in states
        for name in names
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
    param: torch.Tensor,
    name: str,
    optimizer: torch.optim.Optimizer,
    step_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return memory for a state of `param`; a remote meta tensor if other ranks hold it."""
    is_step = name == "step"
    options = optimizer.defaults
    dtype = step_dtype if is_step else options.get("state_dtype") or param.dtype
    if is_remote(param):
        state = torch.empty(() if is_step else param.shape, dtype=dtype, device="meta")
        mark_remote(state)
        return state
    local = local_of(param)
    if not is_step:
        return sharded_like(param, torch.empty(local.shape, dtype=dtype, device=local.device))
    # torch keeps the step counter on the host unless a kernel reads it.
    on_device = options.get("fused") or options.get("capturable")
    return torch.empty((), dtype=dtype, device=local.device if on_device else "cpu")
