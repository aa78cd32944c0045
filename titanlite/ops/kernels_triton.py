"""Triton kernels: grouped GEMMs of experts, without padding or synchronization; softmax over a
vocabulary.

- `row_gemm_kernel`: `y[m] = x[rows[m]] @ w[group of m]`. Forward, and with a transposed weight the
  gradient of the input. Epilogues: SwiGLU times the router's weight, and its backward.
- `wgrad_kernel`: `dw[e] = x_e^T @ dy_e`, the gradient of the weight; an empty group gets zeros.
- `gather_sum_kernel`: `out[t] = sum over j of y[rows[t, j]]` in float32, in order of j.
- `softmax_statistics_kernel`, `softmax_gradient_kernel`: logits, in the model's dtype, are read
  once for the loss, and once more when the gradient replaces them; torch's operators move them a
  dozen times, mostly in float32.

Group e owns rows offsets[e - 1] to offsets[e]. Offsets stay on the device: each program loads all
of them as one vector; a cumsum over the row tiles of all groups turns a tile number into (group,
first row). The grid is fixed: the number of programs that the device runs at once. Each program
visits tiles, a band of row tiles by all columns at a time, so that programs that run at the same
time share operands in the L2 cache. Rows from offsets[E - 1] on are one more group, E: nothing is
multiplied, zeros are stored.

Deterministic: one program owns each output element, and adds in a fixed order. If it adds
atomically to old values, this is the only addition to its element. Blackwell miscompiles two dots
into one accumulator in an iteration of a loop (triton #10821), so no loop has two.

Shapes: M rows, E groups, K reduction, N columns; C rows of logits, V columns.
"""

import triton
import triton.language as tl

# Epilogues of `row_gemm_kernel`.
PLAIN = 0
SWIGLU = 1
SWIGLU_BACKWARD = 2


@triton.jit
def _row_tiles(offsets_ptr, M, E, E_CEIL: tl.constexpr, BM: tl.constexpr):
    """Return the number of row tiles of each group, with the rows after the last group as one more,
    and their inclusive cumsum.
    """
    e = tl.arange(0, E_CEIL)
    end = tl.load(offsets_ptr + e, mask=e < E, other=M)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    tiles = tl.where(e <= E, tl.cdiv(end - start, BM), 0)
    return tiles, tl.cumsum(tiles, 0)


@triton.jit
def _find_rows(tiles, cumulated, offsets_ptr, tile, M, E, BM: tl.constexpr):
    """Return the group of a row tile, its first row, and the end of the group."""
    passed = cumulated <= tile
    group = tl.sum(passed.to(tl.int32), 0)
    before = tl.sum(tl.where(passed, tiles, 0), 0)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets_ptr + group, mask=group < E, other=M)
    return group, start + (tile - before) * BM, end


@triton.jit
def _swizzle(tile, row_tiles, col_tiles, BAND: tl.constexpr):
    """Return (row tile, column tile) of a tile number: bands of BAND row tiles, rows fastest inside
    a band.
    """
    first = tile // (BAND * col_tiles) * BAND
    height = tl.minimum(row_tiles - first, BAND)
    inside = tile % (BAND * col_tiles)
    return first + inside % height, inside // height


@triton.jit
def _swiglu_backward(dh, weight, m, n, real, end, N, z_ptr, dz_ptr, h_ptr):
    """From dh before the router's weight, store dz = [dgate | dup] and h; return this tile's part
    of dweight.
    """
    row = m.to(tl.int64)[:, None]
    inside = (n < N)[None, :]
    read = real[:, None] & inside
    mask = (m < end)[:, None] & inside
    left = row * 2 * N + n[None, :]  # z and dz have 2 N columns
    gate = tl.load(z_ptr + left, mask=read, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + left + N, mask=read, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(
        h_ptr + row * N + n[None, :],
        (silu * up * weight).to(h_ptr.dtype.element_ty),
        mask=mask,
    )
    dweight = tl.sum(dh * silu * up, 1)
    dh *= weight
    dup = dh * silu
    dgate = dh * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dz_ptr + left, dgate.to(dz_ptr.dtype.element_ty), mask=mask)
    tl.store(dz_ptr + left + N, dup.to(dz_ptr.dtype.element_ty), mask=mask)
    return dweight


