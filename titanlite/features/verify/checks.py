"""Checks of a folder of weights: of the weights alone, against the base model, and against the
certificate.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

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
from titanlite.features.verify.certificate import digest_base, read_certificate, spell
from titanlite.features.verify.scan import GROUPS, PLAIN, Look, scan

_FULL = {"norms", "routers, biases", "embedding"}  # groups that adapters leave unchanged
_KEPT = ("frozen", "carried")
_ENOUGH = 1 << 14  # elements needed to recognize a distribution


@dataclass
class Report:
    """Problems, each a sentence with a remedy; notes; and a table of the groups."""

    folder: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    table: list[tuple[str, ...]] = field(default_factory=list)

    def blame(self, keys: Iterable[str], sentence: str) -> None:
        """Add `sentence` as a problem of `keys`, if there are any."""
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


def verify_folder(folder: Path, base: Path | None = None, *, frozen: str = "") -> Report:
    """Read a Hugging Face folder, or adapters, once, and check it.

    Args:
        base: folder of the model that training began with.
        frozen: pattern of the keys that training should not have changed.
    """
    report = Report(str(folder))
    is_adapter = (folder / ADAPTER_FILE).exists()
    try:
        certificate = read_certificate(folder)
        path = folder / (ADAPTER_CONFIG if is_adapter else "config.json")
        config = read_json(path, str(folder)) if path.exists() else {}
        stored = _read(folder, report)
        origin = Stored({}, {}) if base is None else read_model_headers(base)
        looks = scan(stored, origin)
        known: dict[str, str] = certificate.get("base", {})
        seen = {
            key: spell(origin.tensors[key].dtype, sum(look.base_digest for look in parts))
            for key, parts in looks.items()
            if any(look.compared for look in parts)
        }
        if base is not None and is_adapter and known:
            seen = digest_base(base)
    except CheckpointError as error:
        report.problems += [line.strip() for line in str(error).splitlines()]
        return report
    report.blame(
        [key for key in known if seen.get(key, known[key]) != known[key]],
        f"{base} is not the base that the run began with. Give the right revision.",
    )
    rows = certificate.get("tensors", {})
    now = {}
    for key, parts in looks.items():
        now[key] = spell(stored.tensors[key].dtype, sum(look.digest for look in parts))
        for look in parts:
            look.dtype = now[key].partition(":")[0]
            look.before = seen.get(key, known.get(key, ""))
            look.row = rows.get(key, {"state": "frozen"} if fnmatch(key, frozen) else {})
            same = look.digest == look.base_digest if look.compared else look.before == now[key]
            look.is_kept = same and look.before.startswith(look.dtype)
    tensors = [look for parts in looks.values() for look in parts]
    _check(tensors, config, report)
    _check_saved(now, rows, report)
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
    own = read_headers((folder / OWN_FOLDER).glob(SIDECAR_FILE), str(folder))
    return Stored(stored.tensors | own.tensors, stored.file_bytes | own.file_bytes)


def _check(tensors: Sequence[Look], config: Mapping[str, Any], report: Report) -> None:
    """Check each tensor by itself. A tensor that equals the base's is skipped: its problems are the
    base's.
    """
    first: dict[int, str] = {}
    for t in tensors:
        if t.is_matrix and not (t.group == "head" and config.get("tie_word_embeddings")):
            first.setdefault(t.own, t.key)
    changed = [t for t in tensors if not t.is_kept]
    report.blame(
        [t.key for t in changed if not t.finite],
        "has NaN or infinite elements. Take an earlier checkpoint.",
    )
    report.blame(
        [t.key for t in changed if len(t.shape) > 1 and not t.varied],
        "all its elements are equal, such as 0: it was not trained, loaded or saved.",
    )
    report.blame(
        [f"{t.key} ({first[t.own]})" for t in changed if first.get(t.own, t.key) != t.key],
        "has the bits of the one in brackets: one was written twice.",
    )
    report.blame(
        [
            t.key
            for t in changed
            if is_bias(t.key) and t.varied and not (t.exact and t.dtype == "float32")
        ],
        "a selection bias was rounded to 16 bits, so routers choose others. Keep it in float32.",
    )
    dtype = {**config, **config.get("text_config", {})}.get("dtype")
    others = {str(x).removeprefix("torch.") for x in PLAIN} - {dtype, "float32"}
    report.blame(
        [t.key for t in changed if dtype and t.dtype in others],
        f"is not in {dtype}, the dtype in config.json. Save it in that.",
    )


def _check_saved(now: Mapping[str, str], rows: Mapping[str, Any], report: Report) -> None:
    key_of = {row["digest"]: key for key, row in rows.items()}
    report.blame(
        [
            f"{key} ({row['state']}, has {key_of.get(now[key], 'other bits')})"
            for key, row in rows.items()
            if now.get(key, row["digest"]) != row["digest"]
        ],
        "is not what was saved. Copy the folder again.",
    )
    report.blame(rows.keys() - now.keys(), "was saved, and is missing. Copy the folder again.")


def _check_training(tensors: Sequence[Look], config: Mapping[str, Any], report: Report) -> None:
    compared = [t for t in tensors if t.before]
    moved = [t for t in compared if not t.is_kept]
    report.blame(
        [t.key for t in moved if t.row.get("state") in _KEPT and t.before.startswith(t.dtype)],
        "was not trained, and differs from the base. Something changed it.",
    )
    report.blame(
        [t.key for t in moved if t.is_matrix and t.change > 0.9],
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
    fresh = [t for t in large if t.is_normal(deviation) and not t.before]
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


def _tabulate(tensors: Sequence[Look]) -> list[tuple[str, ...]]:
    rows = [("group", "tensors", "dtype", "differ from the base", "by (median, most)")]
    for name in GROUPS:
        group = [t for t in tensors if t.group == name]
        compared = [t for t in group if t.before]
        changes = [t.change for t in group if t.compared]
        moved = sum(not t.is_kept for t in compared)
        if group:
            by = f"{median(changes):.2%}, {max(changes):.2%}" if changes else "-"
            differ = f"{moved} of {len(compared)}" if compared else "-"
            dtypes = ", ".join(sorted({t.dtype for t in group}))
            rows.append((name, str(len(group)), dtypes, differ, by))
    return rows
