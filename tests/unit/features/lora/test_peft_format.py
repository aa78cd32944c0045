"""adapter_config.json of peft, field by field: refused by name, or merged and continued to peft's own logits."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig, LoraRuntimeConfig
from tiny_transformers import shift_adapters
from transformers import AutoModelForCausalLM, Qwen3Config

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection, LoRASection
from titanlite.features.lora.layers import apply_lora
from titanlite.features.lora.peft_format import PeftFormat, adapter_checkpoint, read_adapter
from titanlite.features.tools.export import main
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families, model_config_from_hf

BOUND = 1e-5  # float32 through 2 layers in another order of operations
TARGETS = ["q_proj", "down_proj"]
# Values of fields of LoraConfig other than their defaults: those that are plain LoRA, ...
PLAIN: dict[str, list[Any]] = {
    "task_type": ["CAUSAL_LM", "SEQ_2_SEQ_LM"],
    "auto_mapping": [{"base_model_class": "Qwen3ForCausalLM", "parent_library": "transformers.models.qwen3"}],
    "peft_version": ["0.99.0"],
    "base_model_name_or_path": ["somewhere/else"],
    "revision": ["main"],
    "inference_mode": [False],
    "r": [3],
    "lora_alpha": [5, 0.5],
    "lora_dropout": [0.5],
    "use_rslora": [True],
    "target_modules": [["o_proj"], r".*\.(k_proj|up_proj)", "all-linear"],
    "exclude_modules": [["layers.0.mlp.down_proj"], r".*\.1\..*"],
    "layers_to_transform": [[1], 0],
    "init_lora_weights": [False, "gaussian", "orthogonal", "eva", "mica"],
    "megatron_core": ["megatron.other"],
    "qalora_group_size": [4],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [EvaConfig()],
    "corda_config": [CordaConfig()],
    "lora_ga_config": [LoraGAConfig()],
    "runtime_config": [LoraRuntimeConfig(ephemeral_gpu_offload=True)],
    "target_parameters": [["mlp.up_proj.weight"]],
}
# ... and those that are not.
OTHER: dict[str, list[Any]] = {
    "peft_type": ["VERA", "ADALORA", "LOHA", "BONE", None],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "something new"],
    "alpha_pattern": [{"q_proj": 8}],
    "use_dora": [True],
    "alora_invocation_tokens": [[5, 6]],
    "kasa_config": [{"beta": 1e-4}],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make(base: Path, folder: Path, **values: Any) -> torch.Tensor:
    """Adapters that peft made and "trained", and the logits that it computes with them once they are loaded again."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | values
    if "target_parameters" in values:
        del settings["target_modules"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings without an effect
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
        shift_adapters(model, 0.1)
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        return again(torch.arange(20).view(2, 10)).logits


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in PLAIN.items() for value in values])
def test_plain(base: Path, tmp_path: Path, field: str, value: Any) -> None:
    extra = {"layers_pattern": "layers"} if field == "layers_to_transform" else {}
    expected = make(base, tmp_path / "adapter", **{field: value}, **extra)
    arguments = [str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge", "--base", str(base)]
    assert main([*arguments, "--dtype", "float32"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert (merged(tokens).logits - expected).norm() <= BOUND * expected.norm()

    stored, config = read_adapter(tmp_path / "adapter")
    names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in stored.tensors}
    table = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    section = LoRASection(
        rank=config.rank, alpha=table["lora_alpha"], use_rslora=table["use_rslora"], targets=", ".join(sorted(names))
    )
    model = build_decoder(model_config_from_hf(base))
    apply_lora(model, section, torch.float32)
    continued = adapter_checkpoint(tmp_path / "adapter", section, str(base), key="lora.init_from")
    materialize(model, "cpu", [weights_of(base, model), continued])
    with torch.no_grad():
        assert (model(tokens) - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in OTHER.items() for value in values])
def test_what_is_not_plain_is_refused(base: Path, tmp_path: Path, capsys: Any, field: str, value: Any) -> None:
    make(base, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert main([str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge", "--base", str(base)]) == 2
    text = f"{field} = {value!r} is not plain LoRA, W + scaling * B A"
    assert text in capsys.readouterr().err and not (tmp_path / "merged").exists()
    with pytest.raises(CheckpointError) as raised:
        adapter_checkpoint(tmp_path / "adapter", LoRASection(rank=4, alpha=12.0), key="lora.init_from")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("target", "tied", "problem"),
    [
        ("lm_head", False, "lm_head.base_layer.weight: is no LoRA adapter"),
        ("lm_head", True, "lm_head.lora_A.weight: the model has no weight that it is for"),
        ("embed_tokens", False, "embed_tokens.lora_embedding_A: is no LoRA adapter"),
    ],
)
def test_adapters_of_embedding_and_head(
    base: Path, tmp_path: Path, capsys: Any, target: str, tied: bool, problem: str
) -> None:
    """peft saves the weights of both with them, and a head that is tied has no weight of its own to add to."""
    shutil.copytree(base, tmp_path / "base")
    if tied:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.save_pretrained(tmp_path / "base")
    make(tmp_path / "base", tmp_path / "adapter", target_modules=[target])
    arguments = [str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge", "--base", str(tmp_path / "base")]
    assert main(arguments) == 2 and problem in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha_pattern": {"down_proj": 3}, "use_rslora": True},
        *({"use_dora": True}, {"bias": "all"}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}),
    ],
)
def test_the_remedy_gives_what_peft_computes(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = make(base, tmp_path / "adapter", **settings)
    with pytest.raises(CheckpointError, match=f"{next(iter(settings))} = .* is not plain LoRA, .* Merge the"):
        read_adapter(tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    ours = build_decoder(model_config_from_hf(tmp_path / "merged"))
    materialize(ours, "cpu", [weights_of(tmp_path / "merged", ours)])
    with torch.no_grad():
        assert (ours(torch.arange(20).view(2, 10)) - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("change", [{"lora_alpha": None}, {"lora_alpha": "12"}, {"r": None}, {"r": "8"}])
def test_a_rank_or_factor_that_is_none_is_refused(base: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    make(base, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | change).items() if v is not None}))
    with pytest.raises(CheckpointError, match="are not a rank and a factor"):
        read_adapter(tmp_path)


def test_matrices_of_another_rank_than_the_configuration_says(base: Path, tmp_path: Path, capsys: Any) -> None:
    """Their scaling would be that of the configuration's rank."""
    make(base, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 8}))
    assert main([str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge", "--base", str(base)]) == 2
    assert "shapes (4, 32) and (32, 4) (lora_B) do not fit rank 8" in capsys.readouterr().err


def test_the_base_of_adapters_is_checked_too(tmp_path):
    """They are merged into it when training is over."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "use_cache": "yes"}))
    model, section = build_decoder(families()["qwen3"].presets["debug"]), LoRASection(rank=2)
    saved_as = PeftFormat(CheckpointSection(initial_load_path=str(tmp_path)), ModelSection(), section)
    with pytest.raises(CheckpointError, match="use_cache"):
        saved_as.describe(model, None, [])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    apply_lora(model, section, torch.float32)
    assert saved_as.describe(model, None, []).keys() == {"adapter_config.json", "titanlite/config.json"}