@triton.jit(do_not_specialize=["M"])  # with expert parallelism, it changes in every step
def row_gemm_kernel(  # noqa: PLR0915 - functions would be inlined, and hide which loads belong to which dot
    x,
    w,
    y_ptr,
    z_ptr,
    h_ptr,
    weight_ptr,
    dweight_ptr,
    rows_ptr,
    offsets_ptr,
    M,
    N,
    K,
    E,
    stride_xm,
    stride_we,
    stride_wn,
    stride_wk,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    E_CEIL: tl.constexpr,
    EPILOGUE: tl.constexpr,
    K_MAJOR: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y = x[rows] @ w, group by group. `x` and `w` are pointers or TMA descriptors, which
    load whole blocks.
    """
    col_tiles = tl.cdiv(N, BN)
    tiles, cumulated = _row_tiles(offsets_ptr, M, E, E_CEIL, BM)
    row_tiles = tl.sum(tiles, 0)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row_tile, col_tile = _swizzle(tile, row_tiles, col_tiles, BAND)
        group, first, end = _find_rows(tiles, cumulated, offsets_ptr, row_tile, M, E, BM)
        m = first + tl.arange(0, BM)
        n = col_tile * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        # Rows after the last group, and the values that belong to them, may be anything, including
        # NaN.
        real = m < tl.where(group < E, end, 0)
        source = m
        if rows_ptr is not None:
            source = tl.load(rows_ptr + m, mask=real, other=0)
        if not TMA_X:
            x_ptrs = x + source.to(tl.int64)[:, None] * stride_xm + k[None, :]
        if not TMA_W:
            w_base = w + group.to(tl.int64) * stride_we + k[:, None].to(tl.int64) * stride_wk
            w_ptrs = w_base + n[None, :].to(tl.int64) * stride_wn
            up_ptrs = w_base + (N + n)[None, :].to(tl.int64) * stride_wn
        acc = tl.zeros((BM, BN), tl.float32)
        if EPILOGUE == 1:
            acc_up = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, tl.where(group < E, K, 0), BK):
            if TMA_X:
                # rows of the next group are loaded too; the store masks them
                a = x.load([first, k0])
            else:
                x_mask = real[:, None] if EVEN_K else real[:, None] & (k0 + k < K)[None, :]
                a = tl.load(x_ptrs, mask=x_mask, other=0.0)
                x_ptrs += BK
            if TMA_W:
                if K_MAJOR:
                    b = w.load([group, col_tile * BN, k0]).reshape(BN, BK).T
                else:
                    b = w.load([group, k0, col_tile * BN]).reshape(BK, BN)
            else:
                w_mask = (n < N)[None, :] if EVEN_K else (n < N)[None, :] & (k0 + k < K)[:, None]
                b = tl.load(w_ptrs, mask=w_mask, other=0.0)
                w_ptrs += BK * stride_wk
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if EPILOGUE == 1:  # the weight is [gate ; up]: N columns further on
                if TMA_W:
                    if K_MAJOR:
                        b = w.load([group, N + col_tile * BN, k0]).reshape(BN, BK).T
                    else:
                        b = w.load([group, k0, N + col_tile * BN]).reshape(BK, BN)
                else:
                    b = tl.load(up_ptrs, mask=w_mask, other=0.0)
                    up_ptrs += BK * stride_wk
                acc_up = tl.dot(a, b, acc_up, input_precision=PRECISION)
        mask = (m < end)[:, None] & (n < N)[None, :]
        row = m.to(tl.int64)[:, None]
        if EPILOGUE == 0:
            tl.store(y_ptr + row * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
        if EPILOGUE == 1:
            # Rounded as it is stored, so that backward recomputes the same h.
            gate = acc.to(h_ptr.dtype.element_ty)
            up = acc_up.to(h_ptr.dtype.element_ty)
            if z_ptr is not None:
                left = row * 2 * N + n[None, :]
                tl.store(z_ptr + left, gate, mask=mask)
                tl.store(z_ptr + left + N, up, mask=mask)
            g = gate.to(tl.float32)
            h = g * tl.sigmoid(g) * up.to(tl.float32)
            h *= tl.load(weight_ptr + m, mask=real, other=0.0).to(tl.float32)[:, None]
            tl.store(h_ptr + row * N + n[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)
        if EPILOGUE == 2:
            weight = tl.load(weight_ptr + m, mask=real, other=0.0).to(tl.float32)[:, None]
            # One half after the other: together they would need too many registers.
            left, right = acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
            n_left = col_tile * BN + tl.arange(0, BN // 2)
            dweight = _swiglu_backward(left, weight, m, n_left, real, end, N, z_ptr, y_ptr, h_ptr)
            dweight += _swiglu_backward(
                right, weight, m, n_left + BN // 2, real, end, N, z_ptr, y_ptr, h_ptr
            )
            tl.store(dweight_ptr + m.to(tl.int64) * col_tiles + col_tile, dweight, mask=m < end)


@triton.jit
def wgrad_kernel(
    x,
    dy,
    dw_ptr,
    x_rows_ptr,
    dy_rows_ptr,
    offsets_ptr,
    N,
    K,
    E,
    stride_xm,
    stride_dm,
    stride_we,
    stride_wk,
    stride_wn,
    BK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BAND: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write dw[e, k, n] = sum over the rows m of group e of x[m, k] * dy[m, n]; if ADDS, add it to
    the old values.
    """
    k_tiles, col_tiles = tl.cdiv(K, BK), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), E * k_tiles * col_tiles, tl.num_programs(0)):
        group = tile // (k_tiles * col_tiles)
        k_tile, col_tile = _swizzle(tile % (k_tiles * col_tiles), k_tiles, col_tiles, BAND)
        start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(offsets_ptr + group)
        k = k_tile * BK + tl.arange(0, BK)
        n = col_tile * BN + tl.arange(0, BN)
        i = tl.arange(0, BM)
        acc = tl.zeros((BK, BN), tl.float32)
        # whole blocks need no masks; rows after the last whole one belong to the next group
        if TMA:
            whole = start + (end - start) // BM * BM
            for m0 in range(start, whole, BM):
                acc = tl.dot(
                    x.load([m0, k_tile * BK]).T,
                    dy.load([m0, col_tile * BN]),
                    acc,
                    input_precision=PRECISION,
                )
            if whole < end:
                real = (whole + i < end)[:, None]
                a = tl.where(real, x.load([whole, k_tile * BK]), 0.0)
                b = tl.where(real, dy.load([whole, col_tile * BN]), 0.0)
                acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        else:
            for m0 in range(start, end, BM):
                x_row = m0 + i
                dy_row = x_row
                real = x_row < end
                if x_rows_ptr is not None:
                    x_row = tl.load(x_rows_ptr + m0 + i, mask=real, other=0)
                if dy_rows_ptr is not None:
                    dy_row = tl.load(dy_rows_ptr + m0 + i, mask=real, other=0)
                a = tl.load(
                    x + x_row.to(tl.int64)[None, :] * stride_xm + k[:, None],
                    mask=real[None, :] & (k < K)[:, None],
                    other=0.0,
                )
                b = tl.load(
                    dy + dy_row.to(tl.int64)[:, None] * stride_dm + n[None, :],
                    mask=real[:, None] & (n < N)[None, :],
                    other=0.0,
                )
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
        dw_ptrs = dw_ptr + group.to(tl.int64) * stride_we + k[:, None].to(tl.int64) * stride_wk
        dw_ptrs += n[None, :].to(tl.int64) * stride_wn
        mask = (k < K)[:, None] & (n < N)[None, :]
        if ADDS:  # if loaded first, old values would not fit the registers
            tl.atomic_add(dw_ptrs, acc, mask=mask, sem="relaxed")
        else:
            tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gather_sum_kernel(
    y_ptr, rows_ptr, out_ptr, M, N, stride_ym, stride_om, TOP_K: tl.constexpr, BN: tl.constexpr
):
    """Write out[t] = sum over j of y[rows[t, j]]; a row index of M or more counts as a row of
    zeros.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + t * TOP_K + j).to(tl.int64)
        # one comparison: the interpreter of Triton 3.9 makes integers of a block's mask and a flag
        width = tl.where(row < M, N, 0)
        acc += tl.load(y_ptr + row * stride_ym + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * stride_om + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def softmax_statistics_kernel(
    logits_ptr, column_ptr, max_ptr, sum_ptr, target_ptr, V, stride_c, BLOCK: tl.constexpr
):
    """Write the maximum of a row, the sum of exp(logit - maximum), and the logit in its column
    (arXiv:1805.02867, algorithm 3).
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_c
    v = tl.arange(0, BLOCK)
    most = tl.full((), -3.0e38, tl.float32)  # finite: a block of -inf must not give NaN
    total = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits_ptr + start + v, mask=start + v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), 0)
        most = higher
    tl.store(max_ptr + row, most)
    tl.store(sum_ptr + row, total)
    tl.store(target_ptr + row, tl.load(logits_ptr + tl.load(column_ptr + row)).to(tl.float32))


@triton.jit
def softmax_gradient_kernel(
    logits_ptr, shift_ptr, scale_ptr, hit_ptr, column_ptr, V, stride_c, BLOCK: tl.constexpr
):
    """Overwrite a block of a row's logits by exp(logit - shift) * scale, and subtract `hit` in the
    column that `column_ptr` names for this row.
    """
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * stride_c + v
    x = tl.load(pointers, mask=v < V, other=0.0).to(tl.float32)
    grad = tl.exp(x - tl.load(shift_ptr + row)) * tl.load(scale_ptr + row)
    grad -= tl.where(v == tl.load(column_ptr + row), tl.load(hit_ptr + row), 0.0)
    tl.store(pointers, grad.to(logits_ptr.dtype.element_ty), mask=v < V)
