"""Inputs of `moe_experts` for tests, and the expected results: a loop over experts in float64."""

import torch

from titanlite.ops import group_by_expert
from titanlite.ops.moe_experts import moe_experts

NAMES = ("out", "dx", "dgate_up", "ddown", "dweight")


class ExpertLayer:
    """Experts, and tokens with their choice of experts; T tokens, k experts per token.

    Args:
        sizes: Rows of each expert. Further choices belong to no expert.
        top_k: Experts per token.
        dtype: The dtype of tokens and weights.
        hidden, inner: Widths.
        spare_tokens: Number of tokens beyond those that the rows need.
        device: The device of all tensors.
    """

    def __init__(
        self,
        sizes,
        top_k,
        dtype=torch.float32,
        hidden=24,
        inner=20,
        *,
        spare_tokens=0,
        device="cpu",
    ):
        generator = torch.Generator().manual_seed(sum(sizes) + top_k)
        rows, num_experts = sum(sizes), len(sizes)
        tokens = -(-rows // top_k) + spare_tokens
        ids = torch.cat(
            [torch.full((size,), e) for e, size in enumerate([*sizes, tokens * top_k - rows])]
        )
        self.ids = ids[torch.randperm(len(ids), generator=generator)].view(tokens, top_k).to(device)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x, gate_up = draw(tokens, hidden), draw(num_experts, 2 * inner, hidden) / hidden**0.5
        down = draw(num_experts, hidden, inner) / inner**0.5
        self.dout = draw(tokens, hidden).to(device, dtype)
        self.inputs = [tensor.to(device, dtype).requires_grad_() for tensor in (x, gate_up, down)]
        weight = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
        self.weight = weight.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()

    def arguments(self):
        """Return the arguments of `moe_experts`; the weight of the rows is a function of
        `weight`.
        """
        order, token, rows, ends = group_by_expert(self.ids, self.inputs[1].shape[0])
        weight = self.weight.flatten().index_select(0, order)
        return *self.inputs, weight, token, rows, ends

    def run(self, backend):
        """Return the operator's result."""
        return moe_experts(*self.arguments(), backend)

    def results(self, out):
        """Return `out` and all gradients, in the order of `NAMES`."""
        return [out, *torch.autograd.grad(out, [*self.inputs, self.weight], self.dout)]

    def expected(self):
        """Return the expected `results` in float64."""
        tensors = [
            tensor.detach().double().requires_grad_() for tensor in (*self.inputs, self.weight)
        ]
        x, gate_up, down, weight = tensors
        out = torch.zeros_like(x)
        for e in range(gate_up.shape[0]):
            token, slot = (self.ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up[e].T).chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up * weight[token, slot, None]
            out = out.index_add(0, token, h @ down[e].T)
        return [out, *torch.autograd.grad(out, tensors, self.dout.double())]


def grouped_products(x, weight, dy, sizes):
    """Return the product of each group of rows with its weight, and the gradients of both, in
    float64 by a loop over groups; results are zero beyond the groups.
    """
    x, weight, dy = x.detach().double(), weight.detach().double(), dy.double()
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(weight)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows] = x[rows] @ weight[e]
        dx[rows] = dy[rows] @ weight[e].T
        dw[e] = x[rows].T @ dy[rows]
        start += size
    return y, dx, dw
