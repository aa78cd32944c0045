"""Random changes of config.json: refused before the first step, or understood as transformers understands it.

CI draws a few dozen for each family. `TITANLITE_MUTATIONS=3000 pytest <this file>` draws more, and
`TITANLITE_SEED=7` others; a failure names the file's content.
"""

import json
import os
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from titanlite.base.errors import ConfigError
from titanlite.checkpoint.description import describe_model
from titanlite.models.families import families, model_config_from_hf
from titanlite.models.families.rope import NotNativeError

DRAWS, SEED = int(os.environ.get("TITANLITE_MUTATIONS", "40")), int(os.environ.get("TITANLITE_SEED", "0"))
BOUND = 1e-5
INFINITY = float("inf")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 8, -1, 2**31, 10**18, 0.0, 0.5, 1.0, 2.0, 4.0, -1.0, 1e-6, 1e30, INFINITY),
    *("1", "yes", "", [], [1], ["full_attention"], ["full_attention"] * 2, ["sliding_attention"] * 2, {}, {"1": "a"}),
    *([0, 1], ["dense", "sparse"], {"a": 1}, "silu", "gelu"),
]
ROPE_VALUES: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "llama3", "yarn", "dynamic", "longrope", None, 1],
    "type": ["default", "linear", "yarn", None],
    "factor": [2.0, 4, 1.0, 0.5, None, "2", INFINITY, True],
    "rope_theta": [1e4, 500000, None, "x"],
    "original_max_position_embeddings": [64, 16, None, 2.5],
    "low_freq_factor": [1.0, 4.0, None],
    "high_freq_factor": [4.0, 1.0, 2],
    "beta_fast": [32, 8.0, 1, None, 0],
    "beta_slow": [1, 0.5, 40],
    "attention_factor": [1.5, 0, None, "1"],
    "mscale": [1.0, 0.7, None, -20],
    "mscale_all_dim": [1.0, 0.5, None, 0],
    "truncate": [True, False, None, 1],
    "partial_rotary_factor": [0.5, 1.0, 0.25, None, 1, 0],
    "attn_factor": [1.0],
    "full_attention": [{"rope_type": "default", "rope_theta": 1e4}, None],
}
# Read by transformers from any configuration, or written by other versions, without being declared by the class.
OTHERS = (
    *("is_causal", "per_layer_config", "head_dim", "num_local_experts", "rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings", "layer_types", "mlp_layer_types", "sliding_window", "max_window_layers"),
    *("use_sliding_window", "moe_layer_freq", "scoring_func", "topk_method", "qk_head_dim", "attention_chunk_size"),
    *("num_labels", "dtype", "torch_dtype", "rope_type", "default_theta", "mlp_bias", "aux_loss_alpha", "n_group"),
)
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "intermediate_size": 24}


def base_of(family: str) -> dict[str, Any]:
    """A tiny model of the family, as a folder of transformers 4 describes one."""
    from dataclasses import replace

    preset = families()[family].presets["debug"]
    hf = families()[family].to_hf(replace(preset, **SMALL, head_dim=8, rope_scaling=None))
    theta = hf.pop("rope_parameters")["rope_theta"]
    return {"model_type": family, **hf, "rope_theta": theta, "hidden_act": "silu", "use_cache": True}


def mutate(hf: dict[str, Any], family: str, draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.3:
        names = draw.sample(sorted(ROPE_VALUES), draw.randint(1, 5))
        table = {name: draw.choice(ROPE_VALUES[name]) for name in names}
        if draw.random() < 0.6:
            rope_type = draw.choice(["linear", "llama3", "yarn"])
            table = {"rope_type": rope_type, "factor": 4.0, **table}
            table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
        hf[draw.choice(["rope_scaling", "rope_parameters"])] = table
        return
    known = sorted(families()[family].declared)
    key = draw.choice([*known, *known, *OTHERS])
    now = hf.get(key)
    if kind < 0.42:
        hf.pop(key, None)
    elif kind < 0.55:
        hf[key] = None
    elif kind < 0.75 and isinstance(now, int | float) and not isinstance(now, bool):
        hf[key] = draw.choice([float(now), int(now), now * 2, now / 2, now + 1, -now, now * 10**12])
    elif kind < 0.85 and isinstance(now, bool):
        hf[key] = draw.choice([not now, int(now), str(now)])
    else:
        hf[key] = deepcopy(draw.choice(VALUES))


def text_of(hf: dict[str, Any], draw: random.Random) -> str:
    text = json.dumps(hf, indent=1).replace("Infinity", "1e400")
    if draw.random() < 0.03:
        key = draw.choice([name for name in hf if name != "model_type"])
        text = text.replace("{", f'{{"{key}": {json.dumps(draw.choice(VALUES[:20]))},'.replace("Infinity", "1e400"), 1)
    return text


def logits_of(hf_config: Any, values: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    hf_config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert (missing, unexpected) == ([], []), f"other tensors: {missing} {unexpected}"
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def hold(folder: Path, tiny: Any) -> str:
    """ "refused", "elsewhere" for transformers' class, or "equal"; asserts otherwise."""
    try:
        config = model_config_from_hf(folder)
    except NotNativeError:
        return "elsewhere"
    except ConfigError:
        return "refused"
    ours = tiny.ours(config).eval()
    key = families()[config.family].expert_bias_key
    values = {
        name.replace("expert_bias", key) if key else name: value
        for name, value in ours.state_dict().items()
        if key or not name.endswith("expert_bias")
    }
    tokens = torch.arange(14).view(1, 14) * 5 % config.vocab_size
    with torch.no_grad():
        logits = ours(tokens)
    expected = logits_of(AutoConfig.from_pretrained(folder), values, tokens)
    assert (logits - expected).norm() <= BOUND * expected.norm(), "other logits"
    out = folder / "out"
    out.mkdir()
    for name, content in describe_model(config, None, torch.float32, folder).items():
        (out / name).write_bytes(content)
    again = logits_of(AutoConfig.from_pretrained(out), values, tokens)
    assert (again - expected).norm() <= BOUND * expected.norm(), "the saved configuration has other logits"
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
    draw = random.Random(f"{family} {SEED}")
    found: dict[str, int] = {}
    failures = []
    for number in range(DRAWS):
        hf = base_of(family)
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            mutate(hf, family, draw)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(text_of(hf, draw))
        try:
            result = hold(folder, tiny)
        except Exception as error:  # noqa: BLE001 - each is a failure, whatever it is
            base = base_of(family)
            changes = {k: hf.get(k, "<missing>") for k in {*hf, *base} if hf.get(k, "-") != base.get(k, "-")}
            failures.append(f"{type(error).__name__}: {str(error)[:300]}\n    {changes}")
            result = "failed"
        found[result] = found.get(result, 0) + 1
    print(family, found)
    assert not failures, f"{len(failures)} of {DRAWS}:\n" + "\n".join(failures[:40])
    assert {"refused", "equal"} <= found.keys()  # the draws reach both
