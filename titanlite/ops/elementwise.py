"""RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), and rotary positions (arXiv:2104.09864) in
two halves.

If `takes_kernels` is True, a norm together with the addition before it, the gate after it, or the
rotation after it is one kernel in forward and one in backward (`elementwise_triton.py`); so is
SwiGLU of two tensors. Otherwise they are composed of torch's operators.

Shapes: D width, R rows of SwiGLU, I its inner width; B batch, S sequence, H heads, K head width, R
<= K rotated part.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titanlite.ops.kernels import define_operator, differentiate, like, wide_dtype
from titanlite.ops.matmul import has_kernels

if TYPE_CHECKING:  # operators import only torch and triton
    from titanlite.config.model import RopeScaling


_KERNELS = "titanlite.ops.elementwise_triton"


_norm_backward = define_operator(
    "add_norm_backward(Tensor dtotal, Tensor dy, Tensor total, Tensor weight, float eps,"
    " float offset) -> (Tensor, Tensor)",
    _KERNELS,
    like(1, 3),
)


def _add_norm_backward(*operands: Any) -> tuple[torch.Tensor, ...]:
    dtotal, dweight = _norm_backward(*operands)
    return dtotal, dtotal, dweight  # of both summands


_add_norm = differentiate(
    define_operator(
        "add_norm(Tensor x, Tensor update, Tensor weight, float eps, float offset)"
        " -> (Tensor, Tensor)",
        _KERNELS,
        like(0, 0),
    ),
    _add_norm_backward,
    saves=lambda x, update, weight, eps, offset, total, y: (total, weight, eps, offset),
)
_gated_norm = differentiate(
    define_operator(
        "gated_norm(Tensor x, Tensor z, Tensor weight, float eps) -> Tensor", _KERNELS, like(0)
    ),
    define_operator(
        "gated_norm_backward(Tensor dy, Tensor x, Tensor z, Tensor weight, float eps)"
        " -> (Tensor, Tensor, Tensor)",
        _KERNELS,
        like(1, 2, 3),
    ),
)
_rotate_heads = define_operator(
    "rotate_heads(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin,"
    " float eps, float offset) -> (Tensor, Tensor)",
    _KERNELS,
    like(0, 1),
)
_normalize_and_rotate = differentiate(
    _rotate_heads,
    define_operator(
        "rotate_heads_backward(Tensor dq, Tensor dk, Tensor q, Tensor k, Tensor q_weight,"
        " Tensor k_weight, Tensor cos, Tensor sin, float eps, float offset)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        _KERNELS,
        like(2, 3, 4, 5),
    ),
)


def _turn(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate_heads(q, k, None, None, cos, sin, 0.0, 0.0)


_turn_heads = differentiate(
    _turn,
    lambda dq, dk, cos, sin: _turn(dq, dk, cos, -sin),
    saves=lambda q, k, cos, sin, *results: (cos, sin),
)
_swiglu_apart = differentiate(
    define_operator("swiglu_apart(Tensor gate, Tensor up) -> Tensor", _KERNELS, like(0)),
    define_operator(
        "swiglu_apart_backward(Tensor dh, Tensor gate, Tensor up) -> (Tensor, Tensor)",
        _KERNELS,
        like(1, 2),
    ),
)


def takes_kernels(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return True if titanlite's kernels support `x` and `others`, all of one dtype. In compiled
    code torch fuses these operations itself.
    """
    if torch.compiler.is_compiling() or any(t.dtype != x.dtype for t in others):
        return False
    return has_kernels(x.device, x.dtype)


