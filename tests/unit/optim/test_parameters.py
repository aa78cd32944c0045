"""Patterns that freeze parameters and change learning rates."""

from dataclasses import replace

import pytest

from titanlite.base.errors import ConfigError
from titanlite.config.schema import OptimizerSection
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families
from titanlite.optim.optimizer import (
    build_adamw,
    count_parameters,
    freeze_parameters,
    lr_multipliers,
)


def build(family="qwen3_moe", **changes):
    return build_decoder(replace(families()[family].presets["debug"], **changes))


def frozen(model):
    return {name for name, param in model.named_parameters() if not param.requires_grad}


def test_freeze_by_pattern():
    model = build(num_layers=2)
    freeze_parameters(model, OptimizerSection(freeze=" model.embed_tokens*, *.mlp.gate.* "))
    routers = {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert frozen(model) == {"model.embed_tokens.weight"} | routers
    total, trained = count_parameters(model)
    assert total - trained == sum(model.get_parameter(name).numel() for name in frozen(model))


@pytest.mark.parametrize("pattern", ["lm_head.weight", "model.embed_tokens.*"])
def test_tied_parameter_is_frozen_under_each_name(pattern):
    model = build("qwen3", tie_word_embeddings=True)
    freeze_parameters(model, OptimizerSection(freeze=pattern))
    assert frozen(model) == {"model.embed_tokens.weight"}


def test_bad_patterns_are_one_error():
    with pytest.raises(ConfigError) as error:
        freeze_parameters(build(), OptimizerSection(freeze="embed_tokens, *.gate.weigth"))
    text = str(error.value)
    assert text.startswith("optimizer.freeze: 2 problems:")
    assert (
        "'embed_tokens' matches no parameter" in text
        and "'*.gate.weigth' matches no parameter" in text
    )


def test_learning_rates_by_pattern():
    model = build(num_layers=2)
    section = OptimizerSection(
        lr=0.1, lr_multipliers="*.experts.*=0.5, lm_head*=2, *.1.mlp.experts.down*=3"
    )
    freeze_parameters(model, OptimizerSection(freeze="model.layers.0.mlp.experts.down_proj"))
    optimizer = build_adamw(model, section)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    expected = {"lm_head.weight": 0.2, "model.layers.1.mlp.experts.down_proj": 0.1 * 3}
    for name, param in model.named_parameters():
        if name == "model.layers.0.mlp.experts.down_proj":
            assert id(param) not in rate
            continue
        wanted = expected.get(name, 0.05 if "experts" in name else 0.1)
        assert rate[id(param)] == pytest.approx(wanted), name


def test_bad_multipliers_are_one_error():
    model = build()
    freeze_parameters(model, OptimizerSection(freeze="lm_head*"))
    with pytest.raises(ConfigError) as error:
        lr_multipliers(model, OptimizerSection(lr_multipliers="head*=2, lm_head*=3"))
    text = str(error.value)
    assert (
        "'head*' matches no parameter" in text
        and "'lm_head*' matches frozen parameters only" in text
        and "'head*' matches frozen" not in text
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lm_head*", "'lm_head*' is not pattern=factor"),
        ("a=nan", "'a=nan' is not"),
        ("a=1, a=2", "'a' is there twice"),
        ("a=1,,b=2", "nothing between two commas"),
    ],
)
def test_multipliers_that_are_none(text, words):
    with pytest.raises(ConfigError) as error:
        lr_multipliers(build(), OptimizerSection(lr_multipliers=text))
    assert words in str(error.value)
