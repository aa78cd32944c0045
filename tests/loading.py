"""Load a Hugging Face folder like the start of a run, without a run."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from titanlite.assemble import build_model
from titanlite.base.errors import TitanliteError
from titanlite.checkpoint.hf_model import HFFormat, weights_of
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection
from titanlite.materialize import materialize
from titanlite.models.families import any_model_config_from_hf, families, family_of

# The command-line option that chooses each family in its small preset.
EVERY_FAMILY = {name: [f"--model.name={name}"] for name in families()}


def load(folder, implementation="auto", **settings):
    """Load the model of `folder` on the CPU, like the start of a run."""
    section = CheckpointSection(initial_load_path=str(folder), **settings)
    model = build_model(any_model_config_from_hf(folder, "test", implementation))
    materialize(model, "cpu", HFFormat(section, ModelSection()).initial_sources(model))
    return model.eval()


def stored(folder):
    """Return all tensors of the model in `folder`, from all its files."""
    files = sorted(folder.glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def refusal(folder, implementation="auto"):
    """Return the error with which `load` refuses `folder`."""
    with pytest.raises(TitanliteError) as error:
        load(folder, implementation)
    return str(error.value)


def hf_config(config):
    """Return transformers' configuration of a native model."""
    return AutoConfig.for_model(config.family, **family_of(config).to_hf(config))


def add_to_hub_cache(cache, repository, config, revision="main", commit="0123456789" * 4):
    """Return the folder of a repository, with the config.json of a native model, as the hub's
    library lays it out in its cache.
    """
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    hf_config(config).save_pretrained(root / "snapshots" / commit)
    return root / "snapshots" / commit


def save_random_model(config, folder, dtype=torch.float32, **options):
    """Save a transformers model whose logits are far apart, so that rounding does not change the
    best one; every tensor is random.
    """
    model = AutoModelForCausalLM.from_config(hf_config(config), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not name.endswith("inv_freq"):
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator)
                    * (0.3 if tensor.dim() < 2 else 0.1)
                )
            if name.endswith("norm.weight"):
                tensor.add_(1.0)
    model.save_pretrained(folder, **options)
    return model.eval()


def hf_checkpoint(folder, config, **options):
    """Return the weights in `folder` as a source for the native decoder of `config`."""
    model = SimpleNamespace(config=config)
    return weights_of(folder, model, **options)
