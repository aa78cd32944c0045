"""Rotary frequencies against transformers' own, positions beyond bfloat16's 256, and the rotation
itself.
"""

import pytest
import torch
from files import read_table
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from titanlite.config import RopeScaling
from titanlite.config.model import ROPE_FIELDS
from titanlite.ops import inverse_frequencies, rope_cos_sin


@pytest.mark.parametrize("given", read_table("rope_scalings")["scalings"])
def test_scaled_frequencies_equal_transformers(given):
    scaling = RopeScaling(**given)
    for theta, head_dim in [(10000.0, 128), (1000000.0, 16)]:
        names = ROPE_FIELDS[scaling.rope_type]
        parameters = {"rope_theta": theta, "rope_type": scaling.rope_type}
        parameters |= {name: getattr(scaling, name) for name in names}
        config = LlamaConfig(
            hidden_size=head_dim * 2,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters=parameters,
        )
        expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, "cpu")
        assert scaling.attention_scaling == pytest.approx(attention_factor, rel=1e-12)
        assert (attention_factor == 1.0) == (scaling.rope_type != "yarn" or scaling.factor == 1)
        actual = inverse_frequencies(head_dim, theta, scaling)
        assert actual.dtype == torch.float32
        # The same formula in another order of operations: a few float32 roundings.
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_frequencies_are_real_inside_a_meta_context():
    with torch.device("meta"):
        assert inverse_frequencies(16, 1e4).device.type == "cpu"


def test_positions_beyond_256_are_told_apart_in_bfloat16():
    inv_freq = inverse_frequencies(64, 1e4)
    positions = torch.tensor([[256, 257, 4095, 4096, 40000, 40001]])
    cos, sin = rope_cos_sin(inv_freq, positions, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    assert cos.shape == (1, 6, 1, 64)
    angles = positions.double()[..., None] * inv_freq.double()
    # Half a unit in the last of bfloat16's 8 bits, plus the float32 rounding of an angle of up to
    # 4e4 radians.
    for actual, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert (actual[0, :, 0, :32].double() - exact[0]).abs().max() < 2**-9 + 4e-3
        assert torch.equal(actual[..., :32], actual[..., 32:])
    assert (cos[0, 0] != cos[0, 1]).any()
    assert (cos[0, 4] != cos[0, 5]).any()


def test_bfloat16_frequencies_are_not_multiplied_in_bfloat16():
    inv_freq = torch.tensor([1.0, 0.5], dtype=torch.bfloat16)
    cos, _ = rope_cos_sin(inv_freq, torch.tensor([[257]]), torch.float32)
    assert cos[0, 0, 0, 0] == torch.tensor(257.0).cos()
