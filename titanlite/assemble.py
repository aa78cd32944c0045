"""The build order, and the only file that knows all features: from a checked configuration to a
trainer.

config -> mesh -> data -> model (meta) -> transforms (meta) -> parallelize (meta) -> plan ->
allocate -> fill -> verify -> optimizer -> state -> trainer
"""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import new_host_group, on_first_rank
from titanlite.base.errors import TitanliteError
from titanlite.base.events import open_events
from titanlite.base.extension import is_extension
from titanlite.base.log import logger
from titanlite.base.process import keep_freed_memory
from titanlite.base.text import format_count, format_size
from titanlite.checkpoint.hf_model import HFFormat, check_layout
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.start import Start, find_start, look_for_start
from titanlite.checkpoint.ties import untie
from titanlite.config import AnyModelConfig, JobConfig, TransformersConfig
from titanlite.config.assets import list_model_paths
from titanlite.config.schema import BLOCK_SIZES
from titanlite.data.dataset import TrainDataset
from titanlite.data.loader import (
    TrainLoader,
    build_loader,
    build_text,
    check_form,
    get_kind,
    resolve_steps,
    resolve_tokenizer_path,
)
from titanlite.data.tokenizer import check_vocabulary, count_ids, follow_tokenizer, load_tokenizer
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import base_dtype, mixed_precision_dtypes
from titanlite.distributed.parallelize import check_device, choose_attention, parallelize
from titanlite.features.copies import check_same_copies
from titanlite.features.custom import build_custom_objective, build_custom_optimizer, build_metric
from titanlite.features.diagnose.process import explain_failure, prepare_device, prepare_process
from titanlite.features.diagnose.values import diagnose
from titanlite.features.dpo import build_dpo, check_pairs, turn_off_dropout
from titanlite.features.generate.evaluate import build_evaluator
from titanlite.features.generate.generate import get_end_of_turn_ids
from titanlite.features.images import build_images
from titanlite.features.lora.block_formats import encode_weights
from titanlite.features.lora.layers import apply_lora
from titanlite.features.lora.peft_format import PeftFormat
from titanlite.features.muon import build_muon, muon_matrices
from titanlite.features.passengers import carry_passengers
from titanlite.features.pipeline import apply_pipeline_parallel, describe_pipeline
from titanlite.features.record.publish import (
    configure_wandb,
    finish_wandb,
    open_wandb,
    push_to_hub,
    render_model_card,
)
from titanlite.features.record.run_files import (
    check_space,
    log_held,
    record_trained,
    save_environment,
)
from titanlite.features.sft.build import build_sft
from titanlite.features.sft.chat_template import with_chat_date
from titanlite.features.streams.mixture import build_mixture
from titanlite.features.streams.stream import build_stream
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.probes import check_documents_per_row
from titanlite.launch.process_group import init_distributed
from titanlite.launch.protocol import beat
from titanlite.materialize import materialize
from titanlite.metrics import run_folder
from titanlite.metrics.flops import train_flops_per_token
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import Results
from titanlite.models.decoder import Decoder, build_decoder
from titanlite.models.families import resolve_model_config
from titanlite.models.interface import Model
from titanlite.objective import NextToken, Objective
from titanlite.ops.kernels import use_triton
from titanlite.optim.expert_bias import (
    advise_balancing,
    complete_balancing,
    warn_of_ignored_balancing,
)
from titanlite.optim.optimizer import build_adamw, count_parameters, freeze_parameters
from titanlite.preflight import Checked
from titanlite.run import check_resumed_model, resolve_held_out, warn_of_other_data
from titanlite.train_step import TrainStep
from titanlite.trainer import Trainer


