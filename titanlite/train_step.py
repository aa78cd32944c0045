"""One optimizer step on any mesh: forward, backward, reduction, clipping, update, and the point
that is logged.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from titanlite.base.timers import StepTimer
from titanlite.data.dataset import Batch
from titanlite.distributed.fsdp import prepare_backward
from titanlite.distributed.grads import clip_grad_norms, find_unreached, reduce_replicated_grads
from titanlite.launch.protocol import beat
from titanlite.metrics.flops import group_parameters
from titanlite.metrics.point import (
    MoEState,
    StepPoint,
    StepResult,
    Window,
    find_largest,
    gather_ranks,
)
from titanlite.models.interface import Model
from titanlite.objective import Objective, ObjectiveSums
from titanlite.optim import FiniteGuard
from titanlite.optim.expert_bias import ExpertBiasBalancer, get_bias_update_rate
from titanlite.optim.optimizer import step_if_finite
from titanlite.optim.schedule import Schedule
from titanlite.run import Run


def order_turns(count: int, ahead: int) -> Iterator[tuple[Literal["forward", "backward"], int]]:
    """Yield the turns of a rank in a step, in order: forward or backward, and of which micro-batch.

    Args:
        count: micro-batches of the step.
        ahead: the most forwards that run ahead of the backwards (1F1B); without pipeline stages 0.
    """
    ahead = min(ahead, count)
    for number in range(count + ahead):
        if number < count:
            yield "forward", number
        if number >= ahead:
            yield "backward", number - ahead


class TrainStep:
    """Optimizer steps of the sharded model of a run, on batches on its device."""

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
            optimizer.train()  # see `evaluation_weights`
        self.schedule = Schedule(job, model, optimizer)
        degrees = run.dims.degrees
        stage_size = degrees.stage_size if degrees.pp > 1 else None
        rate = get_bias_update_rate(job.moe, model)
        self.balancer = ExpertBiasBalancer(model, rate, dist.all_reduce, stage_size)
        self.grad_groups = group_parameters(model, whole=not job.metrics.grad_norm_groups)
        max_nonfinite = (
            job.training.max_nonfinite_steps if job.training.on_nonfinite == "skip" else 1
        )
        self.finite_guard = FiniteGuard(run.device, max_nonfinite)
        self.timer = StepTimer(run.device)
        # trained parameters without a gradient; known after the first step
        self.unreached: list[str] | None = None

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """Make one optimizer step over this rank's micro-batches. Collective: every rank must call.

        The loss of every micro-batch is divided by the number of units (tokens with a label, or
        pairs) in the *global* batch, so gradients are sums over ranks and micro-batches, whatever
        the mesh and however unevenly the units are spread. Each backward follows its forward,
        except that a pipeline stage runs some forwards ahead.
        """
        self.begin(self.step)
        # ranks that wait below for one whose data is late are not slow themselves
        self.timer.start("other")
        objective = self.objective
        count = len(micro_batches)
        units, num_tokens = self.count_units(micro_batches)
        sums = torch.zeros(2 + len(objective.metric_names), device=self.device)
        once_per_step = self.job.parallelism.fsdp_once_per_step
        losses_in_flight: dict[int, ObjectiveSums] = {}
        for phase, number in order_turns(count, self.dims.degrees.turns_ahead(self.dims.stage)):
            self.enter(phase, number)
            if phase == "forward":
                losses_in_flight[number] = losses = objective(self.model, micro_batches[number])
                self.balancer.accumulate()
                sums += self.local_sums(losses)
                continue
            if count > 1 and number in (0, count - 1):  # between steps, each backward is a last one
                is_last = number == count - 1
                prepare_backward(
                    self.model, self.dims, is_last=is_last, once_per_step=once_per_step
                )
            self.scaled_loss(losses_in_flight.pop(number), units, num_tokens).backward()

        self.enter("optimizer")
        sums = self.sum_over_data(sums, in_stages=True)
        # once: what has no part in the loss of one step has none in others
        if self.unreached is None:
            self.unreached = find_unreached(self.model, self.device)
        reduce_replicated_grads(self.model.parameters(), self.dims)
        norm_device = torch.device("cpu") if self.job.training.enable_cpu_offload else self.device
        max_norm = self.job.training.max_norm
        grad_norm, group_norms = clip_grad_norms(
            self.grad_groups, max_norm, self.dims.stage_group, norm_device
        )
        self.step += 1
        finite = grad_norm.to(self.device).isfinite() & sums[:2].isfinite().all()  # both are global
        apply = self.finite_guard.admit(self.step, finite).to(grad_norm.device)
        step_if_finite(self.optimizer, apply)
        self.optimizer.zero_grad()
        tokens_per_expert = self.balancer.step(apply)

        tokens = sum(batch.tokens.numel() for batch in micro_batches) * self.dims.degrees.dp
        means = sums / units
        return StepResult(
            loss=means[0],
            aux_loss=sums[1] / num_tokens,
            grad_norm=grad_norm,
            group_norms=group_norms,
            tokens=tokens,
            unpadded_tokens=num_tokens,
            tokens_per_expert=tokens_per_expert,
            metrics=means[2:],
        )

    def begin(self, step: int) -> None:
        """Set the random generators and all values that follow the step, for optimizer step `step`
        (0-based) or for computing it again.
        """
        self.dims.seed_generators(self.job.training.seed, step, self.device)
        self.schedule.apply(step)

    def enter(self, phase: str, micro_batch: int | None = None) -> None:
        """Start `phase` in the step's timer and in the heartbeat, which shows the launcher hung
        ranks.

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
        """Return the loss to call backward on: the share of one micro-batch in the mean over the
        global batch.

        Balance losses are divided by all tokens, because routers balance prompts too. Divided by
        labels, they would weigh more, the fewer tokens of a chat are trained.
        """
        return losses.loss / units + losses.aux / num_tokens

    def local_sums(self, losses: ObjectiveSums) -> torch.Tensor:
        """Return this rank's summands of loss, balance losses and metrics, on the device.

        cp and tp ranks hold equal losses, but balance losses of their own positions. Each pipeline
        stage has the balance losses of its own layers; only the last one has losses.
        """
        aux_sum = losses.aux * self.dims.degrees.ranks_per_sequence
        loss, metrics = losses.loss, losses.metrics
        if not self.dims.is_last_stage:
            loss, metrics = torch.zeros_like(loss), torch.zeros_like(metrics)
        return torch.cat([torch.stack([loss, aux_sum]), metrics]).detach()

    def sum_over_data(self, value: torch.Tensor, *, in_stages: bool = False) -> torch.Tensor:
        """Sum `value` over the data-parallel ranks; ranks that share sequences hold the same value
        and count once.

        So do other pipeline stages, unless each has a summand of the value (`in_stages`).
        """
        value = value.clone()
        dist.all_reduce(value)
        degrees = self.dims.degrees
        copies = degrees.ranks_per_sequence * (1 if in_stages else degrees.pp)
        return value // copies if value.dtype == torch.int64 else value / copies

    def build_point(self, window: Window, losses: Sequence[float]) -> StepPoint:
        """Build the point of a log step from the measurements of all ranks since the last one.
        `losses` are of the steps in `window`. Collective: every rank must call. Synchronizes.
        """
        result = window.results[-1]
        self.timer.start(None)
        seconds = time.perf_counter() - window.start
        phases = self.timer.read()
        norms = window.read("grad_norm")
        tokens = sum(step.tokens for step in window.results)
        group_norms = dict(zip(self.grad_groups, result.group_norms.tolist(), strict=True))
        applied = [loss for loss in losses if math.isfinite(loss)]
        moe = None
        if result.tokens_per_expert is not None:
            counts = [
                step.tokens_per_expert
                for step in window.results
                if step.tokens_per_expert is not None
            ]
            moe = MoEState(
                result.tokens_per_expert,
                self.balancer.bias_range(),
                torch.stack(counts).sum(dim=0),
                self.model.config.top_k,
            )
        return StepPoint(
            self.step,
            loss=sum(applied) / len(applied) if applied else math.nan,
            grad_norm=norms[-1],
            lr=self.schedule.learning_rate(self.step - 1),
            tokens=tokens,
            num_padding=tokens - int(sum(window.read("unpadded_tokens"))),
            seconds=seconds,
            slowest_s=self.timer.read_slowest(),
            largest={
                "loss/train_max": find_largest(losses, self.step),
                "grad_norm_max": find_largest(norms, self.step),
            },
            phases=phases,
            ranks=gather_ranks(phases, self.device),
            group_norms=group_norms if len(group_norms) > 1 else {},
            moe=moe,
            extra=self._extra_metrics(result),
        )

    def _extra_metrics(self, result: StepResult) -> dict[str, float]:
        """Return the metrics of this run in addition to the loss, for the log. Synchronizes."""
        found = dict(zip(self.objective.metric_names, result.metrics.tolist(), strict=True))
        if self.job.training.on_nonfinite == "skip":
            found["nonfinite_steps"] = float(self.finite_guard.total)
        if self.job.moe.aux_loss_coeff or self.job.moe.z_loss_coeff:
            found["loss/aux"] = result.aux_loss.item()
        return found
