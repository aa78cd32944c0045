"""What a recomputation of a layer takes from the forward."""

import torch

from titanlite.distributed.activation_checkpoint import _checkpoint
from titanlite.models.layers import keep


def test_what_is_kept_is_made_once_however_often_a_layer_is_recomputed():
    made = []

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        number = keep(lambda: len(made))  # another one, if it were made again
        factor = keep(lambda: made.append(None) or weight * 2)
        return (x.sin() * factor * (number + 1)).sin().sin()

    x, weight = (torch.linspace(0.1, 1.0, 5, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(layer(x, weight).sum(), (x, weight))
    made.clear()
    out = [_checkpoint(layer, x, weight).sum()]
    assert len(made) == 1
    out.append(_checkpoint(layer, x, weight).sum())  # a layer's next micro-batch has values of its own
    assert len(made) == 2
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(out[0], (x, weight), retain_graph=True), expected, rtol=0, atol=0
        )
    assert len(made) == 2
    expected = torch.autograd.grad(out[1], (x, weight))
    made.pop()
    torch.testing.assert_close(torch.autograd.grad(layer(x, weight).sum(), (x, weight)), expected, rtol=0, atol=0)
