"""A trainer without memory: titanlite's own model, optimizer and step on fake tensors of a fake
rank.

Parameters are built and sharded by the functions of a real run, FSDP2's hooks run, and `TrainStep`
is the trainer's. Only the data of tensors and the other ranks are missing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from titanlite.assemble import build_objective, build_on_meta, build_optimizer
from titanlite.config import JobConfig
from titanlite.config.schema import TrainingSection
from titanlite.data.dataset import Batch
from titanlite.distributed import ParallelDims
from titanlite.features.dpo import DPO, AdaptersOff
from titanlite.features.estimate.tracker import GRADIENTS, UNITS, FixedScalars, StepRecorder
from titanlite.features.images import ImageBatch
from titanlite.materialize import Plan, build_plan
from titanlite.materialize.execute import exchange, sharded_like
from titanlite.materialize.layout import is_remote
from titanlite.models.interface import Model
from titanlite.objective import Objective
from titanlite.ops import grouped_gemm
from titanlite.ops.attention import AttentionBackend, AttentionMask
from titanlite.ops.kernels import define_operator, differentiate, like, plan_for_device
from titanlite.optim.optimizer import step_if_finite
from titanlite.preflight import Checked
from titanlite.run import Run
from titanlite.train_step import TrainStep

DeviceType = Literal["cuda", "cpu"]


class StandInTrainer(TrainStep):
    """The steps of a run on `device_type`, as a rank of `fake_ranks`. Use it inside
    `without_data`.
    """

    def __init__(self, checked: Checked, device_type: DeviceType) -> None:
        job = checked.job
        dims = ParallelDims.build(checked.degrees, "cpu")
        run = Run(job, checked.model_config, dims, torch.device(device_type))
        # This also creates the meshes in `dims` that a step needs: without data, a mesh cannot look
        # up its ranks.
        model = build_on_meta(run)
        self.plan = build_plan(model)
        with FixedScalars() as self.fake:
            _allocate(self.plan)
            super().__init__(
                # the device of fake tensors, for which FSDP2 needs no streams
                replace(run, device=torch.device("cpu")),
                model,
                build_optimizer(job, model, dims),
                _build_objective(job, model.config.vocab_size),
            )
            self.unreached = []  # not searched: no values can be read
            self._make_optimizer_states()

    def _make_optimizer_states(self) -> None:
        """Create optimizer states as a first step does, without DTensor's temporaries of global
        size, which a run does not hold.
        """
        for param in filterfalse(is_remote, self.model.parameters()):
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        step_if_finite(self.optimizer, torch.ones((), dtype=torch.bool))
        self.optimizer.zero_grad()

    def persistent(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that lives from step to step."""
        yield from filterfalse(is_remote, self.model.parameters())
        yield from filterfalse(is_remote, self.model.buffers())
        yield from self.optimizer_states()
        yield self.finite_guard.in_a_row
        if hasattr(self.balancer, "counts"):
            yield self.balancer.counts

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def make_batches(self, count: int) -> list[Batch]:
        """Make `count` micro-batches of the configured size, without content."""
        training = self.job.training

        def ids() -> torch.Tensor:
            return torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)

        if self.job.data.dataset == "images":
            return [ImageBatch(ids(), ids()) for _ in range(count)]  # pyright: ignore[reportReturnType]
        return [Batch(ids(), ids(), ids(), ids()) for _ in range(count)]


@contextmanager
def without_data(trainer: StandInTrainer, device_type: DeviceType) -> Iterator[None]:
    """Create tensors without data while the context is open: operators compute only sizes, and
    kernels are chosen as on `device_type`.
    """
    with ExitStack() as stack:
        stand_ins: dict[str, Callable[..., Any]] = {"expert_splits": _even_splits}
        # A `TorchFunctionMode` would not apply inside `backward`, where layers are recomputed.
        stack.enter_context(patch.object(F, "grouped_mm", _grouped_mm))
        stack.enter_context(patch.object(FakeTensor, "tolist", _tolist))
        if device_type == "cuda":
            stand_ins["attention_mask"] = partial(_mask, trainer.job.training)
        stack.enter_context(plan_for_device(device_type, stand_ins))
        if device_type == "cuda":
            # Both consist of many operators on the CPU, and are one kernel on CUDA.
            for name, kernel in _ON_CUDA.items():
                stack.enter_context(patch.object(F, name, partial(kernel, getattr(F, name))))
        stack.enter_context(trainer.fake)
        yield


@contextmanager
def observed(trainer: TrainStep, recorder: StepRecorder) -> Iterator[None]:
    """Report the segments of a step to `recorder`, while `trainer` runs one step; works for real
    trainers too.
    """
    model = trainer.model
    enter = trainer.enter
    layers = model.decoder_layers()
    sharded = dict.fromkeys(model.parameters())  # FSDP2 replaces them by gathered parameters
    turns = {"forward": -1, "backward": -1}  # index of the latest micro-batch in each phase
    handles = []

    def begin(micro_batch: int, phase: str, layer: int | None = None) -> None:
        recorder.mark((p for p in model.parameters() if p not in sharded), UNITS)
        recorder.mark((p.grad for p in sharded if p.grad is not None), GRADIENTS)
        recorder.begin(micro_batch, phase, layer)

    def watch(layer: nn.Module, index: int) -> None:
        def before(*_: Any) -> None:
            begin(turns["forward"], "forward", index)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if index == len(layers) - 1:
                begin(turns["forward"], "head")
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: begin(turns["backward"], "backward", index))

        handles.append(layer.register_forward_pre_hook(before, prepend=True))
        handles.append(layer.register_forward_hook(after))

    def observed_enter(phase: str, micro_batch: int | None = None) -> None:
        if micro_batch is not None:
            turns[phase] = micro_batch
        begin(-1 if micro_batch is None else micro_batch, phase)
        enter(phase, micro_batch)

    for index, layer in enumerate(layers):
        watch(layer, index)
    trainer.enter = observed_enter  # type: ignore[method-assign]
    try:
        with recorder:
            yield
    finally:
        del trainer.enter
        for handle in handles:
            handle.remove()


