"""Metrics of a run: model FLOPs, TensorBoard, `metrics.jsonl` and the console."""

from titanlite.metrics.events import open_events, record_event
from titanlite.metrics.flops import num_parameters, peak_flops, train_flops_per_token
from titanlite.metrics.heatmap import expert_load_image
from titanlite.metrics.logger import MetricsLogger
from titanlite.metrics.profiler import build_profiler

__all__ = [
    "MetricsLogger",
    "build_profiler",
    "expert_load_image",
    "num_parameters",
    "open_events",
    "peak_flops",
    "record_event",
    "train_flops_per_token",
]
