"""LoRA on one process: what is trained, what it computes, and that peft computes the same from what
was saved. `export --merge` gives what peft merges in float64, rounded once.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import PeftModel
from tensors import changed
from tiny_transformers import shift_adapters
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from tests.saving import save_hf_model
from titanlite.base.errors import CheckpointError, PlanError
from titanlite.checkpoint.commit import commit_folder
from titanlite.config.schema import LoRASection
from titanlite.features.lora.layers import adapters_disabled, apply_lora
from titanlite.features.lora.peft_format import (
    adapter_checkpoint,
    adapter_files,
    describe_adapters,
)
from titanlite.features.tools.export import main
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.interface import is_adapter

# Both compute in float32 (6e-8) through 3 layers, in a different order of operations.
BOUND = 1e-5
SECTION = LoRASection(rank=4, alpha=12.0)


def build(config, section=SECTION, *, base=None, spread=0.05):
    """The decoder with adapters; weights of `base` if given, and adapters that are not zero unless
    `spread` is.
    """
    model = build_decoder(config)
    apply_lora(model, section, torch.float32)
    plan = materialize(model, "cpu")
    if base is not None:
        missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
        assert unexpected == [] and all(map(is_adapter, missing))
    if spread:
        shift_adapters(model, spread)
    return model, plan


def tokens_of(config):
    return torch.randint(config.vocab_size, (2, 17))


def save(folder, model, plan, section, base=("base", None, None)):
    """Save the adapters; `base` is a folder, and what is saved there: a model or None, a dtype."""
    place, base_model, dtype = base
    description = describe_adapters(model, section, str(place))
    commit_folder(folder, adapter_files(plan), description)
    if base_model is not None:
        save_hf_model(base_model, materialize(base_model, "cpu"), None, place, dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text"])
def test_only_adapters_are_trained(tiny, family):
    config = tiny.config(family)
    model, _ = build(config)
    model(tokens_of(config), tokens_of(config)).cross_entropy.backward()
    for name, param in model.named_parameters():
        assert (param.grad is not None) == param.requires_grad == is_adapter(name), name
        if param.grad is not None:
            assert param.grad.abs().max() > 0, name
    leaves = {name.split(".")[-2] for name, _ in model.named_parameters() if is_adapter(name)}
    expected = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if family == "deepseek_v3":
        expected = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    if family == "qwen3_next":
        expected |= {"in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"}
    if family == "qwen3_5_text":
        expected |= {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    expected |= {"gate_proj", "up_proj", "down_proj"} if family != "qwen3_moe" else set()
    assert leaves == expected | ({"experts"} if config.num_experts else set())


def test_training_begins_at_the_base_model_and_disabled_adapters_are_it_bit_for_bit(tiny):
    config = tiny.config("qwen3_moe")
    base = tiny.ours(config)
    tokens = tokens_of(config)
    fresh, _ = build(config, base=base, spread=0.0)
    assert all(p.abs().max() > 0 for n, p in fresh.named_parameters() if n.endswith("lora_A"))
    assert all(p.abs().max() == 0 for n, p in fresh.named_parameters() if n.endswith("lora_B"))
    torch.testing.assert_close(fresh(tokens), base(tokens), rtol=0, atol=1e-5)

    moved, _ = build(config, base=base)
    expected = base(tokens)
    with_adapters = moved(tokens)
    assert (with_adapters - expected).norm() > 1e-3 * expected.norm()
    with adapters_disabled(moved):
        assert torch.equal(moved(tokens), expected)
    assert torch.equal(moved(tokens), with_adapters)


def test_gradients_of_expert_adapters(tiny):
    """Against autograd through merged weights in float64."""
    config = tiny.config("qwen3_moe")
    model, _ = build(config, replace(SECTION, targets="experts"))
    experts = model.model.layers[0].mlp.experts.double()
    rows = torch.tensor([5, 0, 4, 3, 2, 6, 1, 7])
    # the third expert has no row
    offsets = torch.tensor([1, 3, 3, 4, 5, 6, 7, 8], dtype=torch.int32)
    x = torch.randn(4, config.hidden_size, dtype=torch.float64)
    weight = torch.rand(8, dtype=torch.float64)
    routed = x, weight, (torch.arange(8) // 2)[rows.argsort()], rows.view(4, 2), offsets
    names = ["gate_up_lora_A", "gate_up_lora_B", "down_lora_A", "down_lora_B"]
    adapters = [getattr(experts, name) for name in names]
    gate_up_A, gate_up_B, down_A, down_B = adapters
    merged = {
        "gate_up_proj": experts.gate_up_proj + experts.scaling * gate_up_B @ gate_up_A,
        "down_proj": experts.down_proj + experts.scaling * down_B @ down_A,
    }
    plain = tiny.ours(config).model.layers[0].mlp.experts.double()
    out, expected = experts(*routed), functional_call(plain, merged, routed)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(y, adapters, upstream) for y in (out, expected))
    torch.testing.assert_close([out, *found], [expected, *wanted])
    assert not any(grad[2].any() for grad in found)


def test_kernels_give_the_same_loss_and_gradients(tiny):
    """Triton's, without a GPU in its interpreter: rank 4 is narrower than any tile."""
    config = tiny.config("qwen3_moe", num_layers=1, num_experts=4)
    model, _ = build(config, replace(SECTION, targets="experts"))
    tokens = tokens_of(config)[:, :4]
    results = []
    for backend in ("torch", "triton"):
        model.zero_grad()
        model.model.layers[0].mlp.experts.grouped_gemm_backend = backend
        loss = model(tokens, tokens).cross_entropy
        loss.backward()
        results.append(
            [loss.detach(), *(p.grad.clone() for n, p in model.named_parameters() if is_adapter(n))]
        )
    assert len(results[0]) == 5
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= BOUND * expected.norm()


