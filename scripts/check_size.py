#!/usr/bin/env python
"""Is titanlite still compact? Prints the tokens of each part and fails where one is above its
limit.

    python scripts/check_size.py

A token is a name, a number, an operator or a string; docstrings and comments are free, and so is
layout: packing code into fewer lines wins nothing. Lower a limit with the code, and never raise one
to make room; a new feature brings its own tokens to those of features, and none to the other parts.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Part -> most tokens. A module of the package that is in no other part is in the core.
LIMITS = {"core": 81_700, "floor": 74_700, "features": 108_500, "tests": 250_300, "scripts": 35_500}
FLOOR = ("base/", "config/", "models/families/", "data/", "metrics/", "launch/", "__main__.py")
COUNTED = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}


def part_of(path: str) -> str:
    """The part that a file, named relative to the repository, belongs to."""
    folder, _, rest = path.partition("/")
    if folder != "titanlite":
        return folder
    if rest.startswith("features/"):
        return "features"
    if rest.startswith(FLOOR) or rest.endswith("_triton.py"):
        return "floor"
    return "core"


def find_docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """Line and column where each docstring begins."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].col_offset


def count_tokens(source: str) -> int:
    """Tokens of Python code without docstrings and comments."""
    docstrings = set(find_docstrings(ast.parse(source)))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in COUNTED and token.start not in docstrings for token in tokens)


def count_parts(root: Path) -> dict[str, int]:
    """Tokens of each part of a repository."""
    parts = dict.fromkeys(LIMITS, 0)
    for folder in ("titanlite", "tests", "scripts"):
        for path in sorted((root / folder).rglob("*.py")):
            part = part_of(path.relative_to(root).as_posix())
            parts[part] += count_tokens(path.read_text(encoding="utf-8"))
    return parts


def main() -> int:
    """Print the sizes; 1 if one is above its limit."""
    parts = count_parts(ROOT)
    for part, tokens in parts.items():
        mark = "  TOO MUCH" if tokens > LIMITS[part] else ""
        print(f"tokens of {part:<10} {tokens:>8,}  limit {LIMITS[part]:>8,}{mark}")
    return int(any(tokens > LIMITS[part] for part, tokens in parts.items()))


if __name__ == "__main__":
    sys.exit(main())
