"""The build order, and the only file that knows all features: from a checked configuration to a
trainer.

config -> mesh -> data -> model (meta) -> transforms (meta) -> parallelize (meta) -> plan ->
allocate -> fill -> verify -> optimizer -> state -> trainer
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titanlite.base.agree import new_host_group, on_first_rank
from titanlite.base.errors import ConfigError, TitanliteError, raise_problems
from titanlite.base.events import open_events
from titanlite.base.extension import is_extension
from titanlite.base.files import FolderLock
from titanlite.base.log import logger
from titanlite.base.process import keep_freed_memory
from titanlite.base.text import format_count, format_size
from titanlite.checkpoint.hf_model import HFFormat, check_layout
from titanlite.checkpoint.manager import Checkpointer
from titanlite.checkpoint.start import Start, find_start, look_for_start
from titanlite.checkpoint.ties import untie
from titanlite.checkpoint.train_state import load_state
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
from titanlite.data.tokenizer import (
    check_vocabulary,
    count_ids,
    describe_tokenizer,
    find_token_ids,
    follow_tokenizer,
    load_tokenizer,
)
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import base_dtype, mixed_precision_dtypes
from titanlite.distributed.parallelize import check_device, choose_attention, parallelize
from titanlite.features.choice.at_start import choose_mesh, choose_rest
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
from titanlite.features.muon import build_muon
from titanlite.features.passthrough import carry_passthrough
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
    save_environment,
    say_end,
)
from titanlite.features.record.unreached import report_unreached
from titanlite.features.rounded_adamw.optimizer import build_rounded_adamw
from titanlite.features.sft.build import build_sft
from titanlite.features.sft.chat_template import with_chat_date
from titanlite.features.streams.mixture import build_mixture
from titanlite.features.streams.stream import build_stream
from titanlite.features.transformers.build import build_transformers
from titanlite.features.transformers.probes import check_documents_per_row
from titanlite.features.verify.of_run import certify_checkpoints
from titanlite.launch.process_group import init_distributed
from titanlite.launch.protocol import beat, configure_heartbeat
from titanlite.materialize import Plan, SourceProvider, materialize
from titanlite.metrics import run_folder
from titanlite.metrics.flops import train_flops_per_token
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.point import Results
from titanlite.models.decoder import Decoder, build_decoder
from titanlite.models.families import resolve_model_config
from titanlite.models.interface import Model
from titanlite.objective import NextToken, Objective
from titanlite.ops.gated_delta import prefer_backend
from titanlite.ops.kernels import use_triton
from titanlite.optim.expert_bias import (
    advise_balancing,
    complete_balancing,
    warn_of_ignored_balancing,
)
from titanlite.optim.optimizer import build_adamw, count_parameters, freeze_parameters
from titanlite.preflight import Checked
from titanlite.run import Run, check_resumed_model, resolve_held_out, warn_of_other_data
from titanlite.train_step import TrainStep
from titanlite.trainer import Closing, Parts, Trainer, Watch


def assemble(checked: Checked) -> Trainer:
    """Build everything that training needs, and load the checkpoint to resume from. Collective:
    every rank must call.

    Raises TitanliteError, on all ranks: something cannot be built, read or saved as the
    configuration says.
    """
    run = begin(checked)
    run, tokenizer, loader = read_data(run)
    refuse(on_first_rank(lambda: find_problems(run, tokenizer, loader)))
    prepare_device(run.job, run.model_config, run.device)
    changes = run_folder.make_dump_folder(run.job, run.folder)
    start_data(run, loader)
    beat("loading", run.first_step)

    model = build_on_meta(run)
    form = build_format(run.job)
    checkpointer = build_checkpointer(run, form, model, tokenizer, loader)
    start = run.start
    sources = form.sources(start.folder, model) if start else form.initial_sources(model)
    plan = fill(run, model, sources)
    carry_passthrough(run.job, model.config, sources, checkpointer)
    optimizer = build_optimizer(run.job, model, run.dims)
    if start is not None:
        load_state(start.folder, plan, optimizer)
    objective = build_objective(run.job, model.config.vocab_size)
    parts = Parts(
        run=run,
        loader=loader,
        plan=plan,
        stepper=TrainStep(run, model, optimizer, objective),
        checkpointer=checkpointer,
        results=build_results(run),
    )
    certify_checkpoints(parts)
    trainer = Trainer(
        parts,
        metrics=build_metrics(run, model, loader),
        watch=build_watch(parts, tokenizer),
        closing=build_closing(parts),
    )
    refuse(find_problems_of(parts))
    record_start(parts, changes)
    coming = loader.coming_batches(run.first_step, run.job)
    objective.prepare(coming, partial(build_initial, parts), run.device)
    return trainer


def begin(checked: Checked) -> Run:
    """Join the other ranks, lock the run's folder, and find where the run starts. Collective.

    Raises TitanliteError, on all ranks: the ranks' settings, models or folders differ; the folder
    is in use; or it does not have the requested checkpoint.
    """
    job = checked.job
    folder = Path(job.job.dump_folder)
    configure_heartbeat(job.comm.timeout_seconds, job.job.stop_grace_seconds, folder)
    beat("loading", 0)
    prepare_process(job, folder)
    device = init_distributed(job.comm.timeout_seconds)
    if device.type == "cpu":
        keep_freed_memory()
    run_folder.check_same_settings(job)
    check_same_copies(list_model_paths(job))
    locks = run_folder.hold_folders(job, folder)  # before anything there is read or removed
    run_folder.check_shared_folder(folder)
    if (folder / job.checkpoint.folder).is_dir():
        open_events(folder)
    group = new_host_group(timedelta(seconds=job.checkpoint.timeout_seconds))
    start = find_start(job.checkpoint, job.job.dump_folder, group)
    checked = choose_mesh(checked, start, device, build_unsharded)
    dims = ParallelDims.build(checked.degrees, device.type)
    logger.info("mesh: %s", describe_mesh(dims, device))
    return Run(
        checked.job,
        checked.model_config,
        dims,
        device,
        start,
        group,
        locks,
        unwritten=checked.unwritten,
    )


def describe_mesh(dims: ParallelDims, device: torch.device) -> str:
    """Return a description of the parallelism degrees, the number of ranks and their type of
    device.
    """
    return f"{dims.degrees}, {format_count(dims.degrees.world_size, 'rank')} on {device.type}"


def read_data(run: Run) -> tuple[Run, Any, TrainLoader]:
    """Return `run` completed with facts from its data and weights, the tokenizer, and this rank's
    batches. Collective.

    Raises TitanliteError, on all ranks: the data or the headers of the weights cannot be read.
    """
    start = run.start
    progress = start and start.progress
    degrees = run.dims.degrees
    job = run.job
    job = on_first_rank(lambda: with_chat_date(job, start))
    with run_folder.waiting_for_machines():  # ranks read files independently: no collective inside
        job = resolve_held_out(job, start)
        tokenizer, loader = build_data(job, run.dims.dp_rank, degrees.dp, start)
        job = resolve_steps(job, loader, progress)
        job, config = fit_vocabulary(job, run.model_config, count_ids(tokenizer), degrees.tp, start)
        has_weights = bool(job.checkpoint.initial_load_path)
        moe = complete_balancing(
            job.moe, config, progress and progress.identity, has_weights=has_weights
        )
        job = replace(job, moe=moe)
    warn_of_ignored_balancing(job.moe, config.num_experts)
    run = replace(run, job=job, model_config=fit_to_weights(job, config, start))
    run, loader = choose_rest(run, loader, build_unsharded)
    describe_pipeline(loader, config, degrees)
    return run, tokenizer, loader


def start_data(run: Run, loader: TrainLoader) -> None:
    """Start reading the data at the position where the run starts."""
    samples = 0
    taken = None
    if run.start is not None:
        samples = run.start.progress.samples
        taken = run.start.progress.taken
    loader.start_from(run.first_step, samples, run.job.data.skip_to_sample, taken)
    warn_of_other_data(run.start, loader)


def fit_to_weights(
    job: JobConfig, model_config: AnyModelConfig, start: Start | None
) -> AnyModelConfig:
    """Return the configuration with the same ties as the weights that the run starts from; see
    `untie`. Collective.
    """
    base = job.checkpoint.initial_load_path
    weights = Path(base) if base and (start is None or job.lora.rank) else start and start.folder
    # The user requested the tie, so a head that is stored with different values is an error.
    is_asked_for = job.model.overrides.tie_word_embeddings
    if weights is None or is_asked_for:
        return model_config
    return untie(model_config, weights, build_model)


def find_problems(run: Run, tokenizer: Any, loader: TrainLoader) -> list[str]:
    """Return the problems that can be found before the weights are read. Called on one rank."""
    dataset = loader.dataset
    problems = check_device(run.job, run.device)
    problems += check_data(
        run.job, run.model_config, dataset.form, dataset.vocab_size, count_ids(tokenizer)
    )
    if run.start is not None:
        identity = run.start.progress.identity
        problems += run_folder.check_same_run(run.job, run.first_step, identity)
        problems += check_resumed_model(run.model_config, run.start)
    return problems


def find_problems_of(parts: Parts) -> list[str]:
    """Return the problems of the parts that were built. Collective."""
    run = parts.run
    plan = parts.plan
    optimizer = parts.stepper.optimizer
    folder = parts.checkpointer.folder
    carried = parts.checkpointer.carried_bytes
    problems: list[str] = []
    if run.job.checkpoint.enable and not run.job.lora.rank:
        problems += check_layout(plan)
    problems += on_first_rank(
        lambda: check_space(run.job, plan, optimizer, folder, run.first_step, carried)
    )
    problems += check_documents_per_row(run.job, parts.stepper.model, run.device)
    return problems


def refuse(problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists the `problems` of a run, the same on all ranks; do nothing
    if there are none.
    """
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise_problems(ConfigError, "configuration", problems)


