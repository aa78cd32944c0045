"""The trainer: the build order, and the loop. Read it from top to bottom; one step is `train_step.py`.

config -> mesh -> build (meta) -> parallelize (meta) -> plan -> allocate -> fill -> verify -> optimizer -> train
"""

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import DataError
from titanlite.base.log import logger
from titanlite.checkpoint import Progress
from titanlite.checkpoint.commit import step_folder
from titanlite.checkpoint.description import (
    check_data_order,
    check_resumed_model,
    check_saved_tokenizer,
    describe_versions,
)
from titanlite.checkpoint.hf_model import check_layout
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.space import check_space
from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.data.build import build_data
from titanlite.data.dataset import Batch
from titanlite.data.run_length import describe_sources, resolve_steps
from titanlite.data.tokenizer import check_vocabulary, count_ids
from titanlite.distributed import ParallelDims
from titanlite.distributed.collectives import all_reduce_sum, all_to_all_single
from titanlite.distributed.device import check_device
from titanlite.distributed.process_group import init_distributed
from titanlite.features.diagnose import (
    DivergenceCheck,
    SpikeDetector,
    diagnose,
    make_deterministic,
    nonfinite_error,
    report_spike,
    say_skipped,
)
from titanlite.features.generate.evaluate import build_evaluator
from titanlite.features.generate.generate import generate_sample, get_end_of_turn_ids
from titanlite.features.pipeline.schedule import describe_pipeline
from titanlite.features.record.environment import save_environment
from titanlite.features.record.hub import push_to_hub
from titanlite.features.record.model_card import render_model_card
from titanlite.features.record.plan_file import save_run_plan
from titanlite.features.sft.chat_template import resolve_chat_date
from titanlite.launch import heartbeat, stop
from titanlite.launch.machines import check_same_settings, check_shared_folder, waiting_for_machines
from titanlite.materialize import Plan, SourceProvider, materialize
from titanlite.materialize.layout import num_values
from titanlite.metrics import build_profiler, record_event, start_memory_history
from titanlite.metrics.flops import train_flops_per_token
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.results import Results
from titanlite.metrics.run_folder import hold_folders, make_dump_folder, record_start
from titanlite.models.interface import Model
from titanlite.objectives.build import build_objective
from titanlite.optim import lr_factor
from titanlite.optim.optimizer import build_optimizer
from titanlite.optim.parameters import count_parameters, muon_matrices
from titanlite.run_setup import build_on_meta, warn_of_settings
from titanlite.train_step import TrainStep, Window

_SAMPLE_TOKENS = 48


