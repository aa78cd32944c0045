"""A training step, operation by operation: live bytes, and work by part of the step.

`StepRecorder` watches every operator that reaches local tensors and follows their storages by weak
references, so that memory is counted when it is really given back: views share, in-place results
add nothing, and what autograd or FSDP2 keeps stays alive. It works alike on real tensors and on
fake ones, which have sizes but no data.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titanlite.base.errors import ConfigError
from titanlite.features.estimate.operators import (
    ATTENTION_OPS,
    GROUPED_OPS,
    Call,
    Work,
    measure,
    moved_by,
)

GRADIENTS, ACTIVATIONS, UNITS, TEMPORARIES = "gradients", "activations", "FSDP units", "temporaries"
_PERSISTENT = "persistent"  # came into being in this step, to stay
_INSIDE_KERNEL = 0  # in place of the serial number of a storage
CATEGORIES = (GRADIENTS, ACTIVATIONS, UNITS, TEMPORARIES)

_aten, _c10d, _fsdp, _own = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp, torch.ops.titanlite
_PROPAGATE = "_propagate_tensor_meta_non_cached"
_METADATA = {torch.ops.prim.device.default, torch.ops.prim.layout.default, _aten.detach.default}


class Segment(NamedTuple):
    """A stretch of a step."""

    micro_batch: int  # -1 for what happens once per step
    phase: str  # "forward", "head", "backward" or "optimizer"
    layer: int  # index of the decoder layer, or -1 outside of layers
    # how often the same stretch came before in this micro-batch: a second forward for a reference
    # model
    turn: int = 0


class Kind(NamedTuple):
    """Calls that are counted together."""

    micro_batch: int  # as in `Segment`
    phase: str
    part: str  # one of `PARTS`; of a collective "", and `call.rate` is its kind
    group: str  # name of a collective's process group, or ""
    call: Call


ATTENTION, DENSE, GROUPED, ROUTING = (
    "attention",
    "dense GEMM",
    "grouped GEMM",
    "routing and permutation",
)
ELEMENTWISE, HEAD, FSDP = "norms / rope / elementwise", "head and loss", "FSDP copies and casts"
CLIPPING, OPTIMIZER = "norm and clipping", "optimizer"
PARTS = (ATTENTION, DENSE, GROUPED, ROUTING, ELEMENTWISE, HEAD, FSDP, CLIPPING, OPTIMIZER)
# By the innermost function that has such a file.
_PLACES = {
    "/titanlite/ops/attention": ATTENTION,
    "/titanlite/ops/moe_experts.py": ROUTING,
    "/titanlite/models/moe.py": ROUTING,
    "/titanlite/distributed/expert_parallel.py": ROUTING,
    "/titanlite/ops/cross_entropy": HEAD,
    "/titanlite/ops/elementwise.py": ELEMENTWISE,
    "/titanlite/models/": ELEMENTWISE,
    "/titanlite/features/lora/": ELEMENTWISE,
    "/titanlite/distributed/grads.py": CLIPPING,
    "/titanlite/optim/": OPTIMIZER,
    "/torch/distributed/fsdp/": FSDP,
}
# which calls the backward of an operator: no file says what that belongs to
_ENGINE = "/torch/autograd/graph.py"
_ACCUMULATES = (1 << 64) - 1  # number of the nodes that add up the gradient of a parameter
_place_of_file: dict[str, str] = {}


def _place(filename: str) -> str:
    if filename not in _place_of_file:
        _place_of_file[filename] = next(
            (part for end, part in _PLACES.items() if end in filename), ""
        )
    return _place_of_file[filename]


# A stretch that begins, or the serial number of a storage and the bytes that it now has.
_Event = Segment | tuple[int, int]
Workspace = Callable[[Any, tuple[Any, ...], Any], int]


def _ask_autograd(owner: Any, name: str) -> Any:
    """Call a private function of torch, so that a version without it is one clear error and not an
    AttributeError.
    """
    if (ask := getattr(owner, name, None)) is None:
        raise ConfigError(f"plan: torch {torch.__version__} has no {name}. Use torch 2.11 to 2.14.")
    return ask()


class StepRecorder(TorchDispatchMode):
    """Recording of one training step. Enter it around the step; call `begin` where a stretch of it
    begins.

    Args:
        persistent: tensors that exist before and after: weights, optimizer states, buffers, the
            batch. Not counted. What a first step makes of that kind is named afterwards, to
            `leave_out`.
        workspace: (operator, arguments, result) -> bytes that its kernel holds only while it runs.

    Attributes:
        work: by kind of call.
    """

    def __init__(
        self, persistent: Iterable[torch.Tensor], workspace: Workspace = lambda *_: 0
    ) -> None:
        super().__init__()
        self.work: dict[Kind, Work] = {}
        self._parts: dict[int, str] = {}  # by number of the autograd node that a forward made
        self._workspace = workspace
        self._segment = Segment(-1, "optimizer", -1)
        self._begun, self._events = [self._segment[:3]], list[_Event]([self._segment])
        self._category: dict[int, str] = {}
        self._serials: dict[int, int | None] = {}  # by address of the storage; None: persistent
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        # Kept, or one that is replaced in the step would leave its address to another storage,
        # which is to be counted.
        self._persistent = [_local(tensor).untyped_storage() for tensor in persistent]
        self._serials.update((storage._cdata, None) for storage in self._persistent)

    def __enter__(self) -> "StepRecorder":
        # or memory in reference cycles would be given back at moments that change from run to run
        gc.disable()
        self._resize = torch.UntypedStorage.resize_
        recorder = self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 frees and reallocates gathered parameters this way, which no operator shows.
            result = recorder._resize(storage, size)
            recorder._resized(storage)
            return result

        # FSDP2's first gather makes parameters of what tensor parallelism has split; torch 2.13
        # works out the layout of that in tensors of global size, on which no kernel runs.
        def propagate(propagator: ShardingPropagator, schema: Any) -> Any:
            recorder._is_propagating = True
            try:
                return recorder._propagate(propagator, schema)
            finally:
                recorder._is_propagating = False

        self._is_propagating = False
        self._propagate = getattr(ShardingPropagator, _PROPAGATE)
        setattr(ShardingPropagator, _PROPAGATE, propagate)
        torch.UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        setattr(ShardingPropagator, _PROPAGATE, self._propagate)
        torch.UntypedStorage.resize_ = self._resize  # pyright: ignore[reportAttributeAccessIssue]
        gc.enable()

    def begin(self, micro_batch: int, phase: str, layer: int = -1) -> None:
        """Begin a segment, and end the one before."""
        self._segment = Segment(
            micro_batch, phase, layer, self._begun.count((micro_batch, phase, layer))
        )
        self._begun.append(self._segment[:3])
        self._events.append(self._segment)

    def mark(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Set the category of the storages of `tensors`, except persistent ones."""
        for tensor in tensors:
            serial = self._serials.get(_local(tensor).untyped_storage()._cdata)
            if serial is not None:
                self._category[serial] = category

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of `tensors`: they stay after the step."""
        self.mark(tensors, _PERSISTENT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls operators on local tensors
        kwargs = kwargs or {}
        out = self.call(func, args, kwargs)
        if func in _METADATA or self._is_propagating:
            return out
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._serials:
                    self._seen(
                        storage,
                        is_argument=any(_holds(argument, storage) for argument in tree_iter(args)),
                    )
        inside = self._workspace(func, args, out)
        if inside:
            self._events.append((_INSIDE_KERNEL, inside))
        self._classify(func, args, kwargs)
        moved, asked_by = moved_by(func, args, out), self._asked_by()
        where = self._segment.micro_batch, self._segment.phase
        for kind, group, tensor in moved:
            self.add(Kind(*where, "", group, Call(kind)), Work(nbytes=tensor.nbytes, launches=1))
        for call, work in measure(
            func, args, kwargs, out, moves=bool(moved), inside=inside
        ).items():
            self.add(Kind(*where, self._part_of(func, asked_by, call), "", call), work)
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator."""
        return func(*args, **kwargs)

    def add(self, kind: Kind, work: Work) -> None:
        """Count what the latest operator does."""
        self.work[kind] = self.work.get(kind, Work()) + work

    def _asked_by(self) -> str:
        """Return the part whose code called an operator, or called the forward of this backward;
        "": no part.

        Nodes of autograd are numbered as forwards make them.
        """
        frame, node = sys._getframe(2), _ask_autograd(torch._C, "_current_autograd_node")
        while frame is not None:
            filename = frame.f_code.co_filename
            if node is not None and filename.endswith(_ENGINE):
                number = node._sequence_nr()
                return self._parts.get(number, FSDP if number == _ACCUMULATES else "")
            if part := _place(filename):
                break
            frame = frame.f_back
        else:
            part = ""
        # The node of the operator was made before its kernel; an operator without one must not
        # claim the node before.
        self._parts.setdefault(_ask_autograd(torch.autograd, "_get_sequence_nr") - 1, part)
        return part

    def _part_of(self, func: Any, asked_by: str, call: Call) -> str:
        """Return the part of the step that a kernel is counted with."""
        phase, is_product = self._segment.phase, call.flops > 0
        if phase == "optimizer":
            return asked_by if asked_by == CLIPPING else OPTIMIZER
        if func in GROUPED_OPS or func in ATTENTION_OPS:
            return GROUPED if func in GROUPED_OPS else ATTENTION
        if self._segment.layer < 0 and phase != "forward" and asked_by in ("", ELEMENTWISE):
            return HEAD
        return DENSE if is_product and asked_by in ("", ELEMENTWISE) else asked_by or ELEMENTWISE

    def _seen(self, storage: torch.UntypedStorage, *, is_argument: bool = False) -> None:
        """Add an unknown storage. One among the arguments existed before, such as a buffer of
        gloo.
        """
        address = storage._cdata
        if is_argument:
            self._serials[address] = None
            self._references[-address] = weakref.ref(storage, lambda _: self._forget(address))
            return
        serial = self._count = self._count + 1
        self._serials[address] = serial
        self._events.append((serial, storage.nbytes()))
        self._references[serial] = weakref.ref(storage, lambda _: self._died(address, serial))

    def _died(self, address: int, serial: int) -> None:
        if self._serials.get(address) == serial:
            del self._serials[address]
        self._references.pop(serial, None)
        self._events.append((serial, 0))

    def _forget(self, address: int) -> None:
        del self._serials[address], self._references[-address]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._serials:
            self._seen(storage)
        serial = self._serials[storage._cdata]
        if serial is not None:
            self._events.append((serial, storage.nbytes()))
            self._category[serial] = UNITS

    def _classify(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note the buffers of FSDP2. Some of them become gradients, which is known later."""
        if func is _fsdp.all_gather_copy_in.default:
            self.mark([*args[0], args[1]], UNITS)
        elif func is _fsdp.split_with_sizes_copy.default:
            self.mark(kwargs["out"], UNITS)
        elif func is _fsdp.chunk_cat.default:
            self.mark([*args[0], kwargs["out"] if "out" in kwargs else args[3]], UNITS)
        elif func is _c10d._reduce_scatter_base_.default:
            self.mark(args[:1], UNITS)

    def peaks(self) -> dict[Segment, dict[str, int]]:
        """Return live bytes by category at the fullest moment of each stretch, without persistent
        tensors.
        """
        category = self._kinds()
        live: dict[int, int] = {}
        totals: dict[str, int] = dict.fromkeys((*CATEGORIES, _PERSISTENT), 0)
        peaks: dict[Segment, dict[str, int]] = {}
        segment, most = self._segment, -1
        for event in self._events:
            inside = 0
            if isinstance(event, Segment):
                segment, most = event, -1
            elif event[0] == _INSIDE_KERNEL:
                inside = event[1]
            else:
                serial, nbytes = event
                totals[category[serial]] += nbytes - live.get(serial, 0)
                live[serial] = nbytes
            total = sum(totals[name] for name in CATEGORIES) + inside
            if total > most:
                most = total
                peaks[segment] = {
                    name: totals[name] + inside * (name == TEMPORARIES) for name in CATEGORIES
                }
        return peaks

    def _kinds(self) -> dict[int, str]:
        """Return the category of every storage. Activations are left by forwards whose backward has
        not run yet.
        """
        kinds = dict(self._category)
        born: dict[int, Segment] = {}
        segment = self._segment
        for event in self._events:
            if isinstance(event, Segment):
                if event.phase == "backward" and segment.phase in ("forward", "head"):
                    for serial, where in born.items():
                        if where.phase in ("forward", "head"):
                            kinds.setdefault(serial, ACTIVATIONS)
                segment = event
            elif event[1]:
                born.setdefault(event[0], segment)
            # or it was resized, and is known to be gathered
            elif born.pop(event[0], None) is not None:
                kinds.setdefault(event[0], TEMPORARIES)
        return {serial: kinds.get(serial, TEMPORARIES) for serial in range(1, self._count + 1)}


def _holds(value: Any, storage: torch.UntypedStorage) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage._cdata


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class FixedScalars(TorchDispatchMode):
    """Make tensors without data read as 1 or True where the host looks at one: a finite norm, a
    count, a flag.
    """

    def __enter__(self) -> "FixedScalars":
        # one read, where by itself it would be one of each element
        def tolist(tensor: torch.Tensor) -> Any:
            values: Any = tensor.flatten()[0].item() if tensor.numel() else 1
            for size in reversed(tensor.shape):
                values = [values] * size
            return values

        self._tolist, FakeTensor.tolist = FakeTensor.tolist, tolist  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        FakeTensor.tolist = self._tolist

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is _aten.addmm.dtype_out:  # torch 2.11 takes the dtype for a factor
            return kwargs["out"]
        return func(*args, **(kwargs or {}))
