"""The certificate of a checkpoint: what its tensors are, where they came from, and what was done
with them.

Everything in it but `mesh` is the same on any mesh, as far as the run is: sums in another order
change the last bits of trained weights, and so their digests.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.folder import OWN_FOLDER, Stored, read_json, read_model_headers
from titanlite.features.verify.scan import scan
from titanlite.materialize import Plan, Read, TensorEntry, digest_plan
from titanlite.materialize.digest import MODULUS, add_up

CERTIFICATE_FILE = f"{OWN_FOLDER}/certificate.json"


def read_certificate(folder: Path) -> dict[str, Any]:
    """Return the certificate in `folder`; empty without one.

    Raises CheckpointError: it is damaged, or of a format that is not known here.
    """
    path = folder / CERTIFICATE_FILE
    found = read_json(path, f"checkpoint {folder}") if path.exists() else {"format": 1}
    if found.pop("format", 0) != 1:
        raise CheckpointError(f"checkpoint {path}: its format is not known to this version.")
    return found


def certify(plan: Plan, folder: Path, base: Path | None = None, **facts: Any) -> None:
    """Write the certificate of the tensors of `plan`, as they are in memory, into `folder`.

    Args:
        base: folder of the model that training began with.
        facts: of the run, as they shall be in the certificate.

    Collectives: as `digest_plan` and `digest_base`; every rank must call.
    """
    digests = digest_plan(plan)
    origin = {} if base is None else digest_base(base)
    entries = {entry.fqn: entry for entry in plan.entries}
    rows = {
        name: describe(entries[name], entries[name].info.shape, entries[name].dtype, value)
        for name, value in digests.items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        (folder / OWN_FOLDER).mkdir(parents=True, exist_ok=True)
        (folder / CERTIFICATE_FILE).write_bytes(render(facts, origin, rows))


def digest_base(folder: Path) -> dict[str, str]:
    """Return the digest of each tensor of the Hugging Face model in `folder`, by its key.

    Raises CheckpointError: it cannot be read. The ranks share the work; collectives: one
    all-reduce; every rank must call.
    """
    stored = read_model_headers(folder)
    rank, step = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = dict(list(stored.tensors.items())[rank::step])
    looks = scan(replace(stored, tensors=mine), Stored({}, {}))
    parts = [looks[key].digest if key in looks else 0 for key in stored.tensors]
    pairs = zip(stored.tensors.values(), add_up(parts), strict=True)
    return {tensor.key: spell(tensor.dtype, value) for tensor, value in pairs}


def spell(dtype: torch.dtype, digest: int) -> str:
    """Return dtype and digest as they are in a certificate."""
    return f"{str(dtype).removeprefix('torch.')}:{digest % MODULUS:016x}"


def describe(
    entry: TensorEntry | None, shape: tuple[int, ...], dtype: torch.dtype, digest: int
) -> dict[str, Any]:
    """Return the row of a stored tensor; `entry` is None if the model does not compute it."""
    source, state = "carried", "carried"
    if entry is not None:
        source = "base" if isinstance(entry.source, Read) else str(entry.source)
        state = "trained" if entry.tensor.requires_grad else "frozen"
        state = "buffer" if entry.info.kind == "buffer" else state
    return {
        "state": state,
        "source": source,
        "shape": list(shape),
        "digest": spell(dtype, digest),
    }


def render(
    facts: Mapping[str, Any], base: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]]
) -> bytes:
    """Return the file, with a line for each tensor."""
    table = {"format": 1, **facts, "tensors": rows, "base": base}
    text = json.dumps(table, indent=1)
    return (re.sub(r"\n {3,}|\n {2}(?=[\]}])", " ", text) + "\n").encode()
