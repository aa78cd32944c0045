"""The initial values of a class's tensors if no checkpoint has them: all ways in which classes of
transformers write them.
"""

import math

import pytest
import torch
from plain_sources import Checkpoint, StateDictReader
from tiny_transformers import ALL_MODELS
from torch import nn
from transformers import MambaConfig, PreTrainedConfig, PreTrainedModel, initialization

from titanlite.base.errors import VerifyError
from titanlite.features.transformers import build
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import Init, Normal, Region, Uniform, materialize
from titanlite.models.families.config_json import transformers_config

SHAPE = (24, 16)


def empty(*shape):
    return nn.Parameter(torch.empty(shape or SHAPE))


class OddConfig(PreTrainedConfig):
    model_type = "odd"


def tied_config():
    config = OddConfig()
    config.tie_word_embeddings = True
    return config


class Odd(nn.Module):
    """Parameters, grouped by the code that writes them."""

    def __init__(self):
        super().__init__()
        self.computed, self.drawn, self.chained = empty(16), empty(), empty()
        self.flax, self.orthogonal, self.sliced = empty(), empty(), empty()
        self.data_row, self.scaled, self.covered, self.plain = (empty() for _ in range(4))
        # Only these lines write the following parameters.
        self.two_rows, self.large_row, self.column = empty(), empty(), empty(16, 16)
        self.alpha = nn.Parameter(torch.log(torch.expm1(torch.tensor(0.8))).unsqueeze(0))
        self.legacy_values = nn.Parameter(torch.normal(0.0, 0.5, size=SHAPE))
        self.attention = nn.MultiheadAttention(16, 2)
        self.linear = nn.Linear(16, 24)
        # This tensor is on the CPU, whatever the device context says.
        self.legacy = nn.Parameter(torch.FloatTensor(*SHAPE))
        self.register_buffer("table", torch.tensor([1.0, 2.0]))
        self.register_buffer("flag", torch.Tensor([True]))
        # A complex number is a pair in memory.
        self.register_buffer("rotation", torch.view_as_complex(torch.arange(8.0).view(4, 2)))


class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012 - of transformers

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(24, 16, padding_idx=2)
        self.odd = Odd()
        self.head = nn.Linear(16, 24, bias=False)
        self.post_init()

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))

    def _init_weights(self, module):
        init = initialization
        if module is self.head:
            # This comes after the embedding, whose own init stays if both are tied.
            init.normal_(module.weight, std=3.0)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=0.02)
            init.zeros_(module.weight.data[module.padding_idx])
        elif isinstance(module, Odd):
            init.copy_(module.computed, torch.log(torch.arange(1.0, 17.0)))
            init.copy_(module.drawn, torch.empty(SHAPE).uniform_(0.01, 16).log_())
            init.copy_(module.chained, init.uniform_(module.chained, a=1.0, b=16.0).log())
            init.default_flax_embed_init_(module.flax)
            init.orthogonal_(module.orthogonal, gain=2.0)
            init.ones_(module.sliced[:4])
            init.normal_(module.sliced[4:], std=0.1)
            init.normal_(module.data_row)
            init.zeros_(module.data_row.data[-1])
            init.normal_(module.two_rows)
            init.zeros_(module.two_rows[3])
            init.zeros_(module.two_rows[5])
            init.normal_(module.large_row)
            init.constant_(module.large_row[3], 50.0)
            init.normal_(module.column)
            init.zeros_(module.column[:, 0])
            init.kaiming_uniform_(module.scaled, a=math.sqrt(5))
            init.copy_(module.scaled, module.scaled / math.sqrt(8))
            init.orthogonal_(module.covered)
            init.normal_(module.covered, std=0.3)
            init.ones_(module.plain)
            module.plain.data.normal_(mean=1.0, std=0.5)
            init.uniform_(module.legacy)


@pytest.fixture
def odd(monkeypatch):
    monkeypatch.setattr(build, "load_config_and_class", lambda *args: (tied_config(), OddModel))
    return build_transformers(transformers_config(ALL_MODELS["llama"]().to_dict(), "test"))


