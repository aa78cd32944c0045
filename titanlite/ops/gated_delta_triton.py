"""Triton kernels of the gated delta rule, forward and backward, with their launchers.

The equations and names are those of `gated_delta.py`. Forward is `solve` (T, U, W of each chunk),
`states` (visits a row's chunks in order: the state before each, and `new`), `read` (outputs).
Backward calls `solve`, which loads T, and `states` again, then `dstates` (visits chunks backwards:
dnew and the gradients of states), `dread` (gradients of queries and keys through outputs and
states, and dW) and `dsolve` (gradients through T).

Operands have two bytes; sums, gates and factors are float32. T is solved in TF32, which rounds as
much as storing it in bfloat16. One program owns each output element and adds in a fixed order: no
atomics, the same bits in every run.

Compiler bugs determine how matmuls are written. Only loaded operands are transposed, by loading
them transposed, never computed ones (Hopper, Triton up to 3.7.0: fla #640): D^T is computed in
addition to D. The result of a matmul is never reduced to a scalar, which does not compile for
sm_100: parts of dg go through memory as vectors and are summed as prefixes.

A pointer's first value belongs to the program's row and head; offsets inside have 32 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titanlite.ops.launchers import INTERPRETED, cdiv, find_table, launch

CHUNK = 64
KEY_WIDTH = 128
HALF = 64
C, K = tl.constexpr(CHUNK), tl.constexpr(KEY_WIDTH)
# Table (`launchers.table_of`) -> kernel -> warps, stages, and columns of V of a program, unless it
# takes all. With three stages, the operands of `dstates` do not fit. The other differences keep
# registers off the stack, or fit the 99 KiB of shared memory of the smallest devices.
_HOPPER = {
    "solve": (4, 2),
    "states": (4, 2, 64),
    "read": (4, 2, 64),
    "dstates": (4, 2, 32),
    "dread": (8, 2),
    "dsolve": (8, 2),
}
_TABLES = {
    "large": _HOPPER,
    "small": _HOPPER | {"states": (4, 2, 32), "dstates": (4, 1, 32)},
    "blackwell": _HOPPER | {"states": (8, 2, 64), "dread": (8, 1)},
}


def options_of(table: str, kernel: str) -> dict[str, int]:
    """Return the options of a kernel on the devices of a table."""
    names = ("num_warps", "num_stages", "BV")
    return dict(zip(names, _TABLES[table][kernel], strict=False))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    documents: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the last state and T, as `gated_delta.gated_delta` does."""
    start = _Launcher(k, v, documents)
    inverse = start.empty(start.num_chunks, *start.outer, CHUNK, CHUNK)
    _, sums, states, new, last = start.walk(g, beta, inverse, state, is_known=False)
    out = torch.empty_like(new)
    start("read", q, k, new, states, sums, out)
    return out, last, inverse


