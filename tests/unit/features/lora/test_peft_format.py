"""adapter_config.json of peft, field by field: refused by name, or merged and continued to peft's
own logits.
"""

import shutil
import warnings

import pytest
import torch
from files import read_json, write_json
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig, LoraRuntimeConfig
from tiny_transformers import TEXT_MODELS, shift_adapters
from transformers import AutoModelForCausalLM

from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.hf_model import weights_of
from titanlite.config.schema import LoRASection
from titanlite.features.lora.layers import apply_lora
from titanlite.features.lora.peft_format import adapter_checkpoint, read_adapter
from titanlite.features.tools.export import main
from titanlite.materialize import materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import model_config_from_hf

BOUND = 1e-5  # float32 through 2 layers in another order of operations
TARGETS = ["q_proj", "down_proj"]
# Values of fields of LoraConfig other than their defaults: those that are plain LoRA, ...
PLAIN = [
    {
        "auto_mapping": {
            "base_model_class": "Qwen3ForCausalLM",
            "parent_library": "transformers.models.qwen3",
        },
        "task_type": "SEQ_2_SEQ_LM",
        "peft_version": "0.99.0",
        "base_model_name_or_path": "somewhere/else",
        "revision": "main",
        "inference_mode": False,
        "lora_dropout": 0.5,
        "megatron_core": "megatron.other",
        "qalora_group_size": 4,
        "loftq_config": {"loftq_bits": 4},
        "eva_config": EvaConfig(),
        "corda_config": CordaConfig(),
        "lora_ga_config": LoraGAConfig(),
        "runtime_config": LoraRuntimeConfig(ephemeral_gpu_offload=True),
    },
    {
        "r": 3,
        "lora_alpha": 0.5,
        "init_lora_weights": "gaussian",
        "target_modules": r".*\.(k_proj|up_proj)",
        "exclude_modules": r".*\.1\..*",
    },
    {
        "use_rslora": True,
        "init_lora_weights": "orthogonal",
        "target_modules": "all-linear",
        "exclude_modules": ["layers.0.mlp.down_proj"],
    },
    {"layers_to_transform": [1], "layers_pattern": "layers", "init_lora_weights": "eva"},
    {"target_parameters": ["mlp.up_proj.weight"]},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    config = TEXT_MODELS["qwen3"](initializer_range=0.2, tie_word_embeddings=False)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make(base, folder, **values):
    """Adapters that peft made and "trained", and the logits that it computes with them once they
    are loaded again.
    """
    settings = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": TARGETS,
        "task_type": "CAUSAL_LM",
    } | values
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


def merge(folder, base):
    """Export `adapter` of the folder, merged into `base`, as `merged`."""
    arguments = [str(folder / "adapter"), str(folder / "merged"), "--base", str(base)]
    return main([*arguments, "--merge", "--dtype", "float32"])


@pytest.mark.parametrize("settings", PLAIN)
def test_plain(base, tmp_path, settings):
    expected = make(base, tmp_path / "adapter", **settings)
    assert merge(tmp_path, base) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert (merged(tokens).logits - expected).norm() <= BOUND * expected.norm()

    stored, config = read_adapter(tmp_path / "adapter")
    names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in stored}
    table = read_json(tmp_path / "adapter/adapter_config.json")
    section = LoRASection(
        rank=config.rank,
        alpha=table["lora_alpha"],
        use_rslora=table["use_rslora"],
        targets=", ".join(sorted(names)),
    )
    model = build_decoder(model_config_from_hf(base))
    apply_lora(model, section, torch.float32)
    continued = adapter_checkpoint(
        tmp_path / "adapter", section, model, str(base), key="lora.init_from"
    )
    materialize(model, "cpu", [weights_of(base, model), continued])
    with torch.no_grad():
        assert (model(tokens) - expected).norm() <= BOUND * expected.norm()


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    make(base, folder)
    return folder


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("peft_type", "VERA", "is not plain LoRA"),
        ("init_lora_weights", "pissa_niter_4", "is not plain LoRA"),
        ("alpha_pattern", {"q_proj": 8}, "is not plain LoRA"),
        ("use_dora", True, "is not plain LoRA"),
        ("lora_alpha", "12", "are not a positive integer and a number"),
        ("r", 8, "with shape (32, 4), the model expects (32, 8)"),
    ],
)
def test_what_is_not_plain_is_refused(base, adapter, tmp_path, capsys, field, value, problem):
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    write_json(path, read_json(path) | {field: value})
    assert merge(tmp_path, base) == 2
    said = capsys.readouterr().err
    assert problem in said and ("plain" not in problem or f"{field} = {value!r}" in said)
    assert not (tmp_path / "merged").exists()
    with pytest.raises(CheckpointError):
        adapter_checkpoint(
            tmp_path / "adapter",
            LoRASection(rank=4, alpha=12.0),
            build_decoder(model_config_from_hf(base)),
            key="lora.init_from",
        )


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("lm_head", "lm_head.base_layer.weight: unexpected"),
        ("embed_tokens", "embed_tokens.lora_embedding_A: unexpected"),
    ],
)
def test_adapters_of_embedding_and_head(base, tmp_path, capsys, target, problem):
    """peft saves the weights of both with them."""
    make(base, tmp_path / "adapter", target_modules=[target])
    assert merge(tmp_path, base) == 2 and problem in capsys.readouterr().err
