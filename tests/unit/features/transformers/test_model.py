"""The declarations of a transformers model, the facts it finds out about itself, and its
refusals.
"""

import pytest
import torch
import transformers
from files import read_table, write_json
from tiny_transformers import ALL_MODELS, VOCAB_SIZE

from titanlite.base.errors import ConfigError, PlanError
from titanlite.config import load_config
from titanlite.config.model import TransformersConfig
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.initial import Notes, find_sources
from titanlite.features.transformers.model import TransformersModel
from titanlite.materialize import materialize
from titanlite.models.families.config_json import transformers_config
from titanlite.preflight import check


def config_of(name):
    return transformers_config(ALL_MODELS[name]().to_dict(), "test")


@pytest.mark.parametrize("name", ALL_MODELS)
def test_every_tensor_has_a_source_without_a_checkpoint(name):
    """The initial values are drawn as transformers draws them, with the same mean and deviation for
    each tensor.
    """
    ours = build_transformers(config_of(name))
    materialize(ours, "cpu", seed=3)
    theirs = getattr(transformers, ours.config.architecture)(ALL_MODELS[name]())
    expected = theirs.state_dict()
    for key, value in ours.transformers_model.state_dict().items():
        wanted = expected[key].float()
        spread = 0.0 if value.numel() == 1 else wanted.std().item()
        # The mean and the deviation of n draws vary by at most spread / sqrt(n), and two of them
        # never differ by 6 times that.
        bound = 6 * spread / value.numel() ** 0.5 + 1e-6
        assert value.float().mean().item() == pytest.approx(wanted.mean().item(), abs=bound), key
        if value.numel() > 1:
            assert value.float().std().item() == pytest.approx(spread, abs=bound), key
    buffers = dict(theirs.named_buffers())
    for key, buffer in ours.transformers_model.named_buffers():
        assert buffer.dtype == buffers[key].dtype, key
        assert torch.equal(buffer, buffers[key]), key


# --- nothing left to luck


def spoil_list(model):
    model.model.layers[1].tables = [torch.empty(4, device="meta")]
    return "model.layers.1.tables"


def spoil_buffer(model):
    model.model.norm.register_buffer("scale", torch.empty(4, device="meta"), persistent=False)
    return "model.norm.scale"


def sources_of(inner):
    return find_sources(inner, Notes(), lambda: (inner, Notes()))


@pytest.mark.parametrize(("spoil", "late"), [(spoil_list, False), (spoil_buffer, True)])
def test_a_tensor_that_nobody_fills_makes_the_plan_fail_with_its_name(spoil, late):
    inner = build_transformers(config_of("llama")).transformers_model
    sources = sources_of(inner) if late else {}
    name = spoil(inner)
    model = TransformersModel(inner, config_of("llama"), sources or sources_of(inner))
    with pytest.raises(PlanError, match=rf"{name}: .*no source"):
        materialize(model, "cpu")
    assert all(param.is_meta for param in model.parameters()), "nothing was allocated"


def test_reading_sources_moves_no_generator(monkeypatch):
    """It changes neither the CPU's generator nor, by a seed for all devices, the GPUs' generators,
    from which dropout draws.
    """

    def seed_all(seed):
        raise AssertionError(f"the GPUs were seeded with {seed}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seed_all)
    before = torch.get_rng_state()
    build_transformers(config_of("llama"))
    assert torch.equal(torch.get_rng_state(), before)


# --- facts from the first forward


def batch():
    tokens, labels = torch.randint(14, VOCAB_SIZE, (2, 2, 12))
    return tokens, labels, torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])


@pytest.mark.parametrize(("cap", "plain"), [(None, True), (2.0, False)])
def test_the_loss_knows_soft_caps(cap, plain):
    hf = ALL_MODELS["gemma3_text"]().to_dict() | {"final_logit_softcapping": cap}
    model = build_transformers(transformers_config(hf, "test"))
    materialize(model, "cpu")
    with torch.no_grad():
        model.transformers_model.lm_head.weight *= 50  # logits large enough for a cap to change
    tokens, labels, documents = batch()
    loss = model(tokens, labels, None, documents).cross_entropy
    logits = model(tokens, None, None, documents)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    # float32, other orders of summation
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.find_facts(torch.device("cpu")).has_plain_head is plain
    assert (logits.abs().max() <= 2.0).item() is (cap is not None)


# --- choosing and refusing


def job(tmp_path, hf, *overrides):
    write_json(tmp_path / "config.json", hf)
    (tmp_path / "job.toml").write_text(
        f'model.hf_assets_path = "{tmp_path}"\ntraining.seq_len = 16\n'
    )
    return check(load_config(["--config", str(tmp_path / "job.toml"), *overrides]), 2)


@pytest.mark.parametrize(
    ("name", "changes", "implementation", "native"),
    [
        ("qwen3", {}, "auto", True),
        ("qwen3", {}, "transformers", False),
        ("gemma3_text", {}, "auto", False),
        ("llama", {"hidden_act": "gelu"}, "auto", False),
    ],
)
def test_auto_takes_the_native_decoder_where_it_can(
    tmp_path, name, changes, implementation, native
):
    hf = ALL_MODELS[name]().to_dict() | changes
    config = job(tmp_path, hf, f"--model.implementation={implementation}").model_config
    assert isinstance(config, TransformersConfig) is not native


@pytest.mark.parametrize("case", read_table("transformers_refusals")["refused"])
def test_what_cannot_be_done_is_said(tmp_path, case):
    hf = ALL_MODELS[case["model"]]().to_dict() | case.get("changes", {})
    with pytest.raises(ConfigError, match=case["says"]):
        job(tmp_path, hf, *case.get("overrides", []))
