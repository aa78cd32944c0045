"""Upload to the hub, against a stand-in for its API."""

from unittest.mock import Mock

import huggingface_hub
import pytest
from files import error_of

from titanlite.base.errors import CheckpointError
from titanlite.features.record.publish import push_to_hub


@pytest.fixture
def api(monkeypatch):
    api = Mock(["create_repo", "upload_folder"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "step-7"
    (folder / "titanlite").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "README.md"):
        (folder / name).write_text("x")
    for name in ("optimizer.safetensors", "expert_bias.safetensors", "certificate.json"):
        (folder / "titanlite" / name).write_text("x")
    return folder


def test_the_model_goes_without_the_training_state(api, step):
    push_to_hub(step, "me/model")
    api.create_repo.assert_called_once_with("me/model", private=True, exist_ok=True)
    options = api.upload_folder.call_args.kwargs
    assert options["repo_id"] == "me/model" and options["folder_path"] == step
    from huggingface_hub.utils import filter_repo_objects

    names = [str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()]
    sent = set(filter_repo_objects(names, ignore_patterns=options["ignore_patterns"]))
    assert sent == {
        "model.safetensors",
        "config.json",
        "README.md",
        "titanlite/expert_bias.safetensors",
        "titanlite/certificate.json",
    }


def test_a_failure_says_where_the_model_is_and_how_to_go_on(api, step):
    api.upload_folder.side_effect = RuntimeError("403 Forbidden: no access\nRequest ID: 12")
    message = error_of(CheckpointError, push_to_hub, step, "me/model")
    assert "403 Forbidden" in message and f"safe in {step}" in message
    assert "hf upload me/model" in message and "\n" not in message
