"""Is what moe_gpu.py measures right? Against float64, bit for bit a second time, beyond 2^31 elements.

Errors are relative Frobenius norms. Bounds: rounding of the result to bfloat16 alone gives 1.7e-3; the experts round
three times in a row, and are given 1.5e-2 (float32: 1e-6 per matmul and 5e-6).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_common import attempt, free_memory, say
from moe_gpu_cases import Copy, Inputs, MoEShape, build_inputs, differentiate, layers

from titanlite.ops import launchers as launch

_GEMM_BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-6}
_LAYER_BOUND = {torch.bfloat16: 1.5e-2, torch.float32: 5e-6}


@dataclass(frozen=True)
class Check:
    """One comparison; `error` is NaN, and `problem` set, if it could not be made."""

    name: str
    error: float
    bound: float
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """NaN is not."""
        return self.error <= self.bound


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error; infinite if there is a NaN, which `max` would lose."""
    difference = (actual.double() - expected.double()).norm().item()
    if math.isnan(difference):
        return math.inf
    return difference / max(expected.double().norm().item(), 1e-30) if difference else 0.0


def run_checks(
    shapes: Sequence[tuple[MoEShape, int]],
    device: str,
    dtype: torch.dtype,
    large: bool,
    matmuls: Sequence[tuple[int, int]] = ((200, 136), (256, 384)),
) -> list[Check]:
    """All checks, each printed as it is done; `matmuls`: (k, n); `large` adds tensors beyond 2^31 elements (14 GB)."""
    checks: list[Check] = []

    def add(name: str, bound: float, compare: Callable[[], float | Iterator[tuple[str, float]]]) -> None:
        def run() -> list[tuple[str, float]]:
            result = compare()
            return [("", result)] if isinstance(result, float) else list(result)

        found, problem = attempt(run)
        for part, error in found or [("", float("nan"))]:
            checks.append(Check(f"{name}{part}", error, bound, problem))
            mark = "ok" if checks[-1].ok else "WRONG"
            say(f"check {checks[-1].name}: {problem or f'{error:.1e} (bound {bound:.1e})'} {mark}")
        free_memory()

    for k, n in matmuls:
        for tma in (None, False):
            loads = "default loads" if tma is None else "pointers"
            add(f"matmuls {k} x {n}, {loads}", _GEMM_BOUND[dtype], lambda: gemm_errors(k, n, tma, device, dtype))  # noqa: B023
    for shape, tokens in shapes:
        label = f"{shape.name}, {tokens} tokens: "
        add(label, _LAYER_BOUND[dtype], lambda: layer_errors(shape, tokens, device, dtype))  # noqa: B023
        add(f"{label}10 repeats", 0.0, lambda: repeat_error(shape, tokens, device, dtype))  # noqa: B023
    if large:
        add("x of 2.2e9 elements", _GEMM_BOUND[dtype], lambda: large_rows_errors(device, dtype))
        add("z of 2.2e9 elements", _LAYER_BOUND[dtype], lambda: large_z_errors(device, dtype))
    return checks


