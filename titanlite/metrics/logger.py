"""`MetricsLogger`: one call per log step writes TensorBoard, `metrics.jsonl` and the console, on rank 0 only."""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.config.schema import JobConfig
from titanlite.errors import TitanliteError
from titanlite.logger import logger
from titanlite.metrics.console import ProgressBar, can_show_bar, format_line
from titanlite.metrics.flops import peak_flops
from titanlite.metrics.heatmap import expert_load_image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.tensorboard.writer import SummaryWriter

_GIB = 2**30
_SHOWN_CHARS = 80


class MetricsLogger:
    """Writes the metrics of a run into `dump_folder`; a context manager. On ranks other than 0 every call does nothing.

    `metrics.jsonl` holds one JSON object per point: `step`, `time` (Unix seconds) and the values under the names that
    TensorBoard shows. Values that are not finite are null there. A resumed run appends; where a step occurs twice,
    the later line counts (TensorBoard hides the earlier points by itself).

    Args:
        job: the run's configuration; `[metrics]`, `training.steps` and the compute dtype are used.
        dump_folder: the run's folder; made if it is missing.
        flops_per_token: model FLOPs of forward and backward for one token, see `train_flops_per_token`.
        num_ranks: ranks that share the work.
        device: this rank's device.
        start_step: steps done before this process started: 0, or the step of the checkpoint it resumes from.
        first_moe_layer: layer index of row 0 of `tokens_per_expert`; `num_dense_layers` of the model.

    Raises:
        TitanliteError: when a metrics file cannot be written, here and in every other method.
    """

    def __init__(
        self,
        job: JobConfig,
        dump_folder: str | Path,
        flops_per_token: int,
        num_ranks: int,
        device: torch.device,
        *,
        start_step: int = 0,
        first_moe_layer: int = 0,
    ) -> None:
        self._num_steps = job.training.steps
        self._flops_per_token = flops_per_token
        self._num_ranks = num_ranks
        self._device = device
        self._last_step = start_step
        self._first_moe_layer = first_moe_layer
        self._peak_flops = _get_peak_flops(job, device)
        self._writer: SummaryWriter | None = None
        self._bar: ProgressBar | None = None
        self._enabled = _get_rank() == 0
        if not self._enabled:
            return
        self._path = Path(dump_folder) / "metrics.jsonl"
        with _clear_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="ascii")
        if job.metrics.enable_tensorboard:
            self._writer = _build_writer(Path(dump_folder) / job.metrics.save_tb_folder, start_step)
        if job.metrics.enable_progress_bar and can_show_bar():
            self._start_bar()

    def log_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        seconds: float,
        data_seconds: float,
        tokens_per_expert: Tensor | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> None:
        """Write one point of training. Call at log steps; no collective, and it copies `tokens_per_expert` to the host.

        Args:
            step: optimizer steps done.
            loss: mean loss per token over all ranks.
            grad_norm: total 2-norm of the gradients before clipping.
            lr: learning rate of this step.
            tokens: tokens trained by all ranks together since the previous call.
            seconds: wall time since the previous call.
            data_seconds: the part of `seconds` spent waiting for data.
            tokens_per_expert: counts (MoE layers, E) over all ranks, any device; None for dense models.
            extra: more values, under the names that TensorBoard shall show.
        """
        if not self._enabled:
            return
        steps = max(step - self._last_step, 1)
        seconds = max(seconds, 1e-9)
        self._last_step = step
        flops_per_gpu = tokens * self._flops_per_token / seconds / self._num_ranks
        values = {
            "loss/train": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "throughput/tokens_per_s": tokens / seconds,
            "throughput/tflops_per_gpu": flops_per_gpu / 1e12,
            "time/step_s": seconds / steps,
            "time/data_s": data_seconds / steps,
            **_get_memory(self._device),
        }
        if self._peak_flops is not None:
            values["throughput/mfu"] = flops_per_gpu / self._peak_flops
        if tokens_per_expert is not None:
            tokens_per_expert = tokens_per_expert.detach().to("cpu", torch.float64)
            ratios = tokens_per_expert.amax(dim=1) / tokens_per_expert.mean(dim=1)  # nan for a layer without tokens
            for row, ratio in enumerate(ratios.tolist()):
                values[f"moe/load_max_over_mean/layer_{self._first_moe_layer + row:02d}"] = ratio
        values.update(extra or {})
        self._write(step, values, tokens_per_expert)
        self._show(step, values)

    def log_validation(self, step: int, loss: float) -> None:
        """Write the validation loss (mean per token over all ranks) after `step` optimizer steps."""
        if not self._enabled:
            return
        self._write(step, {"loss/validation": loss}, None)
        logger.info(f"step {step:>5}/{self._num_steps}  validation loss {loss:7.4f}")

    def log_evaluation(self, step: int, values: Mapping[str, float], examples: Sequence[Mapping[str, Any]]) -> None:
        """Write the scores of an evaluation after `step` optimizer steps, and show some generations.

        Args:
            step: optimizer steps done.
            values: by the names that TensorBoard shall show; the first one is the score.
            examples: `prompt`, `prediction`, `reference` (texts) and `score` of a few prompts; `metrics.jsonl` has them
                under `eval/examples`.
        """
        if not self._enabled:
            return
        self._write(step, values, None, {"eval/examples": list(examples)})
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in values.items())
        logger.info(f"step {step:>5}/{self._num_steps}  evaluation  {shown}")
        for example in examples:
            prompt, prediction, reference = (_on_one_line(example[k]) for k in ("prompt", "prediction", "reference"))
            logger.info(f"  {prompt} -> {prediction} (wanted {reference}, score {example['score']:g})")

    def close(self) -> None:
        """Flush and close the files and take the progress bar away; later calls do nothing."""
        if not self._enabled:
            return
        self._enabled = False
        self._stop_bar()
        with _clear_errors(self._path):
            self._file.close()
        if self._writer is not None:
            with _clear_errors(Path(self._writer.get_logdir())):
                self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The first error says what happened; one from closing a file on a full disk must not replace it.
        with suppress(*([] if error is None else [TitanliteError])):
            self.close()

    def _write(
        self,
        step: int,
        values: Mapping[str, float],
        tokens_per_expert: Tensor | None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        point: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        point.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        point.update(extra or {})
        with _clear_errors(self._path):
            self._file.write(json.dumps(point, allow_nan=False) + "\n")
            self._file.flush()
        if self._writer is None:
            return
        with _clear_errors(Path(self._writer.get_logdir())):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            if tokens_per_expert is not None:
                self._writer.add_image("moe/expert_load", expert_load_image(tokens_per_expert), step, dataformats="HWC")

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is not None:
            try:
                self._bar.show(step, values)
                return
            except Exception as error:  # noqa: BLE001  a terminal gone wrong must not end a run; plain lines follow
                self._stop_bar()
                logger.warning(f"metrics: the progress bar failed ({error!r}). Plain lines follow.")
        logger.info(format_line(step, self._num_steps, values))

    def _start_bar(self) -> None:
        try:
            self._bar = ProgressBar(self._num_steps).__enter__()
        except Exception as error:  # noqa: BLE001  see _show
            logger.warning(f"metrics: no progress bar ({error!r}). Plain lines follow.")

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(Exception):  # it is only the terminal's last line
                bar.__exit__(None, None, None)


def _on_one_line(text: str) -> str:
    """Quoted, without line breaks, and its end if it is long: of a prompt the end is what counts."""
    return repr(text if len(text) <= _SHOWN_CHARS else "..." + text[-_SHOWN_CHARS:])


def _get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _get_peak_flops(job: JobConfig, device: torch.device) -> float | None:
    """Peak of the device in the dtype of the matmuls; None on CPU and unknown GPUs."""
    if device.type != "cuda":
        return None
    dtype = job.training.mixed_precision_param
    return peak_flops(torch.cuda.get_device_name(device), torch.float32 if dtype == "float32" else torch.bfloat16)


def _get_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this rank since its start."""
    if device.type == "cuda":
        return {"memory/max_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return {"memory/host_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB}


def _build_writer(folder: Path, start_step: int) -> "SummaryWriter":
    """A TensorBoard writer that hides points after `start_step` left by an earlier run in the same folder."""
    # Imported here: 0.1 to 1 s, and only rank 0 needs it.
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise TitanliteError(
            f"metrics: enable_tensorboard = true, but tensorboard cannot be imported ({error}). "
            "Install tensorboard or set metrics.enable_tensorboard = false."
        ) from error
    with _clear_errors(folder):
        return SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=30)


@contextmanager
def _clear_errors(path: Path) -> "Iterator[None]":
    """Say which file could not be written and why."""
    try:
        yield
    except OSError as error:
        raise TitanliteError(
            f"metrics: cannot write {path}: {error.strerror or error}. "
            "Free space there or choose another folder with job.dump_folder."
        ) from error
