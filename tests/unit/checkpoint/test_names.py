"""Checkpoints whose keys differ from the model's, as other training programs save them."""

from itertools import cycle

import pytest
import torch
import transformers
from tensors import changed
from tiny_transformers import TEXT_MODELS, TEXT_SIZES

from tests.loading import load, refusal

DENSE = {
    "qwen3, tied": TEXT_MODELS["qwen3"](),
    "qwen3, untied": TEXT_MODELS["qwen3"](tie_word_embeddings=False),
    "gemma2, tied": transformers.Gemma2Config(**TEXT_SIZES, head_dim=8),
    "gpt2, tied": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "mixtral, untied": TEXT_MODELS["mixtral"](),
    "gpt_neox, untied": transformers.GPTNeoXConfig(**TEXT_SIZES),
}
TOKENS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return {
        name: transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, config in DENSE.items()
    }


def rewrite(folder, name_of):
    with changed(folder / "model.safetensors") as tensors:
        renamed = {name_of(key): tensors.pop(key) for key in [*tensors]}
        tensors |= renamed


@pytest.mark.parametrize(
    ("name", "prefix"), [*zip(DENSE, cycle(["module.", "base_model.model.", "a.inner."]))]
)
def test_a_wrong_prefix_is_one_sentence_that_names_it(models, tmp_path, name, prefix):
    models[name].save_pretrained(tmp_path)
    rewrite(tmp_path, lambda key: prefix + key)
    text = refusal(tmp_path)
    assert text.startswith(
        f"checkpoint {tmp_path}: its keys begin with '{prefix}', which the model's do not."
    )
    assert f"key.replace('{prefix}', '', 1)" in text and "missing" not in text and "\n" not in text
    rewrite(tmp_path, lambda key: key.replace(prefix, "", 1))
    load(tmp_path)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("how", ["base model", "without", "doubled"])
def test_the_base_models_prefix_is_as_in_from_pretrained(models, tmp_path, name, how):
    model = models[name]
    model.save_pretrained(tmp_path)
    prefix = f"{model.base_model_prefix}."
    if how == "base model":  # as AutoModel saves it
        model.base_model.save_pretrained(tmp_path)
    else:
        rewrite(
            tmp_path, lambda key: prefix + key if how == "doubled" else key.removeprefix(prefix)
        )
    if how == "base model" and "untied" in name:
        text = refusal(tmp_path)
        assert (
            "weight: missing, checkpoint" in text
            and "has the base model alone" in text
            and "\n" not in text
        )
        return
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    # Files of GPT-NeoX name the head differently, and transformers does not find it in this case.
    if found["missing_keys"]:
        assert how == "doubled" and "lm_head.weight: missing" in refusal(tmp_path)
        return
    with torch.no_grad():
        torch.testing.assert_close(
            load(tmp_path)(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5
        )
