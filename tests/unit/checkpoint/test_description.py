"""What is written into config.json beside a model's weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titanlite.checkpoint.description import write_hf_files
from titanlite.config import ModelConfig, RopeScaling
from titanlite.models.families import families, model_config_from_hf
from titanlite.models.hf_config import transformers_config

YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=1024)


def write(config: ModelConfig, original: dict, folder: Path) -> dict:
    """Beside the weights of `config`, which training began with those of a folder with the config.json `original`."""
    assets, out = folder / "assets", folder / "out"
    assets.mkdir()
    out.mkdir()
    (assets / "config.json").write_text(json.dumps({**original, "model_type": config.family}))
    write_hf_files(out, [], config, None, torch.float32, assets)
    return json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("where", ["table", "top", "both"])
def test_the_rotary_scaling_of_the_run_is_what_is_read_back(tmp_path, family, where):
    """The original's may stand in two places; one of them would count for more than the run's own."""
    config = replace(families()[family].presets["debug"], rope_scaling=YARN)
    table = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    top = {"original_max_position_embeddings": 512}
    original = {"table": {"rope_scaling": table}, "top": top, "both": {"rope_scaling": table, **top}}[where]
    write(config, original, tmp_path)
    assert model_config_from_hf(tmp_path / "out") == config


def test_code_that_is_not_written_is_not_named(tmp_path):
    original = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001}
    written = write(families()["deepseek_v3"].presets["debug"], original, tmp_path)
    assert "auto_map" not in written and written["aux_loss_alpha"] == 0.001
    hf = {**original, "model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    out = tmp_path / "transformers"
    out.mkdir()
    write_hf_files(out, [], transformers_config(hf, "config.json"), None, torch.float32, None)
    written = json.loads((out / "config.json").read_text())
    assert "auto_map" not in written and written["head_dim"] == 32


@pytest.mark.parametrize(
    ("model_type", "width"), [("deepseek_v3", 128 * 320 // 2), ("deepseek_v2", 32 * 320 // 2), ("gemma3_text", 8 * 256)]
)
def test_attention_width_of_transformers_classes(model_type, width):
    assert transformers_config({"model_type": model_type}, "config.json").attention_width == width
