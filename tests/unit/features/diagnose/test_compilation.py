"""What a user reads when torch cannot compile a layer."""

from collections.abc import Callable

import pytest
import torch

from titanlite.features.diagnose import explain_uncompiled


def graph_break(x: torch.Tensor) -> torch.Tensor:
    print("a side effect")
    return x


def mistake(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)


def raised_by(function: Callable[[torch.Tensor], torch.Tensor]) -> Exception:
    torch.compiler.reset()
    with pytest.raises(Exception) as found:
        torch.compile(function, fullgraph=True)(torch.ones(2, 2))
    return found.value


@pytest.mark.parametrize(("function", "reason"), [(graph_break, "`print`"), (mistake, "[2, 2] X [3, 3]")])
def test_code_that_cannot_be_traced_is_named(function, reason):
    explained = str(explain_uncompiled(raised_by(function)))
    assert explained.startswith("compile.enable: torch cannot compile a layer: ") and reason in explained
    line = function.__code__.co_firstlineno + 1
    assert (
        f" (in {function.__name__}, {__file__}:{line}). Change that code, or set compile.enable = false." in explained
    )
    assert "\n" not in explained and "TORCHDYNAMO" not in explained


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))}):
        explained = str(explain_uncompiled(raised_by(lambda x: x.sin() + x.cos())))
    assert "No working C++ compiler found" in explained
    assert explained.endswith("Install one (Debian and Ubuntu: apt install g++), or set compile.enable = false.")


def test_other_errors_are_not_touched():
    assert explain_uncompiled(RuntimeError("something else")) is None
