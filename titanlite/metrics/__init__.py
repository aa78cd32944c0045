"""Metrics of a run: model FLOPs, TensorBoard, Weights & Biases, `metrics.jsonl` and the console."""

from titanlite.metrics.point import (
    Largest,
    MoEState,
    StepPoint,
    find_largest,
    gather_ranks,
    get_busy_seconds,
    get_memory,
)
from titanlite.metrics.profiler import Profiler
from titanlite.metrics.run_folder import open_events, record_event