def backward(
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
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the first state."""
    start = _Launcher(k, v, documents)
    W, sums, states, new, last = start.walk(g, beta, inverse, state, is_known=True)
    dstates, dnew, dstate = (torch.empty_like(x) for x in (states, new, last))
    start("dstates", q, k, W, sums, dout, dlast, dstates, dnew, dstate)
    dW, dq = torch.empty_like(W), torch.empty_like(q)
    dk = torch.empty_like(k, dtype=torch.float32)
    parts = (*states.shape[:3], KEY_WIDTH // HALF, CHUNK)
    dsums, wrote = (start.empty(*parts, dtype=torch.float32) for _ in range(2))
    carried = start.empty(*states.shape[:4], dtype=torch.float32)
    operands = (q, k, new, states, dstates, dnew, dout, sums, dq, dk, dW, dsums, wrote, carried)
    start("dread", *operands)
    dk_through, dv, dbeta, dg = (torch.empty_like(x) for x in (W, v, sums, sums))
    operands = (k, v, beta, inverse, dW, dnew, sums, dsums, wrote, carried)
    start("dsolve", *operands, dk_through, dv, dbeta, dg)
    dk += dk_through.unflatten(2, (k.shape[2], -1)).sum(3, dtype=torch.float32)
    return dq, dk.to(k.dtype), dv, dg.to(g.dtype), dbeta.to(beta.dtype), dstate


class _Launcher:
    """Launcher of the kernels. A grid has chunks, blocks of columns, and rows times value heads or,
    for `dread`, times key heads.
    """

    def __init__(self, k: Tensor, v: Tensor, documents: Tensor) -> None:
        (batch, self.size, heads, _) = k.shape
        value_heads = v.shape[2]
        self.k, self.v, self.documents = k, v, documents
        self.num_chunks = cdiv(self.size, CHUNK)
        self.outer = (batch, heads, value_heads // heads)
        self.sizes = {"H": heads, "G": value_heads, "V": v.shape[3]}

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.v.dtype, device=self.v.device)

    def __call__(self, name: str, *operands: Tensor, **more: Any) -> None:
        table = "large" if INTERPRETED else find_table(self.v.device)
        options = self.sizes | options_of(table, name) | more
        chunks = self.num_chunks
        heads = options["G"]
        blocks = options["V"] // options.get("BV", options["V"])
        if name in ("states", "dstates"):  # they visit a whole row
            chunks = 1
        if name == "dread":
            blocks = KEY_WIDTH // HALF
            heads = options["H"]
        grid = (chunks, blocks, self.k.shape[0] * heads)
        sizes = (self.size, self.num_chunks)
        launch(KERNELS[name], grid, *operands, self.documents, *sizes, **options)

    def walk(
        self, g: Tensor, beta: Tensor, inverse: Tensor, state: Tensor, *, is_known: bool
    ) -> tuple[Tensor, ...]:
        """Return W, the sums of g in chunks, the state before each chunk (B, N, G, K, V), `new`,
        and the last state; write T unless it is known.
        """
        k = self.k
        v = self.v
        batch, _, value_heads, width = v.shape
        W = self.empty(*v.shape[:3], KEY_WIDTH)
        U, new = torch.empty_like(v), torch.empty_like(v)
        sums = torch.empty_like(g, dtype=torch.float32)
        self("solve", k, v, g, beta, inverse, W, U, sums, IS_KNOWN=is_known)
        states = self.empty(batch, self.num_chunks, value_heads, KEY_WIDTH, width)
        state = state.contiguous()
        last = torch.empty_like(state)
        self("states", k, W, U, sums, state, states, new, last)
        return W, sums, states, new, last


@triton.jit
def _place(program, S, H, G):
    """Return a program's row and value head, and the positions of its first rows of values and of
    keys, if each row holds one head.
    """
    b = (program // G).to(tl.int64)
    head = program % G
    return b, head, b * S * G + head, b * S * H + head // (G // H)


@triton.jit
def _load(pointer, tokens, columns, stride):
    """Load (C, columns) of the tokens of a chunk."""
    t, inside = tokens[0], tokens[1]
    place = pointer + t[:, None] * stride + columns[None, :]
    return tl.load(place, mask=inside[:, None], other=0.0)


@triton.jit
def _load_t(pointer, tokens, columns, stride):
    """Load (columns, C) of the tokens of a chunk."""
    t, inside = tokens[0], tokens[1]
    place = pointer + t[None, :] * stride + columns[:, None]
    return tl.load(place, mask=inside[None, :], other=0.0)


@triton.jit
def _store(pointer, tokens, columns, stride, value):
    t, inside = tokens[0], tokens[1]
    place = pointer + t[:, None] * stride + columns[None, :]
    tl.store(place, value.to(pointer.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _load_halves(place, V):
    """Load the two halves of K of a state (K, columns)."""
    return tl.load(place), tl.load(place + 64 * V)


@triton.jit
def _store_halves(place, first, second, V):
    tl.store(place, first)
    tl.store(place + 64 * V, second)


@triton.jit
def _products(a, b, tokens, stride, WIDTH: tl.constexpr):
    """Return a b^T (C, C) of the tokens of a chunk, in blocks of 64 of their WIDTH columns."""
    total = tl.zeros([C, C], tl.float32)
    for x in range(WIDTH // 64):
        columns = x * 64 + tl.arange(0, 64)
        total += tl.dot(_load(a, tokens, columns, stride), _load_t(b, tokens, columns, stride))
    return total


@triton.jit
def _tokens(documents, n, S):
    """Return the tokens of chunk n, whether they are in the row, and the documents of these tokens,
    of the token before the chunk, and of its last one. Tokens after the row's end belong to its
    last document.
    """
    t = n * C + tl.arange(0, C)
    document = tl.load(documents + tl.minimum(t, S - 1))
    before = tl.load(documents + tl.maximum(n * C - 1, 0))
    last = tl.load(documents + tl.minimum(n * C + C - 1, S - 1))
    return t, t < S, document, before, last


@triton.jit
def _factors(sums, n, S, G, tokens):
    """Return sums of g, and three factors: of the state before (read), to the state after (write),
    and from the state before to the state after (keep).
    """
    t, inside, document, before, last = tokens
    total = tl.load(sums + tl.minimum(t, S - 1) * G)
    end = tl.load(sums + tl.minimum(n * C + C - 1, S - 1) * G)
    read = tl.where((document == before) & inside, tl.exp(total), 0.0)
    write = tl.where((document == last) & inside, tl.exp(end - total), 0.0)
    return total, read, write, tl.where(last == before, tl.exp(end), 0.0)


@triton.jit
def _decay(total, tokens, FIRST: tl.constexpr, IS_TRANSPOSED: tl.constexpr = False):
    """Return D without the diagonals above -FIRST, or its transpose, which is computed directly."""
    i = tl.arange(0, C)
    document = tokens[2]
    same = document[:, None] == document[None, :]
    # Written in a different order, `solve` spills 72 bytes per thread on sm_100.
    if IS_TRANSPOSED:
        seen = same & (i[None, :] >= i[:, None] + FIRST)
        decay = total[None, :] - total[:, None]
    else:
        seen = same & (i[:, None] >= i[None, :] + FIRST)
        decay = total[:, None] - total[None, :]
    return tl.exp(tl.where(seen, decay, float("-inf")))


@triton.jit
def _invert(A):
    """Return (I + A)^-1 of a strictly lower triangular A, from the inverses of ever larger diagonal
    blocks. Powers of A would lose all digits if keys are similar.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, A, 0.0)
    X = _merge(_merge(_merge(X, A, i, j, 2), A, i, j, 4), A, i, j, 8)
    return _merge(_merge(X, A, i, j, 16), A, i, j, 32)


