"""Set-up of a process before training (determinism, flight recorder, kernels, memory history), and
explanations of its failures.

`training.deterministic` gives the same bits in every run on the same mesh, and in a resumed run.
"""

import random
import re
import socket
import subprocess
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.attention

from titanlite.base.agree import gather_objects, together
from titanlite.base.errors import ConfigError, TitanliteError, TrainingError
from titanlite.base.log import logger
from titanlite.base.process import read_rank, read_variable, set_defaults
from titanlite.base.text import describe_error, format_memory
from titanlite.config import AnyModelConfig, JobConfig, ModelConfig
from titanlite.distributed.parallelize import choose_attention
from titanlite.ops.attention import varlen_attention
from titanlite.ops.matmul import triton_problem

_CODE = re.compile(
    r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE
)
# cuBLAS and NCCL read these when they start: a workspace of fixed size, and sums over ranks in a
# fixed order, independent of the message size and of the load of the interconnect.
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
# Workspaces that cuBLAS documents as deterministic.
_WORKSPACES = (":4096:8", ":16:8")
# Variables that torch 2.11 to 2.15 read for the flight recorder, each with its older name, which
# torch still reads. 2,000 collectives take about 1 MiB per rank and cover several steps of a large
# model.
_FLIGHT_RECORDER = (
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", ""),
)


def prepare_process(job: JobConfig, folder: Path) -> None:
    """Run the set-up that must precede the process group and CUDA: `make_deterministic`,
    `start_flight_recorder`.
    """
    make_deterministic(job)
    start_flight_recorder(folder)


def prepare_device(job: JobConfig, model_config: AnyModelConfig, device: torch.device) -> None:
    """Try the kernels and start the memory history according to `job`. Collective: every rank must
    call.
    """
    check_triton(job, device)
    use_flash_attention_3(job, model_config, device)
    start_memory_history(job, device)


def explain_failure(error: BaseException, job: JobConfig | None) -> TitanliteError | None:
    """Return an error that names the cause, if full memory or a setting of `job` caused an error of
    torch; None for other errors.
    """
    return (job and explain_out_of_memory(job, error)) or explain_refusal(error)


def make_deterministic(job: JobConfig) -> None:
    """Make this process deterministic if `training.deterministic` is set; call this before the
    process group and CUDA start.

    Seeds the generators of Python and numpy. (`train_step` seeds torch's generators by step and
    rank, and titanlite's own random numbers come from counters.) Selects deterministic algorithms,
    no autotuning, attention kernels whose backward sums in a fixed order, and the environment of
    cuBLAS and NCCL. An operation without a deterministic implementation raises an error with its
    name when it is first called.

    Raises:
        ConfigError, on all ranks: a setting cannot be deterministic, or the environment forbids it.
    """
    if not job.training.deterministic:
        return
    random.seed(job.training.seed)
    np.random.seed(job.training.seed % 2**32)
    given = set_defaults(_ENVIRONMENT)["CUBLAS_WORKSPACE_CONFIG"]
    if given not in _WORKSPACES:
        raise ConfigError(
            f"training.deterministic: the environment has CUBLAS_WORKSPACE_CONFIG={given}, which "
            f"is not deterministic. Unset it, or set it to {' or '.join(_WORKSPACES)}."
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]  a pass over each new tensor
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # FlashAttention's backward obeys the flag above. These two do not, or select their algorithm
    # themselves.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def start_flight_recorder(dump_folder: Path) -> None:
    """Make NCCL write to `dump_folder/flight_recorder/rank_N` when a collective times out; no-op
    without GPUs.

    Call this before the process group is made, which reads the environment. Variables that the user
    set are not changed. gloo has no flight recorder; its error on the waiting rank names the
    collective.
    """
    if not torch.cuda.is_available():
        return
    folder = dump_folder.absolute() / "flight_recorder"
    for name, old_name, value in _FLIGHT_RECORDER:
        if read_variable(old_name) is None:
            set_defaults({name: value or f"{folder}/rank_"})
    # NCCL's watchdog does not create the folder. If the run cannot write here, `make_dump_folder`
    # raises a clear error later.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)


