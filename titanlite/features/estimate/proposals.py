"""Settings that make a run fit or faster, and a sweep of degrees. Each candidate is planned
separately, as the command line would do it.

A candidate is a list of arguments of `python -m titanlite plan`; its figures are those that the
command prints with them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from titanlite.base.errors import TitanliteError
from titanlite.base.log import logger
from titanlite.base.text import describe_error
from titanlite.config import JobConfig, ModelConfig
from titanlite.config.schema import BLOCK_SIZES
from titanlite.config.settings import get_value
from titanlite.features.choice.choose import MODES, SHORTEST_PIECE, Choice, list_divisors
from titanlite.features.choice.hardware import Hardware
from titanlite.features.estimate.estimate import Estimate
from titanlite.preflight import Checked

_WORTH = 1.02  # smallest factor in speed or memory that is worth a proposal
_PARALLELISM = "--parallelism."
_THE_REST = f"{_PARALLELISM}data_parallel_shard_degree=-1"


@dataclass(frozen=True)
class Planned:
    """The plan of the command line with more arguments."""

    arguments: tuple[str, ...]
    checked: Checked
    estimate: Estimate  # figures of the run: memory of its fullest and time of its slowest stage
    stages: Mapping[int, Estimate]  # pipeline stages that were traced
    choice: Choice  # of the closed form, for the open settings
    best: Choice  # for all settings that may be chosen

    @property
    def fits(self) -> bool:
        return self.estimate.fits

    @property
    def rate(self) -> float:
        return self.estimate.expected_rate

    def is_better_than(self, other: "Planned") -> bool:
        """Return True if this plan is better than `other` by more than 2 %."""
        if self.fits != other.fits:
            return self.fits
        if self.fits:
            return self.rate > other.rate * _WORTH
        return self.estimate.memory.total * _WORTH < other.estimate.memory.total


# Plans the run with more arguments. Raises a TitanliteError if they are not legal.
Plan = Callable[[Sequence[str]], Planned]
_Arguments = tuple[str, ...]


def propose(base: Planned, plan: Plan) -> Iterator[Planned]:
    """Yield plans that fit, as they are found; if `base` fits, only plans that are more than 2 %
    faster.

    Candidates are tried in the order of `_candidates`, each separately, and then the two best ones
    together.
    """
    helpful = list[Planned]()
    for one in _try_all(plan, _candidates(base)):
        if one.is_better_than(base):
            helpful.append(one)
            if one.fits:
                yield one
    if len(helpful) > 1:
        best, second = sorted(helpful, key=_merit, reverse=True)[:2]
        # if an option occurs twice, the later value counts
        joined = {text.partition("=")[0]: text for text in (*best.arguments, *second.arguments)}
        for one in _try_all(plan, [tuple(joined.values())]):
            if one.fits and one.is_better_than(best):
                yield one


def _merit(plan: Planned) -> tuple[bool, float]:
    """Return a sort key that is larger for better plans: plans that fit are better than plans that
    do not; of plans that fit the faster one is better, otherwise the smaller one.
    """
    return plan.fits, plan.rate if plan.fits else -float(plan.estimate.memory.total)


def _try_all(plan: Plan, candidates: Iterable[_Arguments]) -> Iterator[Planned]:
    """Yield the plans of the legal candidates. A candidate that fails with any other error is
    reported and left out.
    """
    for arguments in candidates:
        try:
            yield plan(arguments)
        except TitanliteError:
            continue
        except Exception as error:  # noqa: BLE001  of torch or transformers, while they trace what is not asked for
            logger.error("plan: %s is left out: %s", " ".join(arguments), describe_error(error))


def _candidates(base: Planned) -> Iterator[_Arguments]:
    """Yield settings to try: a larger batch if that is much faster, all settings that may be
    chosen, and single settings that leave the training's result unchanged. If the run does not fit,
    also optimizer states in bfloat16, and adapters.
    """
    job, degrees = base.checked.job, base.estimate.degrees
    best = base.best
    larger = base.choice.larger
    if larger is not None:
        yield (f"--training.global_batch_size={larger.batch}",)
    if dict(best.values) != {key: get_value(job, key) for key in best.values}:
        yield tuple(f"--{key}={value}" for key, value in best.values.items())
    if not base.fits:
        if job.optimizer.name == "AdamW" and job.optimizer.state_dtype == "float32":
            yield ("--optimizer.state_dtype=bfloat16",)
        yield from _adapters(job)
    training = job.training
    model = base.checked.model_config
    if isinstance(model, ModelConfig) and job.model.attention_backend == "sdpa":
        yield ("--model.attention_backend=varlen",)
    open_ones = base.choice.values
    if "activation_checkpoint.mode" not in open_ones:
        modes = (m for m in MODES if m != job.activation_checkpoint.mode)
        yield from ((f"--activation_checkpoint.mode={mode}",) for mode in modes)
    if "training.local_batch_size" not in open_ones:
        sizes = (training.local_batch_size * 2, training.local_batch_size // 2)
        yield from ((f"--training.local_batch_size={size}",) for size in sizes if size)
    if base.estimate.trace.micro_batches > 1 and not job.parallelism.fsdp_once_per_step:
        yield (f"{_PARALLELISM}fsdp_once_per_step=true",)
    if model.num_experts and f"{_PARALLELISM[2:]}expert_parallel_degree" not in open_ones:
        per_node = base.estimate.hardware.gpus_per_node
        widths = {1, min(per_node, degrees.fsdp * degrees.tp)} - {degrees.ep}
        yield from ((f"{_PARALLELISM}expert_parallel_degree={ep}",) for ep in sorted(widths))
    if degrees.world_size > 1 and degrees.tp == 1:
        yield f"{_PARALLELISM}tensor_parallel_degree=2", _THE_REST
    if degrees.world_size > 1 and training.seq_len >= 2 * SHORTEST_PIECE * degrees.cp:
        yield f"{_PARALLELISM}context_parallel_degree={2 * degrees.cp}", _THE_REST


def _adapters(job: JobConfig) -> Iterator[_Arguments]:
    """Yield settings for adapters, then for adapters of a quantized model, then of its attention
    only.
    """
    rank = () if job.lora.rank else ("--lora.rank=16",)
    if rank:
        yield rank
    bits = () if job.lora.base_dtype in BLOCK_SIZES else ("--lora.base_dtype=nf4",)
    if bits:
        yield (*rank, *bits)
    if not job.lora.targets:
        yield (*rank, *bits, "--lora.targets=q_proj,k_proj,v_proj,o_proj")


def sweep(
    job: JobConfig, hardware: Hardware, world_size: int, plan: Plan
) -> tuple[list[Planned], int]:
    """Try all legal degrees.

    dp_replicate is 1 or the number of nodes. cp is the degree in `job`, or a degree that leaves at
    least 4096 tokens of a sequence to a rank. The number of pipeline stages is as in `job`.

    Returns:
        The plans, with plans that fit first and of these the fastest first; and how many were not
        legal.

    Raises:
        TitanliteError: no combination is legal; the reason of the first.
    """
    candidates = list(_combinations(job, hardware, world_size))
    found = list(_try_all(plan, candidates))
    if not found:
        plan(candidates[0])
    return sorted(found, key=_merit, reverse=True), len(candidates) - len(found)


def _combinations(job: JobConfig, hardware: Hardware, world_size: int) -> Iterator[_Arguments]:
    """Yield degrees that may be legal, few replicas first; ep takes all divisors of the ranks that
    it may use.
    """
    ranks = max(world_size // job.parallelism.pipeline_parallel_degree, 1)
    nodes = world_size // hardware.gpus_per_node
    divisors = list_divisors(ranks)
    replicas = sorted({1, nodes}.intersection(divisors))
    for replicate, cp, tp, ep in product(replicas, divisors, divisors, divisors):
        is_long = job.training.seq_len >= SHORTEST_PIECE * cp * tp
        has_pieces = cp in (1, job.parallelism.context_parallel_degree) or is_long
        is_even = ranks % (replicate * cp * tp) == 0 and ranks // replicate % ep == 0
        if has_pieces and is_even:
            yield (
                _THE_REST,
                f"{_PARALLELISM}data_parallel_replicate_degree={replicate}",
                f"{_PARALLELISM}context_parallel_degree={cp}",
                f"{_PARALLELISM}tensor_parallel_degree={tp}",
                f"{_PARALLELISM}expert_parallel_degree={ep}",
            )
