"""Lists of names and errors of bounded length, and how a command ends."""

from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest

from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.text import command, describe_error, list_names
from titanlite.config import load_config
from titanlite.config.model import ModelSection
from titanlite.models.families import Family, families, resolve_model_config

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


def test_lists_of_names_are_bounded():
    assert list_names(["a", "b"]) == "a, b" and list_names([]) == ""
    assert list_names(range(20), most=3) == "0, 1, 2 and 17 more"
    long = list_names(["x" * 5000] * 1000)
    assert len(long) < 2000 and long.endswith("[4,920 more characters] and 984 more")


def test_errors_of_others_are_one_line_of_bounded_length():
    assert describe_error(ValueError("first\n  second.")) == "ValueError: first second"
    assert describe_error(KeyError()) == "KeyError"
    known = ValueError("Should contain one of " + ", ".join(f"model-{i}" for i in range(1000)))
    assert len(describe_error(known)) < 500 and "more characters]" in describe_error(known)


MANY = [f"column_{i}" for i in range(3000)]


def _fail_with_many_families():
    with patch.dict(cast(dict[str, Family], families()), dict.fromkeys(MANY, families()["llama"])):
        return resolve_model_config(ModelSection(name="zzz", flavor="debug"))


def test_messages_do_not_grow_with_what_a_user_has():
    with pytest.raises(TitanliteError) as error:
        _fail_with_many_families()
    assert 50 < len(str(error.value)) < 1500, str(error.value)[:3000]
