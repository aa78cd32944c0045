"""Parallelism degrees, resolved and checked against world size and model: without torch, and with
the same result on all ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.config.model import AnyModelConfig, ModelConfig, TransformersConfig
from titanlite.config.schema import BLOCK_SIZES, JobConfig, ParallelismSection
from titanlite.config.settings import get_value

# Batch of an optimizer step if none is set: number, unit and source of the recommendation; keyed by
# whether the objective is DPO.
BATCHES = {
    False: (16, "examples", "QLoRA, arXiv:2305.14314"),
    True: (32, "pairs", "Zephyr, arXiv:2310.16944"),
}
_SEQ_LEN = 2048  # if it is not set
# Settings that are chosen for the GPUs if they are not set, and their values if nothing is chosen.
CHOSEN: Mapping[str, int | str] = {
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "training.local_batch_size": 1,
    "activation_checkpoint.mode": "none",
}


@dataclass(frozen=True)
class Degrees:
    """Resolved degrees. Dense mesh: (dp_replicate, fsdp = dp_shard * cp, tp); sparse mesh:
    (dp_replicate, efsdp, ep).

    Both meshes cover the ranks of one pipeline stage, which are neighbours. FSDP shards over
    dp_shard and cp: cp ranks have the same parameters, and gradients of different tokens. Experts
    are split over ep neighbouring ranks of dp_shard, cp and tp, since all of these hold different
    tokens between layers.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1
    layers: tuple[int, ...] = ()  # layers of each stage, as configured; empty: split evenly

    @property
    def dp(self) -> int:
        """Number of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that one copy of the dense parameters, or of their tp shards, is sharded
        over.
        """
        return self.dp_shard * self.cp

    @property
    def fsdp_axis(self) -> str:
        return "dp_shard" if self.cp == 1 else "dp_shard_cp"

    @property
    def ranks_per_sequence(self) -> int:
        """Number of ranks (cp * tp) that read the same sequences, and hold different positions of
        them between layers.
        """
        return self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Number of ranks that one expert-parallel shard is sharded over."""
        return self.fsdp * self.tp // self.ep

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage, which hold one or several copies of its layers."""
        return self.dp_replicate * self.fsdp * self.tp

    @property
    def world_size(self) -> int:
        return self.pp * self.stage_size

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage. The remainder goes to the stages just
        before the last one: the last stage also has the output head, and the first holds the
        activations of most micro-batches.
        """
        if self.layers:
            return list(self.layers)
        last = self.pp - 1
        even, more = divmod(num_layers, self.pp)
        return [even + (last - more <= stage < last) for stage in range(self.pp)]

    def stage_layers(self, num_layers: int, stage: int) -> range:
        """Return the layers of a pipeline stage."""
        sizes = self.stage_sizes(num_layers)
        start = sum(sizes[:stage])
        return range(start, start + sizes[stage])

    def turns_ahead(self, stage: int) -> int:
        """Return how many forwards a stage runs ahead of its backwards at most: one for each later
        stage.
        """
        return self.pp - 1 - stage

    def waiting(self, num_micro_batches: int) -> float:
        """Return the bubble, the fraction of a step in which a rank waits for other stages: (p - 1)
        / (n + p - 1).
        """
        return (self.pp - 1) / (num_micro_batches + self.pp - 1)

    @property
    def experts_on_own_mesh(self) -> bool:
        """True if experts are sharded over different ranks than dense parameters."""
        return self.tp > 1 or self.ep > 1

    def expert_shard_dim(self, num_experts: int) -> int:
        """Dim that FSDP splits in expert weights: 0, or 1 if there are fewer experts than ranks."""
        return 1 if self.efsdp * self.ep > num_experts else 0

    def __str__(self) -> str:
        cp = f" x cp {self.cp}" if self.cp > 1 else ""
        pp = f"pp {self.pp} x " if self.pp > 1 else ""
        return (
            f"{pp}dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard}{cp} x tp {self.tp}, "
            f"ep {self.ep}"
        )


@dataclass(frozen=True)
class PartSizes:
    """Sizes of a part of a layer; the keys of mappings are names for messages.

    Attributes:
        splits: sizes that tensor parallelism divides.
        heads: numbers of heads that context parallelism exchanges inside the part. Its degree must
            divide the first one, and must divide or be a multiple of the others.
        inputs: input widths of matmuls whose weight tensor parallelism splits along that dim.
        core_flops: forward FLOPs per token of the operation that mixes tokens, as a function of the
            sequence length.
        attention_bytes: bytes per token that `activation_checkpoint.mode = "keep_attention"` keeps.
    """

    splits: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    core_flops: Callable[[int], int] = lambda _seq_len: 0
    attention_bytes: int = 0


def set_values(job: JobConfig, values: Mapping[str, int | str]) -> JobConfig:
    """Return `job` with the settings `values`, by dotted key."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed: Any = {section: replace(getattr(job, section), **{name: value})}
        job = replace(job, **changed)
    return job


