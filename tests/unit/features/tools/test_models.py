"""Commands take a run, a step or a model; adapters are merged into their model while it is read, as
peft computes.
"""

import pytest
import torch
from files import write_manifest
from peft import PeftModel
from tiny_transformers import TEXT_SIZES, shift_adapters, word_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from titanlite.__main__ import main
from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.features.lora import merge
from titanlite.features.tools.models import find_base, find_model


def save_model(folder):
    tokenizer = word_tokenizer([])
    tokenizer.save_pretrained(folder)
    sizes = TEXT_SIZES | {"vocab_size": len(tokenizer), "head_dim": 8}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **moe, initializer_range=0.3))
    model.save_pretrained(folder)


def save_adapter(base, folder, **settings):
    from peft import LoraConfig, get_peft_model

    targets = {"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_alpha": 16} | settings
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(**targets, task_type="CAUSAL_LM")
    )
    shift_adapters(model, 0.5)
    model.save_pretrained(folder)


def expect(base, adapter, prompt):
    """What transformers adds to the prompt, greedily, with peft where there are adapters."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    text = tokenizer.decode(out[0, ids.shape[1] :])
    return text.removesuffix("<eos>").strip()


# peft's
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def test_adapters_generate_what_peft_generates(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(merge, "_CHUNK_ELEMENTS", 200)  # every weight in several parts
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_model(base)
    save_adapter(base, adapter, **EXPERTS)
    prompt = "what is this red"
    expected, plain = (expect(base, folder, prompt) for folder in (adapter, None))
    assert expected != plain, "the adapters change nothing"
    for folder, more, text in ((adapter, [], expected), (base, ["--do-sample", "false"], plain)):
        arguments = ["generate", str(folder), "--prompt", prompt, "--max-new-tokens", "12", *more]
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"{prompt} {text}\n"


def test_the_base_of_adapters(tmp_path):
    run = tmp_path / "run"
    adapter = run / "checkpoint/step-3"
    save_model(tmp_path / "base")
    save_adapter(tmp_path / "base", adapter)
    assert find_base("generate", adapter) == tmp_path / "base"
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=f"names {tmp_path / 'base'}, which is not a folder.*Give the model that"
    ):
        find_base("generate", adapter)
    assert find_base("generate", adapter, str(tmp_path / "moved")) == tmp_path / "moved"
    with pytest.raises(
        ConfigError, match=r"--base names /no/such, which is not a folder\. Correct"
    ):
        find_base("generate", adapter, "/no/such")


def complete(folder):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345678")
    write_manifest(folder)


@pytest.mark.parametrize("where", ["checkpoint", "."])
def test_the_newest_complete_checkpoint_of_a_run(tmp_path, capsys, where):
    inner = tmp_path / "run" / where
    for step in (2, 10, 30):
        complete(inner / f"step-{step}")
    assert find_model("inspect", str(tmp_path / "run")) == inner / "step-30"
    (inner / "step-30/model.safetensors").write_bytes(b"cut")
    capsys.readouterr()
    assert find_model("inspect", str(tmp_path / "run")) == inner / "step-10"
    assert "step-30 is not complete" in capsys.readouterr().err
    assert find_model("inspect", str(inner / "step-2")) == inner / "step-2"
    for step in (2, 10):
        (inner / f"step-{step}/model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is complete; of step-30: model.safetensors"
    ):
        find_model("inspect", str(tmp_path / "run"))