@triton.jit
def _merge(X, A, i, j, size: tl.constexpr):
    """Return the inverses of diagonal blocks of twice the size."""
    corner = (i // (2 * size) == j // (2 * size)) & (i // size > j // size)
    part = tl.dot(X, tl.where(corner, A, 0.0), input_precision="tf32")
    return X - tl.dot(part, X, input_precision="tf32")


@triton.jit
def solve_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    T_ptr,
    W_ptr,
    U_ptr,
    sums_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    IS_KNOWN: tl.constexpr,
):
    """Compute sums of g, T, W, U of one chunk and value head."""
    n, program = tl.program_id(0), tl.program_id(2)
    b, _, row, key_row = _place(program, S, H, G)
    tokens = _tokens(documents_ptr + b * S, n, S)
    t, inside, document, before, _ = tokens
    gate = tl.load(g_ptr + row + t * G, mask=inside, other=0.0)
    total = tl.cumsum(gate.to(tl.float32), 0)
    tl.store(sums_ptr + row + t * G, total, mask=inside)
    beta = tl.load(beta_ptr + row + t * G, mask=inside, other=0.0).to(tl.float32)
    keys, values = tl.arange(0, K), tl.arange(0, V)
    k_base = k_ptr + key_row * K
    k = _load(k_base, tokens, keys, H * K)
    i = tl.arange(0, C)
    T_place = T_ptr + (n.to(tl.int64) * tl.num_programs(2) + program) * C * C
    T_place += i[:, None] * C + i[None, :]
    if IS_KNOWN:
        T = tl.load(T_place)
    else:
        A = tl.dot(k, _load_t(k_base, tokens, keys, H * K)) * _decay(total, tokens, 1)
        T = _invert(A * beta[:, None]).to(k.dtype)
        tl.store(T_place, T)
    read = tl.where(document == before, tl.exp(total), 0.0)
    w = tl.dot(T, (k * (beta * read)[:, None]).to(T.dtype))
    _store(W_ptr + row * K, tokens, keys, G * K, w)
    v = _load(v_ptr + row * V, tokens, values, G * V)
    u = tl.dot(T, (v * beta[:, None]).to(T.dtype))
    _store(U_ptr + row * V, tokens, values, G * V, u)


