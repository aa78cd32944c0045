"""The gated delta rule (arXiv:2412.06464) on packed documents: forward, backward, and a step.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t

A document that begins at t has S_{t-1} = 0. Rows are cut into chunks of C tokens, even inside of
documents. Factors between tokens of different documents are zero, so that shapes are static, and
the host never waits for the starts of documents. Let G be the sum of g inside a chunk, and
D_ij = exp(G_i - G_j) for i >= j:

    A = strict_tril(beta_i (k_i . k_j) D_ij)    T = (I + A)^-1    U = T (beta v)    W = T (beta e^G k)
    P = q k^T * D    new = U - W S    o = e^G (q S) + P new    S' = e^(G_C) S + (e^(G_C - G) k)^T new

Saved for backward are the arguments and T, C values per token and value head; the rest is
recomputed. With torch's operators, backward has formulas for T and for the visit of the chunks in
order; autograd differentiates the terms that depend on one chunk (`_Chunks`). All sums are float32
or wider. Backends:

- `triton`: titanlite's kernels (`gated_delta_triton.py`), for bfloat16 and K = 128.
- `torch`: the equations, in float32 or wider.
- `fla`: the kernels of flash-linear-attention, for CUDA, if that package is installed. It cuts
  documents, so the host waits for their starts.
- `auto`: the backend given to `prefer_backend`; by default `triton` on CUDA if it supports the
  tensors and its code can be trusted, else `torch`.

Shapes: B batch, S sequence, N chunks, C tokens of a chunk, H key heads, G value heads, R = G / H
(value head i reads key head i // R), K width of a key, V of a value. Inside, a tensor is
(N, B, H, R, C, ...), with R = 1 if it belongs to a key head.
"""  # noqa: E501 - the equations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titanlite.base.process import read_variable
from titanlite.ops.attention import find_starts
from titanlite.ops.kernels import (
    differentiate,
    has_triton,
    kernel_device,
    like,
    operator,
    recording,
    wide_dtype,
)
from titanlite.ops.matmul import has_fences

DeltaBackend = Literal["auto", "triton", "torch", "fla"]
CHUNK = 64
_preferred: DeltaBackend = "auto"


def prefer_backend(backend: DeltaBackend) -> None:
    """Make `auto` mean `backend` in this process, as `model.delta_backend` configures."""
    global _preferred
    _preferred = backend


def import_fla() -> Any:
    """Return the rule of flash-linear-attention.

    Raises ValueError: the package cannot be imported.
    """
    try:
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
        )
    except ImportError as error:
        raise ValueError(
            "gated_delta_rule: backend 'fla' needs the package flash-linear-attention, which "
            f"cannot be imported ({error}). Use 'auto', or: pip install flash-linear-attention."
        ) from error
    return chunk_gated_delta_rule


def l2_norm(x: Tensor, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """Return `scale * x / sqrt(sum(x ** 2) + eps)` over the last dim, in the dtype of x."""
    wide = x.to(wide_dtype(x))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt() * scale).to(x.dtype)


