"""scripts/check_size.py: the limits on the size of the package."""

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


def make_package(folder: Path) -> None:
    for name, lines in {
        "trainer.py": 5,
        "ops/x_triton.py": 7,
        "ops/x.py": 11,
        "data/order.py": 13,
        "features/report/page.js": 17,
        "features/report/notes.md": 19,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n" * lines)


def test_lines_are_counted_by_part(check_size, tmp_path: Path) -> None:
    make_package(tmp_path)
    parts, files, entries = check_size.count(tmp_path)
    assert parts == {"core": 5 + 11, "floor": 7 + 13, "features": 17}
    assert len(files) == 5 and files["trainer.py"] == 5
    assert entries == {"titanlite": 4, "ops": 2, "data": 1, "features": 1, "features/report": 1}


def test_a_part_above_its_limit_is_named_and_fails(check_size, tmp_path: Path, monkeypatch, capsys) -> None:
    make_package(tmp_path)
    monkeypatch.setattr(check_size, "PACKAGE", tmp_path)
    assert check_size.main() == 0
    monkeypatch.setattr(check_size, "LINES", {**check_size.LINES, "core": (15, 10)})
    capsys.readouterr()
    assert check_size.main() == 1
    above = [line for line in capsys.readouterr().out.splitlines() if line.endswith("TOO MUCH")]
    assert [line.split()[:3] for line in above] == [["lines", "of", "core"]]
    monkeypatch.setattr(check_size, "READ_FIRST", {"trainer.py + ops/x.py": 15})
    check_size.main()
    assert "trainer.py + ops/x.py                16  limit      15" in capsys.readouterr().out
