"""The expert load of transformers' models: the native one's, a plain count from the router's
logits, and its gaps.
"""

import pytest
import torch
import transformers
from tiny_transformers import TEXT_MODELS, TEXT_SIZES, VOCAB_SIZE

from tests.loading import hf_config
from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.config.schema import ActivationCheckpointSection, MoESection
from titanlite.distributed.parallelize import checkpoint_layers
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.experts import use_titanlite_experts
from titanlite.materialize import materialize
from titanlite.models.families.config_json import transformers_config
from titanlite.optim.expert_bias import ExpertBiasBalancer

# Packed documents and padding at the ends of rows.
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 7 + [-1] * 4, [0] * 18 + [-1] * 2])
TRUE = torch.tensor(True)


def build(hf):
    """Of a configuration of transformers, with random weights."""
    model = build_transformers(transformers_config(hf, "test"))
    materialize(model, "cpu", seed=1)
    return model


def loads_of(model):
    return torch.stack([counter.tokens_per_expert for counter in model.expert_counters().values()])


def draw(vocab_size, seed=0):
    tokens, labels = torch.randint(
        14, vocab_size, (2, *DOCUMENTS.shape), generator=torch.Generator().manual_seed(seed)
    )
    return tokens, labels.masked_fill(DOCUMENTS < 0, -100)


def one_rank(counts):
    """The sum over a single rank."""


def native_and_other(tiny, family, **changes):
    """titanlite's decoder and transformers' class with the same values."""
    config = tiny.config(family, **changes)
    ours = tiny.ours(config)
    other = build(hf_config(config).to_dict())
    other.transformers_model.load_state_dict(tiny.theirs(config, ours).state_dict())
    return ours.train(), other.train()


@pytest.mark.parametrize(
    ("family", "changes", "mode"),
    [
        ("qwen3_moe", {}, "full"),
        ("dots1", {"num_expert_groups": 2, "num_limited_groups": 1}, "none"),
        ("dots1", {"num_dense_layers": 2}, "full"),
    ],
)
def test_counts_are_those_of_the_native_decoder(tiny, family, changes, mode):
    """Over two micro-batches, recomputed in backward or not; what is evaluated between counts
    nothing.
    """
    models = native_and_other(tiny, family, **changes)
    found = []
    for model in models:
        checkpoint_layers(model, ActivationCheckpointSection(mode=mode))
        balancer = ExpertBiasBalancer(model, 0.0, one_rank)
        for seed in (0, 1):
            tokens, labels = draw(model.config.vocab_size, seed)
            model(tokens, labels, None, DOCUMENTS).cross_entropy.backward()
            model.eval()
            with torch.no_grad():
                model(tokens[:1], labels[:1], None, DOCUMENTS[:1])
            model.train()
            balancer.accumulate()
        found.append(balancer.step(TRUE))
        assert not balancer.counts.any()
    native, other = models
    assert list(other.expert_counters()) == list(native.expert_counters())
    rows = 2 * int((DOCUMENTS >= 0).sum()) * native.config.top_k
    assert found[1].sum(dim=1).tolist() == [rows] * len(native.expert_counters())
    assert torch.equal(found[1], found[0])


def test_the_bias_of_a_class_moves_as_the_native_one_does(tiny):
    """Over two steps, the second of which uses the bias that the first has set."""
    found = []
    for model in native_and_other(tiny, "dots1", num_dense_layers=2):
        balancer = ExpertBiasBalancer(model, 0.1, one_rank)
        for seed in (0, 1):
            tokens, labels = draw(model.config.vocab_size, seed)
            model(tokens, labels, None, DOCUMENTS)
            balancer.accumulate()
            balancer.step(TRUE)
        found.append([moe.gate.expert_bias for moe in model.moe_layers().values()])
    native, other = map(torch.stack, found)
    assert native.any() and torch.equal(native, other)


def configure(name, device_type, **moe):
    model = build(TEXT_MODELS[name]().to_dict())
    model.configure("sdpa", MoESection(**moe), 64, torch.device(device_type))
    return model


def test_a_class_without_a_bias_buffer_is_not_balanced():
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM have no such buffer\. Leave it out"):
        configure("mixtral", "cpu", expert_bias_update_rate=0.1)


@pytest.mark.parametrize(
    ("name", "device_type", "ours"),
    [("mixtral", "cuda", True), ("mixtral", "cpu", False), ("gpt_oss", "cuda", False)],
)
def test_plain_experts_of_a_class_are_computed_by_ours_on_cuda(name, device_type, ours):
    config = configure(name, device_type).transformers_model.config
    assert (config._experts_implementation == "titanlite") == ours


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("mixtral", "eager"),
        ("mixtral", "titanlite"),
        ("gpt_oss", "grouped_mm"),
        ("gpt_oss", "batched_mm"),
    ],
)
def test_counts_are_those_of_the_logits(name, implementation):
    """Whatever computes the experts; without documents nothing is padding."""
    model = build(TEXT_MODELS[name]().to_dict())
    inner = model.transformers_model
    use_titanlite_experts(
        inner
    ) if implementation == "titanlite" else inner.set_experts_implementation(implementation)
    logits = []
    for layer in inner.model.layers:
        router = layer.mlp.gate if name == "mixtral" else layer.mlp.router
        router.register_forward_hook(lambda module, args, out: logits.append(out[0].detach()))
    tokens, labels = draw(VOCAB_SIZE)
    for ids in (None, DOCUMENTS):
        if ids is not None:
            model(tokens, labels, None, ids)  # looks at how the model works
        logits.clear()
        model(tokens, labels, None, ids).cross_entropy.backward()
        valid = slice(None) if ids is None else (ids >= 0).flatten()
        chosen = [scores[valid].topk(2).indices.flatten() for scores in logits[-2:]]
        expected = torch.stack([ids.bincount(minlength=4) for ids in chosen])
        assert torch.equal(loads_of(model), expected)
        assert expected.sum() < 2 * 2 * DOCUMENTS.numel() or ids is None


def test_a_model_whose_experts_transformers_does_not_call_is_not_counted():
    experts = {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 48}
    config = transformers.Llama4TextConfig(**TEXT_SIZES, **experts, head_dim=8)
    model = build(config.to_dict())
    model.configure("sdpa", JobConfig().moe, 1024, torch.device("cpu"))
    balancer = ExpertBiasBalancer(model, 0.0, one_rank)
    model(*draw(VOCAB_SIZE))
    balancer.accumulate()
    assert balancer.step(TRUE) is None and not model.expert_counters()
    assert balancer.bias_range() is None