def log_decay(a_BSG: Tensor, A_log_G: Tensor, dt_bias_G: Tensor) -> Tensor:
    """Return `-exp(A_log) * softplus(a + dt_bias)`, the log of a token's decay, float32 or wider;
    at most 0.
    """
    dtype = wide_dtype(a_BSG)
    return -A_log_G.to(dtype).exp() * F.softplus(a_BSG.to(dtype) + dt_bias_G.to(dtype))


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSGV: Tensor,
    g_BSG: Tensor,
    beta_BSG: Tensor,
    document_ids_BS: Tensor | None = None,
    state_BGKV: Tensor | None = None,
    backend: DeltaBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, S, G, V), in the dtype of v, and the state after each row (B, G, K,
    V), float32 or wider.

    A token whose g and beta are 0 does not change the state. If the state after a prompt is wanted,
    padding after the prompt must have g = beta = 0, and the document id of the prompt's last token.

    Args:
        q_BSHK: queries, normalized and multiplied by K ** -0.5.
        k_BSHK: keys, normalized, in the dtype of q and v.
        v_BSGV: values; G is a multiple of H.
        g_BSG: logs of the decays, at most 0.
        beta_BSG: fraction of a new value that replaces the old one, between 0 and 1.
        document_ids_BS: integers; a document ends where the next token's differs. None: one
            document per row.
        state_BGKV: state with which the first document of each row continues; None: zeros.
        backend: see the module's docstring.

    Raises ValueError: the backend does not run here.
    """
    operands = (q_BSHK, k_BSHK, v_BSGV, g_BSG, beta_BSG)
    key_width = k_BSHK.shape[3]
    batch, _, value_heads, value_width = v_BSGV.shape
    backend = choose_backend(backend, v_BSGV, key_width, value_width)
    if backend == "fla":
        return _run_fla(operands, document_ids_BS, state_BGKV)
    if state_BGKV is None:
        zero = torch.zeros((), device=v_BSGV.device)
        state_BGKV = zero.expand(batch, value_heads, key_width, value_width)
    state_BGKV = state_BGKV.to(wide_dtype(v_BSGV))
    documents_BS = number_documents(document_ids_BS, v_BSGV)
    return _rule(*(x.contiguous() for x in operands), state_BGKV, documents_BS, backend)


def number_documents(document_ids_BS: Tensor | None, x: Tensor) -> Tensor:
    """Return the ids for a kernel, int32; zeros if each row of x, (B, S, ...), is one document."""
    if document_ids_BS is None:
        return torch.zeros(x.shape[:2], dtype=torch.int32, device=x.device)
    return document_ids_BS.int().contiguous()


def choose_backend(
    backend: DeltaBackend, x: Tensor, key_width: int, value_width: int
) -> DeltaBackend:
    """Return the backend that supports keys and values of these widths, on the device and in the
    dtype of x.

    Raises ValueError: `triton` was requested and does not support them.
    """
    backend = _preferred if backend == "auto" else backend
    if backend == "fla" and kernel_device(x.device) == x.device.type:  # a plan has no values for it
        return "fla"
    if backend == "torch" or (backend != "triton" and not has_triton(x.device)):
        return "torch"
    problem = _find_problem(x, key_width, value_width)
    if problem is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"gated_delta_rule: backend 'triton': {problem} Use 'auto' or 'torch'.")
    return "torch"


def _find_problem(x: Tensor, key_width: int, value_width: int) -> str | None:
    """Return the reason, a sentence, why titanlite's kernels do not support the tensors; None if
    they do.
    """
    if key_width != 128 or value_width % 64:
        found = f"keys are {key_width} wide and values {value_width}"
        return f"{found}; it wants 128 and a multiple of 64."
    where = kernel_device(x.device)
    if where not in ("cuda", "meta"):
        is_interpreted = read_variable("TRITON_INTERPRET") == "1"
        problem = f"it needs a CUDA device, and the tensors are on {where}."
        return None if is_interpreted else problem
    if x.dtype != torch.bfloat16:
        return f"it wants bfloat16 and not {x.dtype}."
    return find_triton_problem()


@torch.compiler.assume_constant_result  # it would break a compiled graph
def find_triton_problem() -> str | None:
    """Return the reason, a sentence, why Triton's code for this machine's GPU cannot be trusted
    with these kernels; None if it can be trusted, or if there is no GPU.
    """
    if not torch.cuda.is_available():
        return None
    import triton

    if not has_fences(version := triton.__version__):
        return f"Triton {version} gives wrong gradients (fla #640); it wants 3.7.1 or newer."
    if not _is_hopper():
        return (
            "it was tested only on Hopper. On Ampere two kernels spill registers, and on Blackwell "
            "others' race (fla #945)."
        )
    return None


@cache
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def gated_delta_step(
    q_B1HK: Tensor,
    k_B1HK: Tensor,
    v_B1GV: Tensor,
    g_B1G: Tensor,
    beta_B1G: Tensor,
    state_BGKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, 1, G, V) of one more token per row, and the state after it."""
    repeats = v_B1GV.shape[2] // k_B1HK.shape[2]
    q, k = (x.repeat_interleave(repeats, 2).to(state_BGKV) for x in (q_B1HK, k_B1HK))
    g, beta = g_B1G.unsqueeze(3), beta_B1G.unsqueeze(3)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v_B1GV, g, beta))  # (B, G, 1, ...)
    state = state_BGKV * g.exp()
    state = state + k.mT * (beta * (v - k @ state))
    return (q @ state).transpose(1, 2).to(v.dtype), state


