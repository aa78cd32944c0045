"""The experts, composed of operators, against a loop in float64."""

import pytest
import torch
from expert_layer import NAMES, ExpertLayer

from titanlite.ops.moe_experts import gather_sum

# relative, of the norm
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def layer_of(sizes, top_k, dtype=torch.float32):
    # at least top_k rows belong to no expert
    return ExpertLayer(sizes, top_k, dtype, spare_tokens=1)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("sizes", "top_k"), [([5, 0, 17, 1], 4), ([1, 0], 1)], ids=str)
def test_equals_a_float64_loop(sizes, top_k, dtype):
    layer = layer_of(sizes, top_k, dtype)
    for name, got, want in zip(
        NAMES, layer.results(layer.run("torch")), layer.expected(), strict=True
    ):
        assert got.isfinite().all(), name
        assert (got.double() - want).norm() <= BOUNDS[dtype] * want.norm(), name


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_of_no_expert_reach_nothing(top_k):
    layer = layer_of([6, 3], top_k)
    layer.ids[-2:] = 2
    alone = (layer.ids == 2).all(dim=1)
    with torch.no_grad():
        layer.inputs[0][alone] = torch.nan
        layer.dout[alone] = torch.nan
    out, dx, dgate_up, ddown, _ = layer.results(layer.run("torch"))
    assert out.isfinite().all() and not out[alone].any() and not dx[alone].any()
    assert dgate_up.isfinite().all() and ddown.isfinite().all()


def test_tokens_with_fewer_rows_than_others():
    """As those that came from other ranks have: rows from R on are none."""
    y = torch.randn(7, 3, dtype=torch.float64)
    rows = torch.tensor([[0, 4, 9], [1, 9, 9], [9, 5, 9], [9, 9, 2], [7, 3, 6]])
    expected = torch.cat([y, torch.zeros(3, 3)])[rows].sum(1)
    torch.testing.assert_close(gather_sum(y, rows), expected, rtol=0, atol=1e-14)
