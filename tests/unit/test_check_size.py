"""scripts/check_size.py: the limits on the size of the repository."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_size.py"


@pytest.fixture
def check_size():
    spec = importlib.util.spec_from_file_location("check_size", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, name: str, lines: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * lines)


def make_repository(root: Path) -> None:
    write(root, "titanlite/trainer.py", 5)
    write(root, "titanlite/ops/x.py", 11)
    write(root, "titanlite/ops/x_triton.py", 7)
    write(root, "titanlite/data/order.py", 13)
    write(root, "titanlite/features/lora/x_triton.py", 17)
    write(root, "tests/unit/test_x.py", 19)
    write(root, "scripts/bench/x.py", 23)


def test_tokens_leave_out_docstrings_comments_and_layout(check_size) -> None:
    packed = "def f(a, b): return g(a, 'text')"
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
    assert check_size.count_tokens(packed) == 16
    assert check_size.count_tokens(spread) == 16 + 2  # two trailing commas


def test_tokens_are_counted_by_part(check_size, tmp_path: Path) -> None:
    make_repository(tmp_path)
    parts = check_size.count_parts(tmp_path)
    lines = {part: tokens / 3 for part, tokens in parts.items()}
    assert lines == {"core": 5 + 11, "floor": 7 + 13, "features": 17, "tests": 19, "scripts": 23}


def test_a_part_above_its_limit_is_named_and_fails(
    check_size, tmp_path: Path, monkeypatch, capsys
) -> None:
    make_repository(tmp_path)
    monkeypatch.setattr(check_size, "ROOT", tmp_path)
    assert check_size.main() == 0
    assert "TOO MUCH" not in capsys.readouterr().out
    monkeypatch.setattr(check_size, "LIMITS", {**check_size.LIMITS, "core": 47})
    assert check_size.main() == 1
    above = [line for line in capsys.readouterr().out.splitlines() if line.endswith("TOO MUCH")]
    assert [line.split()[:3] for line in above] == [["tokens", "of", "core"]]
