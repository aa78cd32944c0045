"""A training step, operation by operation: live bytes, and work by part of the step.

`StepRecorder` sees every operator on local tensors. torch's `MemTracker` follows their storages by
weak references, so memory counts as free when it is really freed: views share it, in-place results
add nothing, and tensors saved by autograd or FSDP2 stay. It works the same on real tensors and on
fake ones, which have sizes but no data.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from titanlite.features.estimate.operators import (
    ATTENTION_OPS,
    GROUPED_OPS,
    Call,
    Work,
    measure,
    moved_by,
    tensors_of,
)

_PROPAGATE = "_propagate_tensor_meta_non_cached"

GRADIENTS = "gradients"
ACTIVATIONS = "activations"
UNITS = "FSDP units"
TEMPORARIES = "temporaries"
PERSISTENT = "persistent"
_REFERENCES = {
    GRADIENTS: _MemRefType.GRAD,
    ACTIVATIONS: _MemRefType.ACT,  # allocated by a forward
    UNITS: _MemRefType.OTH,
    TEMPORARIES: _MemRefType.TEMP,  # allocated by a backward
    PERSISTENT: _MemRefType.PARAM,
}
CATEGORIES = (GRADIENTS, ACTIVATIONS, UNITS, TEMPORARIES)
# purposes of persistent tensors
WEIGHTS = "weights"
STATES = "optimizer states"
BUFFERS = "buffers"

_aten, _c10d, _fsdp, _own = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp, torch.ops.titanlite
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Segment(NamedTuple):
    """A segment of a step."""

    micro_batch: int  # -1 for once-per-step work
    phase: str  # "forward", "head", "backward" or "optimizer"
    # index of the decoder layer, in a `StepTrace` counted from the last one if it is negative; None
    # outside of layers
    layer: int | None = None
    # number of earlier segments like this one in the micro-batch: 1 in a second forward, of a
    # reference model
    turn: int = 0


class Kind(NamedTuple):
    """Key of calls that are counted together."""

    micro_batch: int  # as in `Segment`
    phase: str
    part: str  # one of `PARTS`; for a collective "", with its kind in `call.rate`
    group: str  # name of a collective's process group, or ""
    call: Call


ATTENTION = "attention"
DENSE = "dense GEMM"
GROUPED = "grouped GEMM"
ROUTING = "routing and permutation"
ELEMENTWISE = "norms / rope / elementwise"
HEAD = "head and loss"
FSDP = "FSDP copies"
OPTIMIZER = "clipping and optimizer"
PARTS = (ATTENTION, DENSE, GROUPED, ROUTING, ELEMENTWISE, HEAD, FSDP, OPTIMIZER)
_ROUTING_OPS = {
    _own.choose_experts,
    _own.weigh_experts_backward,
    _own.group_rows,
    _own.gather_sum,
    _aten._embedding_bag,
    _aten.index_select,
    _aten.index_add,
    _aten.topk,
    _aten.sort,
    _aten.gather,
    _aten.scatter,
}

Workspace = Callable[[Any, tuple[Any, ...], Any], int]


class _NoModules(nullcontext[None]):
    """Empty replacement of MemTracker's hooks on all modules, which are not needed here."""

    def register_user_hooks(self, *hooks: Any) -> None: ...
    def clear_user_hooks(self) -> None: ...


