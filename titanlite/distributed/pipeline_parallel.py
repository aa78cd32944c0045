"""Pipeline parallelism: each stage, a group of ranks, has some layers, and micro-batches pass from one to the next.

All ranks are given the same micro-batches. The first stage looks the tokens up, the last one has the norm, the output
head and with it the losses; the others get hidden states and hand hidden states on. What a stage does not have stays on
meta, under its name (`models.elsewhere`), so the model is cut before it has a byte, and the calls of its modules are
those of a whole one: where a module is elsewhere, its place receives, sends, or does nothing.

The order of forwards and backwards is that of 1F1B (PipeDream-Flush, arXiv:2006.09503, arXiv:2104.04473): a stage runs
at most as many micro-batches ahead as there are stages behind it, and then one backward after every forward. With n
micro-batches and p stages a rank waits for (p - 1) / (n + p - 1) of the time.

Shapes: B batch, S sequence, s = S / (cp * tp) positions of a rank, D hidden.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from titanlite import timers
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.materialize.layout import set_sharing_group
from titanlite.models.decoder import Decoder, LossSums
from titanlite.models.elsewhere import Elsewhere, ElsewhereLayer

_MOST_DIMS = 3  # of logits

Turn = tuple[Literal["forward", "backward"], int]


def order_turns(num_micro_batches: int, stages_behind: int) -> Iterator[Turn]:
    """What a stage does one after the other: ("forward" or "backward", number of the micro-batch)."""
    ahead = min(stages_behind, num_micro_batches)
    for number in range(num_micro_batches + ahead):
        if number < num_micro_batches:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


def apply_pipeline_parallel(model: Decoder, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Leave to the other stages what this one does not have of `model`, in place, on meta; no collective is run.

    The losses of all stages but the last are zeros, whose backward waits for the gradient of what the stage sent;
    balance losses are those of the stage's own layers. Logits are those of the last stage on all of them.

    Collectives: a forward receives from the stage before and sends to the stage behind; backward the other way round.
    Forwards and backwards must be run in the order of `order_turns`, with the same micro-batches on all stages.

    Args:
        model: whole, on meta; no other parallelism was applied to it yet.
        dims: with the mesh axis "pp".
        dtype: of hidden states.
    """
    degrees, stage = dims.degrees, dims.stage
    link = StageLink(dims, model.config.hidden_size, dtype)
    layers, here = model.model.layers, degrees.stage_layers(len(model.model.layers), stage)
    for number, layer in enumerate(layers):
        if number not in here:
            layers[number] = ElsewhereLayer(layer)
    if stage > 0:
        model.model.embed_tokens = _ReceivingEmbedding(model.model.embed_tokens, link)  # pyright: ignore[reportAttributeAccessIssue]
    if not dims.is_last_stage:
        model.model.norm = Elsewhere(model.model.norm)  # pyright: ignore[reportAttributeAccessIssue]
        model.lm_head = _SendingHead(model.lm_head, link)  # pyright: ignore[reportAttributeAccessIssue]
    model.register_forward_hook(partial(_share_logits, link=link))
    assert dims.stage_group is not None
    set_sharing_group(model, dims.stage_group)


