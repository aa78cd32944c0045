"""What the trainer does before and around building: checks that need the device or the data, settings for modules."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titanlite.base.agree import on_first_rank
from titanlite.base.errors import RENDEZVOUS, ConfigError, DataError
from titanlite.base.files import check_regular, is_full
from titanlite.base.folder_lock import LOCK_WAIT_S, FolderHeldError, FolderLock
from titanlite.base.hf_objects import load_from_folder
from titanlite.base.log import log_to_folder, logger
from titanlite.base.tables import format_memory
from titanlite.checkpoint import Progress
from titanlite.checkpoint.description import save_tokenizer
from titanlite.checkpoint.folder import OWN_FOLDER
from titanlite.checkpoint.train_state import find_progress
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig, TransformersConfig, describe_changes, save_resolved
from titanlite.config.parallelism import Degrees
from titanlite.config.schema import BLOCK_SIZES
from titanlite.data.loader import TrainLoader
from titanlite.data.tokenizer import describe_other_ids, describe_resizing
from titanlite.distributed import ParallelDims
from titanlite.distributed.fsdp import base_dtype, mixed_precision_dtypes
from titanlite.distributed.parallelize import parallelize
from titanlite.features.lora.layers import apply_lora
from titanlite.features.lowbit.weights import encode_weights
from titanlite.features.streams.mixture import get_sources
from titanlite.features.transformers.model import TransformersModel
from titanlite.launch.notices import read_restart
from titanlite.metrics import open_events, record_event
from titanlite.metrics.events import get_rank
from titanlite.models.build import build_model
from titanlite.models.decoder import Decoder
from titanlite.models.families import describe_differences, family_of, model_config_from_hf
from titanlite.models.interface import Model
from titanlite.models.moe import is_routed
from titanlite.ops.grouped_gemm import resolve_backend, triton_problem
from titanlite.optim.parameters import freeze_parameters

_MANY_EPOCHS = 10  # of a pretrained model's new data
_LARGE_MASK = 2 << 30  # bytes
_WRITTEN = (".jsonl", ".json", ".toml", ".txt")  # files of the run
_MUCH_WAITING = 0.5  # of a step
_COMPARED_SEQUENCES, _COMPARED_TOKENS = 64, 1 << 16  # at most, by two tokenizers
_CONFIG, _NEXT_CONFIG = "config.toml", "config.next.toml"  # of the run in a folder, and of one that is being built


def check_data_order(start: Progress, loader: TrainLoader) -> None:
    """Say so if a resumed run would train on other data, or in another order, than the run that it goes on with."""
    if start.data == loader.fingerprint or get_rank() != 0:
        return
    taken = loader.get_taken(start.step)
    places = ", ".join(f"{name} at {count}" for name, count in taken.items())
    logger.warning(
        "data: the checkpoint was trained on %s, this run has %s; it goes on at sample %d of the new order%s.",
        *(start.data, loader.fingerprint, start.samples, f", of the sources {places}" if places else ""),
    )


def check_saved_tokenizer(
    job: JobConfig, model_config: AnyModelConfig, tokenizer: Any, loader: TrainLoader, is_new: bool
) -> None:
    """Compare the tokenizer with what `AutoTokenizer` will make of it in a saved folder, on the training data.

    Transformers builds the tokenizers of some models anew, in the form of the model's class. Of a model that is not new
    (`is_new`) the tokenizer cannot be chosen: it gets a warning.

    Raises:
        DataError: it will read texts otherwise. The same on all ranks. Collective: every rank must call.
    """

    def find() -> str:
        hf = model_config.hf if isinstance(model_config, TransformersConfig) else {"model_type": model_config.family}
        with TemporaryDirectory() as folder:
            save_tokenizer(tokenizer, Path(folder))
            (Path(folder) / "config.json").write_text(json.dumps(dict(hf)), encoding="utf-8")
            try:
                theirs = load_from_folder("AutoTokenizer", Path(folder))
            except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing more specific
                return f"it raises {type(error).__name__}: {error}"
        found = describe_other_ids(tokenizer, theirs, map(tokenizer.decode, _take_sequences(job, loader)))
        return f"its {type(theirs).__name__} reads {found}" if found else ""

    if not job.checkpoint.enable or not (found := on_first_rank(find)):
        return
    text = f"data: transformers will not read the tokenizer of this run as it is in a saved {model_config.family}: "
    if is_new:
        raise DataError(
            f"{text}{found}. Empty data.tokenizer_path to train one in the right form, or take one of that class."
        )
    if get_rank() == 0:
        logger.warning("%s%s. Load it with PreTrainedTokenizerFast.from_pretrained.", text, found)


def _take_sequences(job: JobConfig, loader: TrainLoader) -> list[list[int]]:
    """Evenly spaced sequences of token ids; none of images, nor of a stream, which would be read from its start."""
    dataset, count = loader.dataset, loader.dataset.num_train_sequences
    if count is None or job.data.dataset == "images":
        return []
    num = max(1, min(count, _COMPARED_SEQUENCES, _COMPARED_TOKENS // dataset.seq_len))
    return [row.tolist() for row in dataset.batch(np.linspace(0, count - 1, num).astype(np.int64)).tokens]


def check_resumed_model(model_config: AnyModelConfig, folder: Path) -> None:
    """The model of the checkpoint in `folder` must be this one, in all that its weights compute.

    Tensors of other shapes are refused where they are read; these would fit, and yet be another function.

    Raises:
        ConfigError: it is another one. The same on all ranks. Collective: every rank must call.
    """

    def find() -> str:
        files = [folder / "config.json", folder / OWN_FOLDER / "config.json"]  # the latter beside adapters
        path = next((path for path in files if path.is_file()), None)
        if not isinstance(model_config, ModelConfig) or path is None:
            return ""
        return describe_differences(model_config, model_config_from_hf(path, "checkpoint"))

    if text := on_first_rank(find):
        raise ConfigError(
            f"model: this run is to resume from {folder}, whose model is another one: {text}. Undo the change, or "
            f"begin a new run: another job.dump_folder, and checkpoint.initial_load_path = {folder}."
        )


def resolve_steps(job: JobConfig, loader: TrainLoader) -> JobConfig:
    """`job` with the `training.steps` that `training.epochs` are, if it has any; says how long the run is."""
    size, num_sequences = loader.global_batch_size, loader.dataset.num_train_sequences
    steps = job.training.steps
    if job.training.epochs and num_sequences is not None:
        steps = math.ceil(job.training.epochs * num_sequences / size)
        job = replace(job, training=replace(job.training, steps=steps))
    length = f"{steps:,} steps of {size} sequences, {steps * size * job.training.seq_len:,} tokens with padding"
    if num_sequences is None:
        logger.info("training: %s", length)
        return job
    epochs = steps * size / num_sequences
    logger.info("training: %s, %.3g epochs", length, epochs)
    _warn_of_many_epochs(job, epochs, "", "training.epochs")
    return job


def describe_pipeline(loader: TrainLoader, model_config: AnyModelConfig, degrees: Degrees) -> None:
    """Say which stages there are, and how long they wait for each other; warn on rank 0 if that is most of a step."""
    if degrees.pp == 1:
        return
    stages = [degrees.stage_parts(model_config.num_layers, stage) for stage in range(degrees.pp)]
    sizes, chunks = [sum(map(len, parts)) for parts in stages], ""
    if degrees.chunks > 1:
        chunks = f" in {degrees.chunks} chunks"
    count, size = loader.num_micro_batches, loader.global_batch_size
    waiting = degrees.waiting(count)
    logger.info(
        "pipeline: %d stages of %s layers%s; micro-batches a step: %d, so that a rank waits for %.0f %% of it",
        *(degrees.pp, ", ".join(map(str, sizes)), chunks, count, 100 * waiting),
    )
    if waiting >= _MUCH_WAITING and get_rank() == 0:
        logger.warning(
            "pipeline: %.0f %% of a step is waiting. Raise training.global_batch_size (%d), or lower "
            "training.local_batch_size (%d), so that there are several micro-batches for each of the %d stages.",
            *(100 * waiting, size, loader.local_batch_size, degrees.pp),
        )


def describe_sources(job: JobConfig, loader: TrainLoader, step: int = 0) -> None:
    """Log how much of each source of a mixture a run takes to its end, with what it took before it began at `step`."""
    sizes = {source.name: source.dataset.num_train_sequences for source in get_sources(loader.dataset)}
    for name, count in loader.get_taken(max(step, job.training.steps)).items():
        size = sizes[name]
        epochs = "" if size is None else f", {count / size:.3g} epochs"
        logger.info("training: of %s %s sequences%s", name, f"{count:,}", epochs)
        if size is not None and loader.dataset.num_train_sequences is None:  # else all have the same epochs
            _warn_of_many_epochs(job, count / size, f" of {name}", f"data.sources.{name}.weight to less")


def _warn_of_many_epochs(job: JobConfig, epochs: float, source: str, remedy: str) -> None:
    if job.checkpoint.initial_load_path and epochs > _MANY_EPOCHS and get_rank() == 0:
        logger.warning(
            "training: a pretrained model sees the data%s %.0f times, which it learns by heart. Set %s, or lower "
            "training.steps, if that is not meant.",
            *(source, epochs, remedy),
        )


def record_start(folder: Path, step: int, where: str, *, resumed: bool, changes: Sequence[str] = ()) -> None:
    """Record that training begins after `step`: its settings, and one event, of the kind that says most. On rank 0.

    If the ranks started again, it is also logged why; and of a run that is resumed, which settings changed.
    """
    if dist.get_rank() == 0 and (folder / _NEXT_CONFIG).exists():
        (folder / _NEXT_CONFIG).replace(folder / _CONFIG)
    if resumed and changes:
        text = f"settings changed since the last start: {', '.join(changes)}"
        logger.info("resume: %s", text)
        where = f"{where}; {text}"
    restart = read_restart()
    if restart is None:
        record_event("resume" if resumed else "start", where, step)
        return
    text = f"restart {restart.count} of {restart.most}, because {restart.why}; training goes on from step {step}"
    logger.info(text)
    record_event("restart", f"{text}; {where}", step)


def hold_folders(job: JobConfig, folder: Path) -> list[FolderLock | None]:
    """Make the run's folder, and let no other run write there as long as the result lives; empty on other ranks than 0.

    The same for the checkpoints, should they be elsewhere. On file systems without locks it is only a warning.

    Raises:
        ConfigError: on all ranks; another run holds it, and which, or rank 0 cannot write there. Collective: every rank
            must call.
    """
    locks: list[FolderLock | None] = []
    wait_s = min(LOCK_WAIT_S, job.comm.timeout_seconds / 2)  # the other ranks wait in a collective

    def take() -> None:
        checkpoints = folder / job.checkpoint.folder
        inside = not job.checkpoint.enable or checkpoints.resolve().is_relative_to(folder.resolve())
        for each in (folder,) if inside else (folder, checkpoints):
            try:
                each.mkdir(parents=True, exist_ok=True)
                locks.append(FolderLock.take(each, os.environ.get(RENDEZVOUS, ""), wait_s))
            except FolderHeldError as error:
                holder = error.holder
                raise ConfigError(
                    f"job.dump_folder: another run writes into {each}: process {holder.pid} on {holder.host}, since "
                    f"{holder.since}. Wait for its end, or end it, or set another job.dump_folder. Remove {error.path} "
                    "if that machine is gone."
                ) from None
            except OSError as error:
                if not is_full(error):
                    raise ConfigError(
                        f"job.dump_folder: cannot write to {each}: {error.strerror}. Choose another folder."
                    ) from None
                logger.warning("job.dump_folder: %s cannot be locked: %s.", each, error.strerror)
            else:
                if locks[-1] is None:
                    logger.warning(
                        "job.dump_folder: the file system of %s has no locks. Start no other run with this folder "
                        "meanwhile: each would remove the other's checkpoints.",
                        each,
                    )

    on_first_rank(take)
    return locks


def get_chat_date(job: JobConfig) -> str:
    """What chat templates take for today, as ISO text: as set, as in the checkpoint to resume from, or today."""
    if job.data.chat_date or not job.checkpoint.enable:
        return job.data.chat_date or date.today().isoformat()
    found = find_progress(Path(job.job.dump_folder) / job.checkpoint.folder, job.checkpoint.load_step)
    return (found and found.chat_date) or date.today().isoformat()


def with_chat_date(job: JobConfig) -> JobConfig:
    """`job` with the date of `get_chat_date`, where the data are chats."""
    has_chats = job.data.dataset in ("examples", "images")
    return replace(job, data=replace(job.data, chat_date=get_chat_date(job))) if has_chats else job


def resolve_chat_date(job: JobConfig) -> JobConfig:
    """As `with_chat_date`, the same on all ranks. Collective: every rank must call."""
    return on_first_rank(lambda: with_chat_date(job))


def make_dump_folder(job: JobConfig, folder: Path) -> list[str]:
    """Make the run's folder and save the resolved configuration in it, on rank 0. Log and events go there from now on.

    It has its usual name from `record_start` on: a start that is refused before changes nothing of what is known of
    the run that is there. Returns the settings that are others than those of that run; on other ranks none.

    Raises:
        ConfigError: on all ranks, if rank 0 cannot write there; a full disk is only a warning if
            `checkpoint.on_save_error` is "continue". Collective: every rank must call.
    """
    failure: list[str | None] = [None]
    changes: list[str] = []
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.suffix in _WRITTEN and path.exists():
                    check_regular(path)
            changes = describe_changes(job, folder / _CONFIG)
            save_resolved(job, folder / _NEXT_CONFIG)
        except OSError as error:
            if is_full(error) and job.checkpoint.on_save_error == "continue":
                logger.warning("cannot write %s: %s.", folder / _CONFIG, error.strerror)
            else:
                failure[0] = str(error)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ConfigError(f"job.dump_folder: cannot write to {folder}: {failure[0]}. Choose another folder.")
    log_to_folder(folder)
    open_events(folder)
    return changes


def check_device(job: JobConfig, device: torch.device) -> None:
    """Refuse settings that this device would ignore or fail on.

    Raises:
        ConfigError: CPU offload, Triton kernels, flex or varlen attention without a GPU, or the latter in float32. The
            same on all ranks.
    """
    if job.model.attention_backend == "flex" and device.type != "cuda":
        raise ConfigError("model.attention_backend: 'flex' has no backward pass on the CPU. Set it to 'sdpa'.")
    if job.model.attention_backend == "varlen":
        dtype, _ = mixed_precision_dtypes(job, device.type)
        if device.type != "cuda" or dtype == torch.float32:
            other = ", or training.mixed_precision_param to 'bfloat16'" if device.type == "cuda" else ""
            raise ConfigError(
                "model.attention_backend: 'varlen' is for bfloat16 on CUDA, and activations are "
                f"{str(dtype).removeprefix('torch.')} on {device.type}. Set it to 'sdpa'{other}."
            )
    if job.training.enable_cpu_offload and device.type != "cuda":
        raise ConfigError("training.enable_cpu_offload: there is no CUDA device to offload from. Set it to false.")
    try:
        resolve_backend(job.moe.grouped_gemm, device, torch.float32)
    except ValueError as error:
        raise ConfigError(f"moe.grouped_gemm: {error}") from None


def check_vocabulary(job: JobConfig, vocab_size: int, num_ids: int, model_config: AnyModelConfig) -> None:
    """Every token id of the data, below `vocab_size`, must have a row in the embedding.

    Ids of the tokenizer, below `num_ids`, without one are a warning; so are many more rows.

    Raises:
        DataError: the data has more tokens than the model. The same on all ranks.
    """
    rows = model_config.vocab_size
    if max(vocab_size, num_ids) > rows:
        text = f"data: the tokenizer has {max(vocab_size, num_ids)} tokens, but the model's vocab_size is {rows}. "
        text += describe_resizing(job, max(vocab_size, num_ids), model_config)
        if vocab_size > rows:
            raise DataError(text)
        if get_rank() == 0:
            logger.warning(
                "%s The data has none of the tokens from %d on, so the run begins; with one of them the saved model "
                "would fail.",
                *(text, rows),
            )
    if 2 * vocab_size < model_config.vocab_size and get_rank() == 0:
        logger.warning(
            "data: the tokenizer has %d tokens, the embedding %d rows, of which most will never be trained. Set "
            "data.tokenizer_path to the model's own tokenizer, or model.overrides.vocab_size = %d.",
            *(vocab_size, model_config.vocab_size, vocab_size),
        )


def get_bias_update_rate(job: JobConfig, model_config: AnyModelConfig) -> float:
    """The configured rate; unset, a bias is trained only where the exported architecture can hold it."""
    if isinstance(model_config, TransformersConfig):
        return 0.0
    if job.moe.expert_bias_update_rate is not None:
        return job.moe.expert_bias_update_rate
    return 1e-3 if family_of(model_config).expert_bias_key is not None else 0.0


def build_on_meta(job: JobConfig, model_config: AnyModelConfig, dims: ParallelDims, device: torch.device) -> Model:
    """The model as it will be trained on devices like `device`, sharded, still without memory; no communication.

    Raises:
        ConfigError: patterns that name nothing, or transformers cannot build the model. The same on all ranks.
    """
    model = build_model(model_config, base_dtype(job, device.type))  # on meta: shapes only
    if isinstance(model_config, ModelConfig) and model_config.pad_token_id is not None:
        logger.info(
            "model: looking up token %d has no gradient, as in transformers: it is pad_token_id in config.json. "
            "Remove it there to train that row.",
            model_config.pad_token_id,
        )
    apply_lora(model, job.lora, getattr(torch, job.training.dtype))
    if job.lora.base_dtype in BLOCK_SIZES:
        encode_weights(model, job.lora.base_dtype)
    freeze_parameters(model, job.optimizer)
    if job.training.objective == "dpo":
        turn_off_dropout(model)
    configure(model, job, device)
    parallelize(model, job, dims, device.type)  # still on meta: now shards
    return model


def turn_off_dropout(model: torch.nn.Module) -> None:
    """Let all layers keep everything: DPO compares with a reference without dropout, whose noise would be reward."""
    found = set()
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.Dropout)
        for name in ["p"] if is_dropout else [name for name in vars(module) if name.endswith("dropout")]:
            value = getattr(module, name)
            if isinstance(value, float) and value > 0.0:
                found.add(value)
                setattr(module, name, 0.0)
    if found:
        logger.info("dpo: dropout of %s is off, as in the reference", ", ".join(map(str, sorted(found))))


def warn_of_settings(job: JobConfig, model_config: AnyModelConfig, device: torch.device) -> None:
    """Warn of settings that do nothing, cost much, or change what a checkpoint goes on with."""
    warn_of_ignored_balancing(job, model_config)
    warn_of_large_mask(job, model_config, device)
    warn_of_changed_base(job, model_config)


def warn_of_ignored_balancing(job: JobConfig, model_config: AnyModelConfig) -> None:
    """Say on rank 0 which settings a model without experts ignores. No error: families are compared on one file."""
    names = ("expert_bias_update_rate", "aux_loss_coeff", "z_loss_coeff")
    given = [f"moe.{name} = {value}" for name in names if (value := getattr(job.moe, name))]
    if given and model_config.num_experts == 0 and get_rank() == 0:
        logger.warning("moe: the model has no experts to balance: no effect of %s", ", ".join(given))


def warn_of_changed_base(job: JobConfig, model_config: AnyModelConfig) -> None:
    """Say on rank 0 if adapters are trained on another model than the one that peft would load them onto."""
    folder = Path(job.checkpoint.initial_load_path)
    if not job.lora.rank or not isinstance(model_config, ModelConfig) or get_rank() != 0:
        return
    if not (folder / "config.json").is_file():
        return
    if text := describe_differences(model_config, model_config_from_hf(folder, "checkpoint.initial_load_path")):
        logger.warning(
            "lora: the adapters are for another model than %s describes: %s. Merge them (python -m titanlite export "
            "--merge), or change its config.json before they are loaded onto it.",
            *(folder, text),
        )


def warn_of_large_mask(job: JobConfig, model_config: AnyModelConfig, device: torch.device) -> None:
    """Say on rank 0 what the dense mask of long packed sequences takes on a GPU, where there is attention without."""
    training, is_native = job.training, isinstance(model_config, ModelConfig)
    if device.type != "cuda" or not is_native or job.model.attention_backend != "sdpa" or get_rank() != 0:
        return
    dtype, _ = mixed_precision_dtypes(job, device.type)
    nbytes = training.local_batch_size * training.seq_len**2 * dtype.itemsize
    if nbytes >= _LARGE_MASK:
        other = "'varlen'" if dtype == torch.bfloat16 else "'flex'"
        logger.warning(
            "model.attention_backend: 'sdpa' masks %d sequences of %d tokens with %s on every rank, however many ranks "
            "split them. Set it to %s, which needs no such mask.",
            *(training.local_batch_size, training.seq_len, format_memory(nbytes), other),
        )


def configure(model: Model, job: JobConfig, device: torch.device) -> None:
    """Hand the settings that are no sizes to the modules that use them."""
    if isinstance(model, TransformersModel):
        model.loss_chunk_tokens = job.training.loss_chunk_tokens
        if model.config.num_experts or any(is_routed(name) for name, _ in model.named_parameters()):
            told = "its expert load is logged" if model.counters else model.why_not_counted()
            logger.info(
                "moe: transformers' %s routes by itself: no balancing is added; %s", model.config.architecture, told
            )
        return
    if model.moe_layers():
        backend = resolve_backend(job.moe.grouped_gemm, device, torch.float32)
        logger.info("moe: grouped GEMM backend: %s", backend)
        chosen = device.type == "cuda" and job.moe.grouped_gemm == "auto" and backend == "torch"
        if chosen and (problem := triton_problem()) is not None:
            logger.warning("moe: %s titanlite's kernels are left out, which is slower. Install a newer torch.", problem)
    assert isinstance(model, Decoder)
    model.model.attention_backend = job.model.attention_backend
    model.lm_head.chunk_tokens = job.training.loss_chunk_tokens
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff, moe.gate.z_loss_coeff = job.moe.aux_loss_coeff, job.moe.z_loss_coeff
        moe.experts.grouped_gemm_backend = job.moe.grouped_gemm
