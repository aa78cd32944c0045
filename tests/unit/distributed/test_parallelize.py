"""Where torch.compile keeps what it loads and runs, and what a recomputation of a layer takes from
the forward.
"""

import os
import stat
from pathlib import Path

import pytest
import torch

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.distributed import parallelize
from titanlite.models.layers import keep

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(NAME, "")  # put back at the end, whatever a test does
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def chosen(tmp_path, monkeypatch) -> Path:
    """The cache folder that the user names, where others can write."""
    monkeypatch.setenv(NAME, str(tmp_path / "chosen"))
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen").chmod(0o775)
    return tmp_path / "chosen"


def test_the_cache_is_in_the_users_own_folder_and_private(home):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    parallelize.secure_cache()
    folder = home / "titanlite/torchinductor"
    assert cache_dir() == str(folder) and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, is_own):
    if not is_own:
        monkeypatch.setenv(NAME, str(tmp_path / "chosen"))
    parallelize.secure_cache()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(
        ConfigError,
        match=rf"loads libraries from .*, which user {owner} owns \(mode 7.*\); user {owner + 1}",
    ):
        parallelize.secure_cache()


def test_a_folder_that_others_can_write_to_or_that_cannot_be_made_is_refused(
    chosen, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"owns \(mode 775\); user .* \(`chmod go-w`\)\."):
        parallelize.secure_cache()
    chosen.chmod(0o755)
    parallelize.secure_cache()
    (tmp_path / "file").touch()
    monkeypatch.setenv(NAME, str(tmp_path / "file/cache"))
    with pytest.raises(
        ConfigError, match=rf"cannot use the cache folder .*/file/cache: .* Set {NAME} to a folder"
    ):
        parallelize.secure_cache()


@pytest.mark.usefixtures("chosen")
def test_all_that_compiles_has_looked_before():
    job = JobConfig()
    job.compile.enable = True

    class Model:
        def decoder_layers(self) -> list[torch.nn.Module]:
            return [torch.nn.Linear(2, 2)]

    with pytest.raises(ConfigError, match="loads libraries from"):
        parallelize.wrap_layers(Model(), job, experts_on_own_mesh=False)
    package = Path(parallelize.__file__).parents[1]
    calls = [
        p.name for p in package.rglob("*.py") if "torch.compile(" in p.read_text(encoding="utf-8")
    ]
    assert calls == ["parallelize.py"], "the only place that calls it"


def test_what_is_kept_is_made_once_however_often_a_layer_is_recomputed():
    made = []

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        number = keep(lambda: len(made))  # another one, if it were made again
        factor = keep(lambda: made.append(None) or weight * 2)
        return (x.sin() * factor * (number + 1)).sin().sin()

    x, weight = (torch.linspace(0.1, 1.0, 5, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(layer(x, weight).sum(), (x, weight))
    made.clear()
    out = [parallelize._checkpoint(layer, x, weight).sum()]
    assert len(made) == 1
    # a layer's next micro-batch has values of its own
    out.append(parallelize._checkpoint(layer, x, weight).sum())
    assert len(made) == 2
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(out[0], (x, weight), retain_graph=True), expected, rtol=0, atol=0
        )
    assert len(made) == 2
    expected = torch.autograd.grad(out[1], (x, weight))
    made.pop()
    torch.testing.assert_close(
        torch.autograd.grad(layer(x, weight).sum(), (x, weight)), expected, rtol=0, atol=0
    )
