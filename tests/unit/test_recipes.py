"""Every recipe loads, passes the preflight, and is built, sharded and planned on meta for its world
size.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from files import read_table
from transformers import Qwen2_5_VLConfig

from titanlite.assemble import build_model, shard
from titanlite.config import assets, load_config
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import base_dtype
from titanlite.features.lora.block_formats import BLOCK_FORMATS, encode_weights
from titanlite.features.lora.layers import apply_lora
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize import build_plan
from titanlite.materialize.layout import encoding_of, num_values
from titanlite.optim.optimizer import count_parameters
from titanlite.preflight import check

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
MAKE_ARITHMETIC = str(ROOT / "scripts/arithmetic/make_arithmetic.py")


@pytest.fixture(autouse=True)
def hub_without_a_network(monkeypatch, tmp_path):
    """Replace repositories of the hub by folders with the files that a recipe needs: the sizes, if
    it names no flavor.
    """
    monkeypatch.chdir(tmp_path)

    def local_folder(key, name, *, weights):
        folder = tmp_path / name
        if name.startswith("outputs/"):
            return name
        assert re.fullmatch(r"(Qwen|meta-llama|deepseek-ai|moonshotai|openai)/[\w.-]+", name), name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "Qwen/Qwen2.5-VL-7B-Instruct":
            sizes = read_table("qwen2_5_vl_7b")
            config = Qwen2_5_VLConfig(**sizes, tie_word_embeddings=False)
            config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
            config.save_pretrained(folder)
        return str(folder)

    monkeypatch.setattr(assets, "local_folder", local_folder)


@pytest.mark.parametrize("path", RECIPES)
def test_recipe_is_planned_for_its_world_size(path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    stated = re.search(r"^# world size: (\d+)$", text, re.MULTILINE)
    world_size = int(stated[1])
    job = load_config(["--config", str(path)])
    if path.stem == "sft_arithmetic":
        monkeypatch.setattr(sys, "argv", [MAKE_ARITHMETIC])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(MAKE_ARITHMETIC, run_name="__main__")
    checked = check(job, world_size)
    assert job.job.description and checked.degrees.world_size == world_size

    with fake_ranks(world_size):
        model = build_model(
            checked.model_config, base_dtype(checked.job.training, checked.job.lora, "cuda")
        )
        apply_lora(model, checked.job.lora, torch.float32)
        form = checked.job.lora.base_dtype
        if form in BLOCK_FORMATS:
            encode_weights(model, form)
        total, trained = count_parameters(model)
        shard(model, checked.job, ParallelDims.build(checked.degrees, "cpu"), "cpu")
        plan = build_plan(model)
    # Every rank holds an equal part, except of tensors that are not split: buffers and small
    # replicated tensors.
    held = sum(entry.region.numel for entry in plan.entries if entry.info.kind == "parameter")
    assert held * world_size == pytest.approx(total, rel=0.02)

    # The recipe's comment first states this memory: frozen weights, or 16 bytes of each parameter.
    stated_gb = re.search(r"= ([\d.]+) GB", text)
    if path.stem != "sft_arithmetic":
        nbytes = 16 * total
        if checked.job.lora.rank:
            encoded = sum(num_values(p) for p in model.parameters() if encoding_of(p) is not None)
            nbytes = (
                2 * (total - trained - encoded)
                + {"fp8": 8.25, "nf4": 4.5, "mxfp4": 5}.get(form, 0) / 8 * encoded
            )
        assert float(stated_gb[1]) == pytest.approx(nbytes / world_size / 1e9, rel=0.01)
