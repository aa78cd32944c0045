"""Where torch.compile keeps what it loads and runs."""

import os
import stat

import pytest

from titanlite.base import process
from titanlite.base.errors import ConfigError

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(NAME, "")  # put back at the end, whatever a test does
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """The cache folder that the user names, where others can write."""
    monkeypatch.setenv(NAME, str(tmp_path / "chosen"))
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen").chmod(0o775)
    return tmp_path / "chosen"


def test_the_cache_is_in_the_users_own_folder_and_private(home):
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    process.secure_cache()
    folder = home / "titanlite/torchinductor"
    assert cache_dir() == str(folder) and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, is_own):
    if not is_own:
        monkeypatch.setenv(NAME, str(tmp_path / "chosen"))
    process.secure_cache()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(
        ConfigError,
        match=rf"loads libraries from .*, which user {owner} owns \(mode 7.*\); user {owner + 1}",
    ):
        process.secure_cache()


def test_a_folder_that_others_can_write_to_or_that_cannot_be_made_is_refused(
    chosen, tmp_path, monkeypatch
):
    with pytest.raises(ConfigError, match=r"owns \(mode 775\); user .* \(`chmod go-w`\)\."):
        process.secure_cache()
    chosen.chmod(0o755)
    process.secure_cache()
    (tmp_path / "file").touch()
    monkeypatch.setenv(NAME, str(tmp_path / "file/cache"))
    with pytest.raises(
        ConfigError, match=rf"cannot use the cache folder .*/file/cache: .* Set {NAME} to a folder"
    ):
        process.secure_cache()
