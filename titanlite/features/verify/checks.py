"""Checks of a folder of weights: of the weights alone, against the base model, and against the
certificate.
"""

import math
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
    Stored,
    read_headers,
    read_json,
    read_model_headers,
)
from titanlite.checkpoint.pieces import SIDECAR_FILE
from titanlite.features.verify.certificate import read_certificate, spell_all
from titanlite.features.verify.scan import GROUPS, Look, scan

_FULL = {"norms", "routers, biases", "embedding"}  # groups that adapters leave unchanged
_ENOUGH = 1 << 15  # bytes needed to recognize a distribution


@dataclass
class Report:
    """Result of the checks of one folder: problems, each a sentence with a remedy; notes; and a
    table with a row for each of the `GROUPS` of tensors.
    """

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
        verdict = f"FAILED ({len(self.problems)}): " if self.problems else "sound"
        lines = [f"{self.folder}: {verdict}{''.join(self.problems[:1])}"]
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
    origin: Stored = {}
    try:
        certificate = read_certificate(folder)
        known = certificate.get("base", {})
        stored = _read(folder, report)
        config = {}
        for path in (folder / "config.json", folder / ADAPTER_CONFIG):
            config |= read_json(path, str(folder)) if path.exists() else {}
        # the keys of adapters are not in their base, which is only read to be recognized
        if base is not None and (known or "peft_type" not in config):
            origin = read_model_headers(base)
        before = scan(origin)
        tensors = scan(stored, before)
    except CheckpointError as error:
        report.problems += [line.strip() for line in str(error).splitlines()]
        return report
    now, seen = spell_all(tensors), spell_all(before)
    report.blame(
        [key for key in known if seen.get(key, known[key]) != known[key]],
        f"{base} is not the base that the run began with. Give the right revision.",
    )
    rows = certificate.get("tensors", {})
    for t in tensors:
        key = t.stored.key
        t.dtype = now[key].partition(":")[0]
        t.before = seen.get(key) or known.get(key, "")
        t.entry = rows.get(key, {"state": "frozen"} if fnmatch(key, frozen) else {})
        same = t.before == now[key] if t.base is None else t.digest == t.base.digest
        t.is_kept = same and t.before.startswith(t.dtype)
    _check(tensors, config, report)
    _check_saved(now, rows, report)
    report.table += _tabulate(tensors)
    return report


def _read(folder: Path, report: Report) -> Stored:
    if (folder / ADAPTER_FILE).exists():
        return read_headers([folder / ADAPTER_FILE], f"checkpoint {folder}")
    stored = read_model_headers(folder)
    if (folder / INDEX_FILE).exists():
        index = read_json(folder / INDEX_FILE, str(folder))["weight_map"]
        files = {key: tensor.file.name for key, tensor in stored.items()}
        stale = [key for key, _ in index.items() ^ files.items()]
        report.blame(stale, f"{INDEX_FILE} is stale: it and the files differ. Write it anew.")
    own = read_headers(folder.glob(SIDECAR_FILE), str(folder))
    return stored | own


def _check(tensors: Sequence[Look], config: Mapping[str, Any], report: Report) -> None:
    """Check each tensor. A tensor that equals the base's is skipped: its problems are the
    base's.
    """
    dtype = {**config, **config.get("text_config", {})}.get("dtype")
    deviation = config.get("initializer_range") or 0.02
    is_tied = config.get("tie_word_embeddings")
    matrices = [t for t in tensors if t.is_matrix and not (is_tied and t.group == "head")]
    twins = {t.digest: t.key for t in reversed(matrices)}  # the first of each digest
    large = [t for t in matrices if t.stored.nbytes >= _ENOUGH]
    normal = [t for t in large if math.isclose(t.deviation, deviation, rel_tol=0.025)]
    fresh = {t.key for t in normal if not t.before}
    mixed = {t.group for t in large if t.key not in fresh}
    moved = {t.group for t in tensors if t.before and not t.is_kept}
    is_full = not moved or not moved.isdisjoint(_FULL)
    checks = {
        "has NaN or infinite elements. Take an earlier checkpoint.": lambda t: not t.finite,
        "all its elements are equal, such as 0: it was not trained, loaded or saved.": (
            lambda t: len(t.shape) > 1 and not t.varied
        ),
        "a selection bias was rounded to 16 bits, so routers choose different experts. "
        "Keep it in float32.": (
            lambda t: is_bias(t.key) and t.varied and not (t.exact and t.dtype == "float32")
        ),
        f"is not in {dtype}, the dtype in config.json. Save it in that.": (
            lambda t: dtype and t.dtype != dtype and t.dtype.endswith("float16")
        ),
        "was not trained, and differs from the base. Something changed it.": (
            lambda t: t.is_fixed and t.before.startswith(t.dtype)
        ),
        "has nothing in common with the base's: exchanged, permuted, or begun anew.": (
            lambda t: t.is_matrix and t.change > 0.9
        ),
        f"still normal with deviation {deviation:g}, as at first: not loaded, or not trained.": (
            lambda t: (
                mixed and t.key in fresh and t.group not in mixed and "init" not in str(t.entry)
            )
        ),
    }
    for sentence, is_wrong in checks.items():
        report.blame([t.key for t in tensors if is_wrong(t) and not t.is_kept], sentence)
    modules = config.get("target_modules") or []
    targets = [] if isinstance(modules, str) else [*modules]
    targets += [name.rpartition(".")[0] for name in config.get("target_parameters") or []]
    report.blame(
        [name for name in targets if not any(f".{name}." in t.key for t in tensors)],
        f"{ADAPTER_CONFIG} targets it, and no adapter of it is stored: it was not trained.",
    )
    copies = [t for t in matrices if not t.is_kept and twins[t.digest] != t.key]
    report.blame(
        [f"{t.key} ({twins[t.digest]})" for t in copies],
        "has the same bits as the tensor in brackets: one tensor was written twice.",
    )
    still = [t for t in matrices if t.is_kept and t.group not in moved]
    report.blame(
        [t.key for t in still if not t.is_fixed and (t.entry or is_full)],
        "is as in the base, and so is all of its group. If it was frozen: --frozen PATTERN.",
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


def _tabulate(tensors: Sequence[Look]) -> list[tuple[str, ...]]:
    rows = [("group", "tensors", "dtype", "differ from the base", "by (median, most)")]
    for name in GROUPS:
        group = [t for t in tensors if t.group == name]
        compared = [t for t in group if t.before]
        changes = [t.change for t in group if t.base]
        moved = sum(not t.is_kept for t in compared)
        if group:
            by = f"{median(changes):.2%}, {max(changes):.2%}" if changes else "-"
            differ = f"{moved} of {len(compared)}" if compared else "-"
            dtypes = ", ".join(sorted({t.dtype for t in group}))
            rows.append((name, str(len(group)), dtypes, differ, by))
    return rows