def close_settings(job: JobConfig) -> tuple[JobConfig, tuple[str, ...]]:
    """Return `job` with the values in `CHOSEN` for settings that are not set, and the keys of these
    settings.
    """
    unwritten = tuple(key for key in CHOSEN if get_value(job, key) in (0, "auto"))
    return set_values(job, {key: CHOSEN[key] for key in unwritten}), unwritten


def resolve_degrees(section: ParallelismSection, world_size: int) -> Degrees:
    """Fill in data_parallel_shard_degree = -1 and check that the degrees multiply to `world_size`.

    Raises ConfigError: they do not, or the experts cannot be split this way.
    """
    shard = section.data_parallel_shard_degree
    tp = section.tensor_parallel_degree
    pp = section.pipeline_parallel_degree
    replicate, cp, ep = (
        degree or 1
        for degree in (
            section.data_parallel_replicate_degree,
            section.context_parallel_degree,
            section.expert_parallel_degree,
        )
    )
    of_cp = f" * cp ({cp})" if cp > 1 else ""
    of_pp = f"pp ({pp}) * " if pp > 1 else ""
    if world_size < 1:
        raise ConfigError(
            f"parallelism: the world size is {world_size}, but a run has at least 1 rank."
        )
    if shard == -1:
        others = pp * replicate * cp * tp
        if world_size % others:
            raise ConfigError(
                f"parallelism: {of_pp}dp_replicate ({replicate}){of_cp} * tp ({tp}) = {others} "
                f"does not divide the world size ({world_size}). Change one of these degrees, or "
                "the number of ranks."
            )
        shard = world_size // others
    degrees = Degrees(replicate, shard, tp, ep, cp, pp, _parse_layers(section))
    if degrees.world_size != world_size:
        raise ConfigError(
            f"parallelism: {of_pp}dp_replicate ({replicate}) * dp_shard ({shard}){of_cp} * tp "
            f"({tp}) = {degrees.world_size}, but the world size is {world_size}. Set "
            "data_parallel_shard_degree = -1 to use the rest, or change a degree."
        )
    if (shard * cp * tp) % ep:
        raise ConfigError(
            f"parallelism: ep ({ep}) does not divide dp_shard ({shard}){of_cp} * tp ({tp}) = "
            f"{shard * cp * tp}. Lower expert_parallel_degree; experts are split over these ranks."
        )
    return degrees


def _parse_layers(section: ParallelismSection) -> tuple[int, ...]:
    """Parse `pipeline_parallel_layers`.

    Raises ConfigError: it is not one number for each stage.
    """
    text = section.pipeline_parallel_layers
    pp = section.pipeline_parallel_degree
    words = [word.strip() for word in text.split(",")] if text else []
    if words and (len(words) != pp or not all(word.isdecimal() for word in words)):
        raise ConfigError(
            f"parallelism.pipeline_parallel_layers = '{text}' is not one number of layers for each "
            f"of the pipeline_parallel_degree ({pp}) stages, with commas between them. Correct it, "
            "or leave it out."
        )
    return tuple(map(int, words))


