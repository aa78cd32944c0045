"""Settings that make a run fit or faster, and a sweep of degrees: each is planned by itself, as the command line would.

A candidate is a list of arguments of `python -m titanlite plan`. Its figures are those that the command shows with it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.log import logger
from titanlite.config import JobConfig, ModelConfig
from titanlite.config.parallelism import resolve_global_batch_size
from titanlite.config.schema import BLOCK_SIZES
from titanlite.features.estimate.estimate import Estimate, Hardware
from titanlite.preflight import Checked

MODES = ("none", "selective", "full")
_WORTH = 1.02  # times as fast, or as small: less is not proposed
_MOST = 5
_MOST_ROUNDS = 3
_MOST_GPUS = 8  # times as many
_SHORTEST_PIECE = 4096
"""Tokens of a sequence that a rank keeps at least in combinations with cp: it is for sequences that are long."""
_WITH_LESS_CHECKPOINTING = 4  # of the best degrees of a sweep
_ADAPTERS = "trains adapters, not all weights"
_PARALLELISM = "--parallelism."
_THE_REST = f"{_PARALLELISM}data_parallel_shard_degree=-1"


@dataclass(frozen=True)
class Planned:
    """The plan of the command line with more arguments."""

    arguments: tuple[str, ...]
    checked: Checked
    estimate: Estimate  # of the run: of its fullest and of its slowest stage
    note: str  # what the arguments change except memory and time
    stages: Mapping[int, Estimate]  # pipeline stages that were traced

    @property
    def fits(self) -> bool:
        return self.estimate.fits

    @property
    def rate(self) -> float:
        return self.estimate.expected_rate

    @property
    def merit(self) -> tuple[bool, float]:
        """What fits is better than what does not; then the faster, or the smaller."""
        return self.fits, self.rate if self.fits else -float(self.estimate.memory.total)

    def is_better_than(self, other: "Planned") -> bool:
        """By more than 2 %."""
        if self.fits != other.fits:
            return self.fits
        if self.fits:
            return self.rate > other.rate * _WORTH
        return self.estimate.memory.total * _WORTH < other.estimate.memory.total


# Plan the run with more arguments, and a note on them. Raises a TitanliteError if it is not legal.
Plan = Callable[[Sequence[str], str], Planned]
_Candidate = tuple[tuple[str, ...], str]


def propose(base: Planned, plan: Plan) -> list[Planned]:
    """Return up to 5: what makes it fit, or faster by more than 2 %; the best first, then what trains something else.

    The first is built up: of all single settings the best is taken, then the best of each other kind is added to it, as
    long as that helps.
    """
    kinds = {kind: list(_try_all(plan, found)) for kind, found in _candidates(base).items()}
    singles = [one for found in kinds.values() for one in found]
    best = base
    for _ in range(_MOST_ROUNDS):
        tried = singles
        if best is not base:  # of degrees all, for which is best depends on the rest
            rest = [found if kind == "degrees" else [max(found, key=_merit)] for kind, found in kinds.items() if found]
            added = [
                ((*best.arguments, *one.arguments), "; ".join(filter(None, (best.note, one.note))))
                for found in rest
                for one in found
            ]
            tried = list(_try_all(plan, added))
        better = max((one for one in tried if one.is_better_than(best)), key=_merit, default=None)
        if better is None:
            break
        best = better
        taken = set(best.arguments)
        kinds = {kind: [] if any(taken & set(p.arguments) for p in found) else found for kind, found in kinds.items()}
    found = {one.arguments: one for one in [best, *singles] if one.fits and one.is_better_than(base)}
    neutral = sorted(found.values(), key=_rate, reverse=True)
    # The smallest of what does not fit may be slow once it does: the fastest degrees are tried, too.
    degrees = [one for one in singles if "_degree=" in one.arguments[0]]
    starts = [best] if best.fits or not degrees else [best, max(degrees, key=_rate)]
    adapted = zip(*(_adapters(base, start) for start in starts), strict=True)
    others = [one for found in adapted for one in _best_that_fits(plan, found)]
    if not best.fits:
        others += _more_gpus(base, starts, plan)
    return [*neutral[: _MOST - len(others)], *others][:_MOST]


_rate, _merit = attrgetter("rate"), attrgetter("merit")


def _try_all(plan: Plan, candidates: Iterable[_Candidate]) -> Iterator[Planned]:
    """Those that are legal; one that fails for another reason is named, and costs nothing but itself."""
    for arguments, note in candidates:
        try:
            yield plan(arguments, note)
        except TitanliteError:
            continue
        except Exception as error:  # noqa: BLE001  of torch or transformers, while they trace what is not asked for
            logger.error("plan: %s is left out: %s: %s", " ".join(arguments), type(error).__name__, error)


def _best_that_fits(plan: Plan, candidates: Iterable[_Candidate]) -> list[Planned]:
    fitting = [one for one in _try_all(plan, candidates) if one.fits]
    return [max(fitting, key=_rate)] if fitting else []


def _candidates(base: Planned) -> dict[str, list[_Candidate]]:
    """Single settings by kind, with a note on those that change what is computed."""
    job, degrees = base.checked.job, base.estimate.degrees
    training, section, model = job.training, job.parallelism, base.checked.model_config
    nodes = degrees.world_size // base.estimate.hardware.gpus_per_node
    found: dict[str, list[_Candidate]] = {}
    if isinstance(model, ModelConfig) and job.model.attention_backend == "sdpa":
        found["attention"] = [(("--model.attention_backend=varlen",), "")]
    now = job.activation_checkpoint.mode
    found["checkpoints"] = [((f"--activation_checkpoint.mode={mode}",), "") for mode in MODES if mode != now]
    found["micro-batch"] = []
    for size in (training.local_batch_size * 2, training.local_batch_size // 2):
        one = replace(job, training=replace(training, local_batch_size=max(size, 1)))
        tokens = resolve_global_batch_size(one, degrees.dp) * training.seq_len
        note = "" if tokens == base.estimate.tokens else f"steps of {tokens:,} tokens"
        found["micro-batch"] += [((f"--training.local_batch_size={size}",), note)] if size else []
    split = []
    if model.num_experts:
        widths = {1, min(base.estimate.hardware.gpus_per_node, degrees.fsdp * degrees.tp)} - {degrees.ep}
        split += [(f"{_PARALLELISM}expert_parallel_degree={ep}",) for ep in sorted(widths)]
    if nodes > 1 and degrees.dp_replicate != nodes:
        split.append((f"{_PARALLELISM}data_parallel_replicate_degree={nodes}", _THE_REST))
    if degrees.world_size > 1 and degrees.tp == 1:
        split.append((f"{_PARALLELISM}tensor_parallel_degree=2", _THE_REST))
    if training.seq_len >= 2 * _SHORTEST_PIECE * degrees.cp and degrees.world_size > 1:
        split.append((f"{_PARALLELISM}context_parallel_degree={2 * degrees.cp}", _THE_REST))
    if base.estimate.trace.micro_batches > 1 and not section.fsdp_once_per_step:
        found["gathers"] = [((f"{_PARALLELISM}fsdp_once_per_step=true",), "")]
    found["degrees"] = [(arguments, "") for arguments in split]
    return found


def _adapters(base: Planned, best: Planned) -> Iterator[_Candidate]:
    """Yield LoRA, and a base of 4 bits; in addition to the best other settings."""
    lora = base.checked.job.lora
    rank = () if lora.rank else ("--lora.rank=16",)
    notes = ([_ADAPTERS] if rank else []) + ([best.note] if best.note else [])
    if rank:
        yield (*best.arguments, *rank), "; ".join(notes)
    if lora.base_dtype not in BLOCK_SIZES:
        notes.insert(len(rank), "frozen weights rounded to 4 bits")
        yield (*best.arguments, *rank, "--lora.base_dtype=nf4"), "; ".join(notes)


def _more_gpus(base: Planned, starts: Sequence[Planned], plan: Plan) -> list[Planned]:
    """Return the smallest power of 2 times as many GPUs on which the run fits as one of `starts`, the fastest."""
    ranks, factor, found = base.estimate.degrees.world_size, 2, list[Planned]()
    while factor <= _MOST_GPUS and not found:
        more = f"--gpus={factor * ranks}x{base.estimate.hardware.name}"
        found = _best_that_fits(plan, [((*start.arguments, more), start.note) for start in starts])
        factor *= 2
    return found


def sweep(job: JobConfig, hardware: Hardware, world_size: int, plan: Plan) -> tuple[list[Planned], int]:
    """Try all legal degrees with full checkpointing, and the best four with less of it where that fits.

    Of replicas it tries one and the number of nodes; of cp what `job` has, and what leaves a rank 4096 tokens of a
    sequence or more; pipeline stages are those of `job`.

    Returns:
        The best of each degrees, those that fit first, the fastest of them first; and how many were not legal.

    Raises:
        ConfigError: no combination is legal; the message has the first reason.
    """
    pp = job.parallelism.pipeline_parallel_degree
    if world_size % pp:
        raise ConfigError(
            f"parallelism: pipeline_parallel_degree ({pp}) does not divide the world size ({world_size}), and a sweep "
            "leaves the stages as they are. Change one of the two."
        )
    refused, found = list[str](), list[Planned]()
    for replicate, cp, tp, ep in _combinations(world_size // pp, {1, world_size // hardware.gpus_per_node}):
        long = job.training.seq_len >= _SHORTEST_PIECE * cp * tp
        if cp not in (1, job.parallelism.context_parallel_degree) and not long:
            continue
        names = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "expert_parallel")
        values = zip(names, (replicate, cp, tp, ep), strict=True)
        arguments = (_THE_REST, *(f"{_PARALLELISM}{name}_degree={value}" for name, value in values))
        try:
            found.append(plan((*arguments, "--activation_checkpoint.mode=full"), ""))
        except TitanliteError as error:
            refused.append(str(error))
    if not found:
        raise ConfigError(f"plan --sweep: of {len(refused)} combinations none is legal. The first: {refused[0]}")
    found.sort(key=_merit, reverse=True)
    for place, full in enumerate(found[:_WITH_LESS_CHECKPOINTING]):
        for mode in MODES[:-1] if full.fits else ():
            less = next(_try_all(plan, [((*full.arguments[:-1], f"--activation_checkpoint.mode={mode}"), "")]), full)
            if less.merit > full.merit:
                found[place] = less
                break
    return sorted(found, key=_merit, reverse=True), len(refused)


def _combinations(ranks: int, replicas: set[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (replicate, cp, tp, ep) that may be legal, few replicas first; all ep that divide what they fold over."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for replicate, cp, tp in product(sorted(replicas.intersection(divisors)), divisors, divisors):
        if ranks % (replicate * cp * tp) == 0:
            yield from ((replicate, cp, tp, ep) for ep in divisors if ranks // replicate % ep == 0)
