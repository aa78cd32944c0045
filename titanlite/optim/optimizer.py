"""The configured optimizer: which parameters it trains, and which steps are skipped because they
are not finite.
"""

from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from titanlite.base.errors import ConfigError, TrainingError, TransientError, raise_problems
from titanlite.base.log import logger
from titanlite.base.text import parse_multipliers, split_patterns
from titanlite.config.schema import OptimizerSection
from titanlite.materialize.layout import local_of, num_values
from titanlite.materialize.plan import clean_name

_LEAST_BFLOAT16_LR = 1e-3


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW (arXiv:1711.05101) on this rank's shards; parameters and states stay DTensors.

    torch's fused AdamW rejects DTensors of two meshes, and DTensor's sharding propagation for the
    first step takes longer than ten updates of a small model.
    """

    def __init__(self, groups: list[dict[str, Any]], section: OptimizerSection) -> None:
        super().__init__(
            groups or [{"params": []}],
            lr=section.lr,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            fused=section.implementation == "fused",
            foreach=section.implementation == "foreach",
        )
        for group in self.param_groups:
            # states that a checkpoint must have for each parameter
            group["state_names"] = ("step", "exp_avg", "exp_avg_sq")

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists` with local tensors, in the order of the update's arguments; private to
        torch.
        """
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return has_complex


def build_adamw(model: nn.Module, section: OptimizerSection) -> LocalAdamW:
    """Build AdamW for the trained parameters. Its groups include parameters held by other ranks,
    which are never updated here.

    Raises ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    _, groups = group_parameters(model, section)
    return LocalAdamW(groups, section)


def group_parameters(
    model: nn.Module, section: OptimizerSection, apart: Container[nn.Parameter] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Group the trained parameters by rate and decay; return two lists of groups: for the
    parameters in `apart`, and for the rest.

    Only matrices decay: not norms and other vectors, nor biases, even if the biases of all experts
    form a matrix.

    Raises ConfigError: `section.lr_multipliers` names nothing that is trained.
    """
    multipliers = lr_multipliers(model, section)
    groups: defaultdict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, param in model.named_parameters():
        if param.requires_grad:
            decays = param.dim() >= 2 and not name.endswith("bias")
            groups[param in apart, decays, multipliers.get(param, 1.0)].append(param)
    rounds_to_nearest = section.state_dtype == "float32" and section.lr < _LEAST_BFLOAT16_LR
    if rounds_to_nearest and any(
        p.dtype == torch.bfloat16 for params in groups.values() for p in params
    ):
        logger.warning(
            "optimizer: a weight in bfloat16 changes by 1/256 of its size or not at all; with "
            "optimizer.lr = %g most never will. Set training.dtype = 'float32', or "
            "optimizer.state_dtype = 'bfloat16', which rounds stochastically.",
            section.lr,
        )
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (is_apart, decays, multiplier), params in groups.items():
        found[is_apart].append(
            {
                "params": params,
                "weight_decay": section.weight_decay if decays else 0.0,
                "lr": section.lr * multiplier,
            }
        )
    return found[True], found[False]