class Trainer(TrainStep):
    """Builds everything from a checked configuration and trains. Every rank makes one and calls `train`."""

    def __init__(self, job: JobConfig, model_config: AnyModelConfig, degrees: Degrees) -> None:
        self.job = job
        self.dump_folder = Path(job.job.dump_folder)
        heartbeat.beat("loading", 0)
        make_deterministic(job)

        if job.job.description:
            logger.info("job: %s", job.job.description)
        self.device = init_distributed(job.comm.timeout_seconds, self.dump_folder)
        check_same_settings(job)
        self.locks = hold_folders(job, self.dump_folder)  # before anything there is read or cleaned
        check_device(job, self.device)
        start_memory_history(job, self.device)
        self.dims = ParallelDims.build(degrees, self.device.type)
        logger.info("mesh: %s, %d ranks on %s", degrees, degrees.world_size, self.device.type)

        job = resolve_chat_date(job)
        with waiting_for_machines():  # each rank reads files by itself: no collective in here
            self.tokenizer, self.loader = build_data(job, self.dims.dp_rank, degrees.dp)
            self.job = job = resolve_steps(job, self.loader)
            describe_pipeline(self.loader, model_config, degrees)
            check_vocabulary(job, self.loader.dataset.vocab_size, count_ids(self.tokenizer), model_config)
            warn_of_settings(job, model_config, self.device)
        changes = make_dump_folder(job, self.dump_folder)
        check_shared_folder(self.dump_folder)

        # Finds what to resume, if anything.
        self.checkpointer = Checkpointer(job, self.dump_folder, record_event, all_reduce_sum)
        start = self.checkpointer.start
        self.step = 0 if start is None else start.step
        if start is not None:
            check_resumed_model(model_config, step_folder(self.checkpointer.folder, start.step))
        is_new = start is None and not job.checkpoint.initial_load_path
        check_saved_tokenizer(job, model_config, self.tokenizer, self.loader, is_new)
        heartbeat.beat("loading", self.step)

        torch.manual_seed(job.training.seed + self.dims.dropout_rank)  # ranks with other tokens drop other elements
        # Of a checkpoint, or the modules' own: random.
        self.model, self.plan = self.build(model_config)
        optimizer = build_optimizer(self.model, job.optimizer, all_to_all_single, self.dims.stage_group)
        self.checkpointer.load_state(self.plan, optimizer, self.device)
        objective = build_objective(job, self.loader.dataset.form)
        super().__init__(job, self.dims, self.device, self.model, optimizer, objective, self.step)
        skip_to = job.data.skip_to_sample
        if start is not None:
            self.loader.start_from(start.step, start.samples, max(skip_to, start.skip_to), start.taken)
            check_data_order(start, self.loader)
        else:
            self.loader.start_from(0, 0, skip_to)
        describe_sources(job, self.loader, self.step)
        self.results = Results(job, None if start is None else start.results)
        self.evaluator = build_evaluator(job, self.loader.dataset, self.tokenizer, model_config, self.dims, self.device)
        self.divergence = DivergenceCheck(job, self.plan, self.optimizer, self.dims, self.step)
        self.spikes = SpikeDetector(job.spike)
        self.stopping = False

        self.metrics = MetricsLogger(
            job,
            self.dump_folder,
            train_flops_per_token(self.model.config, job.training.seq_len, self.model),
            degrees.world_size,
            self.device,
            start_step=self.step,
            moe_layers=self.model.moe_layer_numbers(),
            stage_size=degrees.stage_size,
        )
        total, trained = count_parameters(self.model)
        logger.info(
            "model: %s, %.1f M parameters%s, %.1f MiB of weights on this rank",
            *(model_config.family, total / 1e6, "" if trained == total else f", {trained / 1e6:.3f} M of them trained"),
            self.plan.local_bytes / 2**20,
        )
        matrices = muon_matrices(self.model, job.optimizer)
        save_run_plan(self.plan, matrices, self.dump_folder)
        check_space(job, self.plan, matrices, self.checkpointer.folder, self.step)
        facts = {"model": model_config.family, "parameters": total, "trained": trained, "mesh": str(degrees)}
        self.metrics.log_environment(save_environment(self.dump_folder, self.device, facts))
        where = f"{degrees.world_size} ranks on {self.device.type}, {degrees}"
        record_start(self.dump_folder, self.step, where, resumed=start is not None, changes=changes)
        self.objective.prepare(self.coming_batches(), self.initial_model, self.device)

    def build(self, model_config: AnyModelConfig) -> tuple[Model, Plan]:
        """The sharded model to train, and its plan, once it is known that it can be saved. Collective."""
        model = build_on_meta(self.job, model_config, self.dims, self.device)
        dataset = self.loader.dataset
        ends = [] if dataset.form == "text" else get_end_of_turn_ids(self.tokenizer, dataset)
        self.checkpointer.prepare(model, self.tokenizer, ends)
        plan = self.fill(model, self.checkpointer.weight_sources(model))
        check_layout(self.job, plan)
        return model, plan

    def fill(self, model: Model, sources: list[SourceProvider]) -> Plan:
        """Give the sharded `model` its values, every tensor once; the plan. Collective: every rank must call."""
        device = torch.device("cpu") if self.job.training.enable_cpu_offload else self.device
        return materialize(model, device, sources, seed=self.job.training.seed, buffer_device=self.device)

    def initial_model(self) -> Model:
        """A model with the weights that this run began with. Collective: every rank must call."""
        if self.step == 0:
            return self.model
        model = build_on_meta(self.job, self.model.config, self.dims, self.device)
        self.fill(model, self.checkpointer.initial_sources(model))
        return model

    def coming_batches(self) -> Iterator[Batch]:
        """Every micro-batch that this rank will train or validate on, on the host."""
        for step in range(self.step, self.job.training.steps):
            yield from self.loader.micro_batches(step)
        if self.job.validation.enable:
            yield from self.loader.validation_batches(self.job.validation.steps)

    def train(self) -> None:
        """Run the configured steps, save on the way and at the end, and show a sample.

        Collective: every rank must call. SIGTERM or SIGINT end it early, after a step, with a checkpoint.
        """
        job = self.job
        with self.checkpointer, self.metrics, build_profiler(job, self.dump_folder) as profiler:
            self.stopping = self.checkpointer.agree(stop.is_requested())  # while everything was loaded
            if self.step == 0 and not self.stopping:
                self.assess(last=False)  # what the model could do before
            window = Window()
            while self.step < job.training.steps and not (self.stopping or self.results.exhausted):
                self.enter("data")
                micro_batches = [batch.to(self.device) for batch in self.loader.micro_batches(self.step)]
                learning_rate = job.optimizer.lr * lr_factor(self.step, job.training.steps, job.lr_scheduler)
                result = self.train_step(micro_batches)
                self.timer.start("other")
                window.add(result)
                profiler.step(self.step)

                last = self.step == job.training.steps
                if self.step % job.metrics.log_freq == 0 or self.step == 1 or last:
                    self.raise_if_not_finite()  # synchronization point: the device has finished this step
                    losses = window.loss_values()
                    self.metrics.log_step(self.describe(result, window, losses, learning_rate))
                    if spike := self.spikes.add(self.step, losses):
                        report_spike(spike, self.checkpointer.folder, self.step, self.loader.samples_before(self.step))
                    window = Window()
                self.timer.start(None)
                pause = time.perf_counter()
                if self.divergence.is_due(self.step):
                    samples = self.loader.samples_before(self.step)
                    self.divergence.check(self.step, self.loader.fingerprint, samples, micro_batches)
                is_best = self.assess(last=last)
                self.stopping = self.checkpointer.agree(stop.is_requested())
                if self.checkpointer.is_due(self.step) or is_best:
                    self.save()
                window.start += time.perf_counter() - pause  # no training time
        self.finish()

    @torch.no_grad()
    def validate(self) -> tuple[float, dict[str, float]]:
        """Mean loss over the held-out sequences of all sources, as in training by their shares; and of each.

        Collective: every rank must call.

        Raises:
            DataError: on all ranks; a source's sequences have nothing to predict.
        """
        self.model.eval()
        losses: dict[str, float] = {}
        loss_of_all, units_of_all = torch.zeros(2, dtype=torch.float64, device=self.device)
        for source, weight, batches in self.loader.validation_sets(self.job.validation.steps):
            loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
            units = torch.zeros((), dtype=torch.int64, device=self.device)
            for batch, chunk, of_batch in self.run_forwards(batches):
                heartbeat.beat("validation")
                loss_sum += self.sums_here(of_batch, chunk)[0]
                units += self.objective.count(batch) if chunk == 0 else 0
            loss_sum, units = self.sum_over_data(loss_sum, in_stages=True), self.sum_over_data(units)
            if not units.item():
                raise DataError(
                    f"validation: the held-out sequences{f' of {source}' if source else ''} have no label. Hold out "
                    "other data, or set validation.enable = false."
                )
            losses[source] = (loss_sum / units).item()
            loss_of_all += weight * loss_sum
            units_of_all += weight * units
        self.model.train()
        return (loss_of_all / units_of_all).item(), losses

    def assess(self, *, last: bool) -> bool:
        """Validate and evaluate where that is due, as it is at step 0; True if this step is the best.

        Collective: every rank must call.
        """
        validation, is_best = self.job.validation, False
        if validation.enable and (self.step % validation.freq == 0 or last):
            self.raise_if_not_finite()
            loss, losses = self.validate()
            loss = on_first_rank(lambda: loss)  # decides when to stop and what to keep: to the last bit on all ranks
            self.metrics.log_validation(self.step, loss, losses if len(losses) > 1 else {})
            is_best = self.results.add_validation(self.step, loss, self.loader.mixture)
        if self.evaluator is not None and self.evaluator.is_due(self.step, last or self.results.exhausted):
            is_best |= self.evaluate()
        return is_best

    def evaluate(self) -> bool:
        """Evaluate by generation, if so configured; True if this step is the best. Collective: every rank must call."""
        if self.evaluator is None:
            return False
        self.raise_if_not_finite()
        heartbeat.beat("evaluation")
        result = self.evaluator.run(self.model)
        values = {f"eval/{result.name}": result.score, "eval/ended": result.ended, "eval/seconds": result.seconds}
        self.metrics.log_evaluation(self.step, values, [asdict(example) for example in result.examples])
        return self.results.add_evaluation(self.step, result.name, result.score)

    def raise_if_not_finite(self) -> None:
        """Say where a loss or gradient since the last look was not finite; end the run if it may not go on.

        The state of before the first such step is saved first. Synchronizes; collective: every rank must call.
        """
        found = self.finite_guard.look()
        if found is None:
            return
        heartbeat.beat("diagnosing")
        step = found.first if found.fatal else found.first_new
        batches = [batch.to(self.device) for batch in self.loader.micro_batches(step - 1)]
        units = self.count_units(batches)
        diagnosis = diagnose(
            self.model,
            batches,
            lambda batch: self.scaled_loss(self.objective(self.model, batch), *units),
            found,
            whole_layers=self.job.compile.enable,
            stage=self.dims.stage,
        )
        if not found.fatal:
            say_skipped(found, diagnosis, self.step)
            return
        self.step = found.first - 1  # nothing was applied since
        saved = ""
        if self.step > 0 and self.job.checkpoint.enable:
            self.save()
            self.checkpointer.wait()
            saved = (
                f", saved in {self.checkpointer.folder}" if self.checkpointer.has_saved(self.step) else ", not saved"
            )
        raise nonfinite_error(found, diagnosis, saved, self.loader.samples_before(self.step))

    def save(self) -> None:
        """Save a checkpoint of this step, unless it was saved already. Collective: every rank must call."""
        self.raise_if_not_finite()
        heartbeat.beat("saving")
        progress = Progress(
            step=self.step,
            samples=self.loader.samples_before(self.step),
            data=self.loader.fingerprint,
            world_size=dist.get_world_size(),
            versions=describe_versions(),
            results=self.results.state(),
            taken=self.loader.get_taken(self.step),
            chat_date=self.job.data.chat_date,
        )
        count, about = sum(map(num_values, self.model.parameters())), {"progress": progress, "results": self.results}
        card = partial(render_model_card, self.job, family=self.model.config.family, num_parameters=count, **about)
        self.checkpointer.save(self.model, self.plan, self.optimizer, progress, self.device, card)

    def finish(self) -> None:
        """Save, show a sample, say where everything is, and upload. Collective: every rank must call."""
        job = self.job
        if self.step > 0 or not self.stopping:  # asked to stop before anything was trained
            self.checkpointer.save_last(self.save)
        heartbeat.beat("finishing")
        if self.stopping and self.step == 0:
            logger.info("stopped before the first step of %d", job.training.steps)
            return
        if self.stopping:
            saved = (
                f"saved; the same command resumes from {self.checkpointer.folder}" if job.checkpoint.enable else "lost"
            )
            logger.info("stopped after step %d of %d, %s", self.step, job.training.steps, saved)
            record_event("stop", f"stopped after step {self.step} of {job.training.steps}, {saved}", self.step)
            return
        record_event("end", f"ended after step {self.step} of {job.training.steps}", self.step)
        if self.results.exhausted:
            logger.info(
                "early stopping after step %d of %d: %s", self.step, job.training.steps, self.results.describe()
            )
        elif self.checkpointer.start is not None and self.step == self.checkpointer.start.step:
            logger.info(
                "nothing left to train: the checkpoint is of step %d, training.steps is %d. Raise training.steps to "
                "train on, or set another job.dump_folder to begin anew.",
                *(self.step, job.training.steps),
            )
        if job.data.dataset in ("stdlib", "text"):  # what a fine-tuned model can do, evaluations show
            sample = generate_sample(
                self.model,
                self.tokenizer,
                prompt="def __init__(self" if job.data.dataset == "stdlib" else "The",
                max_new_tokens=_SAMPLE_TOKENS,
                device=self.device,
                dims=self.dims,
            )
            logger.info("sample (temperature 0.7):\n\n    %s\n", sample.replace("\n", "\n    "))
        if job.checkpoint.enable:
            folder = self.checkpointer.folder / f"step-{self.step}"
            text = "AutoModelForImageTextToText" if job.data.dataset == "images" else "AutoModelForCausalLM"
            how = "peft: PeftModel" if job.lora.rank else f"transformers: {text}"
            logger.info("checkpoint: %s (%s.from_pretrained)", folder, how)
        if job.metrics.enable_tensorboard:
            logger.info("metrics:    tensorboard --logdir %s", self.dump_folder / job.metrics.save_tb_folder)
        logger.info("report:     python -m titanlite report %s", self.dump_folder)
        if job.checkpoint.push_to_hub and not self.stopping and dist.get_rank() == 0:
            push_to_hub(self.checkpointer.final_folder(self.step), job.checkpoint.push_to_hub)  # no collective after it
