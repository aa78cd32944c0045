"""The training loop. `assemble.py` builds the parts of the trainer; `train_step.py` is one step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import DataError
from titanlite.base.events import record_event
from titanlite.base.log import logger
from titanlite.checkpoint import Progress
from titanlite.checkpoint.description import describe_versions
from titanlite.checkpoint.manager import Checkpointer
from titanlite.data.dataset import Batch
from titanlite.data.loader import TrainLoader
from titanlite.distributed.fsdp import forward_only
from titanlite.launch.protocol import beat, is_stop_requested
from titanlite.materialize import Plan
from titanlite.metrics import profiling
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import EvaluationResult, Results, Window, build_point
from titanlite.metrics.run_folder import get_identity
from titanlite.models.interface import Model
from titanlite.optim.optimizer import Diagnosis, evaluation_weights
from titanlite.run import Run
from titanlite.train_step import TrainStep


class Evaluator(Protocol):
    """Evaluation of the model on the answers that it generates; `run` is collective."""

    def is_due(self, step: int, last: bool) -> bool: ...
    def run(self, model: Model) -> EvaluationResult: ...


@dataclass(frozen=True)
class Parts:
    """The parts of a run that `assemble` has built."""

    run: Run
    loader: TrainLoader
    plan: Plan
    stepper: TrainStep  # runs the steps; owns the model, the optimizer and the objective
    checkpointer: Checkpointer
    results: Results


@dataclass(frozen=True)
class Watch:
    """Optional observers of a run while it trains.

    Attributes:
        diagnose: called with (micro-batches, function that returns the scaled loss of one).
            Collective.
        report_unreached: called with (model, names, step) after the first step, if trained
            parameters got no gradient.
    """

    evaluator: Evaluator | None = None
    diagnose: Callable[[Sequence[Batch], Callable[[Batch], torch.Tensor]], Diagnosis] = lambda *_: (
        Diagnosis("Its origin was not searched.", repeats=True)
    )
    report_unreached: Callable[[Model, Sequence[str], int], None] = lambda *_: None


@dataclass(frozen=True)
class Closing:
    """Optional actions at the end of a run, and the README.md of its checkpoints.

    Attributes:
        render_card: returns the README.md of a checkpoint, from `progress` and `results`.
        say_end: logs and records how the run ended.
        push_to_hub: called with (folder, repository) on rank 0.
    """

    render_card: Callable[..., str] = lambda **_: ""
    say_end: Callable[["Trainer"], None] = lambda _: None
    push_to_hub: Callable[[Path, str], None] = lambda *_: None


@dataclass
class Trainer:
    """Training loop of one rank, built by `assemble`."""

    parts: Parts
    metrics: MetricsLogger
    watch: Watch = Watch()
    closing: Closing = Closing()
    stopping: bool = False  # the run was asked to end early
    loss: float | None = None  # loss of the last step that was logged

    @property
    def step(self) -> int:
        """Number of optimizer steps completed."""
        return self.parts.stepper.step

    @property
    def model(self) -> Model:
        return self.parts.stepper.model

    def train(self) -> None:
        """Run the configured steps, and save checkpoints in between and at the end.

        Collective: every rank must call. SIGTERM or SIGINT ends training early, after a step, with
        a checkpoint.
        """
        job = self.parts.run.job
        stepper = self.parts.stepper
        checkpointer = self.parts.checkpointer
        with (
            checkpointer,
            self.metrics,
            profiling(job.profiling, self.parts.run.folder) as end_step,
        ):
            self.stopping = checkpointer.agree(is_stop_requested())  # a signal while loading
            if self.step == 0 and not self.stopping:
                self.assess(last=False)  # the model before training
            stepper.measures_backwards = self.metrics.reads_backwards
            window = Window()
            while self.step < job.training.steps and not (
                self.stopping or self.parts.results.out_of_patience
            ):
                stepper.enter("data")
                micro_batches = self.micro_batches(self.step)
                is_first = stepper.unreached is None
                last = self.step + 1 == job.training.steps
                is_logged = (self.step + 1) % job.metrics.log_freq == 0 or self.step == 0 or last
                stepper.is_logged = is_logged
                window.results.append(stepper.train_step(micro_batches))
                if is_first and stepper.unreached:
                    self.watch.report_unreached(self.model, stepper.unreached, self.step)
                stepper.timer.start("other")
                end_step(self.step)
                self.metrics.advance(self.step)

                if is_logged:
                    self.check_finite()  # synchronization point: the device has finished this step
                    self.log_step(window)
                    window = Window()
                stepper.timer.start(None)
                pause = time.perf_counter()
                is_best = self.assess(last=last)
                self.stopping = checkpointer.agree(is_stop_requested())
                if checkpointer.is_due(self.step) or is_best:
                    self.save()
                window.start += time.perf_counter() - pause  # pauses do not count as training time
        self.finish()

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's batches of optimizer step `step` (0-based), on its device."""
        device = self.parts.run.device
        return [batch.to(device) for batch in self.parts.loader.micro_batches(step)]

    def log_step(self, window: Window) -> None:
        """Log the steps of `window`. Collective: every rank must call."""
        run = self.parts.run
        stepper = self.parts.stepper
        self.loss = window.results[-1].loss.item()
        point = build_point(
            run.job,
            window,
            stepper.timer,
            self.step,
            lr=stepper.schedule.learning_rate(self.step - 1),
            device=run.device,
            groups=list(stepper.grad_groups),
            metric_names=stepper.objective.metric_names,
            bias_range=stepper.balancer.bias_range(),
            top_k=self.model.config.top_k,
            nonfinite_steps=stepper.finite_guard.total,
        )
        self.metrics.log_step(point)

    def validate(self) -> tuple[float, dict[str, float]]:
        """Return the mean held-out loss, weighted by the sources' shares, and the loss of each
        source.

        Raises DataError, on all ranks: a source has no tokens to predict. Collective: every rank
        must call.
        """
        run = self.parts.run
        stepper = self.parts.stepper
        objective = stepper.objective
        losses: dict[str, float] = {}
        loss_of_all, units_of_all = torch.zeros(2, dtype=torch.float64, device=run.device)
        with evaluation_weights(stepper.optimizer), forward_only(self.model):
            for source, weight, batches in self.parts.loader.validation_sets(
                run.job.validation.steps
            ):
                loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
                units = torch.zeros((), dtype=torch.int64, device=run.device)
                for batch in (batch.to(run.device) for batch in batches):
                    losses_of_batch = objective(self.model, batch)
                    beat("validation")
                    loss_sum += stepper.local_sums(losses_of_batch)[0]
                    units += objective.count(batch)
                loss_sum = stepper.sum_over_data(loss_sum, in_stages=True)
                units = stepper.sum_over_data(units)
                if not units.item():
                    raise DataError(
                        f"validation: the held-out sequences{f' of {source}' if source else ''} "
                        "have no label. Hold out other data, or set validation.enable = false."
                    )
                losses[source] = (loss_sum / units).item()
                loss_of_all += weight * loss_sum
                units_of_all += weight * units
        return (loss_of_all / units_of_all).item(), losses

    def assess(self, *, last: bool) -> bool:
        """Validate and evaluate if this step is due (step 0 is); return True if this step is the
        best so far.

        Collective: every rank must call.
        """
        validation = self.parts.run.job.validation
        results = self.parts.results
        evaluator = self.watch.evaluator
        is_best = False
        if validation.enable and (self.step % validation.freq == 0 or last):
            self.check_finite()
            loss, losses = self.validate()
            # Bit-identical on all ranks, because it decides when to stop and which checkpoint to
            # keep.
            loss = on_first_rank(lambda: loss)
            self.metrics.log_validation(self.step, loss, losses if len(losses) > 1 else {})
            is_best = results.add_validation(self.step, loss, self.parts.loader.mixture)
        if evaluator is not None and evaluator.is_due(self.step, last or results.out_of_patience):
            self.check_finite()
            beat("evaluation")
            with evaluation_weights(self.parts.stepper.optimizer):
                result = evaluator.run(self.model)
            values = {
                f"eval/{result.name}": result.score,
                "eval/ended": result.ended,
                "eval/seconds": result.seconds,
            }
            self.metrics.log_evaluation(
                self.step, values, [asdict(example) for example in result.examples]
            )
            is_best |= results.add_evaluation(self.step, result.name, result.score)
        return is_best

    def check_finite(self) -> None:
        """Diagnose a non-finite loss or gradient since the last check; end the run unless the step
        may be skipped.

        Before the run ends, the state before the first such step is saved. Synchronizes.
        Collective: every rank must call.
        """
        stepper = self.parts.stepper
        loader = self.parts.loader
        checkpointer = self.parts.checkpointer
        found = stepper.finite_guard.look()
        if found is None:
            return
        beat("diagnosing")
        step = found.first if found.fatal else found.first_new
        batches = self.micro_batches(step - 1)
        units, num_tokens = stepper.count_units(batches)
        stepper.begin(step - 1)
        diagnosis = self.watch.diagnose(
            batches,
            lambda batch: stepper.scaled_loss(
                stepper.objective(stepper.model, batch), units, num_tokens
            ),
        )
        if not found.fatal:
            if dist.get_rank() == 0:
                logger.warning("training: %s", diagnosis.describe_skipped(found))
            record_event("skip", diagnosis.describe_skipped(found), self.step)
            return
        stepper.step = found.first - 1  # later steps applied no update
        saved = ""
        if self.step > 0 and self.parts.run.job.checkpoint.enable:
            self.save()
            checkpointer.wait()
            saved = ", not saved"
            if checkpointer.has_saved(self.step):
                saved = f", saved in {checkpointer.folder}"
        raise diagnosis.to_error(found, saved, loader.samples_before(self.step))

    def save(self) -> None:
        """Save a checkpoint of this step, unless it was saved already. Collective: every rank must
        call.
        """
        self.check_finite()
        beat("saving")
        parts = self.parts
        job = parts.run.job
        progress = Progress(
            step=self.step,
            samples=parts.loader.samples_before(self.step),
            data=parts.loader.fingerprint,
            world_size=dist.get_world_size(),
            versions=describe_versions(),
            results=parts.results.state(),
            taken=parts.loader.get_taken(self.step),
            chat_date=job.data.chat_date,
            identity=get_identity(job),
        )
        card = partial(self.closing.render_card, progress=progress, results=parts.results)
        optimizer = parts.stepper.optimizer
        with evaluation_weights(optimizer):
            parts.checkpointer.save(parts.plan, optimizer, progress, card)

    def finish(self) -> None:
        """Save, log how the run ended, and upload the model. Collective: every rank must call."""
        if self.step > 0 or not self.stopping:  # otherwise no step was trained
            self.save()
            self.parts.checkpointer.finish()
        beat("finishing")
        self.closing.say_end(self)
        repository = self.parts.run.job.checkpoint.push_to_hub
        if repository and not self.stopping and dist.get_rank() == 0:
            # No collective after this call.
            folder = self.parts.checkpointer.final_folder(self.step)
            self.closing.push_to_hub(folder, repository)
