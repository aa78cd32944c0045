"""Checks of a folder of weights: what is wrong in itself, against the base, and against what its
certificate says.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from titanlite.base.errors import CheckpointError
from titanlite.base.text import format_table
from titanlite.checkpoint.bias import is_bias
from titanlite.checkpoint.folder import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    INDEX_FILE,
    OWN_FOLDER,
    Stored,
    read_headers,
    read_json,
    read_model_headers,
)
from titanlite.checkpoint.pieces import SIDECAR_FILE
from titanlite.features.verify.certificate import read_certificate, spell
from titanlite.features.verify.scan import PLAIN, Look, scan

# A tensor belongs to the first group whose pattern its key has.
_GROUPS = {
    "norms": "norm",
    "routers, biases": r"(gate|router)\.|bias$",
    "experts": "expert",
    "embedding": "embed|wte",
    "head": "head",
    "attention": "attn|attention",
    "others": "",
}
_FULL = {"norms", "routers, biases", "embedding"}  # adapters leave them as they are
_KEPT = ("frozen", "carried")
_ENOUGH = 1 << 14  # elements, to tell a distribution


class Tensor(NamedTuple):
    """A stored tensor: `now` and `before` (in the base) are its digests, `row` is that of the
    certificate.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    look: Look
    now: str
    before: str | None
    row: Mapping[str, Any]

    @property
    def group(self) -> str:
        return next(name for name, pattern in _GROUPS.items() if re.search(pattern, self.key))

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1 and self.look.varied > 0

    @property
    def is_kept(self) -> bool:
        return self.now == self.before


@dataclass
class Report:
    """Problems, each a sentence to act on; notes; and a table of the groups."""

    folder: str
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    table: list[tuple[str, ...]] = field(default_factory=list)

    def blame(self, keys: Iterable[str], sentence: str) -> None:
        """Add a problem of `keys`, if there are any."""
        names = list(dict.fromkeys(keys))
        if names:
            more = f" and {len(names) - 3} more" if names[3:] else ""
            self.problems.append(f"{', '.join(names[:3])}{more}: {sentence}")

    def __str__(self) -> str:
        count = f"FAILED ({len(self.problems)}): " if self.problems else "sound"
        lines = [f"{self.folder}: {count}{'; '.join(self.problems[:1])}"]
        lines += [f"  also: {text}" for text in self.problems[1:10]]
        lines += [format_table(self.table)] if self.table else []
        return "\n".join([*lines, *(f"  note: {text}" for text in self.notes)])


def verify_folder(
    folder: Path, base: Path | None = None, *, problems: Sequence[str] = (), frozen: str = ""
) -> Report:
    """Read a Hugging Face folder, or adapters, once, and check it.

    Args:
        base: folder of the model that training began with.
        problems: those that are known already.
        frozen: pattern of the keys that training was to leave as they were.
    """
    report = Report(str(folder), list(problems))
    is_adapter = (folder / ADAPTER_FILE).exists()
    try:
        certificate = read_certificate(folder)
        path = folder / (ADAPTER_CONFIG if is_adapter else "config.json")
        config = read_json(path, str(folder)) if path.exists() else {}
        stored = _read(folder, report)
        origin = Stored({}, {}) if base is None else read_model_headers(base)
        looks = scan(stored, origin)
        known = certificate.get("base", {})
        given = {key: look.base_digest for key, look in looks.items() if look.compared}
        if known and is_adapter:
            given = {key: look.digest for key, look in scan(origin, Stored({}, {})).items()}
    except CheckpointError as error:
        report.problems += [line.strip() for line in str(error).splitlines()]
        return report
    seen = {key: spell(origin.tensors[key].dtype, digest) for key, digest in given.items()}
    report.blame(
        [key for key, value in seen.items() if known and known.get(key) != value],
        f"{base} is not the base that the run began with. Give the right revision.",
    )
    rows = certificate.get("tensors", {})
    tensors = []
    for key, look in looks.items():
        _, dtype, shape, *_ = stored.tensors[key]
        row = rows.get(key, {"state": "frozen"} if fnmatch(key, frozen) else {})
        before = seen.get(key, known.get(key))
        now = spell(dtype, look.digest)
        tensors.append(Tensor(key, shape, now.partition(":")[0], look, now, before, row))
    _check(tensors, config, report)
    _check_saved({tensor.key: tensor.now for tensor in tensors}, rows, report)
    if is_adapter:
        _check_targets(looks, config, report)
    else:
        _check_training(tensors, config, report)
    report.table += _tabulate(tensors)
    return report


def _read(folder: Path, report: Report) -> Stored:
    if (folder / ADAPTER_FILE).exists():
        return read_headers([folder / ADAPTER_FILE], f"checkpoint {folder}")
    stored = read_model_headers(folder)
    if (folder / INDEX_FILE).exists():
        index = read_json(folder / INDEX_FILE, str(folder))["weight_map"]
        files = {key: tensor.file.name for key, tensor in stored.tensors.items()}
        stale = [key for key, _ in index.items() ^ files.items()]
        report.blame(stale, f"{INDEX_FILE} is stale: it and the files differ. Write it anew.")
    sidecar = folder / OWN_FOLDER / SIDECAR_FILE
    own = read_headers([sidecar] if sidecar.exists() else [], str(folder))
    return replace(
        stored,
        tensors=stored.tensors | own.tensors,
        file_bytes=stored.file_bytes | own.file_bytes,
    )


