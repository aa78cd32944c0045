"""The trainer: the build order, and the loop. Read it from top to bottom.

config -> mesh -> build (meta) -> parallelize (meta) -> plan -> allocate -> fill -> verify -> optimizer -> train
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite import stop
from titanlite.checkpoint import Checkpointer, Progress, describe_versions
from titanlite.config import AnyModelConfig, JobConfig, TransformersConfig, save_resolved
from titanlite.config.parallelism import Degrees
from titanlite.data import IGNORE_INDEX, Batch, TrainLoader, build_data
from titanlite.distributed import (
    ParallelDims,
    clip_grad_norm,
    init_distributed,
    parallelize,
    reduce_replicated_grads,
)
from titanlite.errors import ConfigError, DataError, TrainingError
from titanlite.generate import generate
from titanlite.logger import logger
from titanlite.materialize import materialize
from titanlite.metrics import MetricsLogger, build_profiler, train_flops_per_token
from titanlite.models.build import build_model
from titanlite.models.decoder import Decoder
from titanlite.models.families import family_of
from titanlite.models.transformers_model import TransformersModel
from titanlite.ops.grouped_gemm import resolve_backend
from titanlite.optim import ExpertBiasBalancer, build_lr_scheduler, build_optimizer, step_if_finite

_SAMPLE_TOKENS = 48


@dataclass
class StepResult:
    """What one optimizer step leaves on the device; reading it synchronizes.

    Attributes:
        loss: mean cross entropy over the global batch's valid tokens, float32 scalar.
        grad_norm: gradient norm before clipping, float32 scalar.
        aux_loss: mean of the balance losses over the same tokens, float32 scalar; 0 without any.
        tokens: tokens of the global batch, padding included.
        tokens_per_expert: (layers, E) int64 over the global batch, or None for a dense model.
    """

    loss: torch.Tensor
    aux_loss: torch.Tensor
    grad_norm: torch.Tensor
    tokens: int
    tokens_per_expert: torch.Tensor | None


@dataclass
class Window:
    """What happened since the last log line.

    Attributes:
        start: time in seconds at which it began.
        data_seconds: time spent waiting for batches.
        tokens: tokens of all ranks.
        losses: loss of each step, on the device.
    """

    start: float = field(default_factory=time.perf_counter)
    data_seconds: float = 0.0
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
        self.device = init_distributed(job.comm.timeout_seconds)
        check_device(job, self.device)
        self.dims = ParallelDims.build(degrees, self.device.type)
        logger.info("mesh: %s, %d ranks on %s", degrees, degrees.world_size, self.device.type)

        self.tokenizer, self.loader = build_data(job, self.dims.dp_rank, degrees.dp)
        check_vocabulary(self.loader.dataset.vocab_size, model_config)
        make_dump_folder(job, self.dump_folder)

        self.checkpointer = Checkpointer(job, self.dump_folder)  # finds what to resume, if anything
        start = self.checkpointer.start
        self.step = 0 if start is None else start.step

        self.model = build_model(model_config, getattr(torch, job.training.dtype))  # on meta: shapes only
        configure(self.model, job, self.device)
        parallelize(self.model, job, self.dims, self.device.type)  # still on meta: now shards
        weights_device = torch.device("cpu") if job.training.enable_cpu_offload else self.device
        sources = self.checkpointer.weight_sources(self.model)  # of a checkpoint, or the modules' own: random
        self.plan = materialize(  # every tensor written once
            self.model, weights_device, sources, seed=job.training.seed, buffer_device=self.device
        )

        self.optimizer = build_optimizer(self.model, job.optimizer)
        self.checkpointer.load_state(self.plan, self.optimizer, self.device)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, job.lr_scheduler, job.training.steps, self.step)
        if start is not None:
            check_data_order(start, self.loader)
            self.loader.start_from(start.step, start.samples)
        self.balancer = ExpertBiasBalancer(self.model, get_bias_update_rate(job, model_config))
        self.has_aux_loss = bool(job.moe.aux_loss_coeff or job.moe.z_loss_coeff)
        self.stopping = False
        self.first_bad_step = torch.full((), -1, dtype=torch.int64, device=self.device)

        self.metrics = MetricsLogger(
            job,
            self.dump_folder,
            train_flops_per_token(self.model.config, job.training.seq_len),
            degrees.world_size,
            self.device,
            start_step=self.step,
            first_moe_layer=model_config.num_dense_layers,
        )
        num_params = sum(param.numel() for param in self.model.parameters())
        logger.info(
            "model: %s, %.1f M parameters, %.1f MiB of weights on this rank",
            *(model_config.family, num_params / 1e6, self.plan.local_bytes / 2**20),
        )

    def train(self) -> None:
        """Run the configured steps, save on the way and at the end, and show a sample.

        Collective: every rank must call. SIGTERM or SIGINT end it early, after a step, with a checkpoint.
        """
        job = self.job
        with self.checkpointer, self.metrics, build_profiler(job, self.dump_folder) as profiler:
            window = Window()
            while self.step < job.training.steps and not self.stopping:
                data_start = time.perf_counter()
                micro_batches = [batch.to(self.device) for batch in self.loader.micro_batches(self.step)]
                window.data_seconds += time.perf_counter() - data_start

                learning_rate = float(self.lr_scheduler.get_last_lr()[0])
                result = self.train_step(micro_batches)
                window.add(result)
                profiler.step()

                last = self.step == job.training.steps
                if self.step % job.metrics.log_freq == 0 or self.step == 1 or last:
                    self.raise_if_not_finite()  # synchronization point: the device has finished this step
                    seconds = time.perf_counter() - window.start
                    self.metrics.log_step(
                        self.step,
                        loss=window.mean_loss(),
                        grad_norm=result.grad_norm.item(),
                        lr=learning_rate,
                        tokens=window.tokens,
                        seconds=seconds,
                        data_seconds=window.data_seconds,
                        tokens_per_expert=result.tokens_per_expert,
                        extra={"loss/aux": result.aux_loss.item()} if self.has_aux_loss else None,
                    )
                    window = Window()
                if job.validation.enable and (self.step % job.validation.freq == 0 or last):
                    self.raise_if_not_finite()
                    validation_start = time.perf_counter()
                    self.metrics.log_validation(self.step, self.validate())
                    window.start += time.perf_counter() - validation_start  # no training time
                self.stopping = self.checkpointer.agree(stop.is_requested())
                if self.checkpointer.is_due(self.step):
                    save_start = time.perf_counter()
                    self.save()
                    window.start += time.perf_counter() - save_start
        self.finish()

    def train_step(self, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step over this rank's micro-batches. Collective: every rank must call.

        The loss of every micro-batch is divided by the number of valid tokens in the *global* batch, so gradients are
        sums over ranks and micro-batches, whatever the mesh and however unevenly the valid tokens are spread.
        """
        labels = torch.stack([batch.labels for batch in micro_batches])
        valid_tokens = self.sum_over_data((labels != IGNORE_INDEX).sum())
        loss_sum, aux_sum = torch.zeros(2, device=self.device)
        for batch in micro_batches:
            losses = self.model(batch.tokens, batch.labels, batch.positions, batch.document_ids, **batch.inputs)
            ((losses.cross_entropy + losses.aux) / valid_tokens).backward()
            loss_sum += losses.cross_entropy.detach()
            aux_sum += losses.aux.detach()
            self.balancer.accumulate()

        reduce_replicated_grads(self.model.parameters(), self.dims.tp_mesh)
        grad_norm = clip_grad_norm(self.model.parameters(), self.job.training.max_norm)
        finite = grad_norm.isfinite()  # the norm is global, and a loss that is not finite has no finite gradient
        step_if_finite(self.optimizer, finite)
        self.lr_scheduler.step()
        self.optimizer.zero_grad()
        tokens_per_expert = self.balancer.step(finite)
        self.step += 1
        bad = ~finite.to(self.device) & (self.first_bad_step < 0)
        self.first_bad_step = torch.where(bad, self.step, self.first_bad_step)

        tokens = sum(batch.tokens.numel() for batch in micro_batches) * self.dims.degrees.dp
        # tp ranks hold the same cross entropy, but the balance losses of their own positions.
        loss, aux_loss = self.sum_over_data(torch.stack([loss_sum, aux_sum * self.dims.degrees.tp])) / valid_tokens
        return StepResult(loss, aux_loss, grad_norm, tokens, tokens_per_expert)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean cross entropy over the held-out batches. Collective: every rank must call."""
        self.model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        valid_tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in self.loader.validation_batches(self.job.validation.steps):
            batch = batch.to(self.device)
            losses = self.model(batch.tokens, batch.labels, batch.positions, batch.document_ids, **batch.inputs)
            loss_sum += losses.cross_entropy
            valid_tokens += (batch.labels != IGNORE_INDEX).sum()
        self.model.train()
        return (self.sum_over_data(loss_sum) / self.sum_over_data(valid_tokens)).item()

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of `value` over the data-parallel ranks; tp ranks of one group hold the same value and count once."""
        value = value.clone()
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
        )
        self.checkpointer.save(self.model, self.plan, self.optimizer, self.tokenizer, progress, self.device)

    def finish(self) -> None:
        """Save, show a sample, and say where everything is. Collective: every rank must call."""
        job = self.job
        self.save()
        self.checkpointer.wait()
        if self.stopping:
            saved = (
                f"saved; the same command resumes from {self.checkpointer.folder}" if job.checkpoint.enable else "lost"
            )
            logger.info("stopped after step %d of %d, %s", self.step, job.training.steps, saved)
            return
        if self.checkpointer.start is not None and self.step == self.checkpointer.start.step:
            logger.info(
                "nothing left to train: the checkpoint is of step %d, training.steps is %d. Raise training.steps to "
                "train on, or set another job.dump_folder to begin anew.",
                *(self.step, job.training.steps),
            )
        sample = generate(
            self.model,
            self.tokenizer,
            prompt="def __init__(self" if job.data.dataset == "stdlib" else "The",
            max_new_tokens=_SAMPLE_TOKENS,
            length_multiple=self.dims.degrees.tp,
            device=self.device,
        )
        logger.info("sample (temperature 0.7):\n\n    %s\n", sample.replace("\n", "\n    "))
        if job.checkpoint.enable:
            folder = self.checkpointer.folder / f"step-{self.step}"
            logger.info("checkpoint: %s (transformers: AutoModelForCausalLM.from_pretrained)", folder)
        if job.metrics.enable_tensorboard:
            logger.info("metrics:    tensorboard --logdir %s", self.dump_folder / job.metrics.save_tb_folder)


