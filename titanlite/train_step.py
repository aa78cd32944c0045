"""One optimizer step on any mesh: forward, backward, reduction, clipping and update."""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist

from titanlite.base.timers import StepTimer
from titanlite.data.dataset import Batch
from titanlite.distributed.fsdp import prepare_backward
from titanlite.distributed.grads import (
    clip_grad_norms,
    find_unreached,
    measure_grads,
    reduce_replicated_grads,
)
from titanlite.launch.protocol import beat
from titanlite.metrics.flops import group_parameters
from titanlite.metrics.point import StepResult
from titanlite.models.interface import Model
from titanlite.objective import Objective, ObjectiveSums
from titanlite.optim.expert_bias import ExpertBiasBalancer, get_bias_update_rate
from titanlite.optim.optimizer import FiniteGuard, step_if_finite
from titanlite.optim.schedule import Schedule
from titanlite.run import Run


def order_turns(count: int, ahead: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield a rank's forwards and backwards of a step in order, each with its micro-batch.

    Args:
        count: micro-batches of the step.
        ahead: the most forwards that run ahead of the backwards (1F1B); 0 without pipeline stages.
    """
    ahead = min(ahead, count)
    for number in range(count + ahead):
        if number < count:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


class TrainStep:
    """Optimizer steps of a run's sharded model, on batches that are on its device."""

    def __init__(
        self,
        run: Run,
        model: Model,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
    ) -> None:
        job = run.job
        self.job = job
        self.dims = run.dims
        self.device = run.device
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.step = run.first_step
        if run.start is not None and hasattr(optimizer, "train"):
            optimizer.train()  # type: ignore[attr-defined]  # see `evaluation_weights`
        self.schedule = Schedule(job, model, optimizer)
        degrees = run.dims.degrees
        stage_size = degrees.stage_size if degrees.pp > 1 else None
        rate = get_bias_update_rate(job.moe, model)
        self.balancer = ExpertBiasBalancer(model, rate, dist.all_reduce, stage_size)
        self.grad_groups = group_parameters(model)
        max_nonfinite = (
            job.training.max_nonfinite_steps if job.training.on_nonfinite == "skip" else 1
        )
        self.finite_guard = FiniteGuard(run.device, max_nonfinite)
        self.timer = StepTimer(run.device)
        self.is_logged = True  # the trainer logs the next step
        # True: logged steps measure the gradients after each backward, for `StepResult.backwards`
        self.measures_backwards = False
        # trained parameters without a gradient; known after the first step
        self.unreached: list[str] | None = None
        self.first: StepResult | None = None  # result of this process's first step

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """Make one optimizer step over this rank's micro-batches. Collective: every rank must call.

        The loss of every micro-batch is divided by the number of units (tokens with a label, or
        pairs) in the *global* batch. So gradients are sums over ranks and micro-batches, whatever
        the mesh is and however unevenly the units are distributed. Each backward directly follows
        its forward, except that a pipeline stage runs some forwards ahead.
        """
        self.begin(self.step)
        # Counted as "other": ranks wait here for late data, which would make every rank look slow.
        self.timer.start("other")
        objective = self.objective
        count = len(micro_batches)
        units, num_tokens = self.count_units(micro_batches)
        sums = torch.zeros(2 + len(objective.metric_names), device=self.device)
        norm_device = torch.device("cpu") if self.job.training.enable_cpu_offload else self.device
        units_of = squares = None
        if self.is_logged and self.measures_backwards:
            counts = torch.stack([objective.count(batch) for batch in micro_batches])
            units_of = self.sum_over_data(counts)
            squares = torch.zeros(count, dtype=torch.float64, device=norm_device)
        losses_in_flight: dict[int, ObjectiveSums] = {}
        for phase, number in order_turns(count, self.dims.degrees.turns_ahead(self.dims.stage)):
            self.enter(phase, number)
            if phase == "forward":
                losses_in_flight[number] = losses = objective(self.model, micro_batches[number])
                self.balancer.accumulate()
                sums += self.local_sums(losses)
                continue
            if count > 1 and number in (0, count - 1):  # between steps FSDP expects a last backward
                is_last = number == count - 1 or squares is not None
                prepare_backward(
                    self.model,
                    self.dims,
                    is_last=is_last,
                    once_per_step=self.job.parallelism.fsdp_once_per_step,
                )
            self.scaled_loss(losses_in_flight.pop(number), units, num_tokens).backward()
            if squares is not None:
                squares[number] = measure_grads(self.grad_groups, self.dims, norm_device)

        if squares is not None:
            dist.all_reduce(squares)
        self.enter("optimizer")
        sums = self.sum_over_data(sums, in_stages=True)
        # Searched only once: a parameter that the loss of one step does not use is not used later
        # either.
        if self.unreached is None:
            self.unreached = find_unreached(self.model, self.device)
        reduce_replicated_grads(self.model.parameters(), self.dims)
        grad_norm, group_norms = clip_grad_norms(
            self.grad_groups, self.job.training.max_norm, self.dims.stage_group, norm_device
        )
        self.step += 1
        finite = grad_norm.to(self.device).isfinite() & sums[:2].isfinite().all()  # both are global
        apply = self.finite_guard.admit(self.step, finite).to(grad_norm.device)
        step_if_finite(self.optimizer, apply)
        self.optimizer.zero_grad()
        tokens_per_expert = self.balancer.step(apply)

        tokens = sum(batch.tokens.numel() for batch in micro_batches) * self.dims.degrees.dp
        means = sums / units
        result = StepResult(
            loss=means[0],
            aux_loss=sums[1] / num_tokens,
            grad_norm=grad_norm,
            group_norms=group_norms,
            tokens=tokens,
            unpadded_tokens=num_tokens,
            tokens_per_expert=tokens_per_expert,
            metrics=means[2:],
            units=units_of,
            squares=squares,
        )
        self.first = self.first or result
        return result

    def begin(self, step: int) -> None:
        """Set the random generators and all values that depend on the step, for optimizer step
        `step` (0-based), or to compute that step again.
        """
        self.dims.seed_generators(self.job.training.seed, step, self.device)
        self.schedule.apply(step)

    def enter(self, phase: str, micro_batch: int | None = None) -> None:
        """Begin `phase` in the step's timer and in the heartbeat, from which the launcher finds
        hung ranks.

        `micro_batch` is for observers that replace this method (`estimate`, tests).
        """
        self.timer.start(phase)
        beat(phase, self.step + 1)

    def count_units(self, micro_batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the units, and the tokens without padding, of the global batch. Collective: every
        rank must call.
        """
        counts = [
            torch.stack([self.objective.count(batch), batch.count_tokens()])
            for batch in micro_batches
        ]
        units, num_tokens = self.sum_over_data(torch.stack(counts).sum(dim=0)).unbind()
        return units, num_tokens

    def scaled_loss(
        self, losses: ObjectiveSums, units: torch.Tensor, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss to call backward on: one micro-batch's summand of the mean over the
        global batch.

        Balance losses are divided by all tokens, because routers balance prompts too. Divided by
        the number of labels, their weight would grow as fewer tokens of a chat are trained.
        """
        return losses.loss / units + losses.aux / num_tokens

    def local_sums(self, losses: ObjectiveSums) -> torch.Tensor:
        """Return this rank's summands of loss, balance losses and metrics, on the device.

        cp and tp ranks have equal losses, but each has the balance losses of its own positions.
        Each pipeline stage has the balance losses of its own layers; only the last stage has the
        other losses.
        """
        aux_sum = losses.aux * self.dims.degrees.ranks_per_sequence
        loss = losses.loss
        metrics = losses.metrics
        if not self.dims.is_last_stage:
            loss = torch.zeros_like(loss)
            metrics = torch.zeros_like(metrics)
        return torch.cat([torch.stack([loss, aux_sum]), metrics]).detach()

    def sum_over_data(self, value: torch.Tensor, *, in_stages: bool = False) -> torch.Tensor:
        """Sum `value` over the data-parallel ranks. Ranks of the same sequences hold the same
        value, which counts once.

        The value of all pipeline stages counts once too, unless each stage has its own summand
        (`in_stages`).
        """
        value = value.clone()
        dist.all_reduce(value)
        degrees = self.dims.degrees
        copies = degrees.ranks_per_sequence * (1 if in_stages else degrees.pp)
        return value // copies if value.dtype == torch.int64 else value / copies
