"""The trainer: the build order, and the loop. Read it from top to bottom.

config -> mesh -> build (meta) -> parallelize (meta) -> plan -> allocate -> fill -> verify -> optimizer -> train
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite import stop, timers
from titanlite.checkpoint import Checkpointer, Progress, describe_versions, push_to_hub
from titanlite.config import AnyModelConfig, JobConfig
from titanlite.config.parallelism import Degrees
from titanlite.data import IGNORE_INDEX, Batch, build_data
from titanlite.distributed import (
    ParallelDims,
    base_dtype,
    clip_grad_norms,
    init_distributed,
    parallelize,
    reduce_replicated_grads,
)
from titanlite.environment import save_environment
from titanlite.errors import TrainingError
from titanlite.evaluate import build_evaluator
from titanlite.generate import generate_sample, get_end_of_turn_ids
from titanlite.logger import logger
from titanlite.materialize import Plan, SourceProvider, materialize
from titanlite.materialize.agree import on_first_rank
from titanlite.metrics import (
    MetricsLogger,
    MoEState,
    StepPoint,
    build_profiler,
    gather_ranks,
    get_busy_seconds,
    get_memory,
    group_parameters,
    record_event,
    start_memory_history,
    train_flops_per_token,
)
from titanlite.model_card import render_model_card
from titanlite.models.build import AnyModel, build_model
from titanlite.models.lora import apply_lora
from titanlite.objectives import build_objective
from titanlite.optim import (
    ExpertBiasBalancer,
    build_lr_scheduler,
    build_optimizer,
    count_parameters,
    freeze_parameters,
    lr_factor,
    step_if_finite,
)
from titanlite.results import Results
from titanlite.run_setup import (
    check_data_order,
    check_device,
    check_vocabulary,
    configure,
    get_bias_update_rate,
    make_dump_folder,
)

_SAMPLE_TOKENS = 48


@dataclass
class StepResult:
    """What one optimizer step leaves on the device; reading it synchronizes.

    Attributes:
        loss: mean loss over the global batch's units (tokens with a label, or pairs), float32 scalar.
        grad_norm: gradient norm before clipping, float32 scalar.
        group_norms: the same by group of parameters, float32 (groups,).
        aux_loss: mean of the balance losses over the tokens with a label, float32 scalar; 0 without any.
        tokens: tokens of the global batch, padding included.
        tokens_per_expert: (layers, E) int64 over the global batch, or None for a dense model.
        metrics: means of the objective's metrics, float32 (len(metric_names),).
    """

    loss: torch.Tensor
    aux_loss: torch.Tensor
    grad_norm: torch.Tensor
    group_norms: torch.Tensor
    tokens: int
    tokens_per_expert: torch.Tensor | None
    metrics: torch.Tensor


@dataclass
class Window:
    """What happened since the last log line.

    Attributes:
        start: time in seconds at which it began.
        tokens: tokens of all ranks.
        losses: loss of each step, on the device.
    """

    start: float = field(default_factory=time.perf_counter)
    tokens: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.tokens += result.tokens
        self.losses.append(result.loss)

    def mean_loss(self) -> float:
        """Mean loss of the window's steps. Synchronizes."""
        return torch.stack(self.losses).mean().item()