@triton.jit
def states_kernel(
    k_ptr,
    W_ptr,
    U_ptr,
    sums_ptr,
    first_ptr,
    states_ptr,
    new_ptr,
    last_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """Visit the chunks of one row, for BV columns of a value head's state."""
    block, program = tl.program_id(1), tl.program_id(2)
    b, head, row, key_row = _place(program, S, H, G)
    keys = tl.arange(0, K)
    values = block * BV + tl.arange(0, BV)
    inner = keys[:, None] * V + values[None, :]
    documents = documents_ptr + b * S
    sums = sums_ptr + row
    k_base, w_base = k_ptr + key_row * K, W_ptr + row * K
    u_base, new_base = U_ptr + row * V, new_ptr + row * V
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    end = program.to(tl.int64) * K * V + inner
    state = tl.load(first_ptr + end)
    for n in range(N):
        tokens = _tokens(documents, n, S)
        _, _, write, keep = _factors(sums, n, S, G, tokens)
        stored = state.to(dtype)
        tl.store(states_ptr + ((b * N + n) * G + head) * K * V + inner, stored)
        new = _load(u_base, tokens, values, G * V).to(tl.float32)
        new -= tl.dot(_load(w_base, tokens, keys, G * K), stored)
        rounded = new.to(dtype)
        _store(new_base, tokens, values, G * V, rounded)
        k_t = _load_t(k_base, tokens, keys, H * K) * write[None, :]
        state = state * keep + tl.dot(k_t.to(dtype), rounded)
    tl.store(last_ptr + end, state)


@triton.jit
def read_kernel(
    q_ptr,
    k_ptr,
    new_ptr,
    states_ptr,
    sums_ptr,
    out_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute the outputs of one chunk, for BV columns of a value head."""
    n, block, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head, row, key_row = _place(program, S, H, G)
    tokens = _tokens(documents_ptr + b * S, n, S)
    total, read, _, _ = _factors(sums_ptr + row, n, S, G, tokens)
    keys = tl.arange(0, K)
    values = block * BV + tl.arange(0, BV)
    q = _load(q_ptr + key_row * K, tokens, keys, H * K)
    k_t = _load_t(k_ptr + key_row * K, tokens, keys, H * K)
    state = states_ptr + ((b * N + n) * G + head) * K * V
    out = tl.dot(q, tl.load(state + keys[:, None] * V + values[None, :])) * read[:, None]
    attended = (tl.dot(q, k_t) * _decay(total, tokens, 0)).to(q.dtype)
    out += tl.dot(attended, _load(new_ptr + row * V, tokens, values, G * V))
    _store(out_ptr + row * V, tokens, values, G * V, out)


@triton.jit
def dstates_kernel(
    q_ptr,
    k_ptr,
    W_ptr,
    sums_ptr,
    dout_ptr,
    dlast_ptr,
    dstates_ptr,
    dnew_ptr,
    dfirst_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """Visit the chunks backwards: compute the gradients of the state after each chunk and of `new`,
    for BV columns of a value head. Held as a whole, not in two halves of K, the state's gradient
    would spill 112 bytes of registers per thread on Hopper.
    """
    block, program = tl.program_id(1), tl.program_id(2)
    b, head, row, key_row = _place(program, S, H, G)
    half = tl.arange(0, 64)
    keys = tl.arange(0, K)
    values = block * BV + tl.arange(0, BV)
    inner = half[:, None] * V + values[None, :]
    documents = documents_ptr + b * S
    sums = sums_ptr + row
    q_base = q_ptr + key_row * K
    k_base, w_base = k_ptr + key_row * K, W_ptr + row * K
    dout_base, dnew_base = dout_ptr + row * V, dnew_ptr + row * V
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    end = program.to(tl.int64) * K * V + inner
    dstate_1, dstate_2 = _load_halves(dlast_ptr + end, V)
    for m in range(N):
        n = N - 1 - m
        tokens = _tokens(documents, n, S)
        total, read, write, keep = _factors(sums, n, S, G, tokens)
        place = dstates_ptr + ((b * N + n) * G + head) * K * V + inner
        rounded_1, rounded_2 = dstate_1.to(dtype), dstate_2.to(dtype)
        _store_halves(place, rounded_1, rounded_2, V)
        dout = _load(dout_base, tokens, values, G * V)
        k = _load(k_base, tokens, keys, H * K)
        q_t = _load_t(q_base, tokens, keys, H * K)
        attended_t = (tl.dot(k, q_t) * _decay(total, tokens, 0, IS_TRANSPOSED=True)).to(dtype)
        dnew = tl.dot(attended_t, dout)
        k_1 = _load(k_base, tokens, half, H * K) * write[:, None]
        k_2 = _load(k_base + 64, tokens, half, H * K) * write[:, None]
        dnew += tl.dot(k_1.to(dtype), rounded_1)
        dnew += tl.dot(k_2.to(dtype), rounded_2)
        rounded = dnew.to(dtype)
        _store(dnew_base, tokens, values, G * V, rounded)
        q_1 = _load_t(q_base, tokens, half, H * K) * read[None, :]
        q_2 = _load_t(q_base + 64, tokens, half, H * K) * read[None, :]
        dstate_1 = dstate_1 * keep + tl.dot(q_1.to(dtype), dout)
        dstate_1 -= tl.dot(_load_t(w_base, tokens, half, G * K), rounded)
        dstate_2 = dstate_2 * keep + tl.dot(q_2.to(dtype), dout)
        dstate_2 -= tl.dot(_load_t(w_base + 64, tokens, half, G * K), rounded)
    _store_halves(dfirst_ptr + end, dstate_1, dstate_2, V)


@triton.jit
def dread_kernel(
    q_ptr,
    k_ptr,
    new_ptr,
    states_ptr,
    dstates_ptr,
    dnew_ptr,
    dout_ptr,
    sums_ptr,
    dq_ptr,
    dk_ptr,
    dW_ptr,
    dsums_ptr,
    wrote_ptr,
    carried_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
):
    """Compute the gradients of queries and keys, and dW, for a chunk, a key head, and half of its
    columns.

    A program loops over the value heads of its key head, so that dq and dk need no sum afterwards.
    dk, float32, does not include the gradient through T; `dsums`, `wrote` and `carried` are parts
    of the gradient of the sums of g.
    """
    n, part, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = (program // H).to(tl.int64)
    key_head = program % H
    repeats: tl.constexpr = G // H
    key_row = b * S * H + key_head
    tokens = _tokens(documents_ptr + b * S, n, S)
    half = tl.arange(0, 64)
    keys = part * 64 + half
    k_base = k_ptr + key_row * K
    q = _load(q_ptr + key_row * K, tokens, keys, H * K)
    k = _load(k_base, tokens, keys, H * K)
    # of these columns only: other programs add the parts of dsums from other columns
    qk = tl.dot(q, _load_t(k_base, tokens, keys, H * K))
    dq, dk = tl.zeros([C, 64], tl.float32), tl.zeros([C, 64], tl.float32)
    for r in range(repeats):
        head = key_head * repeats + r
        row = b * S * G + head
        total, read, write, _ = _factors(sums_ptr + row, n, S, G, tokens)
        dout_base, new_base = dout_ptr + row * V, new_ptr + row * V
        dnew_base = dnew_ptr + row * V
        # Several loops over V: in a single loop, their sums would not fit the registers.
        dP = _products(dout_base, new_base, tokens, G * V, V) * _decay(total, tokens, 0)
        dq += tl.dot(dP.to(k.dtype), k)
        dsums = tl.sum(dP * qk, 1) - tl.sum(dP * qk, 0)
        dP_t = _products(new_base, dout_base, tokens, G * V, V)
        dP_t *= _decay(total, tokens, 0, IS_TRANSPOSED=True)
        dk += tl.dot(dP_t.to(q.dtype), q)
        wrote, carried = tl.zeros([C], tl.float32), tl.zeros([64], tl.float32)
        place = ((b * N + n) * G + head) * K
        for x in range(V // 64):
            values = x * 64 + half
            inner = (place + keys[None, :]) * V + values[:, None]
            state_t, dstate_t = tl.load(states_ptr + inner), tl.load(dstates_ptr + inner)
            carried += tl.sum(state_t.to(tl.float32) * dstate_t, 0)
            dq_read = tl.dot(_load(dout_base, tokens, values, G * V), state_t) * read[:, None]
            dq += dq_read
            dsums += tl.sum(dq_read * q, 1)
            dk_write = tl.dot(_load(new_base, tokens, values, G * V), dstate_t)
            dk_write *= write[:, None]
            dk += dk_write
            wrote += tl.sum(dk_write * k, 1)
        tl.store(carried_ptr + place + keys, carried)
        vector = (place // 64 + part) * C + tl.arange(0, C)
        tl.store(dsums_ptr + vector, dsums)
        tl.store(wrote_ptr + vector, wrote)
        dW = tl.zeros([C, 64], tl.float32)
        for x in range(V // 64):
            values = x * 64 + half
            inner = (place + keys[None, :]) * V + values[:, None]
            dnew = _load(dnew_base, tokens, values, G * V)
            dW -= tl.dot(dnew, tl.load(states_ptr + inner))
        _store(dW_ptr + row * K, tokens, keys, G * K, dW)
    _store(dq_ptr + key_row * K, tokens, keys, H * K, dq)
    _store(dk_ptr + key_row * K, tokens, keys, H * K, dk)


@triton.jit
def dsolve_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    T_ptr,
    dW_ptr,
    dnew_ptr,
    sums_ptr,
    dsums_ptr,
    wrote_ptr,
    carried_ptr,
    dk_ptr,
    dv_ptr,
    dbeta_ptr,
    dg_ptr,
    documents_ptr,
    S,
    N,
    H: tl.constexpr,
    G: tl.constexpr,
    V: tl.constexpr,
):
    """Compute the gradients through T and its operands for one chunk and value head: the rest of
    dk, and dv, dbeta, dg.
    """
    n, program = tl.program_id(0), tl.program_id(2)
    b, head, row, key_row = _place(program, S, H, G)
    tokens = _tokens(documents_ptr + b * S, n, S)
    t, inside, _, _, _ = tokens
    total, read, _, keep = _factors(sums_ptr + row, n, S, G, tokens)
    beta = tl.load(beta_ptr + row + t * G, mask=inside, other=0.0).to(tl.float32)
    scale = beta * read
    half, i = tl.arange(0, 64), tl.arange(0, C)
    k_base, dw_base = k_ptr + key_row * K, dW_ptr + row * K
    v_base, dnew_base = v_ptr + row * V, dnew_ptr + row * V
    dk_base, dv_base = dk_ptr + row * K, dv_ptr + row * V
    T_base = T_ptr + (n.to(tl.int64) * tl.num_programs(2) + program) * C * C
    T_t = tl.load(T_base + i[None, :] * C + i[:, None])
    dtype: tl.constexpr = T_ptr.dtype.element_ty
    # dT = dU (beta v)^T + dW (beta e^G k)^T
    dT = tl.zeros([C, C], tl.float32)
    dbeta, along = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for x in range(V // 64):
        values = x * 64 + half
        dnew = _load(dnew_base, tokens, values, G * V)
        v_t = _load_t(v_base, tokens, values, G * V) * beta[None, :]
        dT += tl.dot(dnew, v_t.to(dtype))
        dbv = tl.dot(T_t, dnew)
        dbeta += tl.sum(dbv * _load(v_base, tokens, values, G * V), 1)
        _store(dv_base, tokens, values, G * V, dbv * beta[:, None])
    for x in range(K // 64):
        keys = x * 64 + half
        dW = _load(dw_base, tokens, keys, G * K)
        k_t = _load_t(k_base, tokens, keys, H * K) * scale[None, :]
        dT += tl.dot(dW, k_t.to(dtype))
        along += tl.sum(tl.dot(T_t, dW) * _load(k_base, tokens, keys, H * K), 1)
    dA = -tl.dot(tl.dot(T_t, dT.to(dtype)).to(dtype), T_t) * _decay(total, tokens, 1)
    kk = _products(k_base, k_base, tokens, H * K, K)
    dbeta += read * along + tl.sum(dA * kk, 1)
    dA *= beta[:, None]
    dsums = scale * along + tl.sum(dA * kk, 1) - tl.sum(dA * kk, 0)
    # Its transpose, by separate matmuls and after the rest, because registers are scarce.
    dT_t = tl.zeros([C, C], tl.float32)
    for x in range(V // 64):
        values = x * 64 + half
        v = _load(v_base, tokens, values, G * V) * beta[:, None]
        dT_t += tl.dot(v.to(dtype), _load_t(dnew_base, tokens, values, G * V))
    for x in range(K // 64):
        keys = x * 64 + half
        k = _load(k_base, tokens, keys, H * K) * scale[:, None]
        dT_t += tl.dot(k.to(dtype), _load_t(dw_base, tokens, keys, G * K))
    place = ((b * N + n) * G + head) * K
    wrote = tl.zeros([C], tl.float32)
    for part in range(K // 64):
        vector = (place // 64 + part) * C + i
        dsums += tl.load(dsums_ptr + vector)
        wrote += tl.load(wrote_ptr + vector)
    T = tl.load(T_base + i[:, None] * C + i[None, :])
    dA_t = tl.dot(tl.dot(T, dT_t.to(dtype)).to(dtype), T)
    dA_t *= _decay(total, tokens, 1, IS_TRANSPOSED=True)
    both = (dA - dA_t * beta[None, :]).to(dtype)  # dA + dA^T
    for x in range(K // 64):
        keys = x * 64 + half
        dk = tl.dot(T_t, _load(dw_base, tokens, keys, G * K)) * scale[:, None]
        dk += tl.dot(both, _load(k_base, tokens, keys, H * K))
        _store(dk_base, tokens, keys, G * K, dk)
    tl.store(dbeta_ptr + row + t * G, dbeta, mask=inside)
    # The write factors e^(G_C - G_j) depend on the gates after j, and the factor of the state on
    # all gates.
    carry = tl.sum(tl.load(carried_ptr + place + tl.arange(0, K)), 0) * keep
    dg = tl.cumsum(dsums, 0, reverse=True) + tl.cumsum(wrote, 0) - wrote + carry
    tl.store(dg_ptr + row + t * G, dg, mask=inside)


KERNELS = {
    "solve": solve_kernel,
    "states": states_kernel,
    "read": read_kernel,
    "dstates": dstates_kernel,
    "dread": dread_kernel,
    "dsolve": dsolve_kernel,
}
