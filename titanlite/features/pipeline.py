"""Pipeline parallelism: each stage, a group of ranks, has some of the layers, and micro-batches
pass from stage to stage.

All ranks get the same micro-batches. The first stage has the embedding; the last one has the final
norm, the output head and the losses. Each stage sends hidden states to the next one. Remote
modules, which other stages hold, stay on meta under their names (`RemoteModule`), so every stage is
called like a whole model: the placeholder of a remote module receives, sends or passes on hidden
states.

The order is 1F1B (PipeDream-Flush, arXiv:2006.09503; `order_turns`): a stage runs forwards ahead,
at most one for each stage after it, and then one backward after every forward. With n micro-batches
and p stages a rank is idle for (p - 1) / (n + p - 1) of the time (the bubble).

Shapes: B batch, S sequence, s = S / (cp * tp) positions of a rank, D hidden.
"""

from collections import deque
from collections.abc import Callable
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
from titanlite.materialize.layout import mark_remote
from titanlite.materialize.sources import Source
from titanlite.models.decoder import Decoder, LossSums

_MUCH_WAITING = 0.5  # fraction of a step

MOST_SENT = 2
_MOST_DIMS = 3  # of logits


def apply_pipeline_parallel(model: Decoder, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Replace the modules of other stages in the whole `model` by placeholders, in place, on meta,
    before any sharding.

    Losses are zeros except in the last stage; their backward waits for the gradient of the hidden
    states that were sent. Balance losses cover the layers of this stage. All stages return the last
    stage's logits. `dtype` is the dtype of hidden states.

    Collectives: a forward receives from the previous stage and sends to the next one; a backward
    does the reverse. Forwards and backwards must run in the order of `order_turns`, with the same
    micro-batches on all stages.
    """
    backbone, stage = model.model, dims.stage
    layers = backbone.layers
    link = StageLink(dims, model.config.hidden_size, dtype)
    receive, send = partial(_receive, link=link), partial(_send, link=link)
    for number in set(range(len(layers))) - set(dims.degrees.stage_layers(len(layers), stage)):
        layers[number] = RemoteModule(layers[number], _skip)
    if stage > 0:
        backbone.embed_tokens = RemoteModule(backbone.embed_tokens, receive)  # pyright: ignore[reportAttributeAccessIssue]
    if not dims.is_last_stage:
        backbone.norm = RemoteModule(backbone.norm, _hand_on)  # pyright: ignore[reportAttributeAccessIssue]
        model.lm_head = RemoteModule(model.lm_head, send)  # pyright: ignore[reportAttributeAccessIssue]
    model.register_forward_hook(partial(_share_logits, link=link))


class RemoteModule(nn.Module):
    """Placeholder for a remote `module`, which another stage holds; its parameters and buffers stay
    on meta.

    It keeps names and declared sources, so that plan, checkpoints and optimizer know the whole
    model on every rank.

    Attributes:
        instead: function that replaces the forward.
    """

    def __init__(self, module: nn.Module, instead: Callable[..., Any]) -> None:
        super().__init__()
        # Both share the dictionaries, so that a parameter that is replaced in one is replaced in
        # the other.
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules
        self._original = (module,)  # in a tuple, so that it is not registered as a submodule
        self.instead = instead
        for tensor in [*module.parameters(), *module.buffers()]:
            mark_remote(tensor)

    def declare_sources(self) -> dict[str, Source]:
        (original,) = self._original
        declare: Any = getattr(original, "declare_sources", dict)
        return declare()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.instead(*args, **kwargs)


class StageLink:
    """Channels to the ranks at the same position in the previous and the next stage.

    The first stage does not use the channels to a previous stage, nor the last stage the channels
    to a next one.
    """

    def __init__(self, dims: ParallelDims, width: int, dtype: torch.dtype) -> None:
        # There are two groups, because NCCL processes a group in order: a hidden state that waits
        # for its receiver would delay a gradient.
        forward = dims.pp_mesh.get_group()
        backward = dims.pp_backward_group
        assert backward is not None
        previous = dims.stage - 1
        following = dims.stage + 1
        self.hidden_in = _Channel(forward, previous, dtype)
        self.gradient_out = _Channel(backward, previous, dtype)
        self.hidden_out = _Channel(forward, following, dtype)
        self.gradient_in = _Channel(backward, following, dtype)
        self._all_group = forward
        self._last = dims.degrees.pp - 1
        self._is_last = dims.is_last_stage
        self._width = width
        self._pieces = dims.degrees.ranks_per_sequence

    def shape_of(self, tokens_BS: torch.Tensor) -> tuple[int, int, int]:
        return tokens_BS.shape[0], tokens_BS.shape[1] // self._pieces, self._width

    def share(self, logits: torch.Tensor) -> torch.Tensor:
        """Broadcast the last stage's `logits` to all stages, which may not know their shape."""
        # A tensor: for each token an object would be pickled, and need a second broadcast.
        sizes = [*logits.shape, *(-1 for _ in range(_MOST_DIMS - logits.dim()))]
        header = torch.tensor(sizes, dtype=torch.int64, device=logits.device)
        dist.broadcast(header, group=self._all_group, group_src=self._last)
        shape = [size for size in header.tolist() if size >= 0]  # synchronization point
        out = logits.detach().contiguous() if self._is_last else logits.new_empty(shape)
        dist.broadcast(out, group=self._all_group, group_src=self._last)
        return out


class _Channel:
    """One direction between this rank and a second one; first in, first out.

    The last `MOST_SENT` tensors stay alive until they are received, so that a sender need not wait
    for a receiver that is a little slower. Tests simulate the stages and show that none deadlocks.
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
    """Receive the previous stage's hidden states; replaces the embedding."""
    return _Receive.apply(_make_anchor(tokens_BS.device), link, link.shape_of(tokens_BS))  # type: ignore[no-any-return]


def _send(
    hidden_BsD: torch.Tensor,
    labels_BS: torch.Tensor | None = None,
    reduction: Any = "sum",
    select: Any = None,
    *,
    link: StageLink,
) -> torch.Tensor:
    """Send the hidden states; replaces the output head. The returned losses are zeros, the returned
    logits meaningless.
    """
    if labels_BS is None:
        link.hidden_out.send(hidden_BsD)
        return hidden_BsD
    # dims of the values of a reduction function
    shape = () if reduction == "sum" else (*labels_BS.shape, *getattr(reduction, "shape", ()))
    return _Send.apply(hidden_BsD, _make_anchor(hidden_BsD.device), link, shape)  # type: ignore[no-any-return]


def _hand_on(hidden_BsD: torch.Tensor) -> torch.Tensor:
    """Return the hidden states unchanged; replaces the final norm in stages before the last."""
    return hidden_BsD


def _skip(hidden_BsD: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Return the hidden states unchanged, without balance losses; replaces a decoder layer."""
    return hidden_BsD, None


def _make_anchor(device: torch.device) -> torch.Tensor:
    """Return an empty input that requires a gradient, if gradients are enabled.

    Without such an input autograd would skip a backward that sends or receives a gradient. A frozen
    stage needs it, too: the next stage sends a gradient, and waits until it is received.
    """
    return torch.empty(0, device=device, requires_grad=torch.is_grad_enabled())


class _Receive(torch.autograd.Function):
    """Receive hidden states of `shape` from the previous stage; in backward, send their gradient to
    it.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, link: StageLink, shape: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.link = link
        return link.hidden_in.receive(shape, anchor.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.link.gradient_out.send(grad)
        return None, None, None


class _Send(torch.autograd.Function):
    """Send hidden states to the next stage, and return zeros of `shape`; in backward, receive their
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        anchor: torch.Tensor,
        link: StageLink,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.link = link
        ctx.shape = tuple(hidden.shape)
        ctx.device = hidden.device
        link.hidden_out.send(hidden)
        return hidden.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # The gradient of zeros is unused: the last stage scaled the loss.
        return ctx.link.gradient_in.receive(ctx.shape, ctx.device), None, None, None


def _share_logits(module: nn.Module, args: Any, out: Any, *, link: StageLink) -> Any:
    """Return the last stage's logits on all stages, so that all ranks choose the same tokens.
    Losses are not shared; the caller sums them.
    """
    return out if isinstance(out, LossSums) else link.share(out)


def describe_pipeline(loader: TrainLoader, model_config: AnyModelConfig, degrees: Degrees) -> None:
    """Log the stages and the size of the bubble; warn on rank 0 if the bubble is most of a step."""
    if degrees.pp == 1:
        return
    sizes = degrees.stage_sizes(model_config.num_layers)
    count = loader.num_micro_batches
    size = loader.global_batch_size
    waiting = degrees.waiting(count)
    logger.info(
        "pipeline: %d stages of %s layers; micro-batches a step: %d, so that a rank waits for "
        "%.0f %% of it",
        degrees.pp,
        ", ".join(map(str, sizes)),
        count,
        100 * waiting,
    )
    if waiting >= _MUCH_WAITING and get_rank() == 0:
        logger.warning(
            "pipeline: ranks wait for other stages in %.0f %% of a step. Raise "
            "training.global_batch_size (%d), or lower training.local_batch_size (%d), so that "
            "there are several micro-batches for each of the %d stages.",
            100 * waiting,
            size,
            loader.local_batch_size,
            degrees.pp,
        )
