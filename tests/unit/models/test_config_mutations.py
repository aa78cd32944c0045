"""Random changes of config.json: refused before the first step, or understood as transformers
understands it.

A failure names the file's content. `TITANLITE_MUTATIONS=300 pytest <this file>` draws more.
"""

import json
import os
import random
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from files import read_json
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
from unit.models.conftest import values_of

from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.checkpoint.description import describe_model
from titanlite.models.families import any_model_config_from_hf, families, model_config_from_hf
from titanlite.models.families.config_json import NotNativeError

DRAWS = int(os.environ.get("TITANLITE_MUTATIONS", "14"))  # of each family
BOUND = 1e-5
# Values of any key and of the keys of rotary tables, and keys that transformers reads from any
# configuration or that other versions write.
DATA = read_json(Path(__file__).parent / "config_mutations.json")
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "intermediate_size": 24}


def base_of(family):
    """A tiny model of the family, as a folder of transformers 4 describes one."""
    preset = families()[family].presets["debug"]
    hf = families()[family].to_hf(replace(preset, **SMALL, head_dim=8, rope_scaling=None))
    table = hf.pop("rope_parameters")
    theta = table.get("full_attention", table)["rope_theta"]
    return {
        "model_type": family,
        **hf,
        "rope_theta": theta,
        "hidden_act": "silu",
        "use_cache": True,
    }


def mutate(hf, family, draw):
    """Change, add or remove one key, or the rotary table."""
    names = sorted(set(hf) - {"model_type"})
    match draw.choice(["rope", "missing", "value", "value", "number"]):
        case "missing":
            hf.pop(draw.choice(names))
        case "value":
            known = sorted({*families()[family].keys.values(), *DATA["other_keys"]})
            hf[draw.choice(known)] = deepcopy(draw.choice(DATA["values"]))
        case "number":
            key = draw.choice([name for name in names if type(hf[name]) in (int, float)])
            now = hf[key]
            hf[key] = draw.choice([float(now), now * 2, now / 2, now + 1, -now, now * 10**12])
        case "rope":
            keys = draw.sample(sorted(DATA["rope_values"]), draw.randint(1, 5))
            table = {name: draw.choice(DATA["rope_values"][name]) for name in keys}
            rope_type = draw.choice(["linear", "llama3", "yarn", None])
            if rope_type is not None:
                table = {"rope_type": rope_type, "factor": 4.0, **table}
            if rope_type == "llama3":
                table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            hf[draw.choice(["rope_scaling", "rope_parameters"])] = table


def logits_of(hf_config, values, tokens):
    hf_config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert (missing, unexpected) == ([], []), f"other tensors: {missing} {unexpected}"
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def hold(folder, tiny):
    """ "refused", "elsewhere" for transformers' class, or "equal"; asserts otherwise."""
    try:
        config = model_config_from_hf(folder)
    except NotNativeError:
        with suppress(ConfigError):
            any_model_config_from_hf(folder, "here")
        return "elsewhere"
    except ConfigError:
        return "refused"
    if config.hidden_size > 256:  # a missing size, of which transformers has a large one
        return "large"
    try:
        description = describe_model(config, {}, torch.float32, folder)
    except CheckpointError:  # of keys without effect; as a run, before its first step
        return "refused"
    ours = tiny.ours(config).eval()
    values = values_of(ours)
    tokens = torch.arange(14).view(1, 14) * 5 % config.vocab_size
    with torch.no_grad():
        logits = ours(tokens)
    expected = logits_of(AutoConfig.from_pretrained(folder), values, tokens)
    assert (logits - expected).norm() <= BOUND * expected.norm(), "other logits"
    out = folder / "out"
    out.mkdir()
    for name, content in description.items():
        (out / name).write_bytes(content)
    again = logits_of(AutoConfig.from_pretrained(out), values, tokens)
    assert (again - expected).norm() <= BOUND * expected.norm(), (
        "the saved configuration has other logits"
    )
    return "equal"


@pytest.fixture
def quiet():
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns of each strange value
    yield
    logging.set_verbosity(verbosity)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("family", sorted(families()))
def test_mutations_are_refused_or_understood(family, tiny, tmp_path):
    draw, base = random.Random(family), base_of(family)
    found = Counter()
    failures = []
    for number in range(DRAWS):
        hf = base_of(family)
        for _ in range(draw.choice([1, 1, 1, 2, 3]) if number else 0):
            mutate(hf, family, draw)
        folder = tmp_path / str(number)
        folder.mkdir()
        text = json.dumps(hf).replace("Infinity", "1e400")
        (folder / "config.json").write_text(text)
        try:
            result = hold(folder, tiny)
            assert result == "equal" or number, "the base is native"
            found[result] += 1
        except Exception as error:  # noqa: BLE001 - each is a failure, whatever it is
            names = [name for name in {*hf, *base} if hf.get(name, "-") != base.get(name, "-")]
            changes = {name: hf.get(name, "<missing>") for name in names}
            failures.append(f"{type(error).__name__}: {str(error)[:300]}\n    {changes}")
    assert not failures, f"{len(failures)} of {DRAWS}:\n" + "\n".join(failures[:40])
    assert min(found["refused"], found["equal"]) >= DRAWS // 7, found