def gemm_errors(k: int, n: int, tma: bool | None, device: str, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Worst expert of forward, dgrad and wgrad; groups of all kinds of sizes, NaN behind the last."""
    sizes = [129, 0, 1, 150, 64, 17]
    slices = [slice(sum(sizes[:e]), sum(sizes[: e + 1])) for e in range(len(sizes))]
    rows = sum(sizes)
    x, dy = (torch.randn(rows + 40, size, device=device).to(dtype) for size in (k, n))
    x[rows:] = dy[rows:] = float("nan")
    weight = torch.randn(len(sizes), n, k, device=device).to(dtype).mT
    offsets = torch.tensor([where.stop for where in slices], dtype=torch.int32, device=device)
    y = launch.row_grouped_gemm(x, weight, offsets, tma=tma)
    dx = launch.row_grouped_gemm(dy, weight.mT, offsets, tma=tma)
    dw = launch.reduction_grouped_gemm(x, dy, offsets, tma=tma)
    yield " forward", max(error_of(y[s], x[s].double() @ w.double()) for s, w in zip(slices, weight, strict=True))
    yield " dgrad", max(error_of(dx[s], dy[s].double() @ w.double().T) for s, w in zip(slices, weight, strict=True))
    yield " wgrad", max(error_of(d, x[s].double().T @ dy[s].double()) for s, d in zip(slices, dw, strict=True))
    yield " rows behind the last group", (y[rows:].norm() + dx[rows:].norm()).item()


def _draw(shape: MoEShape, tokens: int, exponent: float, device: str, dtype: torch.dtype) -> tuple[Inputs, Copy]:
    inputs = build_inputs(shape, tokens, exponent, device, dtype, copies=1)
    c = inputs.copies[0]
    inputs.drop_rows()
    for tensor in (c.x, c.gate_up, c.down, c.row_weight):
        tensor.requires_grad_()
    return inputs, c


def layer_errors(shape: MoEShape, tokens: int, device: str, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Fused experts, output and gradients, against a float64 loop over the experts; of weights, the worst expert."""
    inputs, c = _draw(shape, tokens, 0.8, device, dtype)
    out = layers(inputs)["titanlite fused"](c)
    dx, dgate_up, ddown, drow_weight = differentiate(out, c)
    expected_out = torch.zeros(c.x.shape, dtype=torch.float64, device=device)
    expected_dx, expected_drow = torch.zeros_like(expected_out), torch.zeros_like(c.row_weight, dtype=torch.float64)
    worst_up = worst_down = 0.0
    for e, where in enumerate(inputs.slices):
        token = inputs.token[where]
        leaves = [
            t.detach().double().requires_grad_() for t in (c.x[token], c.gate_up[e], c.down[e], c.row_weight[where])
        ]
        y = expert_rows(*leaves)
        grads = torch.autograd.grad(y, leaves, c.dout[token].double())
        expected_out.index_add_(0, token, y.detach())
        expected_dx.index_add_(0, token, grads[0])
        expected_drow[where] = grads[3]
        worst_up = max(worst_up, error_of(dgate_up[e], grads[1]))
        worst_down = max(worst_down, error_of(ddown[e], grads[2]))
    yield "out", error_of(out.detach(), expected_out)
    yield "dx", error_of(dx, expected_dx)
    yield "dgate_up", worst_up
    yield "ddown", worst_down
    yield "drow_weight", error_of(drow_weight, expected_drow)


def expert_rows(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One expert on its rows."""
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up * weight.unsqueeze(-1)) @ down.T


def repeat_error(shape: MoEShape, tokens: int, device: str, dtype: torch.dtype, repeats: int = 10) -> float:
    """How many of the repeated results, forward and gradients, differ from the first in any bit."""
    inputs, c = _draw(shape, tokens, 0.8, device, dtype)
    experts = layers(inputs)["titanlite fused"]
    first = [out := experts(c), *differentiate(out, c)]
    differing = 0
    for _ in range(repeats):
        again = [out := experts(c), *differentiate(out, c)]
        differing += sum(not torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return float(differing)


def large_rows_errors(
    device: str, dtype: torch.dtype, rows: int = 1_100_000, k: int = 2048, last: int = 1000
) -> Iterator[tuple[str, float]]:
    """An x, and a dx, of more than 2^31 elements, looked at in its last group, which has `last` rows."""
    n = 128
    x = torch.empty(rows, k, dtype=dtype, device=device)
    for part in x.split(65536):
        part.normal_()
    dy = torch.randn(rows, n, device=device).to(dtype)
    weight = torch.randn(4, n, k, device=device).to(dtype).mT
    offsets = torch.tensor([rows // 3, rows // 2, rows - last, rows], dtype=torch.int32, device=device)
    tail, end = slice(rows - last, rows), weight[3].double()
    y = launch.row_grouped_gemm(x, weight, offsets)
    yield " forward", error_of(y[tail], x[tail].double() @ end)
    del y
    dw = launch.reduction_grouped_gemm(x, dy, offsets)
    yield " wgrad", error_of(dw[3], x[tail].double().T @ dy[tail].double())
    dx = launch.row_grouped_gemm(dy, weight.mT, offsets)
    yield " dgrad", error_of(dx[tail], dy[tail].double() @ end.T)


def large_z_errors(
    device: str, dtype: torch.dtype, shape: MoEShape | None = None, tokens: int = 180_000
) -> Iterator[tuple[str, float]]:
    """Fused experts whose z has more than 2^31 elements, looked at in the last rows of the last expert."""
    shape = shape or MoEShape("large", 256, 768, 16, 8)
    inputs, c = _draw(shape, tokens, 0.0, device, dtype)
    out = layers(inputs)["titanlite fused"](c)
    dx, dgate_up, _, drow_weight = differentiate(out, c)
    chosen = inputs.token[-16:]  # tokens of the last rows, whose z lies at the end
    rows = inputs.rows[chosen]
    x = c.x.detach()[chosen].double().requires_grad_()
    expert_Tk = torch.searchsorted(inputs.offsets, rows.int(), right=True)
    parts = [
        torch.stack(
            [
                expert_rows(x[t : t + 1], c.gate_up[e].double(), c.down[e].double(), c.row_weight[r : r + 1].double())[
                    0
                ]
                for e, r in zip(expert_Tk[t].tolist(), rows[t].tolist(), strict=True)
            ]
        ).sum(dim=0)
        for t in range(len(chosen))
    ]
    expected = torch.stack(parts)
    (expected_dx,) = torch.autograd.grad(expected, x, c.dout[chosen].double())
    yield " out", error_of(out.detach()[chosen], expected.detach())
    yield " dx", error_of(dx[chosen], expected_dx)
    where = inputs.slices[-1]
    token = inputs.token[where]
    leaves = [
        t.detach().double().requires_grad_() for t in (c.x[token], c.gate_up[-1], c.down[-1], c.row_weight[where])
    ]
    grads = torch.autograd.grad(expert_rows(*leaves), leaves, c.dout[token].double())
    yield " dgate_up", error_of(dgate_up[-1], grads[1])
    yield " drow_weight", error_of(drow_weight[where], grads[3])