def _run_fla(
    operands: Sequence[Tensor], documents_BS: Tensor | None, state_BGKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` with flash-linear-attention, which takes packed documents as one
    row and returns the state after each document.
    """
    rule = partial(import_fla(), scale=1.0, output_final_state=True)
    if documents_BS is None:
        return rule(*operands, initial_state=state_BGKV)
    if state_BGKV is not None:
        raise ValueError(
            "gated_delta_rule: backend 'fla' takes documents or a first state, and not both. Use "
            "'auto'."
        )
    starts_N1 = find_starts(documents_BS).long()
    row = (x.flatten(0, 1).unsqueeze(0) for x in operands)
    out, states_NGKV = rule(*row, cu_seqlens=starts_N1)
    batch, size = documents_BS.shape
    ends_B = torch.arange(1, batch + 1, device=out.device) * size
    last_B = torch.searchsorted(starts_N1, ends_B) - 1
    return out.unflatten(1, (batch, size)).squeeze(0), states_NGKV[last_B]


def _like_results(
    q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Any, state: Tensor, documents: Any, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, size, heads, _ = k.shape
    shape = (-(-size // CHUNK), batch, heads, v.shape[2] // heads, CHUNK, CHUNK)
    inverse = v.new_empty(shape, dtype=v.dtype if backend == "triton" else state.dtype)
    return v.new_empty(v.shape), state.new_empty(state.shape), inverse


@operator(fake=_like_results)
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    documents: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gated_delta_rule` without argument checks; also return T (N, B, H, R, C, C).
    Operands are contiguous, except the state.
    """
    if backend == "triton":
        return _get_kernels().forward(q, k, v, g, beta, state, documents)
    c = _prepare(q, k, v, g, beta, documents)
    eye = torch.eye(c.A.shape[-1], dtype=c.A.dtype, device=c.A.device).expand_as(c.A)
    inverse = torch.linalg.solve_triangular(c.A, eye, upper=False, unitriangular=True)
    states, new, _, _ = _walk(c, inverse, state)
    out = (c.q_read @ states[:-1]).add_(c.P @ new)
    return _join(out, v), states[-1].flatten(1, 2).clone(), inverse.contiguous()


@operator(fake=like(2, 3, 4, 5, 6, 7))
def gated_delta_backward(
    dout: Tensor,
    dlast: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    documents: Tensor,
    inverse: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta and the first state."""
    if backend == "triton":
        operands = (q, k, v, g, beta, state, documents, inverse)
        return _get_kernels().backward(dout, dlast, *operands)
    with recording():
        q, k, v, g, beta = (x.detach().requires_grad_() for x in (q, k, v, g, beta))
        chunks = _prepare(q, k, v, g, beta, documents)
    c = _Chunks._make(x.detach() for x in chunks)
    states, new, U, W = _walk(c, inverse, state)
    do = _cut(dout, k.shape[2])
    dstates = torch.empty_like(states)
    dnew = c.P.mT @ do
    torch.matmul(c.q_read.mT, do, out=dstates[:-1])
    dstates[-1] = dlast.view_as(dstates[-1])
    for n in reversed(range(len(new))):
        dnew[n] += c.k_write[n] @ dstates[n + 1]
        dstates[n].addcmul_(c.keep[n], dstates[n + 1]).sub_(W[n].mT @ dnew[n])
    dU = dnew
    dW = (dnew @ states[:-1].mT).neg_()
    dvalues, dkeys = inverse.mT @ dU, inverse.mT @ dW
    # d(T X) = T (dX - dA T X), because T (I + A) = I
    dA = (dvalues @ U.mT + dkeys @ W.mT).tril_(-1).neg_()
    dchunks = _Chunks(
        A=dA,
        values=dvalues,
        keys=dkeys,
        P=do @ new.mT,
        q_read=do @ states[:-1].mT,
        k_write=new @ dstates[1:].mT,
        keep=(dstates[1:] * states[:-1]).sum((-2, -1), keepdim=True),
    )
    with recording():
        grads = torch.autograd.grad(chunks, (q, k, v, g, beta), dchunks)
    dq, dk, dv, dg, dbeta = (grad.contiguous() for grad in grads)
    return dq, dk, dv, dg, dbeta, dstates[0].flatten(1, 2).clone()


_rule = differentiate(gated_delta, gated_delta_backward, num_kept=1)


class _Chunks(NamedTuple):
    """The terms of the module's equations that depend only on the tokens of one chunk, for all
    chunks.
    """

    A: Tensor
    values: Tensor  # beta v
    keys: Tensor  # beta e^G k
    P: Tensor
    q_read: Tensor  # e^G q
    k_write: Tensor  # e^(G_C - G) k
    keep: Tensor  # e^(G_C)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor
) -> _Chunks:
    """Compute the terms of all chunks; operands are as in `gated_delta`."""
    heads = k.shape[2]
    q, k, v = (_cut(x, heads) for x in (q, k, v))
    g, beta = (_cut(x.unsqueeze(-1), heads) for x in (g, beta))  # (N, B, H, R, C, 1)
    G = g.cumsum(-2)
    k_t = k.mT
    # Padding after the row's end belongs to its last document.
    places = torch.arange(-1, len(k) * CHUNK, device=k.device).clamp(0, documents.shape[1] - 1)
    padded = documents[:, places]
    ids = padded[:, 1:].unflatten(1, (-1, CHUNK)).transpose(0, 1)[:, :, None, None, :, None]
    before = padded[:, :-1:CHUNK].T[:, :, None, None, None, None]
    is_seen = (ids == ids.mT).tril()
    # A mask before exp: above the diagonal it may overflow, and 0 * inf is NaN. With `G - G.mT`
    # autograd would negate the gradient of all differences, and not of G alone.
    D = (G + (-G).mT).add_(torch.where(is_seen, 0.0, float("-inf"))).exp_()
    read = G.exp() * (ids == before)
    write = (G[..., -1:, :] - G).exp() * (ids == ids[..., -1:, :])
    return _Chunks(
        A=k @ k_t * D * beta,
        values=beta * v,
        keys=beta * read * k,
        P=q @ k_t * D,
        q_read=read * q,
        k_write=write * k,
        keep=read[..., -1:, :],
    )