class Trainer:
    """Builds everything from a checked configuration and trains. Every rank makes one and calls `train`."""

    def __init__(self, job: JobConfig, model_config: AnyModelConfig, degrees: Degrees) -> None:
        self.job = job
        self.dump_folder = Path(job.job.dump_folder)
        if job.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when CUDA starts
            torch.use_deterministic_algorithms(True)

        if job.job.description:
            logger.info("job: %s", job.job.description)
        self.device = init_distributed(job.comm.timeout_seconds, self.dump_folder)
        check_device(job, self.device)
        start_memory_history(job, self.device)
        self.dims = ParallelDims.build(degrees, self.device.type)
        logger.info("mesh: %s, %d ranks on %s", degrees, degrees.world_size, self.device.type)

        self.tokenizer, self.loader = build_data(job, self.dims.dp_rank, degrees.dp)
        check_vocabulary(self.loader.dataset.vocab_size, model_config)
        make_dump_folder(job, self.dump_folder)

        self.checkpointer = Checkpointer(job, self.dump_folder)  # finds what to resume, if anything
        start = self.checkpointer.start
        self.step = 0 if start is None else start.step

        if job.lora.dropout:
            torch.manual_seed(job.training.seed + self.dims.dp_rank)  # ranks with other data drop other elements
        # Of a checkpoint, or the modules' own: random.
        self.model, self.plan = self.build_sharded(model_config, self.checkpointer.weight_sources)
        self.optimizer = build_optimizer(self.model, job.optimizer)
        self.checkpointer.load_state(self.plan, self.optimizer, self.device)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, job.lr_scheduler, job.training.steps, self.step)
        if start is not None:
            check_data_order(start, self.loader)
            self.loader.start_from(start.step, start.samples)
        self.objective = build_objective(job, self.loader.dataset.form)
        self.results = Results(job, None if start is None else start.results)
        self.evaluator = build_evaluator(job, self.loader.dataset, self.tokenizer, model_config, self.dims, self.device)
        self.balancer = ExpertBiasBalancer(self.model, get_bias_update_rate(job, model_config))
        self.has_aux_loss = bool(job.moe.aux_loss_coeff or job.moe.z_loss_coeff)
        self.timer = timers.StepTimer(self.device)
        timers.activate(self.timer)
        self.grad_groups = group_parameters(self.model, whole=not job.metrics.grad_norm_groups)
        self.stopping = False
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)

        self.metrics = MetricsLogger(
            job,
            self.dump_folder,
            train_flops_per_token(self.model.config, job.training.seq_len, frozen=job.lora.rank > 0),
            degrees.world_size,
            self.device,
            start_step=self.step,
            first_moe_layer=model_config.num_dense_layers,
        )
        total, trained = count_parameters(self.model)
        logger.info(
            "model: %s, %.1f M parameters%s, %.1f MiB of weights on this rank",
            *(model_config.family, total / 1e6, "" if trained == total else f", {trained / 1e6:.3f} M of them trained"),
            self.plan.local_bytes / 2**20,
        )
        facts = {"model": model_config.family, "parameters": total, "trained": trained, "mesh": str(degrees)}
        save_environment(self.dump_folder, self.device, facts)
        kind = "start" if start is None else "resume"
        record_event(kind, f"{degrees.world_size} ranks on {self.device.type}, {degrees}", self.step)
        self.objective.prepare(self.coming_batches(), self.initial_model, self.device)

    def build_sharded(
        self, model_config: AnyModelConfig, weight_sources: Callable[[AnyModel], list[SourceProvider]]
    ) -> tuple[AnyModel, Plan]:
        """The sharded model with values from its sources, and its plan. Collective: every rank must call."""
        job = self.job
        model = build_model(model_config, base_dtype(job, self.device.type))  # on meta: shapes only
        apply_lora(model, job.lora, getattr(torch, job.training.dtype))
        freeze_parameters(model, job.optimizer)
        configure(model, job, self.device)
        parallelize(model, job, self.dims, self.device.type)  # still on meta: now shards
        weights_device = torch.device("cpu") if job.training.enable_cpu_offload else self.device
        plan = materialize(  # every tensor written once
            model, weights_device, weight_sources(model), seed=job.training.seed, buffer_device=self.device
        )
        return model, plan

    def initial_model(self) -> AnyModel:
        """A model with the weights that this run began with. Collective: every rank must call."""
        if self.step == 0:
            return self.model
        return self.build_sharded(self.model.config, self.checkpointer.initial_sources)[0]

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
            if self.step == 0:
                self.evaluate()  # what the model could do before
            window = Window()
            while self.step < job.training.steps and not self.stopping and not self.results.exhausted:
                self.timer.start("data")
                micro_batches = [batch.to(self.device) for batch in self.loader.micro_batches(self.step)]
                learning_rate = job.optimizer.lr * lr_factor(self.step, job.training.steps, job.lr_scheduler)
                result = self.train_step(micro_batches)
                window.add(result)
                profiler.step()

                last = self.step == job.training.steps
                if self.step % job.metrics.log_freq == 0 or self.step == 1 or last:
                    self.raise_if_not_finite()  # synchronization point: the device has finished this step
                    self.metrics.log_step(self.describe_step(result, window, learning_rate))
                    window = Window()
                self.timer.start(None)
                pause = time.perf_counter()
                is_best = self.assess(last)
                self.stopping = self.checkpointer.agree(stop.is_requested())
                if self.checkpointer.is_due(self.step) or is_best:
                    self.save()
                window.start += time.perf_counter() - pause  # no training time
        self.finish()

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches. Collective: every rank must call.

        The loss of every micro-batch is divided by the number of units (tokens with a label, or pairs) in the *global*
        batch, so gradients are sums over ranks and micro-batches, whatever the mesh and however unevenly the units are
        spread.
        """
        objective = self.objective
        counts = [torch.stack([objective.count(b), (b.labels != IGNORE_INDEX).sum()]) for b in micro_batches]
        units, valid_tokens = self.sum_over_data(torch.stack(counts).sum(dim=0)).unbind()
        sums = torch.zeros(2 + len(objective.metric_names), device=self.device)
        for batch in micro_batches:
            self.timer.start("forward")
            losses = objective(self.model, batch)
            self.timer.start("backward")
            (losses.loss / units + losses.aux / valid_tokens).backward()
            # tp ranks hold the same losses, but the balance losses of their own positions.
            aux_sum = losses.aux * self.dims.degrees.tp
            sums += torch.cat([torch.stack([losses.loss, aux_sum]).detach(), losses.metrics])
            self.balancer.accumulate()

        self.timer.start("optimizer")
        reduce_replicated_grads(self.model.parameters(), self.dims.tp_mesh)
        grad_norm, group_norms = clip_grad_norms(self.grad_groups, self.job.training.max_norm)
        finite = grad_norm.isfinite()  # the norm is global, and a loss that is not finite has no finite gradient
        step_if_finite(self.optimizer, finite)
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        tokens_per_expert = self.balancer.step(finite)
        self.step += 1
        bad = ~finite.to(self.device) & (self.first_bad_step < 0)
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)

        tokens = sum(batch.tokens.numel() for batch in micro_batches) * self.dims.degrees.dp
        sums = self.sum_over_data(sums)
        means = sums / units
        aux_loss = sums[1] / valid_tokens
        return StepResult(means[0], aux_loss, grad_norm, group_norms, tokens, tokens_per_expert, means[2:])

    def describe_step(self, result: StepResult, window: Window, learning_rate: float) -> StepPoint:
        """The point of this log step, with what every rank measured. Collective: every rank must call. Synchronizes."""
        self.timer.start(None)
        seconds, phases = time.perf_counter() - window.start, self.timer.read()
        busy = {"busy_s": get_busy_seconds(phases), "data_s": phases.get("data", 0.0)}
        norms = dict(zip(self.grad_groups, result.group_norms.tolist(), strict=True))
        moe, bias_range, row_errors = None, self.balancer.bias_range(), self.balancer.take_row_errors()
        if result.tokens_per_expert is not None and bias_range is not None and row_errors is not None:
            moe = MoEState(result.tokens_per_expert, bias_range, row_errors)
        return StepPoint(
            self.step,
            loss=window.mean_loss(),
            grad_norm=result.grad_norm.item(),
            lr=learning_rate,
            tokens=window.tokens,
            seconds=seconds,
            phases=phases,
            ranks=gather_ranks(busy | get_memory(self.device)),
            group_norms=norms if len(norms) > 1 else {},
            moe=moe,
            extra=self.extra_metrics(result),
        )

    def extra_metrics(self, result: StepResult) -> dict[str, float]:
        """What this run has beside the loss, for the log. Synchronizes."""
        found = dict(zip(self.objective.metric_names, result.metrics.tolist(), strict=True))
        return found | ({"loss/aux": result.aux_loss.item()} if self.has_aux_loss else {})

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out batches. Collective: every rank must call."""
        self.model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        units = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in self.loader.validation_batches(self.job.validation.steps):
            batch = batch.to(self.device)
            loss_sum += self.objective(self.model, batch).loss
            units += self.objective.count(batch)
        self.model.train()
        return (self.sum_over_data(loss_sum) / self.sum_over_data(units)).item()

    def assess(self, last: bool) -> bool:
        """Validate and evaluate where that is due; True if this step is the best. Collective: every rank must call."""
        validation, is_best = self.job.validation, False
        if validation.enable and (self.step % validation.freq == 0 or last):
            self.raise_if_not_finite()
            loss = self.validate()
            loss = on_first_rank(lambda: loss)  # decides when to stop and what to keep: to the last bit on all ranks
            self.metrics.log_validation(self.step, loss)
            is_best = self.results.add_validation(self.step, loss)
        if self.evaluator is not None and self.evaluator.is_due(self.step, last or self.results.exhausted):
            is_best |= self.evaluate()
        return is_best

    def evaluate(self) -> bool:
        """Evaluate by generation, if so configured; True if this step is the best. Collective: every rank must call."""
        if self.evaluator is None:
            return False
        self.raise_if_not_finite()
        result = self.evaluator.run(self.model)
        values = {f"eval/{result.name}": result.score, "eval/ended": result.ended, "eval/seconds": result.seconds}
        self.metrics.log_evaluation(self.step, values, [asdict(example) for example in result.examples])
        return self.results.add_evaluation(self.step, result.name, result.score)

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of `value` over the data-parallel ranks; tp ranks of one group hold the same value and count once."""
        value = value.clone()
        with timers.collective():
            dist.all_reduce(value)
        tp = self.dims.degrees.tp
        return value // tp if value.dtype == torch.int64 else value / tp

    def raise_if_not_finite(self) -> None:
        """Stop if a step was skipped for a loss or gradient that was not finite. Synchronizes; alike on all ranks."""
        bad_step = int(self.first_bad_step.item())
        if bad_step >= 0:
            raise TrainingError(
                f"training: the loss or gradient of step {bad_step} is not finite. No such update was applied, so the "
                "weights are finite. Lower optimizer.lr, raise lr_scheduler.warmup_steps, or look at that step's data."
            )

    def save(self) -> None:
        """Save a checkpoint of this step, unless it was saved already. Collective: every rank must call."""
        self.raise_if_not_finite()
        progress = Progress(
            step=self.step,
            samples=self.loader.samples_before(self.step),
            data=self.loader.fingerprint,
            world_size=dist.get_world_size(),
            versions=describe_versions(),
            results=self.results.state(),
        )
        family, count = self.model.config.family, sum(param.numel() for param in self.model.parameters())
        card = render_model_card(self.job, family=family, num_parameters=count, progress=progress, results=self.results)
        ends = [] if self.loader.dataset.form == "text" else get_end_of_turn_ids(self.tokenizer)  # of a chat's answers
        state = self.model, self.plan, self.optimizer, self.tokenizer, progress
        if self.checkpointer.save(*state, self.device, card, ends):
            record_event("save", f"checkpoint step-{self.step}", self.step)

    def finish(self) -> None:
        """Save, show a sample, say where everything is, and upload. Collective: every rank must call."""
        job = self.job
        self.save()
        self.checkpointer.wait()
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
            how = "peft: PeftModel" if job.lora.rank else "transformers: AutoModelForCausalLM"
            logger.info("checkpoint: %s (%s.from_pretrained)", folder, how)
        if job.metrics.enable_tensorboard:
            logger.info("metrics:    tensorboard --logdir %s", self.dump_folder / job.metrics.save_tb_folder)
        logger.info("report:     python -m titanlite report %s", self.dump_folder)
        if job.checkpoint.push_to_hub and not self.stopping and dist.get_rank() == 0:
            push_to_hub(self.checkpointer.final_folder(self.step), job.checkpoint.push_to_hub)  # no collective after it
