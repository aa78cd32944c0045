"""Pipeline parallelism: each stage, a group of ranks, has some layers, and micro-batches pass from one to the next.

All ranks get the same micro-batches. The first stage looks the tokens up, the last one has the norm, the output head
and the losses; stages send hidden states to the next one. Modules of other stages stay on meta under their names
(`Elsewhere`), so the calls are those of a whole model: in place of such a module, hidden states are received, sent, or
passed on.

The order is 1F1B (PipeDream-Flush, arXiv:2006.09503): a stage runs at most as many micro-batches ahead as there are
stages after it, and then one backward after every forward. With n micro-batches and p stages a rank waits for (p - 1)
/ (n + p - 1) of the time. With v chunks of layers in each stage (interleaved 1F1B, arXiv:2104.04473) micro-batches go
round the stages v times, and a rank waits for (p - 1) / (v n + p - 1). While `only_chunk` is open, the model is that
chunk alone; otherwise a forward runs all of them, and waits for other stages in between.

Shapes: B batch, S sequence, s = S / (cp * tp) positions of a rank, D hidden.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.base.agree import get_rank
from titanlite.base.log import logger
from titanlite.config import AnyModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.loader import TrainLoader
from titanlite.distributed.parallel_dims import ParallelDims
from titanlite.materialize.layout import leave_elsewhere, set_sharing_group
from titanlite.materialize.sources import Source
from titanlite.models.decoder import Decoder, LossSums
from titanlite.train_step import Schedule, Turn

_MUCH_WAITING = 0.5  # of a step

MOST_SENT = 2
_MOST_DIMS = 3  # of logits
_CHUNKS = "stand_ins_of_chunks"  # attribute of the model


class PipelineSchedule(Schedule):
    def __init__(self, dims: ParallelDims) -> None:
        self._degrees, self._stage, self.group_size = dims.degrees, dims.stage, dims.degrees.pp

    def turns(self, num_micro_batches: int) -> Iterable[Turn]:
        return order_turns(num_micro_batches, self._degrees, self._stage)

    def forwards(self, num_micro_batches: int) -> Iterable[tuple[int, int]]:
        return order_forwards(num_micro_batches, self._degrees)

    def chunk(self, model: nn.Module, chunk: int) -> AbstractContextManager[None]:
        return only_chunk(model, chunk)


def order_turns(num_micro_batches: int, degrees: Degrees, stage: int) -> Iterator[Turn]:
    """Yield the turns of a stage; with several chunks `num_micro_batches` must be a multiple of the stages."""
    forwards = order_forwards(num_micro_batches, degrees)
    ahead = min(degrees.turns_ahead(stage), len(forwards))
    for number in range(len(forwards) + ahead):
        if number < len(forwards):
            yield Turn("forward", *forwards[number])
        if number >= ahead:
            micro_batch, chunk = forwards[number - ahead]
            yield Turn("backward", micro_batch, degrees.chunks - 1 - chunk)


def order_forwards(num_micro_batches: int, degrees: Degrees) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) of all forwards, in the order in which every stage runs them."""
    return [
        (micro_batch, chunk)
        for start in range(0, num_micro_batches, degrees.pp)
        for chunk in range(degrees.chunks)
        for micro_batch in range(start, min(start + degrees.pp, num_micro_batches))
    ]


