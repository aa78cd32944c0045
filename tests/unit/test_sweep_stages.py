"""The stages of the sweep see a difference, and none where there is none."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_transformers import ALL_MODELS

from titanlite.models.families.config_json import transformers_config

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import sweep_stages
import sweep_table


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


def test_the_page_gives_each_refusal_its_reason() -> None:
    words = {"built": "0.1 M", "reads": "yes", "loads": "equal", "exports": "equal", "generates": "cached"}
    trained = [
        sweep_table.Result(f"kind{i}", "Of", words | {"trains": kind}) for i, kind in enumerate(["packed", "apart"])
    ]
    refused = sweep_table.Result("bert", "Of", words | {"trains": "refused: model: Of is not causal: other tokens"})
    wrong = sweep_table.Result("gpt", "Of", words | {"trains": "WRONG: loss 2, of transformers 1"})
    assert [result.why_untrained != "" for result in (*trained, refused, wrong)] == [False, False, True, True]
    assert [result.is_wrong for result in (*trained, refused, wrong)] == [False, False, False, True]
    page = list(sweep_table.part_of_page([*trained, refused, wrong], "here"))
    assert [line for line in page if "bert" in line] == [
        "- **Refused: sees later tokens, so it predicts nothing**, 1: bert."
    ]
    assert "| trains | " + sweep_table._STAGES["trains"][0] + " | 2 of 4 |" in page
    assert page[-1] == "here" and max(map(len, page)) <= 120
