"""User-defined objectives, optimizers and metrics, which settings name as "package.module:name".

An objective is a loss of each token's logits, in chunks, a loss of log-probabilities, or a whole
`Objective`. An optimizer is first tried on small placeholders, to learn which states it has, so
that they can be saved and restored. A metric is a function of a logged `StepPoint`.

Shapes: B rows, S tokens, T = B * S, C tokens of a chunk, V vocabulary, v rows of the vocabulary on
this rank, D width, M = 1 + the number of metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.base.errors import ConfigError, TrainingError, raise_problems
from titanlite.base.extension import get_call, load_extension
from titanlite.base.text import describe_error, list_names
from titanlite.config import JobConfig
from titanlite.config.schema import MetricsSection, OptimizerSection
from titanlite.config.settings import get_settings
from titanlite.data.dataset import Batch
from titanlite.materialize.plan import clean_name
from titanlite.metrics.point import StepPoint
from titanlite.models.interface import Model
from titanlite.objective import NextToken, Objective, ObjectiveSums
from titanlite.ops import IGNORE_INDEX, VocabShard
from titanlite.ops.matmul import sum_over_rows

_KEY = "training.objective"
_TRIED_TOKENS = 4


def build_custom_objective(job: JobConfig, vocab_size: int) -> Objective:
    """Return the objective that `training.objective` names, after a trial on a few tokens.

    Raises:
        ConfigError: the objective cannot be imported, raises an error, or does not return a loss
            and metrics.
    """
    name = job.training.objective
    calls = list(get_settings()[_KEY].calls or [])
    function = load_extension(_KEY, name, calls)
    call = get_call(function, calls)
    where = f'{_KEY} = "{name}"'
    try:
        if call == calls[0]:
            return TokenObjective(function, vocab_size)
        if call == calls[1]:
            return BatchObjective(function, job.training.seq_len)
        objective = function(job)
        lacking = [
            each for each in ("metric_names", "prepare", "count") if not hasattr(objective, each)
        ]
        if lacking or not callable(objective):
            raise TypeError(f"{type(objective).__name__} has no {', '.join(lacking) or '__call__'}")
        return cast(Objective, objective)
    except Exception as error:
        raise ConfigError(
            f"{where}: a trial raised {describe_error(error)}. Correct the function; "
            "docs/extending.md has what it takes and returns."
        ) from error


def _split(found: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Split a function's result into loss and metrics, all of this shape. TypeError: it is neither
    a loss nor a tuple of a loss and a dictionary of metrics.
    """
    parts: tuple[Any, Any] = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    loss, metrics = parts
    if not isinstance(metrics, Mapping):
        raise TypeError(f"it returned {type(metrics).__name__} for metrics, not a dictionary")
    wanted = f"a tensor of shape {shape}"
    for name, value in {"the loss": loss, **metrics}.items():
        is_tensor = isinstance(value, torch.Tensor)
        kind = f"a tensor of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        if kind != wanted:
            raise TypeError(f"{name} is {kind}, not {wanted}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise TypeError("the loss depends on nothing that is trained")
    return loss, metrics


class TokenObjective(NextToken):
    """The mean of a function of the logits over the tokens with a label.

    The function gets logits (C, V) float32 and labels (C,) int64, -100 for tokens without a label.
    It returns the losses (C,), optionally with a dictionary of metrics (C,). Backward calls it
    again, so it must be deterministic.
    """

    def __init__(self, function: Callable[..., Any], vocab_size: int) -> None:
        logits = torch.zeros(_TRIED_TOKENS, vocab_size, requires_grad=True)
        labels = torch.arange(_TRIED_TOKENS) - 1
        with torch.enable_grad():
            names = [
                *_split(
                    function(logits, labels.where(labels >= 0, IGNORE_INDEX)), (_TRIED_TOKENS,)
                )[1]
            ]
        self.metric_names: Sequence[str] = [f"objective/{name}" for name in names]
        self._values = TokenValues(function, names)

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        place = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
        found = model(*place, reduction=self._values, **batch.inputs)
        sums_M = found.cross_entropy.flatten(0, -2).sum(dim=0)
        return ObjectiveSums(sums_M[0], found.aux, sums_M[1:].detach())


class TokenValues:
    """A `reduction` for a model's forward: computes loss and metrics of every token, (B, S, M),
    from logits in chunks.
    """

    def __init__(self, function: Callable[..., Any], names: Sequence[str]) -> None:
        self._function = function
        self._names = names
        self.shape = (1 + len(names),)

    def __call__(
        self,
        hidden_TD: torch.Tensor,
        weight_vD: torch.Tensor,
        labels_T: torch.Tensor,
        chunk_tokens: int,
        shard: VocabShard | None,
    ) -> torch.Tensor:
        """Return (T, M) float32; arguments are as in `linear_cross_entropy` with `reduction` =
        "none".

        Collectives: with `shard`, a sum of (C, V) per chunk, in forward and in backward; all ranks
        must hold the same tokens.
        """
        return _InChunks.apply(hidden_TD, weight_vD, labels_T, chunk_tokens, shard, self.of_logits)  # type: ignore[no-any-return]

    def of_logits(self, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        """Return (C, M), 0 for tokens without a label."""
        loss_C, metrics = _split(self._function(logits_CV, labels_C), tuple(labels_C.shape))
        columns = [loss_C, *(metrics[name].detach() for name in self._names)]
        return torch.stack([x.to(logits_CV.dtype) for x in columns], dim=-1).where(
            labels_C.unsqueeze(-1) != IGNORE_INDEX, 0.0
        )


class _InChunks(torch.autograd.Function):
    """`TokenValues` with a backward that projects every chunk again, and sums the gradient of the
    weight in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_vD: torch.Tensor,
        labels_T: torch.Tensor,
        chunk_tokens: int,
        shard: VocabShard | None,
        of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_TD, weight_vD, labels_T)
        ctx.options = chunk_tokens, shard, of_logits
        chunks = zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        return torch.cat(
            [of_logits(_project(hidden, weight_vD, shard), labels) for hidden, labels in chunks]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalues_TM: torch.Tensor) -> tuple[Any, ...]:
        hidden_TD, weight_vD, labels_T = ctx.saved_tensors
        chunk_tokens, shard, of_logits = ctx.options
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        dweight_vD = torch.zeros_like(weight_vD, dtype=dvalues_TM.dtype) if need_weight else None
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_CV = _project(hidden_TD[rows], weight_vD, shard).requires_grad_()
            with torch.enable_grad():
                values_CM = of_logits(logits_CV, labels_T[rows])
            (grad_CV,) = torch.autograd.grad(values_CM, logits_CV, dvalues_TM[rows])
            own = grad_CV if shard is None else grad_CV.narrow(1, shard.start, weight_vD.shape[0])
            grad_Cv = own.to(hidden_TD.dtype)
            if dhidden_TD is not None:
                torch.mm(grad_Cv, weight_vD, out=dhidden_TD[rows])
            if dweight_vD is not None:
                sum_over_rows(grad_Cv, hidden_TD[rows], dweight_vD, accumulate=True)
        return (
            dhidden_TD,
            None if dweight_vD is None else dweight_vD.to(weight_vD.dtype),
            None,
            None,
            None,
            None,
        )


def _project(
    hidden_CD: torch.Tensor, weight_vD: torch.Tensor, shard: VocabShard | None
) -> torch.Tensor:
    """Return logits of the whole vocabulary, (C, V), in float32 or float64."""
    own_Cv = hidden_CD @ weight_vD.T
    own_Cv = own_Cv.to(torch.promote_types(own_Cv.dtype, torch.float32))
    if shard is None:
        return own_Cv
    logits_CV = own_Cv.new_zeros(own_Cv.shape[0], shard.vocab_size)
    logits_CV[:, shard.start : shard.start + own_Cv.shape[1]] = own_Cv
    return shard.reduce_sum(logits_CV)


class BatchObjective(NextToken):
    """A function of the log-probability of every label, divided by the number of tokens with a
    label.

    The function gets log-probabilities (B, S) float32, 0 for tokens without a label, and the
    `Batch`. It returns the sum of the losses of these rows, a scalar, optionally with a dictionary
    of metrics, which are sums, too.
    """

    def __init__(self, function: Callable[..., Any], seq_len: int) -> None:
        ids = torch.zeros(1, seq_len, dtype=torch.int64)
        ids[:, seq_len // 2 :] = 1  # a pair
        log_probs = torch.full((1, seq_len), -1.0, requires_grad=True)
        with torch.enable_grad():
            names = [*_split(function(log_probs, Batch(ids, ids, ids, ids)), ())[1]]
        self.metric_names: Sequence[str] = [f"objective/{name}" for name in names]
        self._function = function
        self._names = names

    def __call__(self, model: Model, batch: Batch) -> ObjectiveSums:
        place = (batch.tokens, batch.labels, batch.positions, batch.document_ids)
        found = model(*place, reduction="none", **batch.inputs)
        loss, metrics = _split(self._function(-found.cross_entropy, batch), ())
        values = [metrics[name].detach().float() for name in self._names]
        return ObjectiveSums(loss, found.aux, torch.stack(values) if values else loss.new_zeros(0))


def build_metric(
    section: MetricsSection,
) -> tuple[Callable[[StepPoint], Mapping[str, float]], bool]:
    """Return a wrapper of the function `metrics.function`, and whether it takes the gradients after
    each backward.

    The values are logged as metric/NAME. If the setting is empty, the wrapper returns no values.

    Raises:
        TrainingError, in a call of the wrapper: the function raises an error, or does not return a
            dictionary of numbers.
    """
    if not section.function:
        return lambda point: {}, False
    key = "metrics.function"
    calls = list(get_settings()[key].calls or [])
    function = load_extension(key, section.function, calls)
    reads_backwards = get_call(function, calls) != calls[0]
    where = f"'{section.function}'"

    def measure(point: StepPoint) -> Mapping[str, float]:
        try:
            found = function(point, point.backwards) if reads_backwards else function(point)
        except Exception as error:
            raise TrainingError(
                f"metrics.function {where} raised {describe_error(error)}. Correct it, or leave it "
                "out."
            ) from error
        if not isinstance(found, Mapping) or not all(
            isinstance(value, SupportsFloat) for value in found.values()
        ):
            raise TrainingError(
                f"metrics.function {where} returned {found!r}. Return a dictionary of numbers."
            )
        return {f"metric/{name}": float(value) for name, value in found.items()}

    return measure, reads_backwards


# Sizes of placeholders; all differ, so that the shape of a state identifies its dims.
_SIZES = (3, 4, 5, 6)
_Named = list[tuple[str, nn.Parameter]]
_Build = Callable[[_Named, OptimizerSection], torch.optim.Optimizer]


def build_custom_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Call the function `optimizer.name` with (name, parameter) of all trained parameters, and
    return the optimizer.

    Raises:
        ConfigError: the optimizer cannot be built or stepped, omits a parameter, or has states that
            cannot be saved.
    """
    build: _Build = load_extension("optimizer.name", section.name, ["named_parameters, section"])
    where = f'optimizer.name = "{section.name}"'
    named = [
        (clean_name(name), param) for name, param in model.named_parameters() if param.requires_grad
    ]
    try:
        states = _try_out(build, named, section)
        optimizer = _build(build, named, section)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        raise ConfigError(f"{where}: it raised {describe_error(error)}. Correct it.") from error
    names = {id(param): name for name, param in named}
    groups: dict[tuple[int, object, tuple[str, ...]], dict[str, Any]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            mesh = param.device_mesh if isinstance(param, DTensor) else None
            key = (number, mesh, states[names[id(param)]])  # a fused update accepts only one mesh
            own = groups.setdefault(key, {**group, "params": [], "state_names": key[2]})
            own["params"].append(param)
    optimizer.param_groups = list(groups.values())
    return optimizer


def _build(build: _Build, named: _Named, section: OptimizerSection) -> torch.optim.Optimizer:
    optimizer = build(list(named), section)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"it returned {type(optimizer).__name__}. Return a torch.optim.Optimizer."
        )
    found = [id(param) for group in optimizer.param_groups for param in group["params"]]
    missing = [name for name, param in named if id(param) not in found]
    if missing or len(found) != len(named):
        what = (
            f"leaves out {', '.join(missing[:3])}"
            if missing
            else "has parameters that it was not given"
        )
        raise ConfigError(
            f"{what}: {len(named)} were given. Use all of them; optimizer.freeze takes some out."
        )
    return optimizer


def _try_out(build: _Build, named: _Named, section: OptimizerSection) -> dict[str, tuple[str, ...]]:
    """Step the optimizer on small placeholders for the parameters; return the names of each
    parameter's state tensors.
    """
    stand_ins = [
        (name, nn.Parameter(torch.ones(_SIZES[: p.dim()], dtype=p.dtype))) for name, p in named
    ]
    optimizer = _build(build, stand_ins, section)
    for group in optimizer.param_groups:  # as in `Schedule`
        group["training_step"] = 0
        group["last_training_step"] = 1
    before = [_get_options(group) for group in optimizer.param_groups]
    for _ in range(2):
        for _, param in stand_ins:
            param.grad = torch.ones_like(param)
        optimizer.step()
    problems = [
        "its step changes "
        f"{list_names(sorted(name for name in now if now[name] != old.get(name)))} of a group of "
        "parameters, which is not saved. Keep it in a tensor in state."
        for old, now in zip(before, map(_get_options, optimizer.param_groups), strict=True)
        if old != now
    ]
    states: dict[str, tuple[str, ...]] = {}
    for name, param in stand_ins:
        state = optimizer.state.get(param, {})
        states[name] = tuple(sorted(state))
        for key, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            like = is_tensor and value.shape == param.shape and value.dtype == param.dtype
            if not (like or (is_tensor and key == "step" and value.dim() == 0)):
                kind = f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__
                problems.append(
                    f"its state '{key}' of a parameter {param.dtype} {tuple(param.shape)} is "
                    f"{kind}, which cannot be saved. Keep tensors like the parameter, and a scalar "
                    "tensor 'step'."
                )
    raise_problems(ConfigError, "a trial step", dict.fromkeys(problems))
    return states


def _get_options(group: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}