def check_triton(job: JobConfig, device: torch.device) -> None:
    """Run a small Triton kernel if the run uses Triton, which needs a C compiler. Warn if this
    version of Triton generates wrong code for this GPU.

    Collective: every rank must call.

    Raises:
        ConfigError, on all ranks: the kernel cannot be compiled or run on one of them.
    """
    if device.type != "cuda" or not job.training.triton_kernels:
        return
    if (problem := triton_problem()) is not None:
        logger.warning(
            "%s titanlite's kernels are not used, which is slower. Install a newer torch.", problem
        )
        return
    problem = None
    try:
        _run_kernel(device)
    except subprocess.CalledProcessError as error:  # the compiler wrote its message to the console
        problem = f"{error.cmd[0]} ended with exit code {error.returncode}"
    except Exception as error:  # noqa: BLE001 - whatever it is: a kernel that does not run is the problem
        problem = describe_error(error)
    with together():
        if problem is not None:
            raise ConfigError(
                f"training.triton_kernels: a first Triton kernel fails on {socket.gethostname()}: "
                f"{problem}. Triton compiles with gcc and Python's headers: install them (Debian "
                "and Ubuntu: apt install gcc python3-dev), or set training.triton_kernels = false, "
                "which is slower."
            )


def _run_kernel(device: torch.device) -> None:
    from titanlite.ops.launchers import gather_sum  # nothing else here needs triton

    gather_sum(
        torch.zeros(1, 16, device=device), torch.zeros(1, 1, device=device, dtype=torch.int32)
    )
    torch.cuda.synchronize(device)


_FLASH_3 = "FA3"
_FLASH_3_PACKAGE = "flash_attn_interface"


def use_flash_attention_3(
    job: JobConfig, model_config: AnyModelConfig, device: torch.device
) -> None:
    """Use FlashAttention 3 for `model.attention_backend` = "auto" on Hopper, if all ranks have its
    package.

    torch activates it in the whole process. Forward and backward are tried with the head sizes of
    this model. If that fails, torch's own FlashAttention 2 is used. It is also used with
    `training.deterministic`, because only its backward is deterministic.

    Collective: every rank must call.
    """
    if device.type != "cuda" or job.model.attention_backend != "auto" or job.training.deterministic:
        return
    if choose_attention(job, model_config, device.type) != "varlen" or not isinstance(
        model_config, ModelConfig
    ):
        return
    attention = torch.nn.attention
    found = (
        torch.cuda.get_device_capability(device)[0] == 9
        and find_spec(_FLASH_3_PACKAGE) is not None
        and _FLASH_3 in attention.list_flash_attention_impls()
    )
    problem = None if found else ""
    if found:
        try:
            attention.activate_flash_attention_impl(_FLASH_3)
            _try_attention(model_config, device)
        except Exception as error:  # noqa: BLE001 - whatever it is: a kernel that does not run is the problem
            problem = describe_error(error)
    problems = gather_objects(problem)
    if all(problem is None for problem in problems):
        logger.info("attention: FlashAttention 3, of %s", _FLASH_3_PACKAGE)
        return
    if found and attention.current_flash_attention_impl() == _FLASH_3:
        attention.restore_flash_attention_impl()
    if why := next(filter(None, problems), None):
        logger.warning(
            "attention: FlashAttention 2 is used: 3 fails with the heads of this model: %s.", why
        )


def _try_attention(config: ModelConfig, device: torch.device) -> None:
    def make(heads: int, width: int) -> torch.Tensor:
        return torch.zeros(
            1, 16, heads, width, dtype=torch.bfloat16, device=device, requires_grad=True
        )

    q = make(config.num_heads, config.qk_head_dim)
    k = make(config.num_kv_heads, config.qk_head_dim)
    v = make(config.num_kv_heads, config.value_head_dim)
    starts = torch.tensor([0, 5, 16], dtype=torch.int32, device=device)
    varlen_attention(q, k, v, starts, 1.0).sum().backward()
    torch.cuda.synchronize(device)


