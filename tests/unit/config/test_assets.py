"""What the configuration calls a model: a folder stays one, a repository of the hub becomes one,
offline too.
"""

from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import huggingface_hub.utils
import pytest

from tests.loading import add_to_hub_cache, hf_config
from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig, load_config
from titanlite.config.assets import local_folder, resolve_assets
from titanlite.config.data import DataSection
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection
from titanlite.models.families import families
from titanlite.preflight import check

CONFIG = families()["qwen3_moe"].presets["debug"]
KEY = "model.hf_assets_path"


def write_model(folder, *, weights=True):
    hf_config(CONFIG).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if weights:
        (folder / "model.safetensors").touch()
    return folder


def add_to_cache(cache, **options):
    return write_model(add_to_hub_cache(cache, "owner/model", CONFIG, **options))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the hub's library is asked for; it finds nothing."""
    calls = []

    def snapshot_download(repository, **options):
        calls.append((repository, options))
        raise huggingface_hub.errors.LocalEntryNotFoundError("Nothing there.\nSecond line.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return calls


def job_of(initial_load_path="", hf_assets_path="", flavor="", tokenizer_path=""):
    return JobConfig(
        model=ModelSection(hf_assets_path=hf_assets_path, flavor=flavor),
        checkpoint=CheckpointSection(initial_load_path=initial_load_path),
        data=DataSection(tokenizer_path=tokenizer_path),
    )


def paths_of(job):
    return job.checkpoint.initial_load_path, job.model.hf_assets_path, job.data.tokenizer_path


# ---- local folders ----


def test_folder_passes_through(tmp_path, asked, monkeypatch):
    folder = write_model(tmp_path / "owner" / "model")
    assert local_folder(KEY, str(folder), weights=True) == str(folder)
    # it is there, so it is meant
    assert local_folder(KEY, "owner/model", weights=True) == "owner/model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_folder(KEY, "~/owner/model", weights=True) == str(folder)
    assert asked == []


@pytest.mark.parametrize(
    "name",
    [
        "../a/b",
        "a/b/c",
        "a/b@",
    ],
)
def test_what_looks_like_a_path_never_goes_to_the_hub(name, asked):
    folder = local_folder(KEY, name, weights=True)
    assert Path(folder) == Path(name)
    assert asked == []


# ---- the hub ----


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", None), ("a/b@refs/pr/7", "a/b", "refs/pr/7")],
)
def test_what_the_hub_is_asked_for(name, repository, revision, asked, weights):
    """Weights only where they are wanted, and never pickle files."""
    with pytest.raises(ConfigError):
        local_folder(KEY, name, weights=weights)
    names = ["config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "run.py"]
    for (call, options), is_local in zip(asked, (True, False), strict=True):
        assert (call, options["revision"]) == (repository, revision)
        assert options["local_files_only"] == is_local
        patterns = options["allow_patterns"]
        wanted = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=patterns)
        assert list(wanted) == names[: 3 if weights else 2]


def test_cached_description_without_weights_is_completed(tmp_path, monkeypatch):
    folder, calls = write_model(tmp_path / "cached", weights=False), []

    def snapshot_download(repository, *, local_files_only, **_):
        calls.append(local_files_only)
        if not local_files_only:
            (folder / "model.safetensors").touch()
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert local_folder(KEY, "a/b", weights=False) == str(folder)
    assert calls == [True]
    assert local_folder(KEY, "a/b", weights=True) == str(folder)
    assert calls == [True, True, False]
    assert local_folder(KEY, "a/b", weights=True) == str(folder)
    assert calls == [True, True, False, True]


def test_revision_in_the_cache(cache):
    main, commit = add_to_cache(cache), "9876543210" * 4
    tagged = add_to_cache(cache, revision="v2", commit=commit)
    assert local_folder(KEY, "owner/model", weights=True) == str(main)
    assert local_folder(KEY, "owner/model@v2", weights=True) == str(tagged)
    assert local_folder(KEY, f"owner/model@{commit}", weights=True) == str(tagged)
    with pytest.raises(ConfigError, match="'owner/model@v3' is not a folder here"):
        local_folder(KEY, "owner/model@v3", weights=True)


def test_neither_cached_nor_online(cache):
    with pytest.raises(
        ConfigError, match=rf"^{KEY}: 'owner/model' is not a folder here, .*Correct the name, give"
    ):
        local_folder(KEY, "owner/model", weights=True)


# ---- what a job takes from where ----


def test_pretrained_model_with_a_flavor_supplies_the_tokenizer(tmp_path):
    folder = str(write_model(tmp_path / "model"))
    assert paths_of(resolve_assets(job_of(folder, flavor="debug"))) == (folder, "", folder)
    job = job_of(folder, flavor="debug", tokenizer_path="mine")
    assert paths_of(resolve_assets(job)) == (folder, "", "mine")


def test_assets_of_their_own_come_first(tmp_path):
    model, assets = (
        str(write_model(tmp_path / "model")),
        str(write_model(tmp_path / "assets", weights=False)),
    )
    assert paths_of(resolve_assets(job_of(model, assets))) == (model, assets, "")


# ---- before the launch ----


def load(tmp_path, *overrides):
    file = tmp_path / "x.toml"
    file.write_text('[model]\nname = "qwen3_moe"\n[training]\nseq_len = 64\n')
    return load_config(["--config", str(file), *overrides])


def test_check_resolves_the_model(cache, tmp_path):
    folder = str(add_to_cache(cache))
    checked = check(load(tmp_path, "--checkpoint.initial_load_path=owner/model"), 1)
    assert checked.model_config == CONFIG
    assert paths_of(checked.job) == (folder, folder, "")