class StepRecorder(MemTracker):
    """Recording of one training step. Enter it around the step, and call `begin` at the beginning
    of each segment.

    It uses private methods of torch's class, the same in 2.11, 2.13 and 2.15. torch's subclass for
    FSDP2 does not work here: it hooks each module of a unit, such as norm and head, which FSDP2
    hooks as one, and accumulating over replicas then fails.

    Args:
        persistent: tensors that exist before and after the step: weights, optimizer states,
            buffers, the batch. Not counted.
        workspace: (operator, arguments, result) -> bytes that its kernel holds only while it runs.

    Attributes:
        work: work by kind of call.
        peaks: live bytes by category at the peak of each segment, without persistent tensors.
    """

    def __init__(
        self, persistent: Iterable[torch.Tensor], workspace: Workspace = lambda *_: 0
    ) -> None:
        super().__init__()
        self._mod_tracker: Any = _NoModules()
        # True while DTensor determines a layout, with fake tensors of global size that no kernel
        # allocates
        self._finds_layout = False
        self.work: defaultdict[Kind, Work] = defaultdict(Work)
        self.peaks: dict[Segment, dict[str, int]] = {}
        self._workspace = workspace
        self._segment = Segment(-1, "optimizer")
        self._most = -1
        self._begun = Counter([self._segment[:3]])
        # By address. Held, because a freed storage would leave its address to a new one.
        self._persistent: dict[int, torch.UntypedStorage] = {}
        self.mark(persistent, PERSISTENT)

    def __enter__(self) -> "StepRecorder":
        # otherwise memory in reference cycles would be freed at a different moment in each run
        gc.disable()
        self._propagate = getattr(ShardingPropagator, _PROPAGATE)

        def propagate(propagator: ShardingPropagator, schema: Any) -> Any:
            self._finds_layout = True
            try:
                return self._propagate(propagator, schema)
            finally:
                self._finds_layout = False

        setattr(ShardingPropagator, _PROPAGATE, propagate)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        setattr(ShardingPropagator, _PROPAGATE, self._propagate)
        gc.enable()

    def _register_global_optimizer_hook(self) -> None:
        """Do not count the optimizer's allocations as its states."""

    def begin(self, micro_batch: int, phase: str, layer: int | None = None) -> None:
        """Begin a segment, and end the previous one."""
        place = micro_batch, phase, layer
        self._segment = Segment(*place, self._begun[place])
        self._most = -1
        self._begun[place] += 1

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of the storages of `tensors`, except persistent ones."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if category == PERSISTENT:
                self._persistent[storage._cdata] = storage
            if category == PERSISTENT or storage._cdata not in self._persistent:
                self._update_and_maybe_create_winfos(local, _REFERENCES[category])

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Subtract from the peaks the `tensors` that the step has allocated itself, and has counted
        as gathered weights: FSDP2 allocates padded shards in the first forward if shards are
        uneven.
        """
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        made = storages.keys() - self._persistent.keys()
        nbytes = sum(storages[address].nbytes() for address in made)
        for held in self.peaks.values():
            held[UNITS] -= min(held[UNITS], nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls operators on local tensors
        kwargs = kwargs or {}
        if self._finds_layout:
            return func(*args, **kwargs)
        # A wait returns its buffer, but without data a new tensor.
        is_fake_wait = func is _WAIT and isinstance(args[0], FakeTensor)
        out = args[0] if is_fake_wait else func(*args, **kwargs)
        # A view allocates nothing; gloo shows views of copies that it makes inside a collective.
        if not func.is_view:
            is_backward = torch._C._current_graph_task_id() != -1
            for tensor in tensors_of(out):
                self._track(_REFERENCES[TEMPORARIES if is_backward else ACTIVATIONS], tensor)
            self._note_peak()
        inside = self._workspace(func, args, out)
        if inside:
            self._note_peak(inside)
        self._classify(func, args, kwargs)
        where = self._segment.micro_batch, self._segment.phase
        moved = moved_by(func, args, out)
        if moved is not None:
            work = Work(nbytes=moved.nbytes, launches=1)
            self.add(Kind(*where, "", moved.group, Call(moved.kind)), work)
        elif done := measure(func, args, kwargs, out, inside=inside):
            call, work = done
            self.add(Kind(*where, self._part_of(func, call), "", call), work)
        return out

    def add(self, kind: Kind, work: Work) -> None:
        """Add the work of the latest operator."""
        self.work[kind] += work

    def _part_of(self, func: Any, call: Call) -> str:
        """Return the part of the step to which a kernel belongs: by operator, or by phase."""
        packet = func._overloadpacket
        if self._segment.phase == "optimizer":
            return OPTIMIZER
        if packet in GROUPED_OPS or func in ATTENTION_OPS:
            return GROUPED if packet in GROUPED_OPS else ATTENTION
        if func.namespace == "fsdp":
            return FSDP
        if self._segment.layer is None and self._segment.phase != "forward":
            return HEAD
        if packet in _ROUTING_OPS:
            return ROUTING
        return DENSE if call.flops else ELEMENTWISE

    def _classify(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record the buffers of FSDP2. Some of them become gradients, which is known later."""
        if func is _fsdp.all_gather_copy_in.default:
            self.mark([*args[0], args[1]], UNITS)
        elif func is _fsdp.split_with_sizes_copy.default:
            self.mark(kwargs["out"], UNITS)
        elif func is _fsdp.chunk_cat.default:
            self.mark([*args[0], kwargs["out"] if "out" in kwargs else args[3]], UNITS)
        elif func is _c10d._reduce_scatter_base_.default:
            self.mark(args[:1], UNITS)

    def _note_peak(self, inside: int = 0) -> None:
        devices = self._curr_mem_snap.values()
        total = inside + sum(live["Total"] - live[_REFERENCES[PERSISTENT]] for live in devices)
        if total > self._most:
            self._most = total
            held = {name: sum(live[_REFERENCES[name]] for live in devices) for name in CATEGORIES}
            held[TEMPORARIES] += inside
            self.peaks[self._segment] = held


class FixedScalars(FakeTensorMode):
    """Fake tensors that the host reads as 1 or True: a finite norm, a count, a flag."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _aten.addmm.dtype_out:  # torch 2.11 treats the dtype as an operand
            return kwargs["out"]
        return super().dispatch(func, types, args, kwargs or {})