def rms_norm(
    x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """Return `x / sqrt(mean(x ** 2) + eps) * (offset + weight)` over the last dim, in the dtype of
    x.
    """
    if not offset:
        return F.rms_norm(x, (x.shape[-1],), weight_D, eps)
    # bfloat16 has no value between 1 and 1.008
    wide = wide_dtype(x)
    return rms_norm(x.to(wide), weight_D.to(wide) + offset, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + update`, or x without an update, and its `rms_norm`."""
    if update is not None and takes_kernels(x, update, weight_D):
        return _add_norm(x.contiguous(), update.contiguous(), weight_D, eps, offset)
    total = x if update is None else x + update
    return total, rms_norm(total, weight_D, eps, offset)


def gated_rms_norm(
    x_BSHRV: torch.Tensor, z_BSHRV: torch.Tensor, weight_V: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return `rms_norm(x) * silu(z)`, in the dtype of x."""
    if takes_kernels(x_BSHRV, z_BSHRV, weight_V):
        return _gated_norm(x_BSHRV.contiguous(), _with_rows(z_BSHRV), weight_V, eps)
    normed_BSHRV = rms_norm(x_BSHRV, weight_V, eps)
    wide = wide_dtype(x_BSHRV)
    return (normed_BSHRV * F.silu(z_BSHRV.to(wide))).to(x_BSHRV.dtype)


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, S, heads, ...), copied if its tokens have no common stride, or if heads are not
    contiguous inside of it.
    """
    has_rows = x.stride(0) == x.shape[1] * x.stride(1) and x[0, 0, 0].is_contiguous()
    return x if has_rows else x.contiguous()


def _apply_swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None) -> torch.Tensor:
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    h_RI = F.silu(gate_RI).mul_(up_RI)
    return h_RI if weight_R is None else h_RI.mul_(weight_R.unsqueeze(-1))


def _swiglu_backward(
    dh_RI: torch.Tensor, gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    dgate_up_R2I = torch.empty_like(gate_up_R2I)
    dgate_RI, dup_RI = dgate_up_R2I.chunk(2, dim=-1)  # written in place: no concatenation
    a_RI = F.silu(gate_RI)
    da_RI = dh_RI * up_RI
    torch.mul(a_RI, dh_RI, out=dup_RI)
    dweight_R = None
    if weight_R is not None:
        dweight_R = a_RI.mul_(da_RI).sum(dim=-1, dtype=weight_R.dtype)
        # As in forward, products with the weight are computed in float32; they are stored in dh's
        # dtype.
        dup_RI.mul_(weight_R.unsqueeze(-1))
        da_RI.mul_(weight_R.unsqueeze(-1))
    torch.ops.aten.silu_backward.grad_input(da_RI, gate_RI, grad_input=dgate_RI)
    return dgate_up_R2I, dweight_R


_swiglu = differentiate(_apply_swiglu, _swiglu_backward)


def swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return `silu(gate) * up * weight` of `gate_up = [gate | up]`, (..., I) in the dtype of
    `gate_up_R2I` (..., 2 I).

    `weight_R` (...,), float32 or the dtype of gate_up, is a factor per row (the router's weight of
    a routed row), or None. Saved for backward: the arguments, and no tensor of size I.
    """
    if torch.compiler.is_compiling():
        # When traced, torch fuses it and saves the same for backward; writing into parts of a
        # tensor is a graph break.
        gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
        h_RI = F.silu(gate_RI) * up_RI
        return h_RI if weight_R is None else (h_RI * weight_R.unsqueeze(-1)).to(h_RI.dtype)
    return _swiglu(gate_up_R2I, weight_R)


def swiglu_apart(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of two tensors. Saved for backward: both."""
    if takes_kernels(gate, up):
        return _swiglu_apart(gate.contiguous(), up.contiguous())
    return swiglu(torch.cat([gate, up], dim=-1))


_ALPHA = 1.702
_LIMIT = 7.0


def _apply_clamped_swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
    gate_RI = gate_up_R2I[..., ::2]
    up_RI = gate_up_R2I[..., 1::2]
    gate_RI = gate_RI.clamp(max=_LIMIT)
    h_RI = (gate_RI * _ALPHA).sigmoid_().mul_(gate_RI)
    return h_RI.mul_(up_RI.clamp(-_LIMIT, _LIMIT).add_(1)).mul_(weight_R.unsqueeze(-1))


def _clamped_swiglu_backward(
    dh_RI: torch.Tensor, gate_up_R2I: torch.Tensor, weight_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_RI = gate_up_R2I[..., ::2]
    up_RI = gate_up_R2I[..., 1::2]
    is_inside_RI = up_RI.abs() <= _LIMIT
    is_low_RI = gate_RI <= _LIMIT
    gate_RI = gate_RI.clamp(max=_LIMIT)
    up1_RI = up_RI.clamp(-_LIMIT, _LIMIT).add_(1)
    sigmoid_RI = (gate_RI * _ALPHA).sigmoid_()
    a_RI = gate_RI * sigmoid_RI
    dweight_R = (dh_RI * a_RI).mul_(up1_RI).sum(dim=-1, dtype=weight_R.dtype)
    dy_RI = dh_RI.mul(weight_R.unsqueeze(-1)).to(dh_RI.dtype)
    slope_RI = sigmoid_RI + _ALPHA * a_RI * (1 - sigmoid_RI)
    dgate_RI = up1_RI.mul_(dy_RI).mul_(slope_RI).mul_(is_low_RI)
    dup_RI = a_RI.mul_(dy_RI).mul_(is_inside_RI)
    return torch.stack([dgate_RI, dup_RI], dim=-1).flatten(-2), dweight_R


_clamped_swiglu = differentiate(_apply_clamped_swiglu, _clamped_swiglu_backward)


def clamped_swiglu(gate_up_R2I: torch.Tensor, weight_R: torch.Tensor) -> torch.Tensor:
    """Return `gate * sigmoid(1.702 gate) * (up + 1) * weight` (..., I), of gates up to 7 and ups
    from -7 to 7 (arXiv:2508.10925). Columns of `gate_up_R2I` (..., 2 I) alternate between gate and
    up.

    `weight_R` (...,) is a factor per row, as in `swiglu`. Saved for backward: the arguments.
    """
    return _clamped_swiglu(gate_up_R2I, weight_R)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: "RopeScaling | None" = None
) -> torch.Tensor:
    """Compute the rotary frequencies (rotary_dim / 2,), float32 on CPU, from the configuration
    alone.

    `linear` divides all frequencies by the factor. `llama3` keeps those with wavelengths below
    original / high_freq_factor, divides those with wavelengths above original / low_freq_factor,
    and blends in between. `yarn` (arXiv:2309.00071, section 3.2) keeps frequencies that turn more
    than beta_fast times in the original length, divides frequencies that turn less than beta_slow
    times, and blends in between, evenly from frequency to frequency.
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
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * inv_freq / scaling.factor + blend * inv_freq


def _yarn_share(rotary_dim: int, theta: float, scaling: "RopeScaling") -> torch.Tensor:
    """Return YaRN's weight of the divided frequency, float32 (rotary_dim / 2,): where it is 0 the
    frequency is kept, where it is 1 the frequency is divided by the factor, and in between both are
    blended.
    """

    def place(turns: float) -> float:
        """Return the index, as a real number, of the frequency that makes `turns` turns in the
        original length.
        """
        wavelength = scaling.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    last = min(last, rotary_dim - 1)
    width = last - first if last != first else 0.001  # then a step, as in transformers
    places = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    return ((places - first) / width).clamp(0.0, 1.0)


def rope_cos_sin(
    inv_freq: torch.Tensor, positions_BS: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
):
    """Return cosines and sines (B, S, 1, R) in `dtype`, times `scale`; angles are float32, because
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

    Both halves of `rope_cos_sin` are equal, so the gradient is rotated back by the same angles, and
    no tensor of the size of x is saved for it.
    """
    return _Rotate.apply(x_BSHK, cos_BS1R, sin_BS1R)


def _rotate(x_BSHK: torch.Tensor, cos_BS1R: torch.Tensor, sin_BS1R: torch.Tensor) -> torch.Tensor:
    width = cos_BS1R.shape[-1]
    half = cos_BS1R.shape[-1] // 2
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


def rotate_heads(
    q_BSHK: torch.Tensor,
    k_BSGK: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    weights_K: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys after `rms_norm` with their weights, if there are any, and
    `apply_rope`.
    """
    if takes_kernels(q_BSHK, k_BSGK, *cos_sin, *(weights_K or ())):
        q_BSHK = _with_rows(q_BSHK)
        k_BSGK = k_BSGK.contiguous()
        if weights_K is None:
            return _turn_heads(q_BSHK, k_BSGK, *cos_sin)
        return _normalize_and_rotate(q_BSHK, k_BSGK, *weights_K, *cos_sin, eps, offset)
    if weights_K is not None:
        q_BSHK = rms_norm(q_BSHK, weights_K[0], eps, offset)
        k_BSGK = rms_norm(k_BSGK, weights_K[1], eps, offset)
    return apply_rope(q_BSHK, *cos_sin), apply_rope(k_BSGK, *cos_sin)
