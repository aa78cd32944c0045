"""The choice of open settings, which the configuration does not set: the fastest expected ones that
fit, for the same batch. It never changes the training's result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from titanlite.base.errors import ConfigError
from titanlite.base.process import read_ranks_here
from titanlite.base.text import format_memory
from titanlite.checkpoint.train_state import Progress
from titanlite.config import JobConfig
from titanlite.config.parallelism import (
    CHOSEN,
    check_parallelism,
    resolve_degrees,
    resolve_global_batch_size,
    set_values,
)
from titanlite.config.settings import get_settings, get_value
from titanlite.features.choice.formula import Setup, Sizes, count_bytes, count_seconds
from titanlite.features.choice.hardware import DEFAULT_GPU, Hardware, get_hardware
from titanlite.models.families import part_sizes
from titanlite.preflight import Checked

_MARGIN = 0.03  # fraction of the memory that a choice leaves free
_MUCH = 1.15  # speedup from which on a larger batch is mentioned
_NEARLY = 0.93  # fraction of the speed with the largest batch
_LARGER = (2, 4, 8, 16)
SHORTEST_PIECE = 4096  # fewest tokens of a sequence on a rank of context parallelism
MODES = ("none", "selective", "keep_attention", "full")  # of recomputation
_REPLICATE, _CONTEXT, _EXPERT, _LOCAL, _MODE = CHOSEN
_BATCH = "training.global_batch_size"


@dataclass(frozen=True)
class Choice:
    """Values of settings, and their speed and memory by the closed form.

    Attributes:
        values: values of settings, by key.
        rate: tokens per second and GPU.
        nbytes: bytes of a rank at the step's peak of memory.
        batch: sequences of a step.
        fits: True if 3 % of the memory stays free.
        larger: the choice for a batch of 2 to 16 times as many sequences, the smallest that is
            nearly as fast as the largest; None if it is not much faster.
    """

    values: Mapping[str, int | str]
    rate: float = 0.0
    nbytes: float = 0.0
    batch: int = 0
    fits: bool = True
    larger: "Choice | None" = None

    def __str__(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.values.items())

    def of_mesh(self) -> "Choice":
        """Return the choice without the settings that depend on the batch of a step."""
        values = {key: self.values[key] for key in self.values if key not in (_LOCAL, _MODE)}
        return replace(self, values=values)


def find_hardware(device: torch.device) -> Hardware | None:
    """Return the GPU of this rank; None on CPU, for which nothing is chosen.

    A GPU that is not in the table gets the default GPU's rates, and its own memory.
    """
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    try:
        hardware = get_hardware(found.name)
    except ConfigError:
        hardware = get_hardware(DEFAULT_GPU)
    return replace(
        hardware,
        name=found.name,
        memory_bytes=found.total_memory,
        gpus_per_node=read_ranks_here(),
    )


def keep_choice(checked: Checked, progress: Progress) -> Choice | None:
    """Return the choice of the run that is resumed; None if it was for different ranks or another
    batch, or its checkpoint does not record it.
    """
    saved = progress.identity
    kinds = get_settings()
    ranks = checked.degrees.world_size
    if progress.world_size != ranks or any(key not in saved for key in checked.unwritten):
        return None
    kept = Choice({key: kinds[key].kind(saved[key]) for key in checked.unwritten})
    taken = take(checked, kept)
    parts = part_sizes(checked.model_config)
    problems = check_parallelism(taken.job, checked.model_config, taken.degrees, parts)
    return None if problems else kept


def take(checked: Checked, choice: Choice) -> Checked:
    """Return `checked` with the settings of `choice`."""
    job = set_values(checked.job, choice.values)
    degrees = resolve_degrees(job.parallelism, checked.degrees.world_size)
    left = tuple(key for key in checked.unwritten if key not in choice.values)
    return replace(checked, job=job, degrees=degrees, unwritten=left)


def choose(checked: Checked, sizes: Sizes, hardware: Hardware, batch: int | None = None) -> Choice:
    """Choose the open settings. Call in one process.

    Args:
        batch: sequences of a step on all ranks. None: the configured number or, if it is not set,
            one computed as if each sequence held one example.
    """
    if batch is None:
        batch = resolve_global_batch_size(checked.job, checked.degrees.dp)

    def find_best(batch: int) -> Choice:
        return max(find_all(checked, sizes, hardware, batch), key=_merit)

    chosen = find_best(batch)
    larger = [find_best(batch * factor) for factor in _LARGER]
    most = max(one.rate for one in larger if one.fits) if larger[-1].fits else 0.0
    enough = next(one for one in larger if one.rate >= _NEARLY * most)
    is_much_faster = enough.fits and enough.rate > _MUCH * chosen.rate
    return replace(chosen, larger=enough if is_much_faster else None)


def describe(choice: Choice, hardware: Hardware) -> str:
    """Describe the choice, its reason, and its speed and memory in a line."""
    why = "the fastest expected" if choice.fits else "THE LEAST MEMORY, AND PERHAPS TOO MUCH,"
    text = (
        f"{choice}: {why} for steps of {choice.batch} sequences, about {choice.rate:,.0f} tokens/s "
        f"per GPU and {format_memory(choice.nbytes)} of {format_memory(hardware.usable_bytes)}"
    )
    if (larger := choice.larger) is None:
        return text
    batch = f"training.global_batch_size = {larger.batch}"
    return f"{text}; with {batch} about {larger.rate:,.0f} tokens/s"


def _merit(choice: Choice) -> tuple[bool, float]:
    return choice.fits, choice.rate if choice.fits else -choice.nbytes


def find_all(checked: Checked, sizes: Sizes, hardware: Hardware, batch: int) -> Iterator[Choice]:
    """Yield every legal combination of the open settings, for steps of `batch` sequences."""
    job = checked.job
    ranks = checked.degrees.world_size
    model_config = checked.model_config
    parts = part_sizes(model_config)
    usable = hardware.usable_bytes * (1 - _MARGIN)
    options = {
        key: values if key in checked.unwritten else [get_value(job, key)]
        for key, values in _list_options(job, ranks, hardware, batch).items()
    }
    for combination in product(*options.values()):
        values = dict(zip(options, combination, strict=True))
        changed = set_values(job, values | {_BATCH: batch})
        try:
            degrees = resolve_degrees(changed.parallelism, ranks)
        except ConfigError:
            continue
        sequences = degrees.dp * changed.training.local_batch_size
        if batch % sequences or check_parallelism(changed, model_config, degrees, parts):
            continue
        setup = Setup(changed, degrees, batch // sequences)
        nbytes = count_bytes(sizes, setup)
        seconds = count_seconds(sizes, setup, hardware)
        chosen = {key: value for key, value in values.items() if key in checked.unwritten}
        if job.training.global_batch_size == -1 and sequences != batch:
            chosen[_BATCH] = batch
        yield Choice(
            values=chosen,
            rate=batch * job.training.seq_len / ranks / seconds,
            nbytes=nbytes,
            batch=batch,
            fits=nbytes <= usable,
        )


def _list_options(
    job: JobConfig, ranks: int, hardware: Hardware, batch: int
) -> dict[str, list[Any]]:
    """Return the values to try for each of `CHOSEN`."""
    nodes = max(ranks // hardware.gpus_per_node, 1)
    longest = job.training.seq_len // SHORTEST_PIECE
    return {
        _REPLICATE: sorted({1, nodes}),
        _CONTEXT: [n for n in list_divisors(ranks) if n == 1 or n <= longest],
        _EXPERT: list_divisors(ranks),
        _MODE: [*MODES],
        _LOCAL: list_divisors(batch),
    }


def list_divisors(number: int) -> list[int]:
    """Return the positive integers that divide `number`, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