def build_checkpointer(
    run: Run, form: HFFormat, model: Model, tokenizer: Any, loader: TrainLoader
) -> Checkpointer:
    """Build the `Checkpointer`, and the files of checkpoints that hold no tensors. Collective.

    Raises CheckpointError, on all ranks: one of those files cannot be built.
    """
    saved_step = -1 if run.start is None else run.first_step
    checkpointer = Checkpointer(run.job.checkpoint, form, run.folder, saved_step, run.file_group)
    is_text = loader.dataset.form == "text"
    ends_of_turn = [] if is_text else get_end_of_turn_ids(tokenizer, loader.dataset)
    token_ids = find_token_ids(tokenizer)
    checkpointer.describe(lambda _: form.describe(model, token_ids, ends_of_turn))
    checkpointer.describe(lambda _: describe_tokenizer(tokenizer))
    return checkpointer


def fill(run: Run, model: Model, sources: Sequence[SourceProvider]) -> Plan:
    """Materialize `model`; raises as `materialize`. Collective."""
    is_on_host = run.job.training.enable_cpu_offload
    return materialize(
        model,
        torch.device("cpu") if is_on_host else run.device,
        sources,
        seed=run.job.training.seed,
        buffer_device=run.device,
        group=run.dims.stage_group,
        waiting=run.file_group,
    )


