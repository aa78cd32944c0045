"""Short causal convolution of every channel, on packed documents, followed by SiLU.

Shapes: B batch, S sequence, D channels, W taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.ops.kernels import differentiate, wide_dtype


def causal_conv(x_BSD: Tensor, weight_DW: Tensor, document_ids_BS: Tensor | None = None) -> Tensor:
    """Return `silu(sum over i of weight[:, W - 1 - i] * x[t - i])`, over tokens of the document of
    t, (B, S, D).

    Sums are float32 or wider, and rounded once to the dtype of x. Saved for backward: the
    arguments.

    Args:
        x_BSD: inputs.
        weight_DW: taps; the last tap belongs to the token itself.
        document_ids_BS: integers; None: one document per row.
    """
    return _causal_conv(x_BSD, weight_DW, document_ids_BS)


def last_inputs(x_BSD: Tensor, lengths_B: Tensor, count: int) -> Tensor:
    """Return the last inputs of each row of `lengths` tokens, (B, count, D), with which the row can
    be continued; before the first token they are zeros.
    """
    places_BL = lengths_B[:, None] + torch.arange(count, device=x_BSD.device)
    padded = F.pad(x_BSD, (0, 0, count, 0))
    return padded.gather(1, places_BL[..., None].expand(-1, -1, x_BSD.shape[2]))


def _forward(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    return F.silu(_convolve(*_widen(x, weight), documents)).to(x.dtype)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    x_wide, taps = _widen(x, weight)
    dout = torch.ops.aten.silu_backward(dy.to(taps.dtype), _convolve(x_wide, taps, documents))
    dx = dout * taps[-1]
    dtaps = torch.empty_like(taps)
    dtaps[-1] = (dout * x_wide).sum((0, 1))
    for i in range(1, len(taps)):
        read = _mask(dout[:, i:], documents, i)
        dx[:, :-i].addcmul_(read, taps[-1 - i])
        dtaps[-1 - i] = (read * x_wide[:, :-i]).sum((0, 1))
    return dx.to(x.dtype), dtaps.T.to(weight.dtype)


_causal_conv = differentiate(_forward, _backward)


def _widen(x: Tensor, weight_DW: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and the taps (W, D), float32 or wider."""
    dtype = wide_dtype(x)
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
