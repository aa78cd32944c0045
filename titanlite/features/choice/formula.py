"""Memory and time of an optimizer step in closed form, computed in a millisecond and accurate
enough for a choice.

The command `plan` traces the step instead. The factors are fitted to its traces of Llama 3, Qwen3,
Qwen3-MoE, GLM-4.5, DeepSeek-V3 and gpt-oss; `scripts/bench/choices.py` compares the two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from titanlite.config import JobConfig, ModelConfig
from titanlite.config.parallelism import Degrees
from titanlite.features.choice.hardware import (
    COLLECTIVE_S,
    KERNEL_S,
    LAUNCH_S,
    LINKS,
    Hardware,
)
from titanlite.materialize.layout import encoding_of, num_values, shape_of
from titanlite.models.families import layers_of
from titanlite.models.interface import Model, is_adapter
from titanlite.models.moe import is_routed

_HALF = 2  # bytes of a value in bfloat16
_FULL = 4
_LOSS_CHUNK = 4096  # tokens whose logits exist at the same time
_LOGIT_BYTES = 2.4  # held for a logit and its gradient
# copies of the head, in bfloat16, that are held
_HEADS = 4.2  # if FSDP shards it
_WHOLE_HEADS = 2  # if not
# bytes moved for a logit, and for a weight of the head in each chunk
_LOGIT_TRAFFIC = 5
_HEAD_TRAFFIC = 45
_UNITS = 4.6  # layers in bfloat16 that FSDP holds in backward: two gathered, gradients of one
# how often FSDP moves a gathered value in each direction, and the bytes that it moves for its
# gradient
_GATHER_COPIES = 1.5
_REDUCE_COPIES = 12
# bytes that clipping and AdamW move for a trained value, without its two moments
_OPTIMIZER_BYTES = 24
# bytes moved for the gradient of a value in a shard
_FIRST_BYTES = 8  # to store it
_SUM_BYTES = 24  # to add the gradient of another micro-batch to it
_WHOLE_BYTES = 16  # to add it, if FSDP does not shard the value
# kernels of a layer without recomputation
_KERNELS = 56  # of every layer
_OF_EXPERTS = 33  # in addition, for experts
_OF_EXCHANGE = 23  # in addition, for their all-to-all
_OF_COPIES = 12  # in addition, for copies without FSDP
_FORWARD = 0.4  # fraction of a layer's kernels that run in forward
_WHOLE_LAYERS = ("keep_attention", "full")  # modes in which backward computes whole layers again
# fraction of a layer's kernels that run again in backward, by mode of recomputation
_AGAIN = {"none": 0.0, "selective": 0.03, "keep_attention": 0.15, "full": 0.15}
# values that elementwise kernels move for each feature of the residual stream, attention, dense
# feed-forward and experts: in forward and backward together, and in recomputation
_MOVED = (37.5, 3.25, 2.67, 2.5)
_MOVED_AGAIN = {
    "none": (0, 0, 0, 0),
    "selective": (0, 1, 1, 0),
    "keep_attention": (6, 1, 1, 0),
    "full": (6, 1, 1, 0),
}
# values moved for each feature of the residual stream: by routing, for a copy of a row that is
# sent, and for that copy in recomputation
_ROUTED = 16.5
_SENT = 8.3
_SENT_AGAIN = 2
# values moved for each of a row's features in experts that are not fused, and in recomputation
_UNFUSED = 31
_UNFUSED_AGAIN = 24
# the same for each of a row's features inside of experts with a clamped SwiGLU
_CLAMPED = 170
_CLAMPED_AGAIN = 28
_STATES = 3  # features that a delta net stores where attention stores one


@dataclass(frozen=True)
class Weights:
    """Numbers of values of one kind of weights: in all layers together, or outside of layers."""

    values: int = 0
    trained: int = 0
    stored: int = 0  # bytes
    gathered: int = 0  # bytes of the values as FSDP gathers them and kernels read them
    copied: int = 0  # bytes of the values that are stored in more bytes than kernels read
    encoded: int = 0  # quantized values, which are decoded at each use


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model on which memory and time depend."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_experts: int
    top_k: int
    dense: Weights  # in layers
    experts: Weights
    outside: Weights  # embedding and head
    attention_width: int  # features that attention stores, of all layers; the same for feed-forward
    mlp_width: int
    expert_width: int  # width of one expert, summed over all layers
    # features that a row stores in addition in experts with biases or adapters, which are not fused
    unfused_width: float
    clamped_width: float  # features of a row inside of experts with a clamped SwiGLU
    core_flops: int  # FLOPs per token in forward of the operations that mix tokens
    attention_flops: int  # those of attention, whose results may be saved
    attention_bytes: int  # bytes per token of these results, of all layers


def measure(model: Model, job: JobConfig) -> Sizes:
    """Return the sizes of `model`, unsharded and on meta."""
    config = model.config
    layers = model.all_layers()
    layered = {param for layer in layers for param in layer.parameters()}
    kinds: dict[str, list[tuple[str, nn.Parameter]]] = {"dense": [], "experts": [], "outside": []}
    for name, param in model.named_parameters():
        kind = "outside" if param not in layered else "experts" if is_routed(name) else "dense"
        kinds[kind].append((name, param))
    attention = 0
    mlp = 0
    for name, param in kinds["dense"]:
        shape = shape_of(param)
        if len(shape) == 2 and not is_adapter(name):
            rows, columns = shape
            # a layer's result is stored once, as the residual stream
            width = columns if rows == config.hidden_size else rows
            if "mlp" in name:
                mlp += width
            else:
                attention += width * (_STATES if "linear_attn" in name else 1)
    experts = _add_up(kinds["experts"])
    native = layers_of(config) if isinstance(config, ModelConfig) else ()
    parts = [block.part.sizes(config) for layer in native for block in layer]
    saved = [part for part in parts if part.attention_bytes]
    expert_width = experts.values // max(config.num_experts, 1) // config.hidden_size
    has_adapters = any(is_adapter(name) for name, _ in kinds["experts"])
    has_biases = any("bias" in name for name, _ in kinds["experts"])
    unfused_width = config.hidden_size * (has_adapters or has_biases)
    inner_width = expert_width / 3 / len(layers)
    return Sizes(
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
        dense=_add_up(kinds["dense"]),
        experts=experts,
        outside=_add_up(kinds["outside"]),
        attention_width=attention,
        mlp_width=mlp,
        expert_width=expert_width,
        unfused_width=unfused_width + has_adapters * inner_width,
        clamped_width=has_biases * inner_width,
        core_flops=sum(model.core_flops(job.training.seq_len)),
        attention_flops=sum(part.core_flops(job.training.seq_len) for part in saved),
        attention_bytes=sum(part.attention_bytes for part in saved),
    )


def _add_up(named: Iterable[tuple[str, nn.Parameter]]) -> Weights:
    sums: Counter[str] = Counter()
    for _, param in named:
        count = num_values(param)
        sums.update(
            values=count,
            trained=count * param.requires_grad,
            stored=param.nbytes,
            gathered=min(param.nbytes, count * _HALF),
            copied=count * _HALF * (param.nbytes > count * _HALF),
            encoded=count * (encoding_of(param) is not None),
        )
    return Weights(**sums)


@dataclass(frozen=True)
class Setup:
    """A run whose settings are all chosen."""

    job: JobConfig
    degrees: Degrees
    micro_batches: int  # of a step

    @property
    def mode(self) -> str:
        """Mode of recomputation."""
        return self.job.activation_checkpoint.mode

    @property
    def state_bytes(self) -> int:
        """Bytes of each of AdamW's two moments of a weight."""
        return _HALF if self.job.optimizer.state_dtype == "bfloat16" else _FULL

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank. Inside of layers a tp rank has all of its group, and
        a share of each one's features.
        """
        training = self.job.training
        return training.local_batch_size * training.seq_len // self.degrees.ranks_per_sequence


def count_bytes(sizes: Sizes, setup: Setup) -> float:
    """Return a rank's bytes at the step's peak of memory."""
    degrees = setup.degrees
    tokens = setup.tokens
    layers = max(sizes.num_layers / degrees.pp, 1)
    weights = gradients = 0.0
    for kind, ranks, split in _shards(sizes, degrees):
        stages = 1 if kind is sizes.outside else degrees.pp
        shards = len(ranks) * split * stages
        weights += kind.stored / shards
        gradients += kind.trained * _FULL / shards
    states = weights + 2 * gradients * setup.state_bytes / _FULL
    if setup.job.training.enable_cpu_offload:
        states = gradients = 0
    local_experts = sizes.experts.gathered / degrees.ep / sizes.num_layers
    copies = 0.0
    unit = sizes.dense.gathered / degrees.tp / sizes.num_layers
    if degrees.experts_on_own_mesh and degrees.efsdp == 1:
        copies = sizes.experts.copied / degrees.ep * layers / sizes.num_layers
        one = unit
    else:
        one = unit + local_experts
    is_split = degrees.fsdp > 1
    if not is_split:
        kinds = (sizes.dense, sizes.experts, sizes.outside)
        copies = sum(kind.copied for kind in kinds)
        one = 0.0
    outside = sizes.vocab_size * sizes.hidden_size * _HALF / degrees.tp
    units = (_UNITS if sizes.dense.trained == sizes.dense.values else 2) * one
    kept = _kept(sizes, degrees.ep, setup.mode)
    kept *= tokens * layers * min(degrees.pp, setup.micro_batches)
    whole = _kept(sizes, degrees.ep, "none")
    logits = min(tokens * degrees.tp, _LOSS_CHUNK) * sizes.vocab_size / degrees.tp * _LOGIT_BYTES
    head = logits + (_HEADS if is_split else _WHOLE_HEADS) * outside
    work = units + 2 * is_split * outside + 1.5 * whole * tokens
    if setup.micro_batches > 1:
        peak = gradients + kept + max(head, work)
    else:
        peak = max(kept + max(head, work), gradients + work)
    return states + copies + peak


def _kept(sizes: Sizes, ep: int, mode: str) -> float:
    """Return the bytes that a layer saves for its backward, per token, in a mode of recomputation
    (see `_AGAIN`).
    """
    hidden = sizes.hidden_size
    layers = sizes.num_layers
    if mode in _WHOLE_LAYERS:
        saved = sizes.attention_bytes if mode == "keep_attention" else 0
        return _HALF * hidden + saved / layers
    attention, mlp = sizes.attention_width / layers, sizes.mlp_width / layers
    experts = sizes.expert_width / layers * sizes.top_k
    if mode == "selective":
        features = 4 * hidden + 1.4 * attention + 0.67 * mlp + experts * 0.6
    else:
        features = 4 * hidden + 1.5 * attention + mlp + experts * 0.67
    features += sizes.top_k * sizes.unfused_width
    return _HALF * (features + _rows_sent(sizes, ep) * hidden)


def _rows_sent(sizes: Sizes, ep: int) -> float:
    """Return the number of expert-parallel ranks to which a token is sent."""
    return ep * (1 - (1 - 1 / ep) ** sizes.top_k) if ep > 1 else 0.0


def count_seconds(sizes: Sizes, setup: Setup, hardware: Hardware) -> float:
    """Return the expected seconds of a step."""
    degrees = setup.degrees
    trained = (sizes.dense.trained + sizes.outside.trained) / (degrees.fsdp * degrees.tp)
    experts = sizes.experts.trained / (degrees.efsdp * degrees.ep)
    added = trained + experts * (degrees.efsdp > 1)  # whole experts' are summed in matmuls
    trained += experts
    later = setup.micro_batches - 1
    moved = _FIRST_BYTES + _SUM_BYTES * later
    if degrees.fsdp == 1:
        moved = _WHOLE_BYTES * setup.micro_batches
    step = setup.micro_batches * _micro_batch_s(sizes, setup, hardware)
    step += added * moved / hardware.rate("memory")
    moved = _OPTIMIZER_BYTES + 4 * setup.state_bytes
    once = trained * moved / hardware.rate("optimizer")
    ranks = range(0, degrees.stage_size, degrees.stage_size // degrees.dp_replicate)
    once += _link_s(hardware, "all_reduce", ranks, trained * _FULL)
    return (step / (1 - degrees.waiting(setup.micro_batches)) + once) / degrees.pp


def _micro_batch_s(sizes: Sizes, setup: Setup, hardware: Hardware) -> float:
    """Return the seconds of a micro-batch, of all pipeline stages together.

    As in a plan, kernels run one after another, and FSDP's collectives and the host's launches
    overlap with them, separately in forward and in backward.
    """
    degrees = setup.degrees
    tokens = setup.tokens
    tp = setup.degrees.tp
    ep = setup.degrees.ep
    memory, elementwise = hardware.rate("memory"), hardware.rate("elementwise")
    kernels = backward = 0.0
    has_wide_experts = sizes.expert_width >= 3 * 1024 * sizes.num_layers
    head = sizes.vocab_size * sizes.hidden_size
    for values, trained, share, rate, split in (
        (sizes.dense.values, sizes.dense.trained, 1.0, "dense", tp),
        (
            sizes.experts.values,
            sizes.experts.trained,
            sizes.top_k / max(sizes.num_experts, 1),
            "grouped wide" if has_wide_experts else "grouped",
            ep,
        ),
        (head, sizes.outside.trained, 1.0, "dense", tp),
    ):
        flops = 2 * values * share * tokens
        read = values * _HALF / split
        busy = max(flops / hardware.rate(rate), read / memory)
        kernels += busy
        backward += busy * (1 + (trained > 0))
    attention_s = tokens / hardware.rate("flash")
    core = sizes.core_flops * attention_s
    rows_sent = _rows_sent(sizes, ep) * sizes.hidden_size * sizes.num_layers
    routed = _ROUTED * sizes.hidden_size * sizes.num_layers * (sizes.num_experts > 0)
    unfused = sizes.top_k * sizes.unfused_width * sizes.num_layers
    clamped = sizes.top_k * sizes.clamped_width * sizes.num_layers
    widths = _widths(sizes, _MOVED) + routed + _SENT * rows_sent
    widths += _UNFUSED * unfused + _CLAMPED * clamped
    again = _widths(sizes, _MOVED_AGAIN[setup.mode])
    decoded = 3 * _HALF * (sizes.experts.encoded / ep + sizes.dense.encoded / tp) / memory
    sent = rows_sent * _HALF * tokens
    # Kernels wait for two all-to-alls in forward and one in backward. One more overlaps with them
    # in backward, and so does the first one if it is recomputed.
    beside = _link_s(hardware, "all_to_all", range(0, ep * tp, tp), sent)
    waits = 4 * COLLECTIVE_S * sizes.num_layers * (ep > 1)
    kernels += core + decoded
    backward += 2.5 * core + decoded + beside + waits
    backward += tokens * sizes.vocab_size * _LOGIT_TRAFFIC / elementwise
    backward += max(tokens * tp / _LOSS_CHUNK, 1) * head / tp * _HEAD_TRAFFIC / memory
    if setup.mode in _WHOLE_LAYERS:
        saved = sizes.attention_flops if setup.mode == "keep_attention" else 0
        backward += kernels - saved * attention_s
        again += _SENT_AGAIN * rows_sent + _UNFUSED_AGAIN * unfused + _CLAMPED_AGAIN * clamped
    moved = _HALF * tokens / memory
    kernels += widths / 3 * moved + 2 * beside + waits
    backward += (widths * 2 / 3 + again) * moved
    links = reduced = 0.0
    for weights, ranks, split in _shards(sizes, degrees):
        gathered = weights.gathered / split
        links += _link_s(hardware, "all_gather", ranks, gathered)
        reduced += _link_s(hardware, "reduce_scatter", ranks, weights.trained * _FULL / split)
        if len(ranks) > 1:
            reduced_bytes = weights.trained / split * _REDUCE_COPIES
            kernels += _GATHER_COPIES * gathered / memory
            backward += (_GATHER_COPIES * gathered + reduced_bytes) / memory
    launches = _KERNELS + _OF_COPIES * (degrees.fsdp == 1)
    launches += _OF_EXPERTS * (sizes.num_experts > 0) + _OF_EXCHANGE * (ep > 1)
    launches *= sizes.num_layers
    first = _FORWARD * launches
    later = (1 - _FORWARD + _AGAIN[setup.mode]) * launches
    return max(kernels + first * KERNEL_S, links, first * LAUNCH_S) + max(
        backward + later * KERNEL_S,
        links + reduced + beside * (1 + (setup.mode in _WHOLE_LAYERS)),
        later * LAUNCH_S,
    )


def _widths(sizes: Sizes, factors: tuple[float, ...]) -> float:
    """Return how many values the elementwise kernels of all layers move for a token; `factors` are
    as in `_MOVED`.
    """
    residual, attention, mlp, experts = factors
    widths = residual * sizes.hidden_size * sizes.num_layers
    widths += attention * sizes.attention_width + mlp * sizes.mlp_width
    return widths + experts * sizes.expert_width * sizes.top_k


def _shards(sizes: Sizes, degrees: Degrees) -> Iterator[tuple[Weights, range, int]]:
    """Yield each kind of weights with the ranks that FSDP shards it over, and the number of parts
    into which tp or ep splits it.
    """
    dense = range(0, degrees.fsdp * degrees.tp, degrees.tp)
    yield sizes.dense, dense, degrees.tp
    yield sizes.outside, dense, degrees.tp
    yield sizes.experts, range(0, degrees.efsdp * degrees.ep, degrees.ep), degrees.ep


def _link_s(hardware: Hardware, kind: str, ranks: range, nbytes: float) -> float:
    inside, outside = hardware.collective_s(kind, ranks, nbytes)
    return (inside + outside) / LINKS
