"""FLOPs of operators, forward and backward: torch's formulas, and those of titanlite's own operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import titanlite.features.cpu.attention
import titanlite.ops.moe_experts  # noqa: F401
from titanlite.features.cpu.onednn import get_onednn_op

_aten, _own = torch.ops.aten, torch.ops.titanlite


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions of matrix products.

    Attributes:
        low: in two-byte floats.
        high: in wider ones.
        skipped: of the former two, those above the diagonal of causal attention, which a causal kernel leaves out.
            torch's FlopCounterMode counts them.
    """

    low: int = 0
    high: int = 0
    skipped: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.low + other.low, self.high + other.high, self.skipped + other.skipped)

    def __mul__(self, factor: int) -> "Flops":
        return Flops(self.low * factor, self.high * factor, self.skipped * factor)

    @property
    def counted(self) -> int:
        """As torch's FlopCounterMode counts."""
        return self.low + self.high

    @property
    def done(self) -> int:
        """As kernels do them."""
        return self.counted - self.skipped


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * weight.shape[2]


def _grouped_mm_wgrad(x: torch.Tensor, dy: torch.Tensor, *rest: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * dy.shape[1]


def _torch_grouped_mm(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> int:
    """Rows (R, K) through matrices (E, K, N), or as in their gradient (M, R) and (R, N), group by group."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


def _moe_experts_forward(
    x: Any, gate_up: torch.Tensor, down: Any, row_weight: Any, token: torch.Tensor, *rest: Any
) -> int:
    _, two_inner, hidden = gate_up.shape
    return 2 * token.shape[0] * hidden * (two_inner + two_inner // 2)


def _moe_experts_backward(
    dout: Any, x: Any, gate_up: torch.Tensor, down: Any, row_weight: Any, token: torch.Tensor, *rest: Any
) -> int:
    """Gradients dh (always: the gradient of the row weights needs it), dx, and those of the two weights."""
    _, two_inner, hidden = gate_up.shape
    need_x, need_gate_up, need_down, _ = rest[-2]
    widths = two_inner // 2 * (1 + need_down) + two_inner * (need_x + need_gate_up)
    return 2 * token.shape[0] * hidden * widths


def _host_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    """With the scores above the diagonal, as torch counts its own."""
    return _sdpa(*(tensor.transpose(1, 2) for tensor in (q, k, v)))


def _host_attention_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    return _sdpa_backward(*(tensor.transpose(1, 2) for tensor in (dout, q, k, v)))


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    return sdpa_flop_count(q.shape, *_repeated(q, k, v))


def _sdpa_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    return sdpa_backward_flop_count(dout.shape, q.shape, *_repeated(q, k, v))


def _repeated(q: torch.Tensor, *others: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of keys and values with a head for each query head: torch 2.11 counts no others."""
    return [(other.shape[0], q.shape[1], *other.shape[2:]) for other in others]


_OWN: dict[Any, Callable[..., int]] = {
    _own.grouped_mm.default: _grouped_mm,
    _own.grouped_mm_wgrad.default: _grouped_mm_wgrad,
    _own.moe_experts_forward.default: _moe_experts_forward,
    _own.moe_experts_backward.default: _moe_experts_backward,
    _own.host_attention.default: _host_attention,
    _own.host_attention_backward.default: _host_attention_backward,
    _aten._grouped_mm.default: _torch_grouped_mm,
    _aten._scaled_dot_product_flash_attention.default: _sdpa,
    _aten._scaled_dot_product_flash_attention_backward.default: _sdpa_backward,
    _aten.addmm_.default: lambda out, a, b, *rest: 2 * a.shape[0] * a.shape[1] * b.shape[1],  # torch knows addmm only
    # torch has no formula for the CPU's.
    get_onednn_op(): lambda x, weight, *rest: 2 * x.numel() * weight.shape[0],
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _sdpa_backward,
}
_ALWAYS_CAUSAL = {_own.host_attention.default, _own.host_attention_backward.default}
# Operator -> place of `is_causal` among its arguments.
_CAUSAL = {
    _aten._scaled_dot_product_flash_attention.default: 4,
    _aten._scaled_dot_product_flash_attention_backward.default: 11,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
    _aten._scaled_dot_product_efficient_attention.default: 6,
    _aten._scaled_dot_product_efficient_attention_backward.default: 11,
}


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Flops | None:
    """FLOPs of one call; None for operators that multiply no matrices."""
    own = _OWN.get(func)
    if own is not None:
        count = own(*args)
    else:
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            return None
        count = formula(*args, **kwargs, out_val=out)
    first = next(arg for arg in args if isinstance(arg, torch.Tensor))
    place = _CAUSAL.get(func)
    causal = func in _ALWAYS_CAUSAL or (
        place is not None and (args[place] if len(args) > place else kwargs.get("is_causal", False))
    )
    is_low = first.dtype.itemsize <= 2
    return Flops(count if is_low else 0, 0 if is_low else count, count // 2 if causal else 0)
