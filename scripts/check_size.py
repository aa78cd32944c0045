#!/usr/bin/env python
"""Is titanlite still compact? Prints lines and files of each room and fails where one is above its limit.

    python scripts/check_size.py

Lines are physical lines of .py, .js and .css files. A limit is what the code needed when it was last lowered: lower it
with the code, never raise it to make room; a new feature brings its own lines to those of features, and none to the
others. The target is where the house is going (docs/architecture.md).
"""

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "titanlite"
SUFFIXES = (".py", ".js", ".css")
# Part of the package -> limit and target in lines. What is in no other part is the core.
LINES = {"core": (9_634, 7_500), "floor": (9_460, 6_000), "features": (17_373, 11_000)}
FLOOR = ("base", "config", "models/families", "data", "metrics", "launch", "__main__.py")
FILES, TOP_LEVEL, FOLDER, FILE_LINES = (166, 150), (20, 20), (19, 14), (400, 400)

READ_FIRST = {"assemble.py": 300, "trainer.py + train_step.py": 500}  # what a reader opens first


def part_of(path: str) -> str:
    """The part of the package that a file, relative to it, belongs to."""
    if path.startswith("features/"):
        return "features"
    if path.startswith(FLOOR) or path.endswith("_triton.py"):
        return "floor"
    return "core"


def count(package: Path) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Lines by part of the package, by file, and entries by folder."""
    files = {
        path.relative_to(package).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(package.rglob("*"))
        if path.suffix in SUFFIXES
    }
    parts = dict.fromkeys(LINES, 0)
    entries: dict[str, set[str]] = {}
    for path, lines in files.items():
        parts[part_of(path)] += lines
        *folders, _ = names = path.split("/")
        for i in range(len(folders) + 1):
            entries.setdefault("/".join(names[:i]), set()).add(names[i])
    return parts, files, {folder or "titanlite": len(found) for folder, found in entries.items()}


def main() -> int:
    """Print the sizes; 1 if one is above its limit."""
    parts, files, entries = count(PACKAGE)
    largest = max((folder for folder in entries if folder != "titanlite"), key=entries.__getitem__)
    longest = max(files, key=files.__getitem__)
    found = [
        *((f"lines of {part}", lines, *LINES[part]) for part, lines in parts.items()),
        ("files", len(files), *FILES),
        ("entries at the top level", entries["titanlite"], *TOP_LEVEL),
        (f"entries of {largest}", entries[largest], *FOLDER),
        (f"lines of {longest}", files[longest], *FILE_LINES),
        *(
            (f"lines of {names}", sum(files.get(name, 0) for name in names.split(" + ")), most, most)
            for names, most in READ_FIRST.items()
        ),
    ]
    for name, value, limit, target in found:
        print(f"{name:<40} {value:>7,}  limit {limit:>7,}  target {target:>7,}{'  TOO MUCH' if value > limit else ''}")
    return int(any(value > limit for _, value, limit, _ in found))


if __name__ == "__main__":
    sys.exit(main())
