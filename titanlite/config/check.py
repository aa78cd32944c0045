"""Range checks of single settings, and of the few that only make sense together.

What needs the world size, the resolved model or the file system is checked where those are known.
"""

import math
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

from titanlite.config.schema import JobConfig

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}

# Every test is written so that nan fails it.
_RULES: tuple[tuple[Callable[[float], bool], str, tuple[str, ...]], ...] = (
    (
        lambda value: 0 <= value < math.inf,
        "0 or more",
        (
            "training.steps",
            "training.max_norm",
            "optimizer.lr",
            "optimizer.weight_decay",
            "lr_scheduler.warmup_steps",
            "moe.expert_bias_update_rate",
            "moe.aux_loss_coeff",
            "moe.z_loss_coeff",
            "checkpoint.interval",
            "checkpoint.keep_latest_k",
            "checkpoint.keep_every_n_steps",
        ),
    ),
    (
        lambda value: value >= 1,
        "1 or more",
        (
            "training.seq_len",
            "training.local_batch_size",
            "training.loss_chunk_tokens",
            "parallelism.data_parallel_replicate_degree",
            "parallelism.tensor_parallel_degree",
            "parallelism.expert_parallel_degree",
            "metrics.log_freq",
            "profiling.profile_freq",
            "validation.freq",
            "validation.steps",
            "comm.timeout_seconds",
        ),
    ),
    (
        lambda value: value == -1 or value >= 1,
        "1 or more, or to -1",
        ("training.global_batch_size", "parallelism.data_parallel_shard_degree"),
    ),
    (lambda value: value >= -1, "-1 or more", ("checkpoint.load_step",)),
    (lambda value: 0 < value < math.inf, "more than 0", ("optimizer.eps",)),
    (lambda value: 0 <= value < 1, "0 or more and less than 1", ("optimizer.beta1", "optimizer.beta2")),
    (lambda value: 0 < value <= 1, "more than 0 and at most 1", ("lr_scheduler.decay_ratio",)),
    (lambda value: 0 <= value <= 1, "0 to 1", ("lr_scheduler.min_lr_factor",)),
    # A byte-level BPE has the 256 bytes and at least one special token.
    (lambda value: value >= 257, "257 or more (256 bytes and a special token)", ("data.bpe_vocab_size",)),
)


def get_value(job: JobConfig, key: str) -> Any:
    """The value of a dotted `key`, for example `get_value(job, "training.steps")`.

    Raises:
        AttributeError: `key` names no setting.
    """
    return reduce(getattr, key.split("."), job)


def format_value(value: object) -> str:
    """`value` as TOML writes it: one line, strings quoted and escaped, floats that read back equal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = (_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else c) for c in value)
        return f'"{"".join(escaped)}"'
    return repr(value) if isinstance(value, int | float) else str(value)


def check_values(job: JobConfig) -> list[str]:
    """Problems of single values and of values that contradict each other, in a fixed order; empty if there are none.

    Each problem names its settings by their full keys, so that a caller can tell where each came from.
    """
    problems = [
        f"{key} = {format_value(value)} is out of range. Set it to {allowed}."
        for is_allowed, allowed, keys in _RULES
        for key in keys
        if (value := get_value(job, key)) is not None and not is_allowed(value)
    ]
    option = job.activation_checkpoint.selective_ac_option
    if option != "op" and not re.fullmatch("[1-9][0-9]*", option):
        problems.append(
            f"activation_checkpoint.selective_ac_option = {format_value(option)} is not 'op' or a positive integer. "
            + 'Write "op", or for example "2" to recompute every second layer.'
        )
    flavor, assets = job.model.flavor, job.model.hf_assets_path
    if not flavor and not assets and not job.checkpoint.initial_load_path:
        problems.append(
            "model.flavor and model.hf_assets_path are both empty, so the model has no sizes. Set one of them."
        )
    if flavor and assets:
        problems.append(
            f"model.flavor = {format_value(flavor)} and model.hf_assets_path = {format_value(assets)} both give the "
            + "model's sizes. Keep one; an empty string clears the other."
        )
    if job.data.dataset == "images" and not job.data.path:
        problems.append('data.dataset = "images" needs data.path, which is empty. Set it to a .jsonl file.')
    if job.data.dataset == "text" and not job.data.path:
        problems.append('data.dataset = "text" needs data.path, which is empty. Set it to a text file or a folder.')
    return problems