def _walk(c: _Chunks, inverse: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Visit the chunks in order. Return the states before each chunk and after the last one, (N +
    1, B, H, R, K, V), and `new`, U and W of all chunks.
    """
    U, W = inverse @ c.values, inverse @ c.keys
    new = torch.empty_like(U)
    states = new.new_empty(len(new) + 1, *W.shape[1:-2], W.shape[-1], U.shape[-1])
    states[0] = state.view_as(states[0])
    for n in range(len(new)):
        torch.sub(U[n], W[n] @ states[n], out=new[n])
        torch.matmul(c.k_write[n].mT, new[n], out=states[n + 1]).addcmul_(c.keep[n], states[n])
    return states, new, U, W


def _get_kernels() -> Any:
    from titanlite.ops import gated_delta_triton

    return gated_delta_triton


def _cut(x: Tensor, heads: int) -> Tensor:
    """Cut (B, S, heads * R, W) into (N, B, heads, R, C, W), with zeros after the row's end."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    cut = padded.unflatten(2, (heads, -1)).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 4, 2, 5)
    return cut.to(wide_dtype(x)).contiguous()


def _join(cut: Tensor, like: Tensor) -> Tensor:
    """Undo `_cut`, in the dtype and shape of `like`."""
    joined = cut.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, : like.shape[1]]
    return joined.to(like.dtype).contiguous()


@register_flop_formula(torch.ops.titanlite.gated_delta)
def _(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    """Count the recurrence as two matmuls and an outer product per token; chunks take about twice
    as many FLOPs.
    """
    return 6 * prod(v) * k[3]


@register_flop_formula(torch.ops.titanlite.gated_delta_backward)
def _(dout: Any, dlast: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    return 12 * prod(v) * k[3]