def assemble(checked: Checked) -> Trainer:
    """Build everything that training needs, and load what it resumes from. Collective: every rank
    must call.

    Raises TitanliteError on all ranks: something cannot be built, read or saved as the
    configuration says.
    """
    job, model_config, degrees = checked.job, checked.model_config, checked.degrees
    folder = Path(job.job.dump_folder)
    device = _join(job, folder)
    locks = run_folder.hold_folders(job, folder)  # before anything there is read or cleaned
    check_device(job, device)
    prepare_device(job, model_config, device)
    dims = ParallelDims.build(degrees, device.type)
    where = f"{degrees}, {format_count(degrees.world_size, 'rank')} on {device.type}"
    logger.info("mesh: %s", where)

    group = new_host_group(timedelta(seconds=job.checkpoint.timeout_seconds))
    if (folder / job.checkpoint.folder).is_dir():
        open_events(folder)
    start = find_start(job.checkpoint, job.job.dump_folder, group)
    step = 0 if start is None else start.progress.step
    job = on_first_rank(lambda: with_chat_date(job, start))
    with run_folder.waiting_for_machines():  # ranks read files independently: no collective inside
        job, model_config, tokenizer, loader = _read_data(job, model_config, dims, start)
        warn_of_ignored_balancing(job.moe, model_config.num_experts)
    changes = run_folder.make_dump_folder(job, folder)
    run_folder.check_shared_folder(folder)

    checkpointer = Checkpointer(job.checkpoint, build_format(job), folder, start, group)
    if start is not None:
        run_folder.check_same_run(job, step, start.progress.identity)
    model_config = _fit_to_weights(job, model_config, start)
    beat("loading", step)

    model = build_on_meta(job, model_config, dims, device)
    ends_of_turn = (
        [] if loader.dataset.form == "text" else get_end_of_turn_ids(tokenizer, loader.dataset)
    )
    checkpointer.prepare(model, tokenizer, ends_of_turn)
    home = torch.device("cpu") if job.training.enable_cpu_offload else device
    fill = partial(
        materialize,
        device=home,
        buffer_device=device,
        seed=job.training.seed,
        waiting=checkpointer.group,
    )
    plan = fill(model, sources=(sources := checkpointer.weight_sources(model)))
    carry_passengers(job, model.config, sources, checkpointer)
    if job.checkpoint.enable and not job.lora.rank:
        check_layout(plan)
    optimizer = build_optimizer(job, model, dims)
    checkpointer.load_state(plan, optimizer)
    objective = build_objective(job, model.config.vocab_size)
    stepper = TrainStep(job, dims, device, model, optimizer, objective, step)
    samples = 0 if start is None else start.progress.samples
    loader.start_from(step, samples, job.data.skip_to_sample, start and start.progress.taken)
    warn_of_other_data(start, loader)
    total, trained = count_parameters(model)
    logger.info(
        "model: %s, %.1f M parameters%s, %s of weights",
        *(
            model_config.family,
            total / 1e6,
            "" if trained == total else f", {trained / 1e6:.3f} M of them trained",
        ),
        format_size(sum(entry.tensor.numel() * entry.dtype.itemsize for entry in plan.entries)),
    )
    trainer = Trainer(
        job=job,
        device=device,
        dump_folder=folder,
        locks=locks,
        loader=loader,
        checkpointer=checkpointer,
        plan=plan,
        stepper=stepper,
        results=Results(job.validation, job.checkpoint.save_best, start and start.progress.results),
        evaluator=build_evaluator(job, loader.dataset, tokenizer, model_config, dims, device),
        diagnose=partial(diagnose, model, whole_layers=job.compile.enable, stage=dims.stage),
        metrics=build_metrics(job, folder, model, loader, dims, device, step),
        render_card=partial(
            render_model_card, job, family=model_config.family, num_parameters=total
        ),
        record_trained=partial(record_trained, folder),
        push_to_hub=push_to_hub,
    )
    matrices = muon_matrices(model, job.optimizer) if job.optimizer.name == "Muon" else {}
    log_held(plan, matrices)
    check_space(job, plan, matrices, checkpointer.folder, step, checkpointer.carried_bytes)
    facts = {
        "model": model_config.family,
        "parameters": total,
        "trained": trained,
        "mesh": str(degrees),
    }
    configure_wandb(save_environment(folder, device, facts))
    run_folder.record_start(folder, step, where, resumed=bool(start), changes=changes)

    def initial_model() -> Model:
        if step == 0:
            return model
        initial = build_on_meta(job, model.config, dims, device)
        fill(initial, sources=checkpointer.initial_sources(initial))
        return initial

    check_documents_per_row(job, model, device)
    objective.prepare(loader.coming_batches(step, job), initial_model, device)
    return trainer


def _join(job: JobConfig, folder: Path) -> torch.device:
    """Join the other ranks, which must have the same settings and models; return the device of this
    one.
    """
    beat("loading", 0)
    prepare_process(job, folder)
    device = init_distributed(job.comm.timeout_seconds)
    if device.type == "cpu":
        keep_freed_memory()
    run_folder.check_same_settings(job)
    check_same_copies(list_model_paths(job))
    return device


