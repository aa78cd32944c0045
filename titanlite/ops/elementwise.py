"""RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), and rotary positions (arXiv:2104.09864) in
two halves.

Shapes: D width, R rows of SwiGLU, I its inner width; B batch, S sequence, H heads, K head width, R
<= K rotated part.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # operators need nothing but torch and triton
    from titanlite.config.model import RopeScaling


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x ** 2) + eps) * weight` over the last dim, in the dtype of x."""
    return F.rms_norm(x, (x.shape[-1],), weight_D, eps)


def apply_swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    """Compute `swiglu` without a gradient."""
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    h_RI = F.silu(gate_RI).mul_(up_RI)
    return h_RI if weight_R is None else h_RI.mul_(weight_R.unsqueeze(-1))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up_R2I, weight_R)
        return apply_swiglu(gate_up_R2I, weight_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_RI: torch.Tensor):
        gate_up_R2I, weight_R = ctx.saved_tensors
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        dgate_up_R2I = torch.empty_like(gate_up_R2I)
        dgate_RI, dup_RI = dgate_up_R2I.chunk(2, dim=-1)  # written in place: no concatenation
        a_RI = F.silu(gate_RI)
        da_RI = dh_RI * up_RI
        torch.mul(a_RI, dh_RI, out=dup_RI)
        dweight_R = None
        if weight_R is not None:
            if ctx.needs_input_grad[1]:
                dweight_R = a_RI.mul_(da_RI).sum(dim=-1, dtype=weight_R.dtype)
            # Products with the weight in float32 as in forward, stored in dh's dtype.
            dup_RI.mul_(weight_R.unsqueeze(-1))
            da_RI.mul_(weight_R.unsqueeze(-1))
        torch.ops.aten.silu_backward.grad_input(da_RI, gate_RI, grad_input=dgate_RI)
        return dgate_up_R2I, dweight_R


def swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up * weight` of `gate_up = [gate | up]`, (..., I) in the dtype of
    `gate_up_R2I` (..., 2 I).

    `weight_R` (...,), float32 or the dtype of gate_up, is a factor per row (the router's weight of
    a routed row), or None. Kept for backward: the arguments, nothing of size I.
    """
    if torch.compiler.is_compiling():
        # Traced, torch fuses it and keeps the same for backward; writing into parts of a tensor is
        # a graph break.
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        return h_RI if weight_R is None else (h_RI * weight_R.unsqueeze(-1)).to(h_RI.dtype)
    return _SwiGLU.apply(gate_up_R2I, weight_R)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: "RopeScaling | None" = None
) -> torch.Tensor:
    """Compute the rotary frequencies (rotary_dim / 2,), float32 on CPU, from the configuration
    alone.

    `linear` divides all by the factor. `llama3` keeps wavelengths below original /
    high_freq_factor, divides those above original / low_freq_factor, and blends in between. `yarn`
    (arXiv:2309.00071, section 3.2) keeps frequencies that turn more than beta_fast times in the
    original length, divides those that turn less than beta_slow times, and blends in between,
    evenly from frequency to frequency.
    """
    exponents = (
        torch.arange(0, rotary_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32)
        / rotary_dim
    )
    inv_freq = 1.0 / (theta**exponents)
    if scaling is None:
        return inv_freq
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    if scaling.rope_type == "yarn":
        divided = _yarn_share(rotary_dim, theta, scaling)
        return inv_freq * (1.0 - divided) + inv_freq / scaling.factor * divided
    wavelength = 2 * math.pi / inv_freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / scaling.factor + blend * inv_freq


def _yarn_share(rotary_dim: int, theta: float, scaling: "RopeScaling") -> torch.Tensor:
    """Return how much of each frequency is divided, (rotary_dim / 2,) float32 between 0 and 1."""

    def place(turns: float) -> float:
        """Return the place among the frequencies, a real number, of one that turns so often in the
        original length.
        """
        wavelength = scaling.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001  # a step then, as transformers has it
    places = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    return ((places - first) / width).clamp(0.0, 1.0)


def rope_cos_sin(
    inv_freq: torch.Tensor, positions_BS: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
):
    """Return cosines and sines (B, S, 1, R) in `dtype`, times `scale`; angles are float32, for
    bfloat16 cannot count past 256.
    """
    angles_BSR = positions_BS.to(torch.float32)[..., None] * inv_freq.to(torch.float32)
    angles_BS1R = torch.cat([angles_BSR, angles_BSR], dim=-1)[:, :, None, :]
    cos_BS1R, sin_BS1R = angles_BS1R.cos(), angles_BS1R.sin()
    if scale != 1.0:
        cos_BS1R, sin_BS1R = cos_BS1R * scale, sin_BS1R * scale
    return cos_BS1R.to(dtype), sin_BS1R.to(dtype)


def apply_rope(
    x_BSHK: torch.Tensor, cos_BS1R: torch.Tensor, sin_BS1R: torch.Tensor
) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + R/2]) of every head by its position's angle; same shape and
    dtype.

    Both halves of `rope_cos_sin` are alike, so the gradient is rotated back by the same angles, and
    nothing of the size of x is kept for it.
    """
    return _Rotate.apply(x_BSHK, cos_BS1R, sin_BS1R)


def _rotate(x_BSHK: torch.Tensor, cos_BS1R: torch.Tensor, sin_BS1R: torch.Tensor) -> torch.Tensor:
    width, half = cos_BS1R.shape[-1], cos_BS1R.shape[-1] // 2
    if width < x_BSHK.shape[-1]:
        return torch.cat(
            [_rotate(x_BSHK[..., :width], cos_BS1R, sin_BS1R), x_BSHK[..., width:]], dim=-1
        )
    out_BSHK = x_BSHK * cos_BS1R
    out_BSHK[..., :half].addcmul_(x_BSHK[..., half:], sin_BS1R[..., :half], value=-1)
    out_BSHK[..., half:].addcmul_(x_BSHK[..., :half], sin_BS1R[..., half:])
    return out_BSHK


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHK: torch.Tensor, cos_BS1R: torch.Tensor, sin_BS1R: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_BS1R, sin_BS1R)
        return _rotate(x_BSHK, cos_BS1R, sin_BS1R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSHK: torch.Tensor):
        cos_BS1R, sin_BS1R = ctx.saved_tensors
        return _rotate(dy_BSHK, cos_BS1R, -sin_BS1R), None, None
