"""LoRA in models of transformers: what is trained, and that peft and a merged export compute the
same.
"""

import pytest
import torch
from tiny_transformers import VOCAB_SIZE, save_tiny, shift_adapters

from titanlite.base.errors import ConfigError
from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config.schema import LoRASection
from titanlite.features.lora.layers import adapted_modules, adapters_disabled, apply_lora
from titanlite.features.lora.peft_format import (
    adapter_checkpoint,
    adapter_files,
    describe_adapters,
)
from titanlite.features.tools.export import export_merged
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.models.families.config_json import transformers_config
from titanlite.models.interface import is_adapter

# Both compute in float32 (6e-8) through 2 layers, in a different order of operations.
BOUND = 1e-5
RANK = 3


def load(folder, section, hf, *sources):
    """The model in `folder` with adapters that are not zero, unless they are read from
    `sources`.
    """
    model = build_transformers(transformers_config(hf, "test"))
    apply_lora(model, section, torch.float32)
    plan = materialize(model, "cpu", [weights_of(folder, model), *sources], seed=1)
    if not sources:
        shift_adapters(model, 0.1)
    return model, plan


CASES = [
    ("gemma3_text", "q_proj, mlp.*", True),
    ("phi3", "", False),
    ("mixtral", "experts.down_proj, v_proj", True),
    ("gpt_oss", "", False),
    ("deepseek_v3", "", False),
    ("qwen2_5_vl", "", False),
]


@pytest.mark.parametrize(("name", "targets", "rslora"), CASES)
# peft asks for it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_computes_the_same_from_what_was_saved(tmp_path, one_rank, name, targets, rslora):
    from peft import PeftModel

    reference = save_tiny(name, tmp_path / "base")
    section = LoRASection(rank=RANK, alpha=12.0, targets=targets, use_rslora=rslora)
    hf = reference.config.to_dict()
    folder = tmp_path / "adapter"

    tokens = torch.randint(14, VOCAB_SIZE, (2, 9))
    model, plan = load(tmp_path / "base", section, hf)
    model(tokens, tokens).cross_entropy.backward()
    for key, param in model.named_parameters():
        assert (param.grad is not None) <= param.requires_grad == is_adapter(key), key
    trained = {
        key.split(".")[-2] for key, param in model.named_parameters() if param.grad is not None
    }
    model.eval()

    commit_folder(folder, adapter_files(plan), describe_adapters(model, section, "base"))
    again, _ = load(tmp_path / "base", section, hf, adapter_checkpoint(folder, section, model))
    saved = dict(model.named_parameters())
    for key, param in again.named_parameters():
        assert torch.equal(param, saved[key]), key
    with torch.no_grad(), adapters_disabled(model):
        off = model(tokens)
    with torch.no_grad():
        ours = model(tokens)
        assert (off - reference(tokens, use_cache=False).logits).abs().max() < BOUND
        theirs = PeftModel.from_pretrained(reference, folder)
        expected = theirs(input_ids=tokens, use_cache=False).logits
    assert (ours - expected).norm() <= BOUND * expected.norm()
    assert (off - expected).norm() > 1e-3 * expected.norm(), "the adapters do nothing"
    export_merged(folder, tmp_path / "merged", torch.float32, tmp_path / "base")
    merged, info = type(reference).from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert {key: value for key, value in info.items() if value} == {}
    with torch.no_grad():
        logits = merged.eval()(tokens, use_cache=False).logits
        assert (logits - expected).norm() <= BOUND * expected.norm()
    if name in ("gpt_oss", "deepseek_v3"):
        assert "experts" in trained


def test_targets_that_name_nothing(tmp_path):
    hf = save_tiny("mixtral", tmp_path).config.to_dict()
    model = build_transformers(transformers_config(hf, "test"))
    for targets, words in (
        ("lm_head", "'lm_head' matches lm_head, which cannot have an adapter"),
        ("w1", "'w1' matches no layer. Layers that can: q_proj, k_proj, v_proj, o_proj, gate"),
    ):
        with pytest.raises(ConfigError, match=words):
            apply_lora(model, LoRASection(rank=RANK, targets=targets), torch.float32)
        assert adapted_modules(model) == {}