def _allocate(plan: Plan) -> None:
    """Allocate tensors without data. As in `materialize.allocate` the objects stay the same."""
    for entry in plan.entries:
        tensor = entry.tensor
        if not tensor.is_meta or entry.is_remote:
            continue
        with unset_fake_temporarily():  # a fake mode has no operators for a DTensor on meta
            shape = entry.local_shape
        local = torch.empty(shape, dtype=entry.dtype)
        if isinstance(tensor, DTensor):
            exchange(tensor, sharded_like(tensor, local))
            continue
        # `nn.Parameter(local)` would have a weak reference, with which it cannot be swapped.
        local.requires_grad_(tensor.requires_grad)
        vars(local).update(vars(tensor), _is_param=isinstance(tensor, nn.Parameter))
        torch.utils.swap_tensors(tensor, local)


def _build_objective(job: JobConfig, vocab_size: int) -> Objective:
    """Return the run's objective; cached references of preference pairs cost nothing in a step."""
    objective = build_objective(job, vocab_size)
    if isinstance(objective, DPO) and not isinstance(objective.reference, AdaptersOff):
        objective.reference = _NoReference()
    return objective


class _NoReference(AdaptersOff):
    def __call__(self, model: Model, batch: Batch) -> torch.Tensor:
        return torch.zeros(batch.tokens.shape[0], 2, dtype=torch.float64)


def _tolist(tensor: torch.Tensor) -> Any:
    """Read a tensor once, where torch would read each element."""
    values: Any = tensor.flatten()[0].item() if tensor.numel() else 1
    for size in reversed(tensor.shape):
        values = [values] * size
    return values


def _grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor, **rest: Any
) -> torch.Tensor:
    """Compute the grouped matmul of transformers' experts by titanlite's `grouped_gemm`. torch's
    `grouped_mm` accepts only two-byte floats if tensors have no data.
    """
    return grouped_gemm(x, weight, offs)


def _even_splits(
    shape: torch.Size, num_experts: int, num_ranks: int
) -> tuple[list[int], list[int], int]:
    """Return splits in which every rank gets the average number of copies and rows of `shape` (T,
    k), whatever the router chose.
    """
    tokens, top_k = shape
    elsewhere = math.comb(num_experts - num_experts // num_ranks, top_k) / math.comb(
        num_experts, top_k
    )
    even = [round(tokens * (1 - elsewhere))] * num_ranks
    return even, even, tokens * top_k


def _mask(
    training: TrainingSection, backend: AttentionBackend, window: int
) -> AttentionMask | None:
    """Return a mask that does not read document ids, which have no data: the mask of one document
    per row, or None for `sdpa`.
    """
    if backend == "sdpa":
        return None
    starts_N1 = torch.zeros(training.local_batch_size + 1, dtype=torch.int32)
    return AttentionMask(starts_N1=starts_N1, window=window)


def _attention(
    composed: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the kernel that CUDA chooses for two-byte floats: flash without a mask, memory-efficient
    with a mask, or if values differ in width from queries and keys.
    """
    aten = torch.ops.aten
    has_grouped_heads = q.shape[1] != k.shape[1]
    if attn_mask is None and (has_grouped_heads or q.shape[-1] == v.shape[-1]):
        found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
        return found[0]
    if has_grouped_heads:
        # With a mask no fused kernel accepts grouped heads: the composed one stores all scores, and
        # is traced as such.
        return composed(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill_(~bias, float("-inf"))
        keys = bias.shape[-1]
        if keys % 16:
            # aligns the addresses of rows
            bias = F.pad(bias, (0, 16 - keys % 16))[..., :keys]
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    found = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, keep, dropout_p, is_causal, scale=scale
    )
    return found[0]


def _norm_without_data(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a norm, and one float32 per row for its backward."""
    rows = x.shape[: x.dim() - weight.dim()]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


# CUDA's kernels, which torch does not have on the CPU
_norm = differentiate(
    define_operator(
        "planned_rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)", "", _norm_without_data
    ),
    define_operator(
        "planned_rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor statistics)"
        " -> (Tensor, Tensor)",
        "",
        like(1, 2),
    ),
    num_kept=1,
)


def _rms_norm(
    composed: Callable[..., torch.Tensor],
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if weight is None or weight.dtype != x.dtype:
        return composed(x, normalized_shape, weight, eps)
    (normed,) = _norm(x, weight)
    return normed


_ON_CUDA = {"scaled_dot_product_attention": _attention, "rms_norm": _rms_norm}