def explain_refusal(error: BaseException) -> ConfigError | None:
    """Return an error with a remedy if a setting caused this error of torch; None for other errors.

    The two cases are an operation that is not deterministic, and a layer that cannot be traced or
    compiled.
    """
    if match := re.search(r"(\S+) does not have a deterministic implementation", str(error)):
        return ConfigError(
            f"training.deterministic: {match[1]} has no deterministic form on this device. Set "
            "training.deterministic = false, or change the model or setting that uses it."
        )
    if not any(
        kind.__module__.startswith(("torch._dynamo.", "torch._inductor."))
        for kind in type(error).__mro__
    ):
        return None
    text = str(error)
    message, _, code = text.partition("from user code:")
    reason = next(
        (line.strip() for line in message.splitlines() if line.strip()), type(error).__name__
    )
    if explanation := re.search(r"^\s*Explanation: (.*)$", message, re.MULTILINE):
        reason = f"{reason.rstrip('.')}: {explanation[1]}"
    frames = list(_CODE.finditer(code))
    place = (
        f" (in {frames[-1]['name']}, {frames[-1]['file']}:{frames[-1]['line']})" if frames else ""
    )
    remedy = "Change that code" if frames else "See what it says"
    if "C++ compiler" in reason:
        remedy = "Install one (Debian and Ubuntu: apt install g++)"
    return ConfigError(
        f"compile.enable: torch cannot compile a layer: {reason.rstrip('.')}{place}. {remedy}, or "
        "set compile.enable = false."
    )


FOLDER = "memory"
# Recorded allocations and frees, with their stacks: a few steps, and a few 100 MB of host memory.
_ENTRIES = 100_000
_REMEDY = (
    'Lower training.local_batch_size or training.seq_len, set activation_checkpoint.mode = "full", '
    "train on more ranks (parallelism.data_parallel_shard_degree), or give data in smaller files "
    "(data.path)."
)
# Texts of out-of-memory errors without a class: torch's host allocator; CUDA (for example
# cudaHostAlloc), Triton and cuBLAS.
_OF_HOST = "DefaultCPUAllocator"
_OF_DEVICE = ("CUDA error: out of memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def start_memory_history(job: JobConfig, device: torch.device) -> None:
    """Start to record allocations if `profiling.enable_memory_snapshot` is set; call this after the
    device is set.

    Raises:
        ConfigError, on all ranks: the device is not CUDA.
    """
    if not job.profiling.enable_memory_snapshot:
        return
    if device.type != "cuda":
        raise ConfigError(
            "profiling.enable_memory_snapshot: only memory of CUDA devices can be recorded, and "
            "there is none. Set it to false."
        )
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)


def explain_out_of_memory(job: JobConfig, error: BaseException) -> TrainingError | None:
    """Return a clear error for an out-of-memory error, and write the recorded history if there is
    one; None for other errors.

    The snapshot is `dump_folder/memory/rankN.pickle`, for https://pytorch.org/memory_viz. Other
    ranks wait for this rank until the launcher ends them.
    """
    if not is_out_of_memory(error):
        return None
    said = str(error).strip().splitlines()
    reason = f" ({said[0].rstrip('.')})" if said else ""
    where = f"{_place(error)}{reason}."
    rank = f"memory: rank {read_rank()} ran out of memory of"
    if _is_of_device(error):
        return TrainingError(f"{rank} the GPU{where}{_device_memory()} {_REMEDY}{_dump(job)}")
    return TrainingError(f"{rank} the host{where} {_REMEDY}")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the host has no memory left."""
    if isinstance(error, dist.DistBackendError):
        # NCCL allocates its buffers when a group is first used
        return "out of memory" in str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (_OF_HOST in str(error) or _is_of_device(error))


def _is_of_device(error: BaseException) -> bool:
    of_class = isinstance(error, torch.OutOfMemoryError | dist.DistBackendError)
    return of_class or any(text in str(error) for text in _OF_DEVICE)


def _place(error: BaseException) -> str:
    """Return the innermost line of titanlite in the error's traceback."""
    package = Path(__file__).parents[2]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and Path(frame.filename).is_relative_to(package)
    ]
    if not frames:
        return ""
    path = Path(frames[-1].filename).relative_to(package.parent)
    return f" in {frames[-1].name}, {path}:{frames[-1].lineno}"


def _device_memory() -> str:
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (
        f" At most {format_memory(allocated)} were allocated and {format_memory(reserved)} "
        f"reserved, of {format_memory(total)}; {format_memory(free)} are free."
    )


def _dump(job: JobConfig) -> str:
    """Write the snapshot if allocations were recorded; return a sentence that names its file, or
    the setting for a snapshot.
    """
    if not job.profiling.enable_memory_snapshot:
        return " For a snapshot of the memory, set profiling.enable_memory_snapshot = true."
    path = Path(job.job.dump_folder) / FOLDER / f"rank{read_rank()}.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:  # must not hide the out-of-memory error
        return f" The snapshot of the memory could not be written to {path}: {error}."
    return f" A snapshot of the memory is in {path}; open it at https://pytorch.org/memory_viz."