class StageLink:
    """What a rank sends to, and gets from, the ranks at its place in the stages before and behind.

    What was sent is kept until the other side must have it, by the order of turns: a hidden state until the backward of
    its micro-batch, a gradient until the one after the next.
    """

    def __init__(self, dims: ParallelDims, width: int, dtype: torch.dtype) -> None:
        # Two groups: NCCL serves one in order, and a hidden state that waits for its receiver would hold up a gradient.
        self._forward_group = dims.pp_mesh.get_group()
        assert dims.pp_backward_group is not None
        self._backward_group: dist.ProcessGroup = dims.pp_backward_group
        self._stage, self._num_stages = dims.stage, dims.degrees.pp
        self._width, self._dtype, self._pieces = width, dtype, dims.degrees.ranks_per_sequence
        self._sent: dict[bool, deque[tuple[dist.Work | None, torch.Tensor]]] = {True: deque(), False: deque()}
        self._most_sent = {True: dims.stages_behind + 1, False: 2}

    def shape_of(self, tokens_BS: torch.Tensor) -> tuple[int, int, int]:
        """(B, s, D) of the hidden states of these tokens."""
        return tokens_BS.shape[0], tokens_BS.shape[1] // self._pieces, self._width

    def send_hidden(self, hidden_BsD: torch.Tensor) -> None:
        """To the stage behind; waits only for what that should have taken long ago."""
        self._send(hidden_BsD, self._stage + 1, is_forward=True)

    def send_gradient(self, grad_BsD: torch.Tensor) -> None:
        """To the stage before; likewise."""
        self._send(grad_BsD, self._stage - 1, is_forward=False)

    def receive_hidden(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """From the stage before."""
        return self._receive(shape, device, self._stage - 1, self._forward_group)

    def receive_gradient(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """From the stage behind."""
        return self._receive(shape, device, self._stage + 1, self._backward_group)

    def _send(self, x: torch.Tensor, stage: int, *, is_forward: bool) -> None:
        x, sent = x.detach().contiguous(), self._sent[is_forward]
        if len(sent) >= self._most_sent[is_forward]:
            work, _ = sent.popleft()
            if work is not None:
                work.wait()
        group = self._forward_group if is_forward else self._backward_group
        sent.append((dist.isend(x, group=group, group_dst=stage), x))

    def _receive(
        self, shape: tuple[int, ...], device: torch.device, stage: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        x = torch.empty(shape, dtype=self._dtype, device=device)
        with timers.collective():
            work = dist.irecv(x, group=group, group_src=stage)
            if work is not None:
                work.wait()
        return x

    def share(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of the last stage on all stages, which may not know their shape."""
        last = self._num_stages - 1
        sizes = [*logits.shape, *(-1 for _ in range(_MOST_DIMS - logits.dim()))]
        header = torch.tensor(sizes, dtype=torch.int64, device=logits.device)
        with timers.collective():
            dist.broadcast(header, group=self._forward_group, group_src=last)
            shape = [size for size in header.tolist() if size >= 0]  # synchronization point
            out = logits.detach().contiguous() if self._stage == last else logits.new_empty(shape)
            dist.broadcast(out, group=self._forward_group, group_src=last)
        return out


class _ReceivingEmbedding(Elsewhere):
    """In place of the embedding: the hidden states of the stage before."""

    def __init__(self, module: nn.Module, link: StageLink) -> None:
        super().__init__(module)
        self.link = link

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        # Of something that requires a gradient, or autograd would not ask for that of the result.
        anchor = torch.empty(0, device=tokens_BS.device, requires_grad=torch.is_grad_enabled())
        return _Receive.apply(anchor, self.link, self.link.shape_of(tokens_BS))  # type: ignore[no-any-return]


class _SendingHead(Elsewhere):
    """In place of the output head: hands the hidden states on. Its losses are zeros, its logits of no meaning."""

    def __init__(self, module: nn.Module, link: StageLink) -> None:
        super().__init__(module)
        self.link = link

    def forward(
        self,
        hidden_BsD: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        reduction: str = "sum",
        select: Any = None,
    ) -> torch.Tensor:
        if labels_BS is None:
            self.link.send_hidden(hidden_BsD)
            return hidden_BsD
        shape = tuple(labels_BS.shape) if reduction == "none" else ()
        # Also where all of the stage is frozen: the stage behind sends a gradient, and waits for its receiver.
        anchor = torch.empty(0, device=hidden_BsD.device, requires_grad=torch.is_grad_enabled())
        return _Send.apply(hidden_BsD, anchor, self.link, shape)  # type: ignore[no-any-return]


class _Receive(torch.autograd.Function):
    """Hidden states from the stage before; their gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, link: StageLink, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.link = link
        return link.receive_hidden(shape, anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.link.send_gradient(grad)
        return None, None, None


class _Send(torch.autograd.Function):
    """Zeros of `shape`; hidden states go to the stage behind, and their gradient comes from there."""

    @staticmethod
    def forward(
        ctx: Any, hidden_BsD: torch.Tensor, anchor: torch.Tensor, link: StageLink, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.link, ctx.shape, ctx.device = link, tuple(hidden_BsD.shape), hidden_BsD.device
        link.send_hidden(hidden_BsD)
        return hidden_BsD.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `grad`, that of the zeros, says nothing: the last stage scaled the loss.
        return ctx.link.receive_gradient(ctx.shape, ctx.device), None, None, None


def _share_logits(module: nn.Module, args: Any, out: Any, *, link: StageLink) -> Any:
    """Of logits tokens are chosen, and all ranks go on with the same ones. Losses are summed by who wants to."""
    return out if isinstance(out, LossSums) else link.share(out)