def step_if_finite(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> None:
    """Step `optimizer` if the bool scalar `finite` is True on the device; otherwise nothing
    changes.

    A fused optimizer reads the flag inside its kernel (`found_inf`), so the host does not wait for
    the gradients. Other implementations cost one synchronization.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the model the weights for validation, evaluation and saving while the context is open.

    An optimizer may train weights of which only an average is the result, as Schedule-Free
    optimizers do (arXiv:2405.15682). It has methods `eval` and `train`, which swap the two in
    place. A resumed run calls `train` once.
    """
    if hasattr(optimizer, "eval"):
        optimizer.eval()  # type: ignore[attr-defined]
    yield
    if hasattr(optimizer, "train"):
        optimizer.train()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NonFiniteSteps:
    """Non-finite steps since the last check, on the host."""

    first_new: int  # first such step since the last check
    first: int  # first of the consecutive such steps up to the latest; -1 if the latest was finite
    in_a_row: int  # number of these consecutive steps
    total: int  # such steps since the process started
    fatal: bool  # their number has reached the limit; no update was applied since `first`


@dataclass(frozen=True)
class Diagnosis:
    """The reason of a non-finite loss or gradient, as found by all ranks together."""

    text: str  # sentences for the user
    # True if the recomputed step is not finite either; otherwise a machine failed
    repeats: bool

    def to_error(self, found: NonFiniteSteps, saved: str, samples: int) -> TrainingError:
        """Return the error that ends a run after `found`: a transient one if the recomputed step is
        finite.

        `samples`: number of sequences before that step in the data order.
        """
        in_a_row = f"; it is the first of {found.in_a_row} in a row" if found.in_a_row > 1 else ""
        start = (
            f"training: the loss or gradient of step {found.first} is not finite{in_a_row}. "
            f"{self.text} No such update was applied, so the weights are finite: those of step "
            f"{found.first - 1}{saved}."
        )
        if not self.repeats:
            return TransientError(
                f"{start} Start again from there; if it comes back, look for a faulty machine."
            )
        return TrainingError(
            f"{start} Lower optimizer.lr, raise lr_scheduler.warmup_steps, or look at that step's "
            f"data: python -m titanlite data --config FILE --data.skip_to_sample={samples}."
        )

    def describe_skipped(self, found: NonFiniteSteps) -> str:
        """Return the warning about skipped steps (`training.on_nonfinite` = "skip")."""
        return (
            f"the loss or gradient of step {found.first_new} is not finite; it was skipped "
            f"({found.total} so far). {self.text}"
        )


class FiniteGuard:
    """Counters on the device that decide which steps are applied; the host waits for them only in
    `look`.

    After `limit` consecutive non-finite steps, no further step is applied. So when the host finds
    out, weights, optimizer states and biases are those before the first of them. All ranks pass it
    the same reduced values, on `device`.
    """

    def __init__(self, device: torch.device, limit: int = 1) -> None:
        self._limit = limit
        # consecutive non-finite steps up to the latest
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        # steps since the last check, with `in_a_row` after each
        self._seen: list[tuple[int, torch.Tensor]] = []
        self._last_in_a_row = 0  # up to the last check
        self.total = 0  # all non-finite steps, up to the last check

    @torch.no_grad()
    def admit(self, step: int, finite: torch.Tensor) -> torch.Tensor:
        """Return True, as a bool scalar on the device, if `step`, counted from 1, is to be applied.

        `finite`, a bool scalar, is True if the step's loss and gradient norm are finite, over all
        ranks.
        """
        finite = finite.to(self.in_a_row.device)
        is_frozen = self.in_a_row >= self._limit
        self.in_a_row = torch.where(
            is_frozen, self.in_a_row, torch.where(finite, 0, self.in_a_row + 1)
        )
        self._seen.append((step, self.in_a_row))
        return finite & ~is_frozen

    def look(self) -> NonFiniteSteps | None:
        """Return the non-finite steps since the last check, or None. Synchronizes."""
        new = list[int]()
        in_a_row = self._last_in_a_row
        counts = torch.stack([count for _, count in self._seen]).tolist() if self._seen else []
        for (step, _), count in zip(self._seen, counts, strict=True):
            if in_a_row < self._limit:  # otherwise no further step was applied
                in_a_row = count
                if count:
                    new.append(step)
        self._seen = []
        self._last_in_a_row = in_a_row
        if not new:
            return None
        self.total += len(new)
        first = new[-1] - in_a_row + 1 if in_a_row else -1
        return NonFiniteSteps(new[0], first, in_a_row, self.total, fatal=in_a_row >= self._limit)


def freeze_parameters(model: nn.Module, section: OptimizerSection) -> None:
    """Turn off gradients for the parameters that `optimizer.freeze` names, in place. Before
    sharding, on meta or not.

    A tied parameter is frozen under each of its names.

    Raises ConfigError, the same on all ranks: a pattern matches no parameter, or no parameter is
    left to train.
    """
    patterns = split_patterns("optimizer.freeze", section.freeze)
    problems: list[str] = []
    for pattern in patterns:
        for param in _match(model, pattern, problems):
            param.requires_grad_(False)
    if patterns and not any(param.requires_grad for param in model.parameters()):
        problems.append("every parameter of the model is frozen. Leave one to train.")
    raise_problems(ConfigError, "optimizer.freeze", problems)


def lr_multipliers(model: nn.Module, section: OptimizerSection) -> dict[nn.Parameter, float]:
    """Return the learning-rate factor of each trained parameter that `optimizer.lr_multipliers`
    names.

    Raises ConfigError, the same on all ranks: a pattern matches no parameter, or only frozen ones.
    """
    found: dict[nn.Parameter, float] = {}
    problems: list[str] = []
    given = parse_multipliers("optimizer.lr_multipliers", section.lr_multipliers)
    for pattern, factor in given.items():
        matched = _match(model, pattern, problems)
        trained = [param for param in matched if param.requires_grad]
        if matched and not trained:
            problems.append(f"'{pattern}' matches frozen parameters only. Remove it.")
        found |= dict.fromkeys(trained, factor)
    raise_problems(ConfigError, "optimizer.lr_multipliers", problems)
    return found


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the values of all parameters, and of the trained ones, over all ranks together; tied
    parameters once.
    """
    params = list(model.parameters())
    return sum(map(num_values, params)), sum(num_values(p) for p in params if p.requires_grad)


def _match(model: nn.Module, pattern: str, problems: list[str]) -> list[nn.Parameter]:
    """Return the parameters whose names match `pattern`; if there are none, add to `problems`."""
    named = [(clean_name(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    matched = [param for name, param in named if fnmatchcase(name, pattern)]
    if not matched:
        problems.append(
            f"'{pattern}' matches no parameter. Names are written out, as '{named[-1][0]}'; '*' "
            "stands for any characters."
        )
    return matched
