"""scripts/check_size.py: the limits on the size of the repository."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/check_size.py"))


def test_tokens_leave_out_docstrings_comments_and_layout() -> None:
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


def test_tokens_are_counted_by_part(tmp_path: Path) -> None:
    files = {"titanlite/trainer.py": 5, "titanlite/ops/x.py": 11, "titanlite/ops/x_triton.py": 7}
    files |= {"titanlite/data/order.py": 13, "titanlite/features/lora/x_triton.py": 17}
    files |= {"tests/unit/test_x.py": 19, "scripts/bench/x.py": 23}
    for name, lines in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * lines)
    lines = {part: tokens / 3 for part, tokens in SCRIPT["count_parts"](tmp_path).items()}
    assert lines == {"core": 5 + 11, "floor": 7 + 13, "features": 17, "tests": 19, "scripts": 23}