def _fit_to_weights(
    job: JobConfig, model_config: AnyModelConfig, start: Start | None
) -> AnyModelConfig:
    """Return the configuration with the ties of the weights that the run resumes or begins with;
    see `untie`.

    Raises ConfigError: the resumed model is another one. The same on all ranks. Collective: every
    rank must call.
    """
    base = job.checkpoint.initial_load_path
    weights = Path(base) if base and (start is None or job.lora.rank) else start and start.folder
    # then one of two stored tensors is a mistake
    is_asked_for = job.model.overrides.tie_word_embeddings
    if weights is not None and not is_asked_for:
        model_config = untie(model_config, weights, build_model)
    if start is not None:
        check_resumed_model(model_config, start)
    return model_config


def build_data(
    job: JobConfig, dp_rank: int, dp_degree: int, start: Start | None = None
) -> tuple[Any, TrainLoader]:
    """Build the tokenizer and the batches of one data-parallel rank, in the run that begins at
    `start`. No collectives.
    """
    job = resolve_held_out(job, start)
    tokenizer, dataset = build_dataset(job)
    batch_size = start and start.progress.batch_size
    return tokenizer, build_loader(job, dataset, dp_rank, dp_degree, batch_size)


def build_dataset(job: JobConfig) -> tuple[Any, TrainDataset]:
    """Build the tokenizer and the dataset of `job`. Every process may call it at any time: those of
    one machine share the work through the cache folder.

    Raises DataError: the text, a row or the tokenizer is missing or unusable, or there is too
    little for `seq_len`.
    """
    match get_kind(job.data):
        case "examples":
            return build_sft(job)
        case "stream":
            return build_stream(job)
        case "mixture":
            return build_mixture(job)
        case "images":
            return build_images(job)
        case _:
            return build_text(job)


def _read_data(
    job: JobConfig, model_config: AnyModelConfig, dims: ParallelDims, start: Start | None
) -> tuple[JobConfig, AnyModelConfig, Any, TrainLoader]:
    """Return the job with its steps and balance of experts, the model's sizes, the tokenizer, this
    rank's batches.
    """
    job = resolve_held_out(job, start)
    tokenizer, loader = build_data(job, dims.dp_rank, dims.degrees.dp, start)
    job = resolve_steps(job, loader, start and start.progress)
    job, model_config = fit_vocabulary(
        job, model_config, count_ids(tokenizer), dims.degrees.tp, start
    )
    check_data(
        job, model_config, loader.dataset.form, loader.dataset.vocab_size, count_ids(tokenizer)
    )
    identity = start and start.progress.identity
    has_weights = bool(job.checkpoint.initial_load_path)
    job = replace(
        job, moe=complete_balancing(job.moe, model_config, identity, has_weights=has_weights)
    )
    describe_pipeline(loader, model_config, dims.degrees)
    return job, model_config, tokenizer, loader


def fit_vocabulary(
    job: JobConfig, model_config: AnyModelConfig, num_ids: int, tp: int, start: Start | None
) -> tuple[JobConfig, AnyModelConfig]:
    """Return `job` and the model's sizes, with the vocabulary of a new model as `follow_tokenizer`
    says.

    A run that resumes keeps the vocabulary of its checkpoint. No collective.
    """
    followed = follow_tokenizer(job, model_config, num_ids, tp, start and start.folder)
    return followed, model_config if followed is job else resolve_model_config(followed.model)


def check_data(
    job: JobConfig, model_config: AnyModelConfig, form: str, vocab_size: int, num_ids: int
) -> None:
    """Check that a run can train on rows of `form`, with tokens below `vocab_size`, of a tokenizer
    of `num_ids` ids.

    Raises ConfigError or DataError: it cannot. The same on all ranks; no collective.
    """
    check_form(job, form)
    check_pairs(job, form)
    check_vocabulary(job, vocab_size, num_ids, model_config)


def check_model(checked: Checked) -> None:
    """Check what a run finds of its model before the first step without weights and rows.

    The embedding has a row for each token, and the model's description can be saved.

    Raises ConfigError, DataError or CheckpointError: it is not so.
    """
    job = checked.job
    config = checked.model_config
    start = look_for_start(job.checkpoint, job.job.dump_folder)
    job = resolve_held_out(job, start)
    if path := resolve_tokenizer_path(job).tokenizer_path:  # otherwise one is trained on the data
        num_ids = count_ids(load_tokenizer(path))
        job, config = fit_vocabulary(job, config, num_ids, checked.degrees.tp, start)
        is_text = job.data.dataset in ("text", "stdlib")  # rows may have only some of the tokens
        check_vocabulary(job, num_ids if is_text else 0, num_ids, config)
    if job.checkpoint.enable:
        build_format(job).describe(build_unsharded(job, config, "cpu"), None, [])


