"""Load a Hugging Face folder as a run begins with it, without a run."""

from types import SimpleNamespace

import pytest

from titanlite.assemble import build_model
from titanlite.base.errors import TitanliteError
from titanlite.checkpoint.hf_model import HFFormat, weights_of
from titanlite.config.model import ModelSection
from titanlite.config.schema import CheckpointSection
from titanlite.materialize import materialize
from titanlite.models.families import any_model_config_from_hf, families

# What chooses each family on the command line, in its small preset.
EVERY_FAMILY = {name: [f"--model.name={name}"] for name in families()}


def load(folder, implementation="auto", **settings):
    """Load the model of `folder` on the CPU, as a run begins with it."""
    section = CheckpointSection(initial_load_path=str(folder), **settings)
    model = build_model(any_model_config_from_hf(folder, "test", implementation))
    materialize(model, "cpu", HFFormat(section, ModelSection()).initial_sources(model))
    return model.eval()


def refusal(folder, implementation="auto"):
    """Return why `load` refuses `folder`."""
    with pytest.raises(TitanliteError) as error:
        load(folder, implementation)
    return str(error.value)


def hf_checkpoint(folder, config, **options):
    """Return the weights in `folder` as a source for the native decoder of `config`."""
    model = SimpleNamespace(config=config)
    return weights_of(folder, model, **options)