def check_parallelism(
    job: JobConfig, model: AnyModelConfig, degrees: Degrees, parts: Iterable[PartSizes]
) -> list[str]:
    """Return one message for each setting that the model's sizes or the batch sizes rule out.

    `parts` are the parts of the native decoder's layers, each kind once (`families.part_sizes`).
    """
    if isinstance(model, TransformersConfig):
        problems = _check_transformers(job, model, degrees)
    else:
        problems = _check_native(job, model, degrees, list(parts))
    return problems + _check_any(job, model, degrees)


def _check_native(
    job: JobConfig, model: ModelConfig, degrees: Degrees, parts: list[PartSizes]
) -> list[str]:
    tp = degrees.tp
    cp = degrees.cp
    pp = degrees.pp
    layers = degrees.layers
    split = {"vocab_size": model.vocab_size}
    for part in parts:
        split |= part.splits
    problems = [
        f"parallelism: tensor_parallel_degree ({tp}) does not divide {name} ({size})."
        for name, size in split.items()
        if size % tp
    ]
    if not problems:
        problems += _check_heads(parts, degrees)
    split_by = f"context_parallel_degree ({cp}) * " if cp > 1 else ""
    problems += _texts(
        (
            job.training.seq_len % degrees.ranks_per_sequence,
            f"training.seq_len ({job.training.seq_len}) is not a multiple of "
            f"{split_by}tensor_parallel_degree ({tp}): activations are sequence-sharded.",
        ),
        (
            pp > 1 and model.tie_word_embeddings,
            f"parallelism: pipeline_parallel_degree is {pp}, but the model's output head, in the "
            "last stage, is tied to its embedding, in the first stage. Set it to 1.",
        ),
        (
            not layers and model.num_layers < pp,
            f"parallelism: pipeline_parallel_degree ({pp}) is more than the model's "
            f"{model.num_layers} layers. Lower it.",
        ),
        (
            layers and (sum(layers) != model.num_layers or 0 in layers),
            f"parallelism.pipeline_parallel_layers: {' + '.join(map(str, layers))} = "
            f"{sum(layers)}, but the model has {model.num_layers} layers, and each stage needs "
            "one or more. Correct it, or leave it out.",
        ),
    )
    form = job.lora.base_dtype
    if form == "mxfp4" and not model.num_experts:
        problems.append(
            "lora.base_dtype = 'mxfp4' quantizes only experts, and the model has none. Set it to "
            "'nf4' or 'fp8'."
        )
    elif form in BLOCK_SIZES and form != "mxfp4" and tp > 1:
        inputs = dict(item for part in parts for item in part.inputs.items())
        problems += [
            f"lora.base_dtype = '{form}' stores blocks of {BLOCK_SIZES[form]} values, but {name} "
            f"({width}) is not a multiple of that for each of tensor_parallel_degree ({tp}) ranks. "
            "Lower tensor_parallel_degree."
            for name, width in inputs.items()
            if width % (tp * BLOCK_SIZES[form])
        ]
    if (
        not model.num_experts
        or model.num_experts % degrees.ep
        or degrees.expert_shard_dim(model.num_experts) != 1
    ):
        return problems
    widths = {
        "2 * moe_intermediate_size": 2 * model.moe_intermediate_size,
        "hidden_size": model.hidden_size,
    }
    return problems + [
        f"parallelism: {degrees.efsdp * degrees.ep} ranks share {model.num_experts} experts, so "
        f"each expert is split into {degrees.efsdp} parts, but that number does not divide {name} "
        f"({size}). Raise expert_parallel_degree."
        for name, size in widths.items()
        if size % degrees.efsdp
    ]


