"""Metrics of a run, on rank 0: one call per log step writes to TensorBoard, W&B, `metrics.jsonl`
and the console.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch

from titanlite.base.agree import get_rank
from titanlite.base.files import AppendedFile
from titanlite.base.log import logger, warn_once
from titanlite.base.text import list_names
from titanlite.config.schema import JobConfig
from titanlite.metrics.console import ProgressBar, can_show_bar, format_line
from titanlite.metrics.flops import peak_flops
from titanlite.metrics.point import StepPoint, describe_moe, describe_ranks

_SHOWN_CHARS = 80
_IDLE_SHARE = 0.01  # fraction of an even share of the tokens
_MOST_LAYERS = 4  # that a warning names


@dataclass
class IdleExperts:
    """Warnings about idle experts, which got almost no tokens in an interval of `log_freq` steps.

    Experts that a collapsed router no longer chooses still get a few tokens. The log warns once,
    and again when more experts become idle; `if_idle` is the remedy in the warning.
    """

    log_freq: int
    layers: Sequence[int]
    if_idle: str
    _counts: torch.Tensor | None = None  # tokens since the last multiple of `log_freq`
    _most: int = 0  # idle experts in the last warning

    def look(self, step: int, counts: torch.Tensor) -> None:
        """Add the tokens of each expert (layers, E) in the steps up to `step`; warn at the end of
        an interval.

        Synchronizes.
        """
        counts = counts if self._counts is None else self._counts + counts
        self._counts = None if step % self.log_freq == 0 else counts
        if self._counts is not None:
            return
        shares = counts * counts.shape[1] / counts.sum(dim=1, keepdim=True)
        num_idle = (shares < _IDLE_SHARE).sum(dim=1).tolist()
        total = sum(num_idle)
        if total > self._most:
            found = [
                f"{count} of {counts.shape[1]} in layer {layer}"
                for layer, count in zip(self.layers, num_idle, strict=True)
                if count
            ]
            logger.warning(
                f"moe: experts got no token, or less than {_IDLE_SHARE:g} of an even share, in "
                f"steps {step - self.log_freq + 1} to {step}: "
                f"{list_names(found, most=_MOST_LAYERS)}. {self.if_idle}"
            )
        self._most = max(self._most, total) if total else 0


@dataclass
class MetricsLogger:
    """Writer of a run's metrics into `dump_folder`, which is created if missing. A no-op on ranks
    other than 0.

    `metrics.jsonl` holds one JSON object per point: `step`, `time` (Unix seconds), and the values
    under their names in TensorBoard (docs/observability.md). Values that are not finite are null,
    and values per MoE layer are lists. A resumed run appends; if a step occurs twice, the later
    line counts.

    A point that cannot be written waits in memory for the next point; only the first failure is a
    warning.
    """

    job: JobConfig
    dump_folder: Path
    flops_per_token: int
    num_ranks: int
    device: torch.device
    _: KW_ONLY
    start_step: int = 0  # steps done before this process started
    moe_layers: Sequence[int] = ()  # the layer number of each row of `tokens_per_expert`
    if_idle: str = ""  # the remedy in a warning of idle experts
    # also gets each point
    sink: Callable[[int, Mapping[str, float]], None] | None = None
    # returns additional values of a point
    measure: Callable[[StepPoint], Mapping[str, float]] = lambda _: {}
    reads_backwards: bool = False  # `measure` reads `StepPoint.backwards`
    steps_per_epoch: float = 0.0  # for the progress bar; 0 if it is not known

    def __post_init__(self) -> None:
        job = self.job
        self._num_steps = job.training.steps
        self._last_step = self.start_step
        self._idle = IdleExperts(job.metrics.log_freq, self.moe_layers, self.if_idle)
        dtype = torch.float32 if job.training.mixed_precision_param == "float32" else torch.bfloat16
        self._peak_flops = (
            peak_flops(torch.cuda.get_device_name(self.device), dtype)
            if self.device.type == "cuda"
            else None
        )
        self._writes_events = job.metrics.enable_tensorboard
        self._writer: Any = None
        self._bar: ProgressBar | None = None
        self._enabled = get_rank() == 0
        if not self._enabled:
            return
        self._file = AppendedFile(self.dump_folder / "metrics.jsonl")
        self._append()  # creates the file at the start, or warns
        if job.metrics.enable_progress_bar and can_show_bar():
            self._bar = ProgressBar(
                self._num_steps, self.start_step, self.steps_per_epoch
            ).__enter__()

    def advance(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Move the progress bar, if there is one. Call after each step; does not wait for the
        device.
        """
        if self._bar is None:
            return
        try:
            self._bar.show(step, values)
        except Exception as error:  # noqa: BLE001  a terminal gone wrong must not end a run
            self._stop_bar()
            logger.warning(f"metrics: the progress bar failed ({error!r}).")

    def log_step(self, point: StepPoint) -> None:
        """Write one point of training. Call at log steps. Copies the MoE layers' state to the host;
        no collective.
        """
        if not self._enabled:
            return
        steps = max(point.step - self._last_step, 1)
        self._last_step = point.step
        values: dict[str, Any] = {
            **point.values(steps, self.flops_per_token, self.num_ranks),
            **self.measure(point),
        }
        if self._peak_flops is not None:
            values["throughput/mfu"] = values["throughput/tflops_per_gpu"] * 1e12 / self._peak_flops
        lists: dict[str, Any] = {
            f"{name}_step": largest.step for name, largest in point.largest.items()
        }
        if point.ranks:
            of_ranks, by_rank = describe_ranks(point.ranks, steps)
            values.update(of_ranks)
            lists.update(by_rank)
        most_load = 0.0
        if point.moe is not None:
            values.update(describe_moe(point.moe))
            lists["moe/layers"] = self.moe_layers
            most_load = point.moe.most_load
        self._write(point.step, values, lists)
        line = format_line(point.step, self._num_steps, values, most_load)
        # includes validations
        pace = (time.monotonic() - self._began_s) / max(point.step - self.start_step, 1)
        logger.info(
            f"{line}  left {timedelta(seconds=round(pace * (self._num_steps - point.step)))}"
        )
        if point.moe is not None and point.moe.tokens_since is not None:
            self._idle.look(point.step, point.moe.tokens_since)
        self.advance(point.step, values)

    def log_validation(self, step: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Write the validation loss (mean per token over all ranks) after `step` optimizer steps,
        and the loss of each source.
        """
        losses = {f"loss/validation/{name}": value for name, value in by_source.items()}
        self._write(step, {"loss/validation": loss, **losses})
        parts = "".join(f"  {name} {value:.4f}" for name, value in by_source.items())
        logger.info(f"step {step:>5}/{self._num_steps}  validation loss {loss:7.4f}{parts}")

    def log_evaluation(
        self, step: int, values: Mapping[str, float], examples: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the scores of an evaluation after `step` optimizer steps (in `values`, the main
        score first), and some generations.

        `examples` have `prompt`, `prediction`, `reference` (strings) and `score`; in
        `metrics.jsonl` they are `eval/examples`.
        """
        self._write(step, values, extra={"eval/examples": examples})
        shown = "  ".join(
            f"{name.removeprefix('eval/')} {value:.4f}" for name, value in values.items()
        )
        logger.info(f"step {step:>5}/{self._num_steps}  evaluation  {shown}")
        for example in examples:
            prompt, prediction, reference = (
                _on_one_line(example[k]) for k in ("prompt", "prediction", "reference")
            )
            logger.info(
                f"  {prompt} -> {prediction} (wanted {reference}, score {example['score']:g})"
            )

    def close(self) -> None:
        """Write the waiting records, if any, and remove the progress bar; later calls do
        nothing.
        """
        if not self._enabled:
            return
        self._enabled = False
        self._stop_bar()
        self._append()
        if self._writer is not None:
            with suppress(OSError):  # the first failure was reported
                self._writer.close()

    def __enter__(self) -> Self:
        self._began_s = time.monotonic()  # loading and DPO's reference passes do not count
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def _write(
        self, step: int, values: Mapping[str, Any], extra: Mapping[str, Any] | None = None
    ) -> None:
        """Write one line of `metrics.jsonl`, and its values except `extra` to TensorBoard and W&B.
        A list in `values` has a value for each MoE layer.
        """
        if not self._enabled:
            return
        found = {**values, **(extra or {})}
        line = {
            "step": step,
            "time": round(time.time(), 3),
            **{name: _or_none(value) for name, value in found.items()},
        }
        self._append((json.dumps(line, allow_nan=False) + "\n").encode("ascii"))
        scalars: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, list):
                for number, item in zip(self.moe_layers, value, strict=True):
                    scalars[f"{name}/layer_{number:02d}"] = item
            else:
                scalars[name] = value
        if self.sink is not None:
            self.sink(step, scalars)
        if self._writes_events:
            self._write_events(step, scalars)

    def _write_events(self, step: int, scalars: Mapping[str, float]) -> None:
        # Imported here: it takes 0.1 to 1 s, and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        folder = self.dump_folder / self.job.metrics.save_tb_folder
        try:
            # makes TensorBoard hide points after `start_step` in the files of earlier processes
            if self._writer is None:
                self._writer = SummaryWriter(str(folder), purge_step=self.start_step + 1)
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            logger.warning(
                f"metrics: cannot write to {folder}: {error}. Only metrics.jsonl is still written."
            )
            self._writes_events = False

    def _append(self, record: bytes = b"") -> None:
        """Append the waiting records and `record` to metrics.jsonl; if that fails, warn once."""
        try:
            self._file.append(record)
        except OSError as error:
            warn_once(
                f"metrics: cannot write {self._file.path}: {error.strerror or error}. Training "
                "continues, and the unwritten points wait for the next one."
            )

    def _stop_bar(self) -> None:
        bar = self._bar
        self._bar = None
        if bar is not None:
            with suppress(Exception):  # only the terminal's last line is affected
                bar.__exit__(None, None, None)


def _on_one_line(text: str) -> str:
    """Quote a text on one line. A long text keeps its end, which matters most in a prompt."""
    return repr(text if len(text) <= _SHOWN_CHARS else "..." + text[-_SHOWN_CHARS:])


def _or_none(value: Any) -> Any:
    """Return `value` with None for numbers that JSON cannot represent (NaN and infinity)."""
    if isinstance(value, list):
        return [_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