def apply_pipeline_parallel(model: Decoder, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Replace the modules of other stages in the whole `model` by stand-ins, in place, on meta, before any sharding.

    Losses are zeros except on the last part of the model; their backward waits for the gradient of the sent hidden
    states. Balance losses are those of the layers that ran. All stages return the logits of the last. `dtype` is that
    of hidden states.

    Collectives: a forward receives from the stage before and sends to the next stage; backward the other way round.
    Forwards and backwards must be run in the order of `order_turns`, with the same micro-batches on all stages.
    """
    backbone, stage = model.model, dims.stage
    layers, link = backbone.layers, StageLink(dims, model.config.hidden_size, dtype)
    parts = dims.degrees.stage_parts(len(layers), stage)
    chunks: list[dict[str, Any]] = [{"layers": [layers[number] for number in part]} for part in parts]
    receive, send = partial(_receive, link=link), partial(_send, link=link)
    here = {number for part in parts for number in part}
    for number in set(range(len(layers))) - here:
        is_between = number - 1 in here and number < parts[-1].start
        instead = partial(_go_round, link=link) if is_between else _skip
        layers[number] = Elsewhere(layers[number], instead, between_chunks=is_between)
    if stage > 0:
        backbone.embed_tokens = Elsewhere(backbone.embed_tokens, receive)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        for chunk in chunks[1:]:
            chunk["embed_tokens"] = receive
    if not dims.is_last_stage:
        backbone.norm = Elsewhere(backbone.norm, _hand_on)  # pyright: ignore[reportAttributeAccessIssue]
        model.lm_head = Elsewhere(model.lm_head, send)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        for chunk in chunks[:-1]:
            chunk |= {"norm": _hand_on, "lm_head": send}
    setattr(model, _CHUNKS, chunks)
    model.register_forward_hook(partial(_share_logits, link=link))
    assert dims.stage_group is not None
    set_sharing_group(model, dims.stage_group)


@contextmanager
def only_chunk(model: Any, chunk: int) -> Iterator[None]:
    """Restrict forwards of `model` to one chunk of this stage's layers; modules, parameters and their names stay."""
    chunks = getattr(model, _CHUNKS, [{}])
    if len(chunks) > 1:
        model.stand_ins = chunks[chunk]
    try:
        yield
    finally:
        model.stand_ins = {}


class Elsewhere(nn.Module):
    """Stand-in for `module`, whose values another stage holds; its parameters and buffers stay on meta.

    Names and declared sources stay, so that plan, checkpoints and optimizer know the whole model on every rank.

    Attributes:
        instead: computes the forward.
        between_chunks: stands for the first of the layers that other stages have between two chunks of this one.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any], *, between_chunks: bool = False) -> None:
        super().__init__()
        # The same dictionaries: a parameter is exchanged in both.
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._original = (module,)  # in a tuple, or it would be a module below this one
        self.instead, self.between_chunks = instead, between_chunks
        for tensor in [*module.parameters(), *module.buffers()]:
            leave_elsewhere(tensor)

    def declare_sources(self) -> dict[str, Source]:
        (original,) = self._original
        declare: Any = getattr(original, "declare_sources", dict)
        return declare()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.instead(*args, **kwargs)


class StageLink:
    """Channels to the ranks at the same place in the previous and the next stage; the stages form a ring."""

    def __init__(self, dims: ParallelDims, width: int, dtype: torch.dtype) -> None:
        # Two groups: NCCL serves one in order, and a hidden state that waits for its receiver would hold up a gradient.
        # Two more between the last stage and the first: of two stages, these are also the first and the second.
        forward, backward = dims.pp_mesh.get_group(), dims.pp_backward_group
        assert backward is not None
        round_forward, round_backward = dims.pp_round_groups or (forward, backward)
        stage, count = dims.stage, dims.degrees.pp
        next_stage, previous = (stage + 1) % count, (stage - 1) % count
        into, out_of = (round_forward, round_backward) if stage == 0 else (forward, backward)
        self.hidden_in, self.gradient_out = _Channel(into, previous, dtype), _Channel(out_of, previous, dtype)
        into, out_of = (round_backward, round_forward) if dims.is_last_stage else (backward, forward)
        self.gradient_in, self.hidden_out = _Channel(into, next_stage, dtype), _Channel(out_of, next_stage, dtype)
        self._all_group, self._last, self._is_last = forward, count - 1, dims.is_last_stage
        self._width, self._pieces = width, dims.degrees.ranks_per_sequence

    def shape_of(self, tokens_BS: torch.Tensor) -> tuple[int, int, int]:
        return tokens_BS.shape[0], tokens_BS.shape[1] // self._pieces, self._width

    def share(self, logits: torch.Tensor) -> torch.Tensor:
        """Broadcast the last stage's `logits` to all stages, which may not know their shape."""
        sizes = [*logits.shape, *(-1 for _ in range(_MOST_DIMS - logits.dim()))]
        header = torch.tensor(sizes, dtype=torch.int64, device=logits.device)
        dist.broadcast(header, group=self._all_group, group_src=self._last)
        shape = [size for size in header.tolist() if size >= 0]  # synchronization point
        out = logits.detach().contiguous() if self._is_last else logits.new_empty(shape)
        dist.broadcast(out, group=self._all_group, group_src=self._last)
        return out


class _Channel:
    """One direction between this rank and another: first in, first out.

    The last `MOST_SENT` tensors stay alive until they are received: with one, two neighbours can deadlock. Two suffice
    for every order of turns (tests simulate them).
    """

    def __init__(self, group: dist.ProcessGroup, stage: int, dtype: torch.dtype) -> None:
        self._group, self._stage, self._dtype = group, stage, dtype
        self._sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        x = x.detach().contiguous()
        if len(self._sent) >= MOST_SENT:
            work, _ = self._sent.popleft()
            if work is not None:
                work.wait()
        self._sent.append((dist.isend(x, group=self._group, group_dst=self._stage), x))

    def receive(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        x = torch.empty(shape, dtype=self._dtype, device=device)
        work = dist.irecv(x, group=self._group, group_src=self._stage)
        if work is not None:
            work.wait()
        return x


def _receive(tokens_BS: torch.Tensor, *, link: StageLink) -> torch.Tensor:
    """Receive, in place of the embedding, the hidden states of the stage before."""
    return _pass(None, tokens_BS.device, link, link.shape_of(tokens_BS), receives=True)


def _send(
    hidden_BsD: torch.Tensor,
    labels_BS: torch.Tensor | None = None,
    reduction: Any = "sum",
    select: Any = None,
    *,
    link: StageLink,
) -> torch.Tensor:
    """Send the hidden states, in place of the output head. Its losses are zeros, its logits meaningless."""
    if labels_BS is None:
        link.hidden_out.send(hidden_BsD)
        return hidden_BsD
    shape = () if reduction == "sum" else (*labels_BS.shape, *getattr(reduction, "shape", ()))  # of a function's values
    return _pass(hidden_BsD, hidden_BsD.device, link, shape, receives=False)


def _hand_on(hidden_BsD: torch.Tensor) -> torch.Tensor:
    """Return the hidden states as they are, in place of the norm before an output head that only sends."""
    return hidden_BsD


def _skip(hidden_BsD: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Return the hidden states as they are, in place of a decoder layer, without balance losses."""
    return hidden_BsD, None


def _go_round(hidden_BsD: torch.Tensor, *args: Any, link: StageLink, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Send hidden states through the other stages, in place of all layers between two chunks."""
    return _pass(hidden_BsD, hidden_BsD.device, link, tuple(hidden_BsD.shape), receives=True), None


def _pass(
    hidden: torch.Tensor | None, device: torch.device, link: StageLink, shape: tuple[int, ...], *, receives: bool
) -> torch.Tensor:
    """Send `hidden`, if there is one, to the next stage; return what comes from the one before, or zeros of `shape`."""
    # Without an input that requires a gradient, autograd would skip the backward that receives one. A frozen stage
    # needs it, too: the next stage sends a gradient, and waits until it is received.
    anchor = torch.empty(0, device=device, requires_grad=torch.is_grad_enabled())
    return _Pass.apply(hidden, anchor, link, shape, receives)  # type: ignore[no-any-return]


class _Pass(torch.autograd.Function):
    """`_pass`; in backward gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor | None,
        anchor: torch.Tensor,
        link: StageLink,
        shape: tuple[int, ...],
        receives: bool,
    ) -> torch.Tensor:
        ctx.link, ctx.receives, ctx.device = link, receives, anchor.device
        ctx.shape = None if hidden is None else tuple(hidden.shape)
        if hidden is not None:
            link.hidden_out.send(hidden)
        return (
            link.hidden_in.receive(shape, anchor.device) if receives else anchor.new_zeros(shape, dtype=torch.float32)
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        # The gradient of zeros is unused: the last stage scaled the loss.
        if ctx.receives:
            ctx.link.gradient_out.send(grad)
        sent = None if ctx.shape is None else ctx.link.gradient_in.receive(ctx.shape, ctx.device)
        return sent, None, None, None, None


def _share_logits(module: nn.Module, args: Any, out: Any, *, link: StageLink) -> Any:
    """Share the last stage's logits, so that all ranks choose the same tokens. Losses stay; the caller sums them."""
    return out if isinstance(out, LossSums) else link.share(out)


def describe_pipeline(loader: TrainLoader, model_config: AnyModelConfig, degrees: Degrees) -> None:
    """Log the stages and how long they wait for each other; warn on rank 0 if that is most of a step."""
    if degrees.pp == 1:
        return
    stages = [degrees.stage_parts(model_config.num_layers, stage) for stage in range(degrees.pp)]
    sizes, chunks = [sum(map(len, parts)) for parts in stages], ""
    if degrees.chunks > 1:
        chunks = f" in {degrees.chunks} chunks"
    count, size = loader.num_micro_batches, loader.global_batch_size
    waiting = degrees.waiting(count)
    logger.info(
        "pipeline: %d stages of %s layers%s; micro-batches a step: %d, so that a rank waits for %.0f %% of it",
        *(degrees.pp, ", ".join(map(str, sizes)), chunks, count, 100 * waiting),
    )
    if waiting >= _MUCH_WAITING and get_rank() == 0:
        logger.warning(
            "pipeline: %.0f %% of a step is waiting. Raise training.global_batch_size (%d), or lower "
            "training.local_batch_size (%d), so that there are several micro-batches for each of the %d stages.",
            *(100 * waiting, size, loader.local_batch_size, degrees.pp),
        )