def _check_heads(parts: list[PartSizes], degrees: Degrees) -> list[str]:
    """Return a problem for each kind of heads that context parallelism cannot split after tensor
    parallelism has split them.
    """
    tp = degrees.tp
    cp = degrees.cp
    problems = []
    for part in parts:
        counts = {name: max(count // tp, 1) for name, count in part.heads.items()}
        first, *others = counts.values() or [cp]
        if first % cp or any(count % cp and cp % count for count in others):
            named = [f"the {count} {name}" for name, count in counts.items()]
            rest = "".join(f", or is neither a divisor nor a multiple of {n}" for n in named[1:])
            problems.append(
                f"parallelism: context_parallel_degree ({cp}) does not divide {named[0]}{rest} "
                f"that tensor_parallel_degree ({tp}) leaves to a rank: context parallelism splits "
                "these heads. Lower one of the degrees."
            )
    return list(dict.fromkeys(problems))


def _check_transformers(job: JobConfig, model: TransformersConfig, degrees: Degrees) -> list[str]:
    """Return a problem for each setting that a transformers class does not support or ignores."""
    what = f"{model.architecture} is transformers' implementation"
    form = job.lora.base_dtype
    backend = job.model.attention_backend
    moe = job.moe
    section = job.activation_checkpoint
    ignored = (
        (
            degrees.cp > 1,
            f"parallelism.context_parallel_degree = {degrees.cp}",
            "attention cannot be split so",
        ),
        (
            degrees.pp > 1,
            f"parallelism.pipeline_parallel_degree = {degrees.pp}",
            "forward cannot be cut into stages",
        ),
        (
            form in BLOCK_SIZES,
            f'lora.base_dtype = "{form}"',
            "layers multiply with plain weights",
        ),
        (
            moe.aux_loss_coeff,
            f"moe.aux_loss_coeff = {moe.aux_loss_coeff}",
            "routers have no such loss",
        ),
        (moe.z_loss_coeff, f"moe.z_loss_coeff = {moe.z_loss_coeff}", "routers have no such loss"),
        (job.compile.enable, "compile.enable = true", "layers are not compiled"),
        (
            backend == "varlen",
            'model.attention_backend = "varlen"',
            "attention is the class's own",
        ),
    )
    return _texts(
        *(
            (
                is_set,
                f"{setting}: {what}, whose {why} here. Leave it out, or use a native family.",
            )
            for is_set, setting, why in ignored
        ),
        (
            degrees.tp > 1,
            f"parallelism.tensor_parallel_degree = {degrees.tp}: {what}, whose layers are not "
            "split. Set it to 1: data_parallel_shard_degree shards the model, and "
            "expert_parallel_degree its experts.",
        ),
        (
            section.mode == "keep_attention"
            or (section.mode == "selective" and section.selective_ac_option == "op"),
            f"activation_checkpoint: mode '{section.mode}' by operation works only in titanlite's "
            f"layers, and {what}. Set mode to 'full', or to 'selective' and selective_ac_option to "
            "a number.",
        ),
    )


def _texts(*rows: tuple[object, str]) -> list[str]:
    """Return the text of each row whose condition holds."""
    return [text for is_wrong, text in rows if is_wrong]


def _check_any(job: JobConfig, model: AnyModelConfig, degrees: Degrees) -> list[str]:
    """Return the problems that native and transformers models can have: kernels, experts,
    resharding that contradicts another setting, batch sizes, and sequence lengths.
    """
    ep = degrees.ep
    parallelism = job.parallelism
    training = job.training
    is_transformers = isinstance(model, TransformersConfig)
    batch = (training.local_batch_size or 1) * degrees.dp
    total = training.global_batch_size or -1
    most = model.max_position_embeddings
    is_alone = (
        training.local_batch_size == 1 and not job.data.packing and training.objective != "dpo"
    )
    limit = model.rope_limit if is_transformers and not is_alone else None  # pairs share a row
    scaling = None if is_transformers else model.rope_scaling
    reached = training.seq_len
    if scaling is not None and scaling.rope_type == "yarn":
        reached = round(scaling.factor * scaling.original_max_position_embeddings)
    return _texts(
        (
            job.model.delta_backend != "auto" and not getattr(model, "linear_num_key_heads", 0),
            f"model.delta_backend = '{job.model.delta_backend}', but the model has no gated delta "
            "net, or the native decoder does not compute it. Leave it out.",
        ),
        (
            model.num_experts == 0 and ep > 1,
            f"parallelism: expert_parallel_degree is {ep}, but the model has no experts. Set it to "
            "1.",
        ),
        (
            model.num_experts % ep,
            f"parallelism: expert_parallel_degree ({ep}) does not divide the model's num_experts "
            f"({model.num_experts}).",
        ),
        (
            parallelism.fsdp_once_per_step and parallelism.fsdp_reshard_after_forward == "always",
            "parallelism.fsdp_once_per_step keeps gathered parameters for a whole step, and "
            "fsdp_reshard_after_forward = 'always' frees them after each forward. Leave one of "
            "the two out.",
        ),
        (
            job.data.dataset == "images" and not (is_transformers and model.takes_images),
            f'data.dataset = "images": {model.family} takes no images. Use an image-and-text '
            "model; if it is one, of which the native decoder computes the text alone, set "
            'model.implementation = "transformers".',
        ),
        (
            total > 0 and total % batch,
            f"training.global_batch_size ({total}) is not a multiple of local_batch_size "
            f"({training.local_batch_size}) * data-parallel degree ({degrees.dp}) = {batch}.",
        ),
        (
            most is not None and training.seq_len > most,
            f"training.seq_len ({training.seq_len}) exceeds the model's max_position_embeddings "
            f"({most}). Set it to that or less.",
        ),
        (
            limit is not None and training.seq_len > limit,
            f"training.seq_len ({training.seq_len}): beyond {limit} tokens "
            f"(original_max_position_embeddings) the rotary frequencies of {model.family} follow "
            "the longest document of a forward, so documents would depend on their neighbours. "
            f"Set training.seq_len = {limit}; examples other than pairs can also be trained one "
            "by one, with data.packing = false and training.local_batch_size = 1.",
        ),
        (
            training.seq_len > reached,
            f"training.seq_len ({training.seq_len}) exceeds the {reached} tokens that YaRN "
            "reaches here, its factor * original_max_position_embeddings. Raise "
            "model.overrides.rope_scaling.factor.",
        ),
    )


def resolve_seq_len(job: JobConfig, model: AnyModelConfig) -> JobConfig:
    """Return `job` with the tokens per sequence, if they are not set: 2048, or the model's
    limit.
    """
    if job.training.seq_len != -1:
        return job
    if (limit := model.max_position_embeddings or _SEQ_LEN) < _SEQ_LEN:
        logger.info(
            f"training.seq_len is {limit}, the model's max_position_embeddings; by default it is "
            f"{_SEQ_LEN}"
        )
    return replace(job, training=replace(job.training, seq_len=min(limit, _SEQ_LEN)))


def resolve_global_batch_size(
    job: JobConfig,
    dp_degree: int,
    examples: float = 1.0,
    num_sequences: int | None = None,
    before: int | None = None,
) -> int:
    """Return the number of sequences in an optimizer step on all ranks.

    If no number is set, a resumed run keeps its number, `before`. A new run takes as many
    sequences as hold the number of examples in `BATCHES`, with `examples` examples in a sequence,
    but at most a 32nd of the `num_sequences` of an epoch, so that an epoch has at least 32 steps
    (as in LIMA, arXiv:2305.11206). The result is rounded down to whole micro-batches on all ranks,
    at least one each.
    """
    total = job.training.global_batch_size
    size = (job.training.local_batch_size or 1) * dp_degree
    if total is not None:
        return size if total == -1 else total
    wanted = BATCHES[job.training.objective == "dpo"][0] / examples if before is None else before
    if before is None and num_sequences is not None:
        wanted = min(wanted, num_sequences / 32)
    return max(int(wanted) // size, 1) * size
