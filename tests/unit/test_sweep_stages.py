"""The stages of the sweep see a difference, and none where there is none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sweep_stages
import torch
import transformers
from tiny_transformers import ALL_MODELS

from titanlite.models.families.config_json import transformers_config


@pytest.fixture
def case(tmp_path: Path) -> Any:
    hf = ALL_MODELS["qwen3"]()
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM._from_config(hf, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight += 0.1
    model.save_pretrained(tmp_path)
    return SimpleNamespace(
        cls=transformers.Qwen3ForCausalLM,
        model=model,
        config=transformers_config(model.config.to_dict(), "test"),
        folder=tmp_path,
        saved=tmp_path,
    )


def test_stages_agree_with_transformers(case: Any) -> None:
    assert sweep_stages.loads(case) == "equal"
    assert sweep_stages.scratch(case) == "equal, 0 replayed"


def test_stages_see_other_values_and_distributions(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build = sweep_stages.build_transformers

    def changed(config: Any) -> Any:
        return build(transformers_config({**config.hf, "initializer_range": 0.025}, "test"))

    monkeypatch.setattr(sweep_stages, "build_transformers", changed)
    assert sweep_stages.scratch(case).startswith("WRONG: ")
    monkeypatch.setattr(sweep_stages, "is_same", lambda found, expected: False)
    assert sweep_stages.loads(case).startswith("WRONG: ")