def build_initial(parts: Parts) -> Model:
    """Build a second model with the weights that the run began with. Collective."""
    run = parts.run
    model = parts.stepper.model
    if run.start is None:
        return model
    initial = build_on_meta(replace(run, model_config=model.config))
    fill(run, initial, build_format(run.job).initial_sources(initial))
    return initial


def record_start(parts: Parts, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Log the model, and record the start with the settings that changed since the previous one.
    Collective.
    """
    run = parts.run
    family = run.model_config.family
    total, trained = count_parameters(parts.stepper.model)
    nbytes = sum(entry.tensor.numel() * entry.dtype.itemsize for entry in parts.plan.entries)
    logger.info(
        "model: %s, %.1f M parameters%s, %s of weights",
        family,
        total / 1e6,
        "" if trained == total else f", {trained / 1e6:.3f} M of them trained",
        format_size(nbytes),
    )
    mesh = str(run.dims.degrees)
    facts = {"model": family, "parameters": total, "trained": trained, "mesh": mesh}
    configure_wandb(save_environment(run.folder, run.device, facts))
    where = describe_mesh(run.dims, run.device)
    is_resumed = run.start is not None
    run_folder.record_start(run.folder, run.first_step, where, resumed=is_resumed, changes=changes)


def build_data(
    job: JobConfig, dp_rank: int, dp_degree: int, start: Start | None = None
) -> tuple[Any, TrainLoader]:
    """Build the tokenizer and the batches of one data-parallel rank, for the run that starts at
    `start`. No collectives.
    """
    job = resolve_held_out(job, start)
    tokenizer, dataset = build_dataset(job)
    batch_size = start and start.progress.batch_size
    return tokenizer, build_loader(job, dataset, dp_rank, dp_degree, batch_size)


def build_dataset(job: JobConfig) -> tuple[Any, TrainDataset]:
    """Build the tokenizer and the dataset of `job`. Any process may call it at any time: the
    processes of a machine share results through the cache folder.

    Raises DataError: the text, a row or the tokenizer is missing or unusable, or there is too
    little data for `seq_len`.
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


def fit_vocabulary(
    job: JobConfig, model_config: AnyModelConfig, num_ids: int, tp: int, start: Start | None
) -> tuple[JobConfig, AnyModelConfig]:
    """Return `job` and the model's sizes. A new model gets the vocabulary size that
    `follow_tokenizer` chooses.

    A run that resumes keeps the vocabulary of its checkpoint. No collective.
    """
    followed = follow_tokenizer(job, model_config, num_ids, tp, start and start.folder)
    return followed, model_config if followed is job else resolve_model_config(followed.model)


def check_data(
    job: JobConfig, model_config: AnyModelConfig, form: str, vocab_size: int, num_ids: int
) -> list[str]:
    """Return the problems of a run whose data have the row format `form` and token ids below
    `vocab_size`, and whose tokenizer has `num_ids` ids.
    """
    problems = check_form(job, form)
    problems += check_pairs(job, form)
    problems += check_vocabulary(job, vocab_size, num_ids, model_config)
    return problems


def check_model(checked: Checked) -> None:
    """Check the model as a run does before its first step, but without reading weights or rows.

    The embedding must have a row for each token, and the model's description must be savable.

    Raises ConfigError, DataError or CheckpointError: one of these checks fails.
    """
    job = checked.job
    config = checked.model_config
    start = look_for_start(job.checkpoint, job.job.dump_folder)
    job = resolve_held_out(job, start)
    if path := resolve_tokenizer_path(job).tokenizer_path:  # else one is trained on the data
        num_ids = count_ids(load_tokenizer(path))
        job, config = fit_vocabulary(job, config, num_ids, checked.degrees.tp, start)
        is_text = job.data.dataset in ("text", "stdlib")  # rows may use only some tokens
        refuse(check_vocabulary(job, num_ids if is_text else 0, num_ids, config))
    if job.checkpoint.enable:
        build_format(job).describe(build_unsharded(job, config, "cpu"), {}, [])


def build_model(config: AnyModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    """Build the model on meta: the native decoder, or a class of transformers."""
    if isinstance(config, TransformersConfig):
        logger.info("model: transformers' %s, because: %s", config.architecture, config.why)
        return build_transformers(config, dtype)
    return build_decoder(config, dtype)


def build_on_meta(run: Run) -> Model:
    """Build the model on meta, configured and sharded for training. No collective.

    Raises ConfigError, the same on all ranks: a pattern matches nothing, or transformers cannot
    build the model.
    """
    job = run.job
    device = run.device
    use_triton(job.training.triton_kernels)
    prefer_backend(job.model.delta_backend)
    model = build_unsharded(job, run.model_config, device.type)
    attention = choose_attention(job, run.model_config, device.type)
    model.configure(attention, job.moe, job.training.loss_chunk_tokens, device)
    shard(model, job, run.dims, device.type)
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
    """Shard `model`, on meta, in place: first over pipeline stages, then by `parallelize`."""
    if dims.degrees.pp > 1:  # first, because hooks on modules of other stages would never be called
        assert isinstance(model, Decoder), "pipeline parallelism of a model of transformers"
        apply_pipeline_parallel(model, dims, mixed_precision_dtypes(job.training, device_type)[0])
    parallelize(model, job, dims, device_type)


def build_format(job: JobConfig) -> HFFormat:
    """Build the format of the model's files in checkpoints: all weights or, with LoRA, only the
    adapters.
    """
    sections = job.checkpoint, job.model
    return PeftFormat(*sections, job.lora) if job.lora.rank else HFFormat(*sections)


def build_results(run: Run) -> Results:
    """Build the record of validations and evaluations, including those before `run.start`."""
    saved = run.start and run.start.progress.results
    return Results(run.job.validation, run.job.checkpoint.save_best, saved)


def build_metrics(run: Run, model: Model, loader: TrainLoader) -> MetricsLogger:
    """Build the metrics logger; rank 0 writes, to W&B too if it is enabled."""
    job = run.job
    measure, reads_backwards = build_metric(job.metrics)
    return MetricsLogger(
        job,
        run.folder,
        train_flops_per_token(model, job.training.seq_len),
        run.dims.degrees.world_size,
        run.device,
        start_step=run.first_step,
        moe_layers=model.moe_layer_numbers(),
        if_idle=advise_balancing(job.moe, job.model.implementation, model),
        sink=open_wandb(job, run.folder),
        measure=measure,
        reads_backwards=reads_backwards,
        steps_per_epoch=(loader.dataset.num_train_sequences or 0) / loader.global_batch_size,
    )


def build_watch(parts: Parts, tokenizer: Any) -> Watch:
    """Build the features that observe the run."""
    run = parts.run
    whole_layers = run.job.compile.enable
    return Watch(
        evaluator=build_evaluator(run, parts.loader.dataset, tokenizer),
        diagnose=partial(
            diagnose, parts.stepper.model, whole_layers=whole_layers, stage=run.dims.stage
        ),
        report_unreached=partial(report_unreached, run.folder),
    )


def build_closing(parts: Parts) -> Closing:
    """Build the features that act at the end of the run."""
    run = parts.run
    total, _ = count_parameters(parts.stepper.model)
    return Closing(
        render_card=partial(
            render_model_card, run.job, family=run.model_config.family, num_parameters=total
        ),
        say_end=say_end,
        push_to_hub=push_to_hub,
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
        case _ if job.optimizer.state_dtype == "bfloat16":
            return build_rounded_adamw(model, job.optimizer, job.training.seed)
        case _:
            return build_adamw(model, job.optimizer)


def build_objective(job: JobConfig, vocab_size: int) -> Objective:
    """Build the objective that `job` names; raises as `build_custom_objective`."""
    if is_extension(job.training.objective):
        return build_custom_objective(job, vocab_size)
    return build_dpo(job) or NextToken()


def explain(error: BaseException, job: JobConfig | None) -> TitanliteError | None:
    """Return the error to show the user for an error that ended the run. A TitanliteError is
    returned unchanged; for an error of torch whose cause is a setting or full memory, a new error
    names that cause; None for other errors.

    If the run was refused before it wrote to its folder, the folder is removed.
    """
    FolderLock.remove_unused()
    return error if isinstance(error, TitanliteError) else explain_failure(error, job)


def close(exit_code: int) -> None:
    """Finish the W&B run, if there is one, with the `exit_code` that the process will have."""
    finish_wandb(exit_code)
