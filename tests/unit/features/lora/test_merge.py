"""`export --merge`: the weights are base + alpha / rank * B A in float64, rounded once, and
transformers loads them.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.saving import save_hf_model
from titanlite.checkpoint.commit import commit_folder
from titanlite.checkpoint.description import render
from titanlite.config.schema import LoRASection
from titanlite.features.lora.layers import LoRAExperts, LoRALinear, adapted_modules, apply_lora
from titanlite.features.lora.peft_format import adapter_files, write_adapter_config
from titanlite.features.tools.export import main
from titanlite.materialize import Init, Normal, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

SECTION = LoRASection(rank=4, alpha=12.0)
CASES = [
    ("qwen3", "q_proj, layers.1.*", True, torch.bfloat16),
    ("qwen3_moe", "layers.0.mlp.experts.gate_up_proj", True, torch.float32),
    ("dots1", "", False, torch.float32),
    ("qwen3_next", "in_proj_qkvz, experts", False, torch.float32),
    ("qwen3_5_moe_text", "", True, torch.bfloat16),
]


def make(folder, family, section, run_ranks, base_dtype=torch.float32):
    """Base model and adapters in `folder`; the full tensors of the model with adapters."""
    config = replace(families()[family].presets["debug"], vocab_size=97)
    model = build_decoder(config)
    apply_lora(model, section, torch.float32)
    plan = materialize(model, "cpu", [{"*lora_B": Init(Normal(std=0.1))}], seed=5)
    base = build_decoder(config)
    base_plan = materialize(base, "cpu", seed=5)

    def rank_main():
        save_hf_model(base, base_plan, None, folder / "base", base_dtype)
        commit_folder(
            folder / "adapter",
            adapter_files(plan),
            render(
                "the adapters",
                lambda path: write_adapter_config(path, model, section, str(folder / "base")),
            ),
        )

    run_ranks(1, rank_main)
    return model


def expected_weights(model, base_dtype, as_stored):
    """base + scaling * B A in float64, by name and in the form of transformers."""
    found = {}
    for name, module in adapted_modules(model).items():
        if isinstance(module, LoRALinear):
            pairs = {"weight": (module.lora_A, module.lora_B)}
        else:
            assert isinstance(module, LoRAExperts)
            prefixes = {weight: weight.removesuffix("proj") for weight in module.adapted}
            pairs = {
                w: (getattr(module, f"{p}lora_A"), getattr(module, f"{p}lora_B"))
                for w, p in prefixes.items()
            }
        for weight, (a, b) in pairs.items():
            base = getattr(module, weight).detach().to(base_dtype).double()
            full = base + module.scaling * (b.detach().double() @ a.detach().double())
            key, stored = as_stored(f"{name}.{weight}", full, model.config)
            found[key] = stored
    return found


@pytest.mark.parametrize(("family", "targets", "rslora", "dtype"), CASES)
def test_merged_model(tmp_path, run_ranks, monkeypatch, tiny, family, targets, rslora, dtype):
    # every weight in several parts
    monkeypatch.setattr("titanlite.features.lora.merge._CHUNK_ELEMENTS", 500)
    section = replace(SECTION, targets=targets, use_rslora=rslora)
    model = make(tmp_path, family, section, run_ranks, dtype)
    out = tmp_path / "merged"
    name = str(dtype).removeprefix("torch.")
    assert main([str(tmp_path / "adapter"), str(out), "--merge", "--dtype", name]) == 0
    assert not (out / "adapter_config.json").exists() and (out / "config.json").exists()

    merged = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    wanted = expected_weights(model, dtype, tiny.as_stored)
    weights = dict(merged.named_parameters(remove_duplicate=False))
    unmerged = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    base = {name: param.detach().clone() for name, param in unmerged.named_parameters()}
    assert wanted and weights.keys() >= wanted.keys()
    for key, weight in weights.items():
        if key in wanted:
            assert torch.equal(weight, wanted[key].to(dtype)), key
            assert not torch.equal(weight, base[key]), key
        elif key in base:
            assert torch.equal(weight, base[key]), key


def test_what_does_not_fit_is_one_error(tmp_path, run_ranks, capsys):
    make(tmp_path, "qwen3", replace(SECTION, targets="q_proj, k_proj"), run_ranks)
    adapter = tmp_path / "adapter"
    assert main([str(adapter), str(tmp_path / "out")]) == 2
    assert "adapters without their model. Add --merge" in capsys.readouterr().err

    (adapter / "titanlite/manifest.json").unlink()
    tensors = load_file(adapter / "adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn"
    del tensors[f"{first}.q_proj.lora_B.weight"]
    tensors[f"{first}.k_proj.lora_A.weight"] = torch.zeros(4, 7)
    tensors["base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight"] = torch.zeros(4, 7)
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert main([str(adapter), str(tmp_path / "out"), "--merge"]) == 2
    text = capsys.readouterr().err
    for words in (
        "3 problems",
        f"does not have {first}.q_proj.lora_B.weight.",
        f"{first}.k_proj.lora_A.weight with shape (4, 7), the model expects (4, 64)",
        "x_proj.lora_A.weight: unexpected",
    ):
        assert words in text
    assert not (tmp_path / "out").exists()
