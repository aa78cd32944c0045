"""Adapters of peft: whole ones are sound, and what is wrong with others is named."""

import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensors import changed
from tiny_transformers import TEXT_MODELS
from transformers import Qwen3ForCausalLM

from titanlite.features.tools.verify import main

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
KEY = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(TEXT_MODELS["qwen3"]()).save_pretrained(folder)
    return folder


@pytest.fixture
def adapters(base, tmp_path):
    """Adapters after one step of peft's own model."""
    targets = ["q_proj", "v_proj"]
    model = get_peft_model(
        Qwen3ForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=targets)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(32).view(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def one_zero(tensors):
    tensors[KEY.format(1, "v", "B")].zero_()


def all_zero(tensors):
    for key in tensors:
        if "lora_B" in key:
            tensors[key].zero_()


def foreign(tensors):
    tensors[KEY.format(0, "w", "A")] = tensors.pop(KEY.format(0, "q", "A"))


def untargeted(tensors):
    for key in [key for key in tensors if "v_proj" in key]:
        del tensors[key]


def test_whole_adapters_are_sound(adapters, base, capsys):
    for more in ([], ["--base", str(base)]):
        assert main([str(adapters), *more]) == 0
        assert "sound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (one_zero, rf"{re.escape(KEY.format(1, 'v', 'B'))}: all its elements are equal, such as 0"),
        (all_zero, r"lora_B.weight and 1 more: all its elements are equal, such as 0"),
        (foreign, r"the model has no module model\.layers\.0\.self_attn\.w_proj"),
        (untargeted, r"v_proj: adapter_config\.json targets it, and no adapter"),
    ],
)
def test_what_is_wrong_is_named(change, text, adapters, capsys):
    with changed(adapters / "adapter_model.safetensors") as tensors:
        change(tensors)
    assert main([str(adapters)]) == 1
    shown = capsys.readouterr().out
    assert re.search(text, shown), shown


def test_a_base_that_is_gone_is_said(adapters, capsys):
    path = adapters / "adapter_config.json"
    table = json.loads(path.read_text()) | {"base_model_name_or_path": "/no/such/model"}
    path.write_text(json.dumps(table))
    assert main([str(adapters)]) == 0
    assert "note: not compared with the class of the model" in capsys.readouterr().out