def _check(tensors: Sequence[Tensor], config: Mapping[str, Any], report: Report) -> None:
    """Check what tensors say by themselves; what is as in the base is the base's."""

    def blame(test: Callable[[Tensor], Any], sentence: str) -> None:
        report.blame([t.key for t in tensors if not t.is_kept and test(t)], sentence)

    blame(lambda t: t.look.bad, "has NaN or infinite elements. Take an earlier checkpoint.")
    blame(
        lambda t: len(t.shape) > 1 and not t.look.varied,
        "all its elements are equal, such as 0: it was not trained, loaded or saved.",
    )
    first: dict[tuple[str, tuple[int, ...]], str] = {}
    for t in tensors:
        if t.is_matrix and not (t.group == "head" and config.get("tie_word_embeddings")):
            original = first.setdefault((t.now, t.shape), t.key)
            if original != t.key:
                blame(lambda x, t=t: x is t, f"has the bits of {original}: one was written twice.")
    blame(
        lambda t: is_bias(t.key) and t.look.varied and not (t.look.exact and t.dtype == "float32"),
        "a selection bias was rounded to 16 bits, so routers choose others. Keep it in float32.",
    )
    dtype = {**config, **config.get("text_config", {})}.get("dtype")
    others = {str(x).removeprefix("torch.") for x in PLAIN} - {dtype, "float32"}
    blame(
        lambda t: dtype and t.dtype in others,
        f"is not in {dtype}, the dtype in config.json. Save it in that.",
    )


def _check_saved(now: Mapping[str, str], rows: Mapping[str, Any], report: Report) -> None:
    saved = {key: row["digest"] for key, row in rows.items()}
    key_of = {digest: key for key, digest in saved.items()}
    changed = [key for key in saved if key in now and now[key] != saved[key]]
    moved = [f"{key} (has {key_of[now[key]]})" for key in changed if now[key] in key_of]
    rest = [f"{key} ({rows[key]['state']})" for key in changed if now[key] not in key_of]
    report.blame(moved, "exchanged since it was saved. Copy the folder again.")
    report.blame(rest, "has other bits than were saved. Copy the folder again.")
    report.blame(saved.keys() - now.keys(), "was saved, and is missing. Copy the folder again.")


def _check_training(tensors: Sequence[Tensor], config: Mapping[str, Any], report: Report) -> None:
    compared = [t for t in tensors if t.before]
    moved = [t for t in compared if not t.is_kept]
    report.blame(
        [
            t.key
            for t in moved
            if t.row.get("state") in _KEPT and (t.before or "").startswith(t.dtype)
        ],
        "was not trained, and differs from the base. Something changed it.",
    )
    report.blame(
        [t.key for t in moved if t.is_matrix and t.look.change > 0.9],
        "has nothing in common with the base's: exchanged, permuted, or begun anew.",
    )
    groups = {t.group for t in moved}
    is_full = not groups or not groups.isdisjoint(_FULL)
    still = [t for t in compared if t.is_matrix and t.group not in groups]
    report.blame(
        [t.key for t in still if t.row.get("state") not in _KEPT and (t.row or is_full)],
        "is as in the base, and so is all of its group. If it was frozen: --frozen PATTERN.",
    )
    deviation = config.get("initializer_range") or 0.02
    large = [t for t in tensors if t.is_matrix and math.prod(t.shape) >= _ENOUGH]
    fresh = [t for t in large if t.look.is_normal(deviation) and t.before is None]
    mixed = {t.group for t in large if t not in fresh}
    report.blame(
        [t.key for t in fresh if mixed and t.group not in mixed and "init" not in str(t.row)],
        f"still normal with deviation {deviation:g}, as at first: not loaded, or not trained.",
    )


def _check_targets(keys: Iterable[str], config: Mapping[str, Any], report: Report) -> None:
    modules, parameters = (config.get(f"target_{kind}") or [] for kind in ("modules", "parameters"))
    names = {re.sub(r"(\.base_layer)*\.lora_.*", "", key) for key in keys}
    wanted = [] if isinstance(modules, str) else [*modules]
    wanted += [name.rpartition(".")[0] for name in parameters]
    report.blame(
        [name for name in wanted if not any(f".{at}".endswith(f".{name}") for at in names)],
        f"{ADAPTER_CONFIG} targets it, and no adapter of it is stored: it was not trained.",
    )


def _tabulate(tensors: Sequence[Tensor]) -> list[tuple[str, ...]]:
    rows = [("group", "tensors", "dtype", "differ from the base", "by (median, most)")]
    for name in _GROUPS:
        group = [t for t in tensors if t.group == name]
        compared = [t for t in group if t.before is not None]
        changes = [t.look.change for t in group if t.look.compared]
        moved = sum(not t.is_kept for t in compared)
        if group:
            by = f"{median(changes):.2%}, {max(changes):.2%}" if changes else "-"
            differ = f"{moved} of {len(compared)}" if compared else "-"
            dtypes = ", ".join(sorted({t.dtype for t in group}))
            rows.append((name, str(len(group)), dtypes, differ, by))
    return rows