def check_data_order(start: Progress, loader: TrainLoader) -> None:
    """Say so if a resumed run would train on other data, or in another order, than the run that it goes on with."""
    if start.data != loader.fingerprint:
        logger.warning(
            "data: the checkpoint was trained on %s, this run has %s; it goes on at sample %d of the new order.",
            *(start.data, loader.fingerprint, start.samples),
        )


def make_dump_folder(job: JobConfig, folder: Path) -> None:
    """Make the run's folder and save the resolved configuration in it, on rank 0.

    Raises:
        ConfigError: on all ranks, if rank 0 cannot write there. Collective: every rank must call.
    """
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_resolved(job, folder / "config.toml")
        except OSError as error:
            failure[0] = str(error)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ConfigError(f"job.dump_folder: cannot write to {folder}: {failure[0]}. Choose another folder.")


def check_device(job: JobConfig, device: torch.device) -> None:
    """Refuse settings that this device would ignore or fail on.

    Raises:
        ConfigError: CPU offload, flex attention or Triton kernels without a GPU. The same on all ranks.
    """
    if job.model.attention_backend == "flex" and device.type != "cuda":
        raise ConfigError("model.attention_backend: 'flex' has no backward pass on the CPU. Set it to 'sdpa'.")
    if job.training.enable_cpu_offload and device.type != "cuda":
        raise ConfigError("training.enable_cpu_offload: there is no CUDA device to offload from. Set it to false.")
    try:
        resolve_backend(job.moe.grouped_gemm, device, torch.float32)
    except ValueError as error:
        raise ConfigError(f"moe.grouped_gemm: {error}") from None


