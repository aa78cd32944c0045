"""From the projection of a gated delta net to queries, keys and values: convolution, SiLU, and
norms.

With the kernels (`delta_inputs_triton.py`) forward and backward are one pass each, which reads the
projection in place; with torch's operators they are composed of `causal_conv` and `l2_norm`.

Shapes: B batch, S sequence, H key heads, K width of a key, R V of the values of a key head, J = 2 K
+ R V, W taps.
"""

from typing import Any

from torch import Tensor

from titanlite.ops.causal_conv import causal_conv
from titanlite.ops.gated_delta import DeltaBackend, choose_backend, l2_norm, number_documents
from titanlite.ops.kernels import define_operator, differentiate, like


def empty_heads(x: Tensor, taps: Any, documents: Any, key_width: int) -> tuple[Tensor, ...]:
    """Return queries, keys and values of x without data; values as one head per key head."""
    widths = (key_width, key_width, x.shape[3] - 2 * key_width)
    return tuple(x.new_empty(*x.shape[:3], width) for width in widths)


_KERNELS = "titanlite.ops.delta_inputs_triton"
_delta_inputs = differentiate(
    define_operator(
        "delta_inputs(Tensor x, Tensor taps, Tensor documents, int key_width)"
        " -> (Tensor, Tensor, Tensor)",
        _KERNELS,
        empty_heads,
    ),
    define_operator(
        "delta_inputs_backward(Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor taps,"
        " Tensor documents, int key_width) -> (Tensor, Tensor)",
        _KERNELS,
        like(3, 4),
    ),
)


def delta_inputs(
    x_BSHJ: Tensor,
    taps_HJW: Tensor,
    document_ids_BS: Tensor | None,
    key_width: int,
    value_width: int,
    backend: DeltaBackend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, normalized and times K ** -0.5, keys, normalized, (B, S, H, K), and values
    (B, S, G, V), all from the `causal_conv` of x in documents.

    Args:
        x_BSHJ: query, key and values of each key head.
        taps_HJW: taps for each of them.
        document_ids_BS: integers; None: one document per row.
        key_width: K.
        value_width: V.
        backend: as in `gated_delta_rule`; for "fla", torch's operators are used.
    """
    chosen = choose_backend(backend, x_BSHJ, key_width, value_width)
    if chosen == "triton" and taps_HJW.dtype == x_BSHJ.dtype:
        x_BSHJ = x_BSHJ if x_BSHJ.stride(3) == 1 else x_BSHJ.contiguous()
        documents_BS = number_documents(document_ids_BS, x_BSHJ)
        q, k, v = _delta_inputs(x_BSHJ, taps_HJW.contiguous(), documents_BS, key_width)
        return q, k, v.flatten(2).unflatten(2, (-1, value_width))
    y_BSC = causal_conv(x_BSHJ.flatten(2), taps_HJW.flatten(0, 1), document_ids_BS)
    return split_heads(y_BSC.unflatten(2, x_BSHJ.shape[2:]), key_width, value_width)


def split_heads(y_BSHJ: Tensor, key_width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `delta_inputs` of the convolution's result."""
    values = y_BSHJ.shape[3] - 2 * key_width
    q_BSHK, k_BSHK, v_BSH = y_BSHJ.split([key_width, key_width, values], dim=3)
    v_BSGV = v_BSH.flatten(2).unflatten(2, (-1, value_width))
    return l2_norm(q_BSHK, key_width**-0.5), l2_norm(k_BSHK), v_BSGV
