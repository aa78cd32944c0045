"""Rules of the code that no linter knows: what may stand where."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "titanlite"
# The process group joins ranks by torchrun's variables, and names gloo and NCCL an interface.
READS_ENVIRONMENT = ("base/", "launch/", "distributed/process_group.py")


def find_environment(code: str) -> list[int]:
    """Lines of `code` that read or set an environment variable."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "unsetenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and node.names[0].name in ("environ", "getenv"))
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "import os\nf(x, e=os.environ)",
        "\nfrom os import environ",
    ],
)
def test_the_environment_is_found(code: str):
    assert find_environment(code) == [2]


def test_the_environment_is_read_in_one_place():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        if not path.relative_to(PACKAGE).as_posix().startswith(READS_ENVIRONMENT)
        for line in find_environment(path.read_text())
    }
    assert not found, "outside base and launch, base/env.py is asked"
