"""Checked configurations of tiny models, as plans trace them."""

from pathlib import Path

from titanlite.config import load_config
from titanlite.preflight import check

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3_moe.toml"


def checked(world_size, num_layers, *overrides):
    """Return the job of a few layers that `world_size` ranks would train."""
    settings = {
        "model.flavor": "debug",
        "model.overrides.vocab_size": 310,
        "model.overrides.num_layers": num_layers,
        "parallelism.tensor_parallel_degree": 1,
        "parallelism.expert_parallel_degree": 1,
        "training.seq_len": 32,
        "training.local_batch_size": 2,
        "training.global_batch_size": -1,
    }
    argv = [f"--{key}={value}" for key, value in settings.items()]
    return check(load_config(["--config", str(CONFIG), *argv, *overrides]), world_size)
