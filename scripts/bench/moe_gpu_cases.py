"""The grouped matmuls and expert layers that moe_gpu.py measures: sizes, FLOPs, bytes, inputs, and
the ways to do them.

Shapes: T tokens, k experts per token, R = T * k rows grouped by expert, E experts, D hidden, I
expert width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

from titanlite.ops import group_by_expert
from titanlite.ops import launchers as launch
from titanlite.ops.moe_experts import moe_experts

_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one MoE layer's experts."""

    name: str
    hidden: int
    width: int
    num_experts: int
    top_k: int

    @property
    def weight_bytes(self) -> int:
        """Of gate_up_proj and down_proj in bfloat16."""
        return 3 * self.num_experts * self.hidden * self.width * _BYTES

    def needed_bytes(self, tokens: int) -> int:
        """About what forward and backward of the unfused layer need: weights, their gradients,
        activations.
        """
        rows = tokens * self.top_k
        return 2 * self.weight_bytes + rows * (4 * self.hidden + 8 * self.width) * _BYTES


SHAPES = (
    MoEShape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    MoEShape("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    MoEShape("DeepSeek-V3", 7168, 2048, 256, 8),
)
TOKENS = (4096, 16384, 65536)
# 0.8: the most loaded of 128 experts gets 11 % of the rows, 15 times the mean
SKEWS = {"balanced": 0.0, "zipf": 0.8}


def fitting(shape: MoEShape, tokens: int, memory_bytes: int) -> tuple[MoEShape, int]:
    """(shape, tokens), or what one of 8 expert-parallel ranks with as many tokens each holds, if
    the whole is too much.

    Such a rank gets tokens * top_k rows for an eighth of the experts; each row is a token of its
    own with one expert.
    """
    if shape.needed_bytes(tokens) <= 0.8 * memory_bytes:
        return shape, tokens
    rank = replace(
        shape, name=f"{shape.name} (a rank of EP8)", num_experts=shape.num_experts // 8, top_k=1
    )
    return rank, tokens * shape.top_k


def group_sizes(rows: int, num_experts: int, exponent: float, most: int) -> list[int]:
    """Rows of each expert, falling as 1 / rank^exponent (Zipf; 0: all alike), none above `most`;
    they sum to `rows`.

    Raises:
        ValueError: `num_experts * most` is below `rows`.
    """
    if num_experts * most < rows:
        raise ValueError(
            f"group_sizes: {num_experts} experts with at most {most} rows cannot hold {rows}."
        )
    weights = [(e + 1) ** -exponent for e in range(num_experts)]
    sizes, ends = [], [0]
    for e, weight in enumerate(weights):
        # What those before left, in proportion; a capped expert's surplus goes to the others.
        left, share = rows - ends[-1], weight / sum(weights[e:])
        fewest = -(-left // (num_experts - e))  # at least the mean of the rest, so that sizes fall
        sizes.append(
            min(max(round(left * share), fewest), most, left, sizes[-1] if sizes else most)
        )
        ends.append(ends[-1] + sizes[-1])
    return sizes


def route(sizes: Sequence[int], tokens: int, top_k: int, seed: int, device: str) -> torch.Tensor:
    """Expert ids (T, k) that give these group sizes, no token with an expert twice, all in random
    order.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randperm(len(sizes), generator=generator)
    expert_R = labels.repeat_interleave(torch.tensor(sizes))
    # Column-major: rows of one expert, at most T of them, go to different tokens.
    ids_Tk = expert_R.view(top_k, tokens).T[torch.randperm(tokens, generator=generator)]
    return ids_Tk.contiguous().to(device)


def gemm_flops(rows: int, k: int, n: int) -> int:
    """Of one grouped matmul, forward, dgrad or wgrad."""
    return 2 * rows * k * n


def gemm_bytes(rows: int, k: int, n: int, num_experts: int) -> int:
    """Every operand and the result moved once, bfloat16."""
    return _BYTES * (rows * (k + n) + num_experts * k * n)


def experts_flops(shape: MoEShape, tokens: int, backward: bool) -> int:
    """Matmul FLOPs of the experts: 3 D I weights per row; backward costs twice the forward."""
    return 6 * tokens * shape.top_k * shape.hidden * shape.width * (3 if backward else 1)


def kept_bytes(shape: MoEShape, tokens: int) -> int:
    """What the fused experts keep for backward: z = [gate | up]."""
    return tokens * shape.top_k * 2 * shape.width * _BYTES


class Operation(NamedTuple):
    """One kernel of the experts. Bytes are for everything moved once; `fused` is 0 where fusion
    removes the kernel.
    """

    name: str
    flops: int
    unfused: int
    fused: int
    backward: bool


def operations(shape: MoEShape, tokens: int) -> list[Operation]:
    """The experts as kernels: with a gather, SwiGLU and their backward in kernels of their own, or
    inside the GEMMs.
    """
    rows = tokens * shape.top_k
    up = gemm_flops(rows, shape.hidden, 2 * shape.width)
    x, xp, h = (
        _BYTES * size for size in (tokens * shape.hidden, rows * shape.hidden, rows * shape.width)
    )
    w_up, w_down, z = (
        _BYTES * 2 * shape.num_experts * shape.hidden * shape.width,
        shape.weight_bytes // 3,
        2 * h,
    )
    return [
        Operation("gather x", 0, x + xp, 0, False),
        Operation("gate_up", up, xp + w_up + z, x + w_up + z + h, False),
        Operation("swiglu", 0, z + h, 0, False),
        Operation("down", up // 2, h + w_down + xp, h + w_down + xp, False),
        Operation("gather-sum", 0, xp + x, xp + x, False),
        Operation("gather dout", 0, x + xp, 0, True),
        Operation("down dgrad", up // 2, xp + w_down + h, x + w_down + 2 * z + h, True),
        Operation("swiglu backward", 0, h + z + z + h, 0, True),
        Operation("down wgrad", up // 2, h + xp + w_down, h + x + w_down, True),
        Operation("gate_up dgrad", up, z + w_up + xp, z + w_up + xp, True),
        Operation("gate_up wgrad", up, xp + z + w_up, x + z + w_up, True),
        Operation("gather-sum dx", 0, xp + x, xp + x, True),
    ]


def floor_s(
    shape: MoEShape, tokens: int, flops: float, bandwidth: float, *, fused: bool, backward: bool
) -> float:
    """Least seconds: each kernel takes the longer of its FLOPs and its bytes at the given rates."""
    return sum(
        max(op.flops / flops, (op.fused if fused else op.unfused) / bandwidth)
        for op in operations(shape, tokens)
        if backward or not op.backward
    )


@dataclass
class Copy:
    """One set of inputs. x, dout (T, D); rows_x, z, h (R, D), (R, 2 I), (R, I); weights as in
    `Experts`.
    """

    x: torch.Tensor
    dout: torch.Tensor
    rows_x: torch.Tensor
    z: torch.Tensor
    h: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    row_weight: torch.Tensor


@dataclass
class Inputs:
    """Routed inputs of one case, in as many copies as are rotated.

    Attributes:
        sizes: rows of each expert, in the order of the experts.
        offsets: int32 ends on the device.
    """

    shape: MoEShape
    tokens: int
    sizes: list[int]
    offsets: torch.Tensor
    token: torch.Tensor
    rows: torch.Tensor
    copies: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token32, self.rows32 = self.token.int(), self.rows.int()
        self.slices = [slice(a, b) for a, b in pairwise([0, *accumulate(self.sizes)])]

    @property
    def num_rows(self) -> int:
        """R."""
        return self.token.shape[0]

    def copy(self, i: int) -> Copy:
        """The inputs of run `i`."""
        return self.copies[i % len(self.copies)]

    def drop_rows(self) -> None:
        """Free what only the single matmuls need, before the layer is measured."""
        for copy in self.copies:
            copy.rows_x = copy.z = copy.h = copy.x[:0]


def build_inputs(
    shape: MoEShape,
    tokens: int,
    exponent: float,
    device: str,
    dtype: torch.dtype,
    copies: int,
    seed: int = 0,
) -> Inputs:
    """Random inputs; every expert's rows come from tokens all over the batch."""
    rows = tokens * shape.top_k
    sizes = group_sizes(rows, shape.num_experts, exponent, tokens)
    ids = route(sizes, tokens, shape.top_k, seed, device)
    _, token_R, rows_Tk, ends_E = group_by_expert(ids, shape.num_experts)
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    inputs = Inputs(shape, tokens, counts, ends_E, token_R.long(), rows_Tk.long())
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int, std: float = 1.0) -> torch.Tensor:
        tensor = torch.empty(size, dtype=dtype, device=device)
        for part in tensor.split(1 if len(size) == 3 else 65536):  # parts below 2^31 elements
            part.normal_(std=std, generator=generator)
        return tensor

    hidden, width, num_experts = shape.hidden, shape.width, shape.num_experts
    for _ in range(copies):
        inputs.copies.append(
            Copy(
                x=draw(tokens, hidden),
                dout=draw(tokens, hidden),
                rows_x=draw(rows, hidden),
                z=draw(rows, 2 * width),
                h=draw(rows, width),
                gate_up=draw(num_experts, 2 * width, hidden, std=hidden**-0.5),
                down=draw(num_experts, hidden, width, std=width**-0.5),
                row_weight=torch.rand(rows, device=device, generator=generator) / shape.top_k,
            )
        )
    return inputs


def copy_bytes(shape: MoEShape, tokens: int) -> int:
    """Bytes of one `Copy` in bfloat16."""
    rows = tokens * shape.top_k
    return shape.weight_bytes + _BYTES * (
        2 * tokens * shape.hidden + rows * (shape.hidden + 3 * shape.width) + 2 * rows
    )


# --- single matmuls


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Torch's own, under either of its names."""
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(x, weight, offs=offsets)


def loop_rows(x: torch.Tensor, weight: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """A cuBLAS matmul per expert; the host knows the sizes already."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, where in enumerate(slices):
        torch.mm(x[where], weight[expert], out=y[where])
    return y


def loop_wgrad(x: torch.Tensor, dy: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """x_e^T @ dy_e for every expert, (E, K, N) stored as (E, N, K)."""
    dw = x.new_empty(len(slices), dy.shape[1], x.shape[1])
    for expert, where in enumerate(slices):
        torch.mm(dy[where].T, x[where], out=dw[expert])
    return dw.mT


class Gemm(NamedTuple):
    """A grouped matmul with K and N of the reduction and the result; `ways` by name, each from a
    copy to a tensor.
    """

    name: str
    flops: int
    ways: dict[str, Callable[[Copy], Any]]


@contextmanager
def trying(kernel: str, tile: launch.Tile) -> Iterator[None]:
    """Launch `kernel` of the table with `tile` inside; rows that it gathers are not copied for
    TMA.
    """
    names = ("gemm", "gemm_few_rows") if kernel in ("gemm", "gemm_few_rows") else (kernel,)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(launch.TILES["large"], dict.fromkeys(names, tile)))
        if kernel == "wgrad_gather":
            stack.enter_context(patch.object(launch, "_tma_fits", lambda *tensors: False))
        yield


OURS, TORCH, LOOP = "titanlite", "grouped_mm", "cuBLAS loop"


def gemms(inputs: Inputs) -> dict[str, Gemm]:
    """All matmuls of forward and backward, alone and, ours only, with what is fused into them."""
    shape, offsets, slices, token = inputs.shape, inputs.offsets, inputs.slices, inputs.token32
    up = gemm_flops(inputs.num_rows, shape.hidden, 2 * shape.width)

    def reduce(x: torch.Tensor, dy: torch.Tensor, *rows: torch.Tensor | None) -> torch.Tensor:
        dw = x.new_empty(len(offsets), dy.shape[1], x.shape[1])
        launch.grouped_mm_wgrad_into(x, dy, offsets, dw, False, *rows)
        return dw.mT

    def rows(
        name: str, flops: int, x: Callable[[Copy], Any], weight: Callable[[Copy], Any]
    ) -> Gemm:
        ways = {
            OURS: lambda c: launch.row_grouped_gemm(x(c), weight(c), offsets),
            TORCH: lambda c: grouped_mm(x(c), weight(c), offsets),
            LOOP: lambda c: loop_rows(x(c), weight(c), slices),
        }
        return Gemm(name, flops, ways)

    def wgrad(name: str, flops: int, x: Callable[[Copy], Any], dy: Callable[[Copy], Any]) -> Gemm:
        ways = {
            OURS: lambda c: reduce(x(c), dy(c)),
            TORCH: lambda c: grouped_mm(dy(c).mT, x(c), offsets).mT,
            LOOP: lambda c: loop_wgrad(x(c), dy(c), slices),
        }
        return Gemm(name, flops, ways)

    def fused(name: str, flops: int, way: Callable[[Copy], Any]) -> Gemm:
        return Gemm(name, flops, {OURS: way})

    swiglu, swiglu_backward = launch.gather_swiglu, launch.gather_swiglu_backward
    listed = [
        rows("forward gate_up", up, lambda c: c.rows_x, lambda c: c.gate_up.mT),
        rows("forward down", up // 2, lambda c: c.h, lambda c: c.down.mT),
        rows("dgrad gate_up", up, lambda c: c.z, lambda c: c.gate_up),
        rows("dgrad down", up // 2, lambda c: c.rows_x, lambda c: c.down),
        wgrad("wgrad gate_up", up, lambda c: c.rows_x, lambda c: c.z),
        wgrad("wgrad down", up // 2, lambda c: c.h, lambda c: c.rows_x),
        fused(
            "gather + gate_up + SwiGLU",
            up,
            lambda c: swiglu(c.x, c.gate_up, c.row_weight, token, offsets, keep=True),
        ),
        fused(
            "gather + dgrad down + dSwiGLU",
            up // 2,
            lambda c: swiglu_backward(c.dout, c.down, c.row_weight, token, offsets, c.z),
        ),
        fused("gather + wgrad gate_up", up, lambda c: reduce(c.x, c.z, token)),
        fused("gather + wgrad down", up // 2, lambda c: reduce(c.h, c.dout, None, token)),
    ]
    return {gemm.name: gemm for gemm in listed}


# --- whole layers


def experts_eager(c: Copy, inputs: Inputs) -> torch.Tensor:
    """The experts as transformers composes them of torch's grouped_mm and eager operations."""
    rows_x = c.x[inputs.token]
    gate, up = grouped_mm(rows_x, c.gate_up.mT, inputs.offsets).chunk(2, dim=-1)
    y = grouped_mm(F.silu(gate) * up, c.down.mT, inputs.offsets)
    y = y * c.row_weight.unsqueeze(-1).to(y.dtype)
    return y[inputs.rows].sum(dim=1)


def experts_loop(c: Copy, inputs: Inputs) -> torch.Tensor:
    """One expert after the other; the host knows the sizes already."""
    out = torch.zeros_like(c.x)
    weight = c.row_weight.to(c.x.dtype).unsqueeze(-1)
    for where, gate_up, down in zip(
        inputs.slices, c.gate_up.unbind(), c.down.unbind(), strict=True
    ):
        token = inputs.token[where]
        gate, up = F.linear(c.x[token], gate_up).chunk(2, dim=-1)
        out = out.index_add_(0, token, F.linear(F.silu(gate) * up * weight[where], down))
    return out


def layers(inputs: Inputs) -> dict[str, Callable[[Copy], torch.Tensor]]:
    """The ways to compute all experts of a layer, differentiable."""

    def ours(c: Copy, backend: Any) -> torch.Tensor:
        arguments = (
            c.x,
            c.gate_up,
            c.down,
            c.row_weight,
            inputs.token,
            inputs.rows,
            inputs.offsets,
        )
        return moe_experts(*arguments, backend)

    return {
        "titanlite fused": lambda c: ours(c, "triton"),
        "titanlite, grouped_mm": lambda c: ours(c, "torch"),
        "eager, grouped_mm": lambda c: experts_eager(c, inputs),
        "eager, cuBLAS loop": lambda c: experts_loop(c, inputs),
    }


def differentiate(out: torch.Tensor, c: Copy) -> tuple[torch.Tensor, ...]:
    """Gradients of x, the weights and the rows' weights."""
    return torch.autograd.grad(out, (c.x, c.gate_up, c.down, c.row_weight), c.dout)
