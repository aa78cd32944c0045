"""The certificate of a checkpoint: its tensors, their origin, and how the run treated them.

All of it except `mesh` is the same on any mesh, as far as training is: sums in a different order
change the last bits of trained weights, and so their digests.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.base.agree import gather_objects, get_rank_and_size, together
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.folder import CERTIFICATE_FILE, read_json, read_model_headers
from titanlite.features.verify.scan import Look, scan
from titanlite.materialize.digest import MODULUS, shift


def read_certificate(folder: Path) -> dict[str, Any]:
    """Return the certificate in `folder`; empty without one.

    Raises CheckpointError: the certificate is damaged, or in an unknown format.
    """
    path = folder / CERTIFICATE_FILE
    found = read_json(path, f"checkpoint {folder}") if path.exists() else {"format": 1}
    if found.pop("format", 0) != 1:
        raise CheckpointError(f"checkpoint {path}: its format is not known to this version.")
    return found


def digest_base(folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the digest of each tensor of the Hugging Face model in `folder`, by its key.

    Raises CheckpointError, on all ranks: a rank cannot read it. The ranks of `group` share the
    work; collectives: two small ones; every rank must call.
    """
    found: dict[str, str] = {}
    with together(group):
        stored = read_model_headers(folder)
        rank, ranks = get_rank_and_size()
        found = spell_all(scan(dict([*stored.items()][rank::ranks])))
    parts = gather_objects(found, group)
    return dict(sorted(item for part in parts for item in part.items()))


def spell_all(looks: Iterable[Look]) -> dict[str, str]:
    """Format dtypes and digests of stored tensors, by key."""
    sums: Counter[Any] = Counter()
    for look in looks:
        words = look.row * look.stored.nbytes // 8
        sums[look.stored.key, look.stored.dtype] += look.digest * shift(words)
    return {key: spell(dtype, value) for (key, dtype), value in sums.items()}


def spell(dtype: torch.dtype, digest: int) -> str:
    """Format dtype and digest as in a certificate."""
    return f"{str(dtype).removeprefix('torch.')}:{digest % MODULUS:016x}"


def render(certificate: Mapping[str, Any]) -> bytes:
    """Return the certificate's file, with a line for each tensor."""
    text = json.dumps({"format": 1, **certificate}, indent=1)
    return (re.sub(r"\n {3,}|\n {2}(?=[\]}])", " ", text) + "\n").encode()