def test_what_a_class_writes_is_what_it_gets(odd):
    """Values that do not depend on chance are equal; random ones agree in mean, deviation and mean
    size.
    """
    materialize(odd, "cpu", seed=1)
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(OddModel._from_config(tied_config()))
    expected, other = (dict(model.named_parameters()) for model in models)
    found = dict(odd.transformers_model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name]
        if torch.equal(wanted, other[name]):
            assert torch.equal(value, wanted), name
            continue
        bound = 6 * wanted.std().item() / value.numel() ** 0.5
        for moment in (torch.mean, torch.std, lambda x: (x - x.mean()).abs().mean()):
            assert moment(value).item() == pytest.approx(moment(wanted).item(), abs=bound), name
    for name, buffer in models[0].named_buffers():
        assert torch.equal(odd.transformers_model.get_buffer(name), buffer), name
    assert not found["embedding.weight"][2].any() and not found["odd.data_row"][-1].any()


def test_sources_are_recipes_where_one_plain_call_draws_all(odd):
    sources = odd.declare_sources()
    assert sources["odd.flax"] == Init(Normal(std=0.25))
    assert sources["odd.legacy"] == Init(Uniform(low=0.0, high=1.0))
    assert sources["odd.covered"] == Init(Normal(std=0.3))
    assert sources["embedding.weight"] == Init(Normal(std=0.02, zero_row=2))
    assert sources["odd.data_row"] == Init(Normal(zero_row=23))


def test_a_checkpoint_fills_what_constructors_put_elsewhere(odd):
    """`torch.normal(size=...)` and `torch.FloatTensor` ignore the device context; DiffLlama and
    XLNet use them.
    """
    stored = OddModel._from_config(tied_config()).state_dict()
    assert all(tensor.is_meta for tensor in odd.transformers_model.state_dict().values())
    materialize(odd, "cpu", [Checkpoint(StateDictReader(stored))])
    for name, tensor in odd.transformers_model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name


def draw(odd, name, region, seed):
    local = torch.empty(region.lengths)
    odd.declare_sources()[name].recipe.fill(local, region, SHAPE, seed, name)
    return local


@pytest.mark.parametrize("name", ["odd.drawn", "odd.legacy_values"])
def test_a_unit_is_drawn_with_the_same_bits_for_every_part(odd, name):
    """The values depend on the seed, but not on the run's generator, the order, or the distribution
    over ranks.
    """
    everything = Region((0, 0), SHAPE)
    before = torch.get_rng_state()
    whole = draw(odd, name, everything, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    other = draw(odd, name, everything, 2)
    assert not torch.equal(other, whole)
    for first in ("odd.orthogonal", name):
        draw(odd, first, everything, 1)
        assert torch.equal(draw(odd, name, Region((5, 2), (7, 9)), 1), whole[5:12, 2:11])


def test_layers_are_drawn_one_at_a_time():
    """Each of two Mamba layers has different numbers, and only one unit's tensors are real at a
    time.
    """
    config = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    model = build_transformers(transformers_config(config.to_dict(), "test"))
    names = [f"backbone.layers.{i}.mixer.conv1d.weight" for i in range(2)]
    recipes = [model.declare_sources()[name].recipe for name in names]  # type: ignore[union-attr]
    assert [recipe.unit for recipe in recipes] == ["backbone.layers.0", "backbone.layers.1"]
    shape = model.state_shapes[names[0]]
    first, second = (recipe.units.take(recipe.unit, recipe.tensor, seed=1) for recipe in recipes)
    assert first.shape == second.shape == shape and not torch.equal(first, second)
    built, _ = recipes[0].units._built
    assert all(param.is_meta for param in built.parameters())


@pytest.mark.parametrize(
    "write",
    [
        lambda param: initialization.ones_(param[1:]),
        lambda param: initialization.copy_(param, param + 1),
    ],
)
def test_what_is_not_written_completely_is_found(odd, monkeypatch, write):
    plain = OddModel._init_weights

    def initialize(self, module):
        plain(self, module)
        if isinstance(module, Odd):
            write(module.extra)

    make = Odd.__init__

    def init(self):
        make(self)
        self.extra = empty()

    monkeypatch.setattr(OddModel, "_init_weights", initialize)
    monkeypatch.setattr(Odd, "__init__", init)
    with pytest.raises(VerifyError, match=r"odd\.extra: not filled"):
        materialize(build_transformers(odd.config), "cpu")