def check_vocabulary(vocab_size: int, model_config: AnyModelConfig) -> None:
    """Every token id must have a row in the embedding.

    Raises:
        DataError: the tokenizer has more tokens than the model. The same on all ranks.
    """
    if vocab_size > model_config.vocab_size:
        raise DataError(
            f"data: the tokenizer has {vocab_size} tokens, but the model's vocab_size is {model_config.vocab_size}. "
            f"Set model.overrides.vocab_size = {vocab_size}, lower data.bpe_vocab_size, or use the model's tokenizer."
        )


def get_bias_update_rate(job: JobConfig, model_config: AnyModelConfig) -> float:
    """The configured rate; unset, a bias is trained only where the exported architecture can hold it."""
    if isinstance(model_config, TransformersConfig):
        return 0.0
    if job.moe.expert_bias_update_rate is not None:
        return job.moe.expert_bias_update_rate
    return 1e-3 if family_of(model_config).expert_bias_key is not None else 0.0


def configure(model: Decoder | TransformersModel, job: JobConfig, device: torch.device) -> None:
    """Hand the settings that are no sizes to the modules that use them."""
    if isinstance(model, TransformersModel):
        model.loss_chunk_tokens = job.training.loss_chunk_tokens
        return
    if model.moe_layers():
        backend = resolve_backend(job.moe.grouped_gemm, device, torch.float32)
        logger.info("moe: grouped GEMM backend: %s", backend)
    model.model.attention_backend = job.model.attention_backend
    model.lm_head.chunk_tokens = job.training.loss_chunk_tokens
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff, moe.gate.z_loss_coeff = job.moe.aux_loss_coeff, job.moe.z_loss_coeff
        moe.experts.grouped_gemm_backend = job.moe.grouped_gemm
