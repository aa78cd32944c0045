"""Metrics of a run: model FLOPs, TensorBoard, Weights & Biases, `metrics.jsonl` and the console."""

from titanlite.metrics.profiler import Profiler
from titanlite.metrics.run_folder import open_events, record_event