def test_dropout_acts_in_training_only(tiny):
    config = tiny.config("qwen3_moe")
    model, _ = build(config, replace(SECTION, dropout=0.5))
    tokens = tokens_of(config)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    with adapters_disabled(model):
        assert torch.equal(model(tokens), model(tokens))


# The dtype is that of the base model's folder.
CASES = [
    ("llama", "q_proj, layers.1.*", True, torch.bfloat16),
    ("qwen3_moe", "", False, torch.float32),
    ("qwen3_moe", "experts.down_proj, o_proj", True, torch.float32),
    ("dots1", "shared_experts.*, layers.0.mlp.up_proj", False, torch.float32),
    ("qwen3_next", "", False, torch.float32),
    ("qwen3_5_moe_text", "in_proj_qkv, gate_up_proj", True, torch.bfloat16),
]


@pytest.mark.parametrize(("family", "targets", "rslora", "dtype"), CASES)
# peft asks for it
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_and_a_merged_export_compute_the_same_from_what_was_saved(
    tiny, tmp_path, one_rank, monkeypatch, family, targets, rslora, dtype
):
    # every weight in several parts
    monkeypatch.setattr("titanlite.features.lora.merge._CHUNK_ELEMENTS", 500)
    config = tiny.config(family)
    section = replace(SECTION, targets=targets, use_rslora=rslora)
    base = tiny.ours(config)
    model, plan = build(config, section, base=base)
    folder = tmp_path / "adapter"
    save(folder, model, plan, section, (tmp_path / "base", base, dtype))
    theirs = PeftModel.from_pretrained(tiny.theirs(config, base), folder)

    tokens = tokens_of(config)
    expected = theirs(tokens, use_cache=False).logits
    assert (model(tokens) - expected).norm() <= BOUND * expected.norm()
    with adapters_disabled(model):
        assert (model(tokens) - expected).norm() > 1e-3 * expected.norm(), "the adapters do nothing"

    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    again = build_decoder(config)
    apply_lora(again, section, torch.float32)
    materialize(again, "cpu", [adapter_checkpoint(tmp_path / "theirs", section, again)])
    for name, param in again.named_parameters():
        if is_adapter(name):
            assert torch.equal(param, model.get_parameter(name)), name

    out, name = tmp_path / "merged", str(dtype).removeprefix("torch.")
    assert main([str(folder), str(out), "--merge", "--dtype", name]) == 0
    assert not (out / "adapter_config.json").exists() and (out / "config.json").exists()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=dtype)
    exact = PeftModel.from_pretrained(load(tmp_path / "base").double(), folder)
    wanted = dict(exact.merge_and_unload().named_parameters())
    for key, weight in load(out).named_parameters():
        assert torch.equal(weight, wanted[key].to(dtype)), key


def test_adapters_of_another_kind_are_refused(tiny, tmp_path, one_rank):
    config = tiny.config("qwen3")
    model, plan = build(config, replace(SECTION, targets="q_proj"))
    folder = tmp_path / "adapter"
    save(folder, model, plan, SECTION)
    for changes, problem in (
        ({"targets": "k_proj"}, r"k_proj.lora_A: missing(.|\n)*q_proj.lora_A.weight: unexpected"),
        (
            {"rank": 8},
            r"with shape \(4, 64\), the model expects \(8, 64\).* Was the model, lora.rank",
        ),
        ({"alpha": 8.0}, r"by 3, but lora.alpha = 8 and lora.use_rslora = false scale by 2"),
    ):
        section = replace(SECTION, **{"targets": "q_proj", **changes})
        again = build_decoder(config)
        apply_lora(again, section, torch.float32)
        with pytest.raises((CheckpointError, PlanError), match=problem):
            materialize(again, "cpu", [adapter_checkpoint(folder, section, again)])
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no adapter_model.safetensors.* set lora.rank = 0"
    ):
        adapter_checkpoint(folder, SECTION, model)


def test_what_does_not_fit_the_base_model_is_one_error(tiny, tmp_path, one_rank, capsys):
    base = tiny.ours(tiny.config("qwen3"))
    section = replace(SECTION, targets="q_proj, k_proj")
    model, plan = build(base.config, section)
    adapter = tmp_path / "adapter"
    save(adapter, model, plan, section, (tmp_path / "base", base, torch.float32))
    assert main([str(adapter), str(tmp_path / "out")]) == 2
    assert "adapters without their model. Add --merge" in capsys.readouterr().err

    (adapter / "titanlite/manifest.json").unlink()
    first = "base_model.model.model.layers.0.self_attn"
    with changed(adapter / "adapter_model.safetensors") as tensors:
        del tensors[f"{first}.q_proj.lora_B.weight"]
        tensors[f"{first}.k_proj.lora_A.weight"] = torch.zeros(4, 7)
        tensors[f"{first}.x_proj.lora_A.weight"] = torch.zeros(4, 7)
    assert main([str(adapter), str(tmp_path / "out"), "--merge"]) == 2
    text = capsys.readouterr().err
    for words in (
        "3 problems",
        f"does not have {first}.q_proj.lora_B.weight.",
        f"has {first}.k_proj.lora_A.weight with shape (4, 7), the model expects (4, 64).",
        "x_proj.lora_A.weight: unexpected",
    ):
        assert words in text
    assert not (tmp_path / "out").exists()
