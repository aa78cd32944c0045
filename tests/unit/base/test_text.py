"""Lists of names and errors of bounded length, and how a command ends."""

from pathlib import Path

import pytest

from titanlite.base.errors import ConfigError
from titanlite.base.text import command
from titanlite.config import load_config

CONFIG = str(Path(__file__).parents[3] / "configs/qwen3_moe.toml")


def test_a_command_ends_with_one_error(capsys):
    @command
    def fail(argv):
        raise ConfigError("x: y.")

    assert fail() == 2 and capsys.readouterr().err == "titanlite: error: x: y.\n"
    assert command(lambda argv: None)([]) == 0 and command(lambda argv: 1)([]) == 1


def test_dtypes_of_settings():
    words = [
        "--training.dtype=bf16",
        "--training.mixed_precision_param=torch.bfloat16",
        "--checkpoint.export_dtype=FP32",
    ]
    job = load_config(["--config", CONFIG, *words])
    assert (job.training.dtype, job.training.mixed_precision_param) == ("bfloat16", "bfloat16")
    assert job.checkpoint.export_dtype == "float32"
    with pytest.raises(
        ConfigError, match=r'training.dtype = "bf17" is not one of "float32", "bfloat16"'
    ):
        load_config(["--config", CONFIG, "--training.dtype=bf17"])
