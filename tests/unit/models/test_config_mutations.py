"""Random changes of config.json: refused before the first step, or understood as transformers
understands it.

CI draws a few of each kind for each family. `TITANLITE_MUTATIONS=300 pytest <this file>` draws
more, and `TITANLITE_SEED=7` others; a failure names the file's content.
"""

import json
import os
import random
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from titanlite.base.errors import CheckpointError, ConfigError
from titanlite.checkpoint.description import describe_model
from titanlite.models.families import any_model_config_from_hf, families, model_config_from_hf
from titanlite.models.families.keys import NotNativeError

DRAWS, SEED = (
    int(os.environ.get("TITANLITE_MUTATIONS", "6")),
    int(os.environ.get("TITANLITE_SEED", "0")),
)
KINDS = ("rope", "missing", "value", "number", "flag")
BOUND = 1e-5
INFINITY = float("inf")
VALUES: list[Any] = [
    *(
        None,
        None,
        None,
        None,
        True,
        False,
        0,
        1,
        2,
        8,
        -1,
        10**18,
        0.5,
        1.0,
        1e30,
        INFINITY,
        "1",
        [],
        [1],
        {},
        {"1": "a"},
        "gelu",
    ),
    *(
        ["full_attention"],
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["dense", "sparse"],
        {"factor": INFINITY},
    ),
]
ROPE_VALUES: dict[str, list[Any]] = {
    "rope_type": ["default", "linear", "llama3", "yarn", "dynamic", None],
    "type": ["default", "linear", "yarn", None],
    "factor": [2.0, 4, 0.5, None, "2", INFINITY],
    "rope_theta": [1e4, 500000, None],
    "original_max_position_embeddings": [64, None, 2.5],
    "low_freq_factor": [1.0, 4.0, None],
    "beta_fast": [32, 8.0, None, 0],
    "attention_factor": [1.5, 0, None],
    "mscale": [1.0, 0.7, None, -20],
    "mscale_all_dim": [1.0, None, 0],
    "truncate": [True, False, None, 1],
    "partial_rotary_factor": [0.5, 1.0, None, 0],
    "full_attention": [{"rope_type": "default", "rope_theta": 1e4}, None],
}
# Read by transformers from any configuration, or written by other versions, without being declared
# by the class.
OTHERS = (
    *(
        "is_causal",
        "per_layer_config",
        "head_dim",
        "num_local_experts",
        "rope_theta",
        "partial_rotary_factor",
    ),
    *(
        "original_max_position_embeddings",
        "layer_types",
        "mlp_layer_types",
        "sliding_window",
        "max_window_layers",
    ),
    *(
        "use_sliding_window",
        "moe_layer_freq",
        "scoring_func",
        "topk_method",
        "qk_head_dim",
        "num_labels",
        "mlp_bias",
    ),
    *(
        "use_cache",
        "bos_token_id",
        "hidden_act",
        "attention_dropout",
        "decoder_sparse_step",
        "mlp_only_layers",
    ),
    *("output_router_logits", "num_nextn_predict_layers", "id2label"),
)
FLAGS = (
    *(
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "use_cache",
        "use_sliding_window",
        "norm_topk_prob",
    ),
    *("use_qk_norm", "rope_interleave", "is_causal"),
)
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "intermediate_size": 24}


def base_of(family: str) -> dict[str, Any]:
    """A tiny model of the family, as a folder of transformers 4 describes one."""
    from dataclasses import replace

    preset = families()[family].presets["debug"]
    hf = families()[family].to_hf(replace(preset, **SMALL, head_dim=8, rope_scaling=None))
    theta = hf.pop("rope_parameters")["rope_theta"]
    return {
        "model_type": family,
        **hf,
        "rope_theta": theta,
        "hidden_act": "silu",
        "use_cache": True,
    }


def mutate(hf: dict[str, Any], kind: str, family: str, draw: random.Random) -> None:
    if kind == "rope":
        names = draw.sample(sorted(ROPE_VALUES), draw.randint(1, 5))
        table = {name: draw.choice(ROPE_VALUES[name]) for name in names}
        if draw.random() < 0.6:
            rope_type = draw.choice(["linear", "llama3", "yarn"])
            table = {"rope_type": rope_type, "factor": 4.0, **table}
            table |= (
                {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
            )
        hf[draw.choice(["rope_scaling", "rope_parameters"])] = table
        return
    known = sorted({*families()[family].declared, *families()[family].keys.values()})
    numbers = [
        name for name in hf if isinstance(hf[name], int | float) and not isinstance(hf[name], bool)
    ]
    match kind:
        case "missing":
            hf.pop(draw.choice([name for name in hf if name != "model_type"]))
        case "value":
            hf[draw.choice([*known, *known, *OTHERS])] = deepcopy(draw.choice(VALUES))
        case "number":
            now = hf[key := draw.choice(numbers)]
            hf[key] = draw.choice(
                [float(now), int(now), now * 2, now / 2, now + 1, -now, now * 10**12, INFINITY]
            )
        case "flag":
            key = draw.choice(
                [
                    name
                    for name in {**hf, "attention_bias": 0, "tie_word_embeddings": 0}
                    if name in FLAGS
                ]
            )
            hf[key] = draw.choice([True, False, True, False, 0, "no"])


def text_of(hf: dict[str, Any]) -> str:
    return json.dumps(hf, indent=1).replace("Infinity", "1e400")


def logits_of(
    hf_config: Any, values: dict[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    hf_config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert (missing, unexpected) == ([], []), f"other tensors: {missing} {unexpected}"
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def hold(folder: Path, tiny: Any) -> str:
    """ "refused", "elsewhere" for transformers' class, or "equal"; asserts otherwise."""
    try:
        config = model_config_from_hf(folder)
    except NotNativeError:
        with suppress(ConfigError):
            any_model_config_from_hf(folder, "here")
        return "elsewhere"
    except ConfigError:
        return "refused"
    try:
        description = describe_model(config, None, torch.float32, folder)
    except CheckpointError:  # of keys without effect; as a run, before its first step
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
    draw, base = random.Random(f"{family} {SEED}"), base_of(family)
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    failures = []
    for number, kind in enumerate(["none", *KINDS * DRAWS]):
        hf = base_of(family)
        while kind != "none" and hf == base:  # a missing key made null is no change of most
            mutate(hf, kind, family, draw)
        for _ in range(draw.choice([0, 0, 0, 1, 2]) if kind != "none" else 0):
            mutate(hf, draw.choice(KINDS), family, draw)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(text_of(hf))
        try:
            result = hold(folder, tiny)
            assert result == "equal" or kind != "none", "the base is native"
        except Exception as error:  # noqa: BLE001 - each is a failure, whatever it is
            changes = {
                k: hf.get(k, "<missing>")
                for k in {*hf, *base}
                if hf.get(k, "-") != base.get(k, "-")
            }
            failures.append(f"{type(error).__name__}: {str(error)[:300]}\n    {kind}: {changes}")
            result = "failed"
        found.setdefault(kind, Counter())[result] += 1
    assert not failures, f"{len(failures)} of {DRAWS * len(KINDS)}:\n" + "\n".join(failures[:40])
    both = sum(found.values(), Counter())
    assert min(both["refused"], both["equal"]) >= DRAWS, f"of {len(KINDS) * DRAWS} draws: {both}"
