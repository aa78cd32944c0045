"""The experts, composed of operators: rows of no expert, and tokens that have fewer rows."""

import pytest
import torch
from expert_layer import ExpertLayer

from titanlite.ops.moe_experts import gather_sum


@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_of_no_expert_reach_nothing(top_k):
    layer = ExpertLayer([6, 3], top_k, spare_tokens=1)  # at least top_k rows belong to no expert
    layer.ids[-2:] = 2
    alone = (layer.ids == 2).all(dim=1)
    with torch.no_grad():
        layer.inputs[0][alone] = torch.nan
        layer.dout[alone] = torch.nan
    out, dx, dgate_up, ddown, _ = layer.results(layer.run("torch"))
    assert out.isfinite().all() and not out[alone].any() and not dx[alone].any()
    assert dgate_up.isfinite().all() and ddown.isfinite().all()


def test_no_tokens():
    layer = ExpertLayer([0, 0], 2)
    out, *gradients = layer.results(layer.run("torch"))
    assert out.shape == (0, 24) and not any(gradient.any() for gradient in gradients)


def test_tokens_with_fewer_rows_than_others():
    """As those that came from other ranks have: rows from R on are none."""
    y = torch.randn(7, 3, dtype=torch.float64)
    rows = torch.tensor([[0, 4, 9], [1, 9, 9], [9, 5, 9], [9, 9, 2], [7, 3, 6]])
    expected = torch.cat([y, torch.zeros(3, 3)])[rows].sum(1)
    torch.testing.assert_close(gather_sum(y, rows), expected, rtol=0, atol=1e-14)
