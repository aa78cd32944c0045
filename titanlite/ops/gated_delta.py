"""The gated delta rule (arXiv:2412.06464) on packed documents: forward, backward, and a step.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t

A document that begins at t has S_{t-1} = 0. Rows are cut into chunks of C tokens, even inside of
documents. Factors between tokens of different documents are zero, so that shapes are static, and
the host never waits for the starts of documents. Let G be the sum of g inside a chunk, and
D_ij = exp(G_i - G_j) for i >= j:

    A = strict_tril(beta_i (k_i . k_j) D_ij)    T = (I + A)^-1    U = T (beta v)    W = T (beta e^G k)
    new = U - W S    o = e^G (q S) + (q k^T * D) new    S' = e^(G_C) S + (e^(G_C - G) k)^T new

The operators save their arguments and T for backward, C values per token and value head; the rest
is recomputed. All sums are float32 or wider. Backends:

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

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from titanlite.base.process import read_variable
from titanlite.ops.attention import find_starts
from titanlite.ops.kernels import has_triton, kernel_device, operator
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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt() * scale).to(x.dtype)


def log_decay(a_BSG: Tensor, A_log_G: Tensor, dt_bias_G: Tensor) -> Tensor:
    """Return `-exp(A_log) * softplus(a + dt_bias)`, the log of a token's decay, float32 or wider;
    at most 0.
    """
    dtype = torch.promote_types(a_BSG.dtype, torch.float32)
    return -A_log_G.to(dtype).exp() * F.softplus(a_BSG.to(dtype) + dt_bias_G.to(dtype))


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSGV: Tensor,
    g_BSG: Tensor,
    beta_BSG: Tensor,
    document_ids_BS: Tensor | None = None,
    state_BGKV: Tensor | None = None,
    chunk: int = CHUNK,
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
        chunk: tokens that are computed at once.
        backend: see the module's docstring.

    Raises ValueError: shapes or dtypes do not fit, or the backend does not run here.
    """
    heads, value_heads = k_BSHK.shape[2], v_BSGV.shape[2]
    sequences = (k_BSHK, v_BSGV, g_BSG, beta_BSG)
    fits = q_BSHK.shape == k_BSHK.shape and value_heads % heads == 0
    fits = fits and all(x.shape[:2] == q_BSHK.shape[:2] for x in sequences)
    fits = fits and g_BSG.shape == beta_BSG.shape == v_BSGV.shape[:3]
    if not fits or not q_BSHK.dtype == k_BSHK.dtype == v_BSGV.dtype:
        found = [(tuple(x.shape), x.dtype) for x in (q_BSHK, *sequences)]
        raise ValueError(f"gated_delta_rule: shapes and dtypes do not fit: {found}.")
    widths = k_BSHK.shape[3], v_BSGV.shape[3]
    backend = choose_backend(backend, v_BSGV.device, v_BSGV.dtype, *widths, chunk)
    if backend == "fla":
        return _run_fla(q_BSHK, k_BSHK, v_BSGV, g_BSG, beta_BSG, document_ids_BS, state_BGKV)
    if document_ids_BS is None:
        document_ids_BS = torch.zeros(v_BSGV.shape[:2], dtype=torch.int32, device=v_BSGV.device)
    operands = (q_BSHK, k_BSHK, v_BSGV, g_BSG, beta_BSG, document_ids_BS.int(), state_BGKV)
    return _GatedDelta.apply(*operands, chunk, backend)


def choose_backend(
    backend: DeltaBackend,
    device: torch.device,
    dtype: torch.dtype,
    key_width: int,
    value_width: int,
    chunk: int = CHUNK,
) -> DeltaBackend:
    """Return the backend that supports such keys and values.

    Raises ValueError: `triton` was requested and does not support them.
    """
    backend = _preferred if backend == "auto" else backend
    if backend == "fla" and kernel_device(device) == device.type:  # a plan has no values for it
        return "fla"
    if backend == "torch" or (backend != "triton" and not has_triton(device)):
        return "torch"
    problem = _find_problem(device, dtype, (key_width, value_width, chunk))
    if problem is not None and backend == "triton":
        raise ValueError(f"gated_delta_rule: backend 'triton': {problem} Use 'auto' or 'torch'.")
    return "triton" if problem is None else "torch"


