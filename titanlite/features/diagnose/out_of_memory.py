"""Out of memory: one readable error instead of a traceback, and on CUDA a snapshot of who holds what."""

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.base.agree import get_rank
from titanlite.base.env import read_rank
from titanlite.base.errors import ConfigError, TrainingError
from titanlite.base.log import logger
from titanlite.base.tables import format_memory
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.distributed.fsdp import mixed_precision_dtypes
from titanlite.distributed.parallelize import choose_attention

FOLDER = "memory"
_GIB = 2**30
_LARGE_MASK = 2 * _GIB
_LONG = 8192  # tokens of a sequence on a rank
# Allocations and frees that are kept with their stacks: some steps, and some 100 MB of host memory.
_ENTRIES = 100_000
# A private part of torch: looked up, so that a version without it is one clear error and not an AttributeError.
_RECORD, _DUMP = "_record_memory_history", "_dump_snapshot"
_DATA_ROOMS = tuple(
    f"titanlite/{room}" for room in ("data/", "features/images.py", "features/sft/", "features/streams/")
)
_DATA_REMEDY = "Give data in smaller rows and files (data.path), or start fewer ranks on this machine."
# Errors that have no class of their own: torch's allocator of the host; cudaHostAlloc, for one, and Triton; cuBLAS.
_OF_HOST = "DefaultCPUAllocator"
_OF_DEVICE = ("CUDA error: out of memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def start_memory_history(job: JobConfig, device: torch.device) -> None:
    """Record allocations from now on, with `profiling.enable_memory_snapshot`. Call once the device is set.

    Raises:
        ConfigError: without a CUDA device, or with a torch that cannot record. The same on all ranks.
    """
    if not job.profiling.enable_memory_snapshot:
        return
    key = "profiling.enable_memory_snapshot"
    if device.type != "cuda":
        raise ConfigError(f"{key}: only memory of CUDA devices can be recorded, and there is none. Set it to false.")
    record = getattr(torch.cuda.memory, _RECORD, None)
    if record is None or not hasattr(torch.cuda.memory, _DUMP):
        raise ConfigError(
            f"{key}: torch {torch.__version__} has no torch.cuda.memory.{_RECORD}. Set it to false, or use torch 2.11 "
            "to 2.14."
        )
    record(max_entries=_ENTRIES)


def warn_of_large_mask(job: JobConfig, model_config: AnyModelConfig, device: torch.device) -> None:
    """Warn on rank 0 of the memory of a dense mask for long packed sequences, where varlen attention could do."""
    training = job.training
    if device.type != "cuda" or not isinstance(model_config, ModelConfig) or get_rank() != 0:
        return
    if choose_attention(job, model_config, device.type) != "sdpa":
        return
    dtype, _ = mixed_precision_dtypes(job.training, device.type)
    nbytes = training.local_batch_size * training.seq_len**2 * dtype.itemsize
    if nbytes >= _LARGE_MASK:
        other = "" if dtype == torch.bfloat16 else ", with training.mixed_precision_param = 'bfloat16'"
        logger.warning(
            "model.attention_backend: 'sdpa' masks %d sequences of %d tokens with %s on every rank, however many ranks "
            "split them. Set it to 'varlen'%s, which needs no such mask.",
            *(training.local_batch_size, training.seq_len, format_memory(nbytes), other),
        )


def explain_out_of_memory(job: JobConfig, error: BaseException) -> TrainingError | None:
    """Turn running out of memory into one clear error, and dump the recorded history if there is one.

    The snapshot is `dump_folder/memory/rankN.pickle`, for https://pytorch.org/memory_viz. None for other errors. Other
    ranks wait for this one until the launcher ends them.
    """
    if not is_out_of_memory(error):
        return None
    of_device = _is_of_device(error)
    said = str(error).strip().splitlines()
    reason = f" ({said[0].rstrip('.')})" if said else ""
    place = _place(error)
    memory, snapshot = (_device_memory(), _dump(job)) if of_device else ("", "")
    remedies = _DATA_REMEDY if any(room in place for room in _DATA_ROOMS) else _describe_remedies(job)
    return TrainingError(
        f"memory: rank {read_rank()} ran out of memory of {'the GPU' if of_device else 'the host'}"
        f"{place}{reason}.{memory} {remedies}{snapshot}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the host has no memory left."""
    if isinstance(error, dist.DistBackendError):
        return "out of memory" in str(error)  # NCCL makes its buffers when a group is first used
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (_OF_HOST in str(error) or _is_of_device(error))


def _is_of_device(error: BaseException) -> bool:
    of_class = isinstance(error, torch.OutOfMemoryError | dist.DistBackendError)
    return of_class or any(text in str(error) for text in _OF_DEVICE)


def _place(error: BaseException) -> str:
    """Return the innermost line of titanlite on the way to the error."""
    package = Path(__file__).parents[2]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not frames:
        return ""
    path = Path(frames[-1].filename).relative_to(package.parent)
    return f" in {frames[-1].name}, {path}:{frames[-1].lineno}"


def _describe_remedies(job: JobConfig) -> str:
    """Name the settings that save memory, with their values; leave out what cannot be lowered any more."""
    training, found = job.training, []
    if job.parallelism.fsdp_once_per_step:
        found.append("set parallelism.fsdp_once_per_step = false")
    if training.local_batch_size > 1:
        found.append(f"lower training.local_batch_size ({training.local_batch_size})")
    if job.activation_checkpoint.mode != "full":
        found.append(f'set activation_checkpoint.mode = "full" (now "{job.activation_checkpoint.mode}")')
    found.append(f"lower training.seq_len ({training.seq_len})")
    cp = job.parallelism.context_parallel_degree
    if job.model.implementation != "transformers" and training.seq_len // cp >= _LONG:
        found.append(f"split sequences over more ranks (parallelism.context_parallel_degree, {cp})")
    if training.loss_chunk_tokens == 0:
        found.append("set training.loss_chunk_tokens = 256")
    elif training.loss_chunk_tokens > 256:
        found.append(f"lower training.loss_chunk_tokens ({training.loss_chunk_tokens})")
    found.append("or train on more ranks (parallelism.data_parallel_shard_degree)")
    text = ", ".join(found)
    return f"{text[0].upper()}{text[1:]}."


def _device_memory() -> str:
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f" At most {allocated / _GIB:.2f} GiB were allocated and {reserved / _GIB:.2f} GiB reserved, of "
        f"{total / _GIB:.2f} GiB; {free / _GIB:.2f} GiB are free."
    )


def _dump(job: JobConfig) -> str:
    """Write the snapshot, if allocations were recorded; a sentence on where it is, or how to get one."""
    if not job.profiling.enable_memory_snapshot:
        return " For a snapshot of the memory, set profiling.enable_memory_snapshot = true."
    path = Path(job.job.dump_folder) / FOLDER / f"rank{read_rank()}.pickle"
    dump: Any = getattr(torch.cuda.memory, _DUMP)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dump(str(path))
    except (OSError, RuntimeError) as error:  # the error that this belongs to must be heard in any case
        return f" The snapshot of the memory could not be written to {path}: {error}."
    return f" A snapshot of the memory is in {path}; open it at https://pytorch.org/memory_viz."
