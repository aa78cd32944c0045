"""Text for people: tables, sizes, and names of tensors folded over layers and experts."""

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<=\.)(\d{1,18})(?=\.|$)")


def format_table(rows: Sequence[tuple[str, ...]], indent: str = "  ") -> str:
    """Format `rows`, the first one the head, in columns as wide as their widest cell; one line each."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def format_count(number: float, noun: str) -> str:
    """Format a count: `1 file`, `2,000 files`, `0.5 epochs`."""
    return f"{number:{',' if isinstance(number, int) else 'g'}} {noun}{'' if number == 1 else 's'}"


def format_size(nbytes: int) -> str:
    """Bytes as files are counted: powers of 1000."""
    return _scale(nbytes, ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_memory(nbytes: float) -> str:
    """Bytes as memory is counted: powers of 1024."""
    return _scale(nbytes, ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def _scale(number: float, *units: tuple[str, float]) -> str:
    unit, scale = next(((unit, scale) for unit, scale in units if abs(number) >= scale), ("B", 1))
    return f"{number:.0f} B" if scale == 1 else f"{number / scale:.2f} {unit}"


def texts_between_numbers(name: str) -> tuple[str, ...]:
    """Return what names of the same tensor in different layers and experts have in common; the key to fold them by."""
    return tuple(_NUMBER.split(name)[::2])


def fold_names(names: Sequence[str]) -> str:
    """Return `layers.{0-10,47-58}.mlp` for names that differ only in the numbers of layers and experts."""
    between = texts_between_numbers(names[0])
    folded = between[0]
    if len(between) > 1:
        columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
        for column, text in zip(columns, between[1:], strict=True):
            # A number that all share stays as it is written: `cpu.00000` is the name of a tensor.
            folded += (column[0] if len(set(column)) == 1 else f"{{{format_runs(map(int, column))}}}") + text
    return folded


def format_runs(numbers: Iterable[int]) -> str:
    """Return `0-10,47` for numbers in any order."""
    found = set(numbers)
    starts = sorted(number for number in found if number - 1 not in found)
    ends = sorted(number for number in found if number + 1 not in found)
    return ",".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
