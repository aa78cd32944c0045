"""scripts/check_size.py: the limits on the size of the repository."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/check_size.py"))


def test_tokens_leave_out_docstrings_comments_and_layout():
    spread = '''
def f(
    a,
    b,
):
    """Add, as the docstring of a function says."""
    # A comment.
    return g(
        a,
        'text',
    )
'''
    packed = SCRIPT["count_tokens"]("def f(a, b): return g(a, 'text')")
    assert packed == 15
    assert SCRIPT["count_tokens"](spread) == packed + 2  # two trailing commas


def test_every_part_has_a_limit():
    paths = [
        "titanlite/trainer.py",
        "titanlite/ops/x_triton.py",
        "titanlite/features/lora/x_triton.py",
        "tests/x.py",
    ]
    assert [SCRIPT["part_of"](path) for path in paths] == ["core", "floor", "features", "tests"]
    assert set(SCRIPT["LIMITS"]) == {"core", "floor", "features", "tests", "scripts"}