def _run_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` with flash-linear-attention, which takes packed documents as one
    row and returns the state after each document.
    """
    chunk_gated_delta_rule = import_fla()
    options = {"scale": 1.0, "output_final_state": True}
    if documents is None:
        return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, **options)
    if state is not None:
        raise ValueError(
            "gated_delta_rule: backend 'fla' takes documents or a first state, and not both. Use "
            "'auto'."
        )
    starts_N1, (batch, size) = find_starts(documents), documents.shape
    rows = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
    out, states = chunk_gated_delta_rule(*rows, cu_seqlens=starts_N1.long(), **options)
    ends_B = torch.arange(1, batch + 1, device=v.device, dtype=starts_N1.dtype) * size
    return out.view_as(v), states[torch.searchsorted(starts_N1, ends_B) - 1]


def _find_problem(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> str | None:
    """Return the reason, a sentence, why titanlite's kernels do not support the tensors; None if
    they do.
    """
    key_width, value_width, chunk = sizes
    if key_width != 128 or value_width % 64 or chunk != CHUNK:
        found = f"keys are {key_width} wide, values {value_width}, chunks {chunk} long"
        return f"{found}; it wants 128, a multiple of 64, and 64."
    if (where := kernel_device(device)) not in ("cuda", "meta"):
        is_interpreted = read_variable("TRITON_INTERPRET") == "1"
        return (
            None if is_interpreted else f"it needs a CUDA device, and the tensors are on {where}."
        )
    if dtype != torch.bfloat16:
        return f"it wants bfloat16 and not {dtype}."
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
    q_BHK: Tensor, k_BHK: Tensor, v_BGV: Tensor, g_BG: Tensor, beta_BG: Tensor, state_BGKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, G, V) of one more token per row, and the state after it."""
    repeats = v_BGV.shape[1] // k_BHK.shape[1]
    q_BGK, k_BGK = (x.repeat_interleave(repeats, 1).to(state_BGKV) for x in (q_BHK, k_BHK))
    state_BGKV = state_BGKV * g_BG.exp()[..., None, None]
    known_BGV = (k_BGK.unsqueeze(2) @ state_BGKV).squeeze(2)
    new_BGV = beta_BG[..., None] * (v_BGV - known_BGV)
    state_BGKV = state_BGKV + k_BGK[..., None] * new_BGV.unsqueeze(2)
    return (q_BGK.unsqueeze(2) @ state_BGKV).squeeze(2).to(v_BGV.dtype), state_BGKV


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *saved, ctx.chunk, ctx.backend = inputs
        out, last, inverse = gated_delta(*inputs)
        ctx.save_for_backward(*saved, inverse)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlast: Tensor | None):
        *saved, inverse = ctx.saved_tensors
        dout = torch.zeros_like(saved[2]) if dout is None else dout
        *grads, dstate = gated_delta_backward(dout, dlast, *saved, inverse, ctx.chunk, ctx.backend)
        return *grads, None, None if saved[6] is None else dstate, None, None


def _like_results(q: Any, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, chunk, backend = rest
    (batch, size, heads, width), value_heads = k.shape, v.shape[2]
    dtype = torch.promote_types(v.dtype, torch.float32)
    last = v.new_empty(batch, value_heads, width, v.shape[3], dtype=dtype)
    shape = (-(-size // chunk), batch, heads, value_heads // heads, chunk, chunk)
    kept = v.dtype if backend == "triton" else dtype
    return v.new_empty(v.shape), last, v.new_empty(shape, dtype=kept)


def _like_gradients(dout: Any, dlast: Any, *operands: Any) -> tuple[Tensor, ...]:
    _, k, v, *_ = operands
    dtype = torch.promote_types(v.dtype, torch.float32)
    dstate = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return *(x.new_empty(x.shape) for x in operands[:5]), dstate


@operator(fake=_like_results)
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor,
    state: Tensor | None,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `gated_delta_rule` without argument checks; also return T (N, B, H, R, C, C)."""
    if backend == "triton":
        operands = (x.contiguous() for x in (q, k, v, g, beta))
        return _get_kernels().forward(*operands, documents, _widen(state))
    chunks = _Chunks(q, k, v, g, beta, documents, chunk)
    inverse = chunks.invert()
    states, new = chunks.walk(inverse, state)
    read = (chunks.q_read @ states[:-1]).add_(chunks.attend() @ new)
    return _join(read, v), states[-1].flatten(1, 2).clone(), inverse


@operator(fake=_like_gradients)
def gated_delta_backward(
    dout: Tensor,
    dlast: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor,
    state: Tensor | None,
    inverse: Tensor,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g, beta and the first state."""
    if backend == "triton":
        operands = (x.contiguous() for x in (q, k, v, g, beta))
        options = (documents, _widen(state), inverse)
        return _get_kernels().backward(dout, _widen(dlast), *operands, *options)
    c = _Chunks(q, k, v, g, beta, documents, chunk)
    do = _cut(dout, k.shape[2], chunk)
    states, new = c.walk(inverse, state)
    attended, k_write, q_read = c.attend(), c.k_write, c.q_read
    dstates, dnew = torch.empty_like(states), attended.mT @ do
    dstates[-1] = 0.0 if dlast is None else dlast.view_as(dstates[-1])
    for n in reversed(range(len(dnew))):
        dnew[n] += k_write[n] @ dstates[n + 1]
        torch.mul(dstates[n + 1], c.keep[n], out=dstates[n])
        dstates[n] += q_read[n].mT @ do[n]
        dstates[n] -= c.W[n].mT @ dnew[n]
    dW = (dnew @ states[:-1].mT).neg_()  # new = U - W S
    dattended, dk_write = do @ new.mT, new @ dstates[1:].mT
    dq_read = do @ states[:-1].mT
    dbv, dbk = inverse.mT @ dnew, inverse.mT @ dW
    # d(X^-1) = -X^-1 dX X^-1, and U and W are T times tensors that do not depend on A
    dA = (dbv @ c.U.mT + dbk @ c.W.mT).mul_(c.D).tril_(-1).neg_()
    dbeta = (dA * c.kk).sum(-1) + (dbv * c.v).sum(-1)
    read_k = (dbk * c.k).sum(-1)
    dbeta += c.read * read_k
    dA *= c.beta[..., None]
    # Every factor is exp of a difference of two sums of g. Its gradient times the factor is added
    # to the first sum's gradient, and subtracted from the second's.
    pairs = attended.mul_(dattended).addcmul_(dA, c.kk)
    wrote = (dk_write * k_write).sum(-1)
    dG = pairs.sum(-1) - pairs.sum(-2) + (dq_read * q_read).sum(-1) - wrote
    dG += c.beta * c.read * read_k
    carried = (dstates[1:] * states[:-1]).sum((-2, -1)) * c.keep[..., 0, 0]
    dG[..., -1] += wrote.sum(-1) + carried
    dg = dG.flip(-1).cumsum(-1).flip(-1)
    # First sum over a key head's value heads, then multiply by its queries and keys.
    dattended, dA = (x.sum(3, keepdim=True) for x in (dattended.mul_(c.D), dA))
    dq = (c.read[..., None] * dq_read).sum(3, keepdim=True) + dattended @ c.k
    dk = c.write[..., None] * dk_write + (c.beta * c.read)[..., None] * dbk
    dk = dk.sum(3, keepdim=True) + dattended.mT @ c.q + (dA + dA.mT) @ c.k
    dv = dbv.mul_(c.beta[..., None])
    results = ((dq, q), (dk, k), (dv, v), (dg, g), (dbeta, beta))
    dq, dk, dv, dg, dbeta = (_join(*pair) for pair in results)
    return dq, dk, dv, dg, dbeta, dstates[0].flatten(1, 2).clone()


class _Chunks:
    """Operands cut into chunks, and the factors of decay between their tokens, all in [0, 1]."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        documents: Tensor,
        chunk: int,
    ) -> None:
        heads = k.shape[2]
        self.q, self.k, self.v, g_cut, self.beta = (
            _cut(x, heads, chunk) for x in (q, k, v, g, beta)
        )
        # Padding after the row's end belongs to its last document.
        rest = documents[:, -1:].expand(-1, -documents.shape[1] % chunk)
        padded = torch.cat([documents, rest], 1)
        before_NB = torch.cat([padded[:, :1], padded[:, chunk - 1 : -1 : chunk]], 1).T
        ids = padded.unflatten(1, (-1, chunk)).transpose(0, 1)[:, :, None, None]  # (N, B, 1, 1, C)
        is_going_on = ids == before_NB[..., None, None, None]
        G = g_cut.cumsum(-1)
        crosses = (ids[..., :, None] != ids[..., None, :]) | _is_above(chunk, g.device)
        # Masked before exp: above the diagonal it may overflow, and 0 * inf is NaN.
        self.D = (G[..., :, None] - G[..., None, :]).masked_fill_(crosses, float("-inf")).exp_()
        self.read = G.exp() * is_going_on  # of the state before the chunk
        self.write = (G[..., -1:] - G).exp() * (ids == ids[..., -1:])  # to the state after it
        self.keep = self.read[..., -1:, None]
        self.kk = self.k @ self.k.mT
        self.q_read = self.read[..., None] * self.q
        self.k_write = self.write[..., None] * self.k

    def invert(self) -> Tensor:
        """Return T = (I + A)^-1."""
        A = (self.kk * self.D).mul_(self.beta[..., None])
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).expand_as(A)
        solved = torch.linalg.solve_triangular(A, eye, upper=False, unitriangular=True)
        return solved.contiguous()

    def attend(self) -> Tensor:
        """Return q k^T * D."""
        return self.q @ self.k.mT * self.D

    def walk(self, inverse: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state before each chunk, with that after the last, (N + 1, B, H, R, K, V), and
        `new`.
        """
        self.U = inverse @ (self.beta[..., None] * self.v)
        self.W = inverse @ ((self.beta * self.read)[..., None] * self.k)
        new = torch.empty_like(self.U)
        num_chunks, *outer, _, width = self.U.shape
        states = new.new_empty(num_chunks + 1, *outer, self.k.shape[-1], width)
        states[0] = 0.0 if state is None else state.view_as(states[0])
        for n in range(num_chunks):
            torch.sub(self.U[n], self.W[n] @ states[n], out=new[n])
            torch.mul(states[n], self.keep[n], out=states[n + 1])
            states[n + 1] += self.k_write[n].mT @ new[n]
        return states, new


def _get_kernels() -> Any:
    from titanlite.ops import gated_delta_triton

    return gated_delta_triton


def _widen(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float().contiguous()


def _is_above(chunk: int, device: torch.device) -> Tensor:
    return torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)


def _cut(x: Tensor, heads: int, chunk: int) -> Tensor:
    """Cut (B, S, heads * R, ...) into (N, B, heads, R, C, ...), with zeros after the row's end."""
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % chunk))
    cut = padded.unflatten(2, (heads, -1)).unflatten(1, (-1, chunk))
    cut = cut.permute(1, 0, 3, 4, 2, *range(5, cut.dim()))
    return cut.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _join(cut: Tensor, like: Tensor) -> Tensor:
    """Undo `_cut`, in the dtype and shape of `like`."""
    joined = cut.permute(1, 0, 4, 2, 3, *range(5, cut.dim()))
    joined = joined.flatten(3, 4).flatten(1, 2)[:, : like.shape[1]]
    return joined.to(like.dtype).contiguous()


@register_flop_formula(torch.ops.titanlite.gated_delta)
def _(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    """Count the recurrence as two matmuls and an outer product per token; chunks take about twice
    as many FLOPs.
    """
    return 6 * v[0] * v[1] * v[2] * v[3] * k[3]


@register_flop_formula(torch.ops.titanlite.gated_delta_backward)
def _(dout: Any, dlast: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    return 12 * v[0] * v[1] * v[2] * v[3] * k[3]
