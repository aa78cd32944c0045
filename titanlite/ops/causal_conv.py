"""Short causal convolution of every channel, on packed documents, followed by SiLU.

Shapes: B batch, S sequence, D channels, W taps, L = W - 1 inputs before a token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_conv(
    x_BSD: Tensor,
    weight_DW: Tensor,
    document_ids_BS: Tensor | None = None,
    before_BLD: Tensor | None = None,
) -> Tensor:
    """Return `silu(sum over i of weight[:, W - 1 - i] * x[t - i])`, over tokens of the document of
    t, (B, S, D).

    Sums are float32 or wider, and rounded once to the dtype of x. Saved for backward: the
    arguments.

    Args:
        x_BSD: inputs.
        weight_DW: taps; the last tap belongs to the token itself.
        document_ids_BS: integers; None: one document per row.
        before_BLD: inputs before the row, in the document of its first token (`last_inputs`); None
            if there are none.
    """
    if before_BLD is None:
        return _CausalConv.apply(x_BSD, weight_DW, document_ids_BS)
    num_before = before_BLD.shape[1]
    if document_ids_BS is not None:
        first = document_ids_BS[:, :1].expand(-1, num_before)
        document_ids_BS = torch.cat([first, document_ids_BS], 1)
    joined = torch.cat([before_BLD, x_BSD], 1)
    return _CausalConv.apply(joined, weight_DW, document_ids_BS)[:, num_before:]


def last_inputs(x_BSD: Tensor, before_BLD: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the last L inputs of each row of `lengths` tokens, (B, L, D), with which the row can
    be continued. `before` are the inputs before the row, zeros if there are none.
    """
    places_BL = lengths_B[:, None] + torch.arange(before_BLD.shape[1], device=x_BSD.device)
    joined = torch.cat([before_BLD, x_BSD], 1)
    return joined.gather(1, places_BL[..., None].expand(-1, -1, x_BSD.shape[2]))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, documents)
        return F.silu(_convolve(*_widen(x, weight), documents)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weight, documents = ctx.saved_tensors
        x_wide, taps = _widen(x, weight)
        dout = torch.ops.aten.silu_backward(dy.to(taps.dtype), _convolve(x_wide, taps, documents))
        dx, dtaps = dout * taps[-1], torch.empty_like(taps)
        dtaps[-1] = (dout * x_wide).sum((0, 1))
        for i in range(1, len(taps)):
            read = _mask(dout[:, i:], documents, i)
            dx[:, :-i].addcmul_(read, taps[-1 - i])
            dtaps[-1 - i] = (read * x_wide[:, :-i]).sum((0, 1))
        return dx.to(x.dtype), dtaps.T.to(weight.dtype), None


def _widen(x: Tensor, weight_DW: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and the taps (W, D), float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype), weight_DW.T.to(dtype).contiguous()


def _convolve(x: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
    out = x * taps[-1]
    for i in range(1, len(taps)):
        out[:, i:].addcmul_(_mask(x[:, :-i], documents, i), taps[-1 - i])
    return out


def _mask(x: Tensor, documents: Tensor | None, distance: int) -> Tensor:
    """Set inputs to zero if the token at that distance is in a different document."""
    if documents is None:
        return x
    return x * (documents[:, distance:] == documents[:, :-distance])[..., None]