def build_model(config: AnyModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Build the model on meta: the native decoder, or the class of transformers that stands in for
    it.
    """
    if isinstance(config, TransformersConfig):
        logger.info("model: transformers' %s, because: %s", config.architecture, config.why)
        return build_transformers(config, dtype)
    return build_decoder(config, dtype)


def build_on_meta(
    job: JobConfig, model_config: AnyModelConfig, dims: ParallelDims, device: torch.device
) -> Model:
    """Build the model on meta, configured and sharded for training on devices like `device`. No
    collective.

    Raises ConfigError, the same on all ranks: a pattern matches nothing, or transformers cannot
    build the model.
    """
    use_triton(job.training.triton_kernels)
    model = build_unsharded(job, model_config, device.type)
    attention = choose_attention(job, model_config, device.type)
    model.configure(attention, job.moe, job.training.loss_chunk_tokens, device)
    shard(model, job, dims, device.type)
    return model


def build_unsharded(job: JobConfig, model_config: AnyModelConfig, device_type: str) -> Model:
    """Build the unsharded model on meta, with adapters and frozen parameters; raises as
    `build_on_meta`.
    """
    model = build_model(model_config, base_dtype(job.training, job.lora, device_type))
    apply_lora(model, job.lora, getattr(torch, job.training.dtype))
    if job.lora.base_dtype in BLOCK_SIZES:
        encode_weights(model, job.lora.base_dtype)
    freeze_parameters(model, job.optimizer)
    if job.training.objective == "dpo":
        turn_off_dropout(model)
    return model


def shard(model: Model, job: JobConfig, dims: ParallelDims, device_type: str) -> None:
    """Shard `model`, on meta, in place: first over pipeline stages, then as `parallelize`."""
    if dims.degrees.pp > 1:  # first: later hooks on modules of other stages are never called
        assert isinstance(model, Decoder), "pipeline parallelism of a model of transformers"
        apply_pipeline_parallel(model, dims, mixed_precision_dtypes(job.training, device_type)[0])
    parallelize(model, job, dims, device_type)


def build_format(job: JobConfig) -> HFFormat:
    """Build the format of the model's files in checkpoints: of all weights or, with LoRA, of the
    adapters alone.
    """
    sections = job.checkpoint, job.model
    return PeftFormat(*sections, job.lora) if job.lora.rank else HFFormat(*sections)


def build_metrics(
    job: JobConfig,
    folder: Path,
    model: Model,
    loader: TrainLoader,
    dims: ParallelDims,
    device: torch.device,
    step: int,
) -> MetricsLogger:
    """Build the metrics logger of a run that begins after `step`; rank 0 writes, also to W&B if
    that is on.
    """
    return MetricsLogger(
        job,
        folder,
        train_flops_per_token(model, job.training.seq_len),
        dims.degrees.world_size,
        device,
        start_step=step,
        moe_layers=model.moe_layer_numbers(),
        if_idle=advise_balancing(job.moe, job.model.implementation, model),
        sink=open_wandb(job, folder),
        measure=build_metric(job.metrics),
        steps_per_epoch=(loader.dataset.num_train_sequences or 0) / loader.global_batch_size,
    )


def build_optimizer(job: JobConfig, model: Model, dims: ParallelDims) -> torch.optim.Optimizer:
    """Build the optimizer that `job` names, for the sharded `model`; raises as `build_adamw` and
    `build_custom_optimizer`.
    """
    match job.optimizer.name:
        case "Muon":
            return build_muon(model, job.optimizer, dims.stage_group)
        case name if is_extension(name):
            return build_custom_optimizer(model, job.optimizer)
        case _:
            return build_adamw(model, job.optimizer)


def build_objective(job: JobConfig, vocab_size: int) -> Objective:
    """Build the objective that `job` names; raises as `build_custom_objective`."""
    if is_extension(job.training.objective):
        return build_custom_objective(job, vocab_size)
    return build_dpo(job) or NextToken()


def explain(error: BaseException, job: JobConfig | None) -> TitanliteError | None:
    """Turn an error of torch that a setting or full memory caused into one that names it; None for
    other errors.
    """
    return explain_failure(error, job)


def close(exit_code: int) -> None:
    """Finish the W&B run, if there is one; the process ends with `exit_code` afterwards."""
    finish_wandb(exit_code)
