"""Metrics of a run: model FLOPs, TensorBoard, Weights & Biases, `metrics.jsonl` and the console."""

from titanlite.metrics.run_folder import profiling
