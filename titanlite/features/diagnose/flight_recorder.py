"""NCCL's flight recorder: what every rank's last collectives were, dumped when one of them times out.

Read the dumps with `torchfrtrace FOLDER --prefix rank_`: it names the collective that ranks disagree on. gloo has no
flight recorder; there the error of the rank that waited says which collective it was.
"""

import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import torch

FOLDER = "flight_recorder"
# Collectives kept per rank; 2,000 take about 1 MiB and are several steps of a large model.
_ENTRIES = 2000
# Names that torch 2.11 to 2.14 read, each with the older name that it still honours.
_SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", str(_ENTRIES)),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", ""),
)


def enable_flight_recorder(dump_folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL, if there are GPUs, dump to `dump_folder/flight_recorder/rank_N` when a collective times out.

    Call it before the process group is made, which reads the environment. What the user has set there stays.
    """
    if not torch.cuda.is_available():
        return
    folder = dump_folder.absolute() / FOLDER
    for name, old_name, value in _SETTINGS:
        if name not in environment and old_name not in environment:
            environment[name] = value or f"{folder}/rank_"
    # NCCL's watchdog makes no folder. A run that cannot write here ends soon with a clear error of `make_dump_folder`.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
