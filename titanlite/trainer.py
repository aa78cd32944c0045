"""The training loop. `assemble.py` builds the parts of the trainer; one step is `train_step.py`."""

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
from titanlite.base.files import FolderLock
from titanlite.base.log import logger
from titanlite.checkpoint import Progress
from titanlite.checkpoint.description import describe_versions
from titanlite.checkpoint.manager import Checkpointer
from titanlite.config import JobConfig
from titanlite.data.dataset import Batch
from titanlite.data.loader import TrainLoader
from titanlite.launch.protocol import beat, is_stop_requested
from titanlite.materialize import Plan
from titanlite.metrics import profiling
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import EvaluationResult, Results, Window
from titanlite.metrics.run_folder import get_identity
from titanlite.models.interface import Model
from titanlite.optim import lr_factor
from titanlite.optim.optimizer import Diagnosis, describe_unreached
from titanlite.train_step import TrainStep


class Evaluator(Protocol):
    """Evaluation of the model by what it generates; `run` is collective."""

    def is_due(self, step: int, last: bool) -> bool: ...
    def run(self, model: Model) -> EvaluationResult: ...


@dataclass
class Trainer:
    """Training loop of one rank, built by `assemble`. `evaluator` and the fields after it are
    optional.
    """

    job: JobConfig
    device: torch.device
    dump_folder: Path
    locks: list[FolderLock | None]  # of the run's folders, held as long as the trainer lives
    loader: TrainLoader
    checkpointer: Checkpointer
    plan: Plan
    stepper: TrainStep  # runs the steps; owns the model, the optimizer and the objective
    metrics: MetricsLogger
    results: Results
    evaluator: Evaluator | None = None
    # Called with (micro-batches, scaled loss of one). Collective.
    diagnose: Callable[[Sequence[Batch], Callable[[Batch], torch.Tensor]], Diagnosis] = lambda *_: (
        Diagnosis("Its origin was not searched.", repeats=True)
    )
    # renders a README.md from `progress` and `results`
    render_card: Callable[..., str] = lambda **_: ""
    # corrects the number of trained parameters, on rank 0
    record_trained: Callable[[int], None] = lambda *_: None
    # called with (folder, repository) on rank 0
    push_to_hub: Callable[[Path, str], None] = lambda *_: None
    stopping: bool = False  # the run was asked to end early
    loss: float | None = None  # of the last step that was logged

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.stepper.step

    @property
    def model(self) -> Model:
        return self.stepper.model

    def train(self) -> None:
        """Run the configured steps, and save on the way and at the end.

        Collective: every rank must call. SIGTERM or SIGINT end it early, after a step, with a
        checkpoint.
        """
        job = self.job
        with (
            self.checkpointer,
            self.metrics,
            profiling(job.profiling, self.dump_folder) as end_step,
        ):
            self.stopping = self.checkpointer.agree(is_stop_requested())  # asked while loading
            if self.step == 0 and not self.stopping:
                self.assess(last=False)  # the model before training
            window = Window()
            while self.step < job.training.steps and not (
                self.stopping or self.results.out_of_patience
            ):
                self.stepper.enter("data")
                micro_batches = [
                    batch.to(self.device) for batch in self.loader.micro_batches(self.step)
                ]
                logged_lr = job.optimizer.lr * lr_factor(
                    self.step, job.training.steps, job.lr_scheduler
                )
                is_first = self.stepper.unreached is None
                window.results.append(self.stepper.train_step(micro_batches))
                if is_first and self.stepper.unreached:
                    self.report_unreached(self.stepper.unreached)
                self.stepper.timer.start("other")
                end_step(self.step)
                self.metrics.advance(self.step)

                last = self.step == job.training.steps
                if self.step % job.metrics.log_freq == 0 or self.step == 1 or last:
                    self.check_finite()  # synchronization point: the device has finished this step
                    losses = window.read("loss")
                    self.loss = losses[-1]
                    self.metrics.log_step(self.stepper.build_point(window, losses, logged_lr))
                    window = Window()
                self.stepper.timer.start(None)
                pause = time.perf_counter()
                is_best = self.assess(last=last)
                self.stopping = self.checkpointer.agree(is_stop_requested())
                if self.checkpointer.is_due(self.step) or is_best:
                    self.save()
                window.start += time.perf_counter() - pause  # pauses do not count as training time
        self.finish()

    def report_unreached(self, names: Sequence[str]) -> None:
        """Warn of the parameters `names`, which have no gradient, and do not count them as trained
        any more.
        """
        if dist.get_rank() == 0:
            text, trained = describe_unreached(self.model, names)
            logger.warning("%s", text)
            record_event("unreached", text, self.step)
            self.record_trained(trained)

    @torch.no_grad()
    def validate(self) -> tuple[float, dict[str, float]]:
        """Return the mean held-out loss, with sources weighted by their shares, and the loss of
        each source.

        Raises DataError: on all ranks; a source has nothing to predict. Collective: every rank must
        call.
        """
        self.model.eval()
        objective, losses = self.stepper.objective, dict[str, float]()
        loss_of_all, units_of_all = torch.zeros(2, dtype=torch.float64, device=self.device)
        for source, weight, batches in self.loader.validation_sets(self.job.validation.steps):
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            units = torch.zeros((), dtype=torch.int64, device=self.device)
            for batch in (batch.to(self.device) for batch in batches):
                losses_of_batch = objective(self.model, batch)
                beat("validation")
                loss_sum += self.stepper.local_sums(losses_of_batch)[0]
                units += objective.count(batch)
            loss_sum, units = (
                self.stepper.sum_over_data(loss_sum, in_stages=True),
                self.stepper.sum_over_data(units),
            )
            if not units.item():
                raise DataError(
                    f"validation: the held-out sequences{f' of {source}' if source else ''} have "
                    "no label. Hold out other data, or set validation.enable = false."
                )
            losses[source] = (loss_sum / units).item()
            loss_of_all += weight * loss_sum
            units_of_all += weight * units
        self.model.train()
        return (loss_of_all / units_of_all).item(), losses

    def assess(self, *, last: bool) -> bool:
        """Validate and evaluate if due (step 0 is); return True if this step is the best.

        Collective: every rank must call.
        """
        validation, is_best = self.job.validation, False
        if validation.enable and (self.step % validation.freq == 0 or last):
            self.check_finite()
            loss, losses = self.validate()
            # bit-identical on all ranks: it decides when to stop and what to keep
            loss = on_first_rank(lambda: loss)
            self.metrics.log_validation(self.step, loss, losses if len(losses) > 1 else {})
            is_best = self.results.add_validation(self.step, loss, self.loader.mixture)
        if self.evaluator is not None and self.evaluator.is_due(
            self.step, last or self.results.out_of_patience
        ):
            self.check_finite()
            beat("evaluation")
            result = self.evaluator.run(self.model)
            values = {
                f"eval/{result.name}": result.score,
                "eval/ended": result.ended,
                "eval/seconds": result.seconds,
            }
            self.metrics.log_evaluation(
                self.step, values, [asdict(example) for example in result.examples]
            )
            is_best |= self.results.add_evaluation(self.step, result.name, result.score)
        return is_best

    def check_finite(self) -> None:
        """Diagnose a non-finite loss or gradient since the last check; end the run unless it may be
        skipped.

        Before the end, save the state before the first such step. Synchronizes; collective: every
        rank must call.
        """
        if (found := self.stepper.finite_guard.look()) is None:
            return
        beat("diagnosing")
        step = found.first if found.fatal else found.first_new
        batches = [batch.to(self.device) for batch in self.loader.micro_batches(step - 1)]
        stepper = self.stepper
        units = stepper.count_units(batches)
        diagnosis = self.diagnose(
            batches,
            lambda batch: stepper.scaled_loss(stepper.objective(stepper.model, batch), *units),
        )
        if not found.fatal:
            if dist.get_rank() == 0:
                logger.warning("training: %s", diagnosis.describe_skipped(found))
            record_event("skip", diagnosis.describe_skipped(found), self.step)
            return
        stepper.step = found.first - 1  # no update was applied since
        saved = ""
        if self.step > 0 and self.job.checkpoint.enable:
            self.save()
            self.checkpointer.wait()
            is_saved = self.checkpointer.has_saved(self.step)
            saved = f", saved in {self.checkpointer.folder}" if is_saved else ", not saved"
        raise diagnosis.to_error(found, saved, self.loader.samples_before(self.step))

    def save(self) -> None:
        """Save a checkpoint of this step, unless it was saved already. Collective: every rank must
        call.
        """
        self.check_finite()
        beat("saving")
        progress = Progress(
            step=self.step,
            samples=self.loader.samples_before(self.step),
            data=self.loader.fingerprint,
            world_size=dist.get_world_size(),
            versions=describe_versions(),
            results=self.results.state(),
            taken=self.loader.get_taken(self.step),
            chat_date=self.job.data.chat_date,
            identity=get_identity(self.job),
        )
        card = partial(self.render_card, progress=progress, results=self.results)
        self.checkpointer.save(self.model, self.plan, self.stepper.optimizer, progress, card)

    def finish(self) -> None:
        """Save, log how the run ended, and upload. Collective: every rank must call."""
        job = self.job
        if self.step > 0 or not self.stopping:  # otherwise stopped before the first step
            self.save()
            self.checkpointer.finish()
        beat("finishing")
        if self.stopping and self.step == 0:
            logger.info("stopped before the first step of %d", job.training.steps)
            return
        if self.stopping:
            resume = f"saved; the same command resumes from {self.checkpointer.folder}"
            saved = resume if job.checkpoint.enable else "lost"
            logger.info("stopped after step %d of %d, %s", self.step, job.training.steps, saved)
            record_event(
                "stop",
                f"stopped after step {self.step} of {job.training.steps}, {saved}",
                self.step,
            )
            return
        record_event("end", f"ended after step {self.step} of {job.training.steps}", self.step)
        if self.results.out_of_patience:
            logger.info(
                "early stopping after step %d of %d: %s",
                self.step,
                job.training.steps,
                self.results.describe(),
            )
        elif (
            self.checkpointer.start is not None
            and self.step == self.checkpointer.start.progress.step
        ):
            logger.info(
                "nothing left to train: the checkpoint is of step %d of %d. Raise training.%s to "
                "train on, or set another job.dump_folder to start a new run.",
                *(self.step, job.training.steps, "epochs" if job.training.epochs else "steps"),
            )
        if job.checkpoint.push_to_hub and dist.get_rank() == 0:
            # No collective after it.
            self.push_to_hub(self.checkpointer.final_folder(self.step), job.checkpoint.push_to_hub)
