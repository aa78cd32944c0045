"""Folded names; command lines: spellings of other trainers are understood, unknown words get the nearest one."""

from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest

from titanlite.__main__ import main
from titanlite.base.errors import ConfigError, TitanliteError
from titanlite.base.files import parse_json
from titanlite.base.text import Parser, command, describe_error, list_names, one_of
from titanlite.config import load_config
from titanlite.config.model import ModelSection
from titanlite.config.settings import spell_dtype
from titanlite.models.families import Family, families, resolve_model_config

CONFIG = str(Path(__file__).parents[3] / "configs/qwen3_moe.toml")


def parser() -> Parser:
    made = Parser("generate", "x")
    made.add_argument("model")
    made.add_argument("--max-new-tokens", type=int)
    made.add_argument("--dtype", type=one_of("float32", "bfloat16", spell=spell_dtype), default="float32")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["M", "--max-new-tokens", "5", "--dtype", "bfloat16"],
        ["M", "--max_new_tokens=5", "--dtype=bf16"],
        ["--model", "M", "--max_new_tokens", "5", "--dtype", "torch.bfloat16"],
        ["--dtype", "BF16", "--max-new-tokens=5", "--model=M"],
    ],
)
def test_spellings(words: list[str]) -> None:
    known = parser().parse_args(words)
    assert (known.model, known.max_new_tokens, known.dtype) == ("M", 5, "bfloat16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["M", "--max-new-token", "5"], "generate: there is no argument '--max-new-token'. Did you mean '--max-new-to"),
        (["M", "--max_token=5"], "generate: there is no argument '--max_token'. Did you mean '--max-new-tokens'?"),
        (["M", "--dtype", "bfloat15"], "'bfloat15' is not one of float32, bfloat16. Did you mean 'bfloat16'?"),
        (
            ["M", "--nothing-like-it"],
            "unrecognized arguments: --nothing-like-it. `python -m titanlite generate --help`",
        ),
        ([], "the following arguments are required: model"),
        (["--model"], "the following arguments are required: model"),
        (["M", "--max-new-tokens", "many"], "argument --max-new-tokens: invalid int value: 'many'"),
    ],
)
def test_unknown_words(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parser().parse_args(words)
    assert said in str(raised.value)


def test_a_command_ends_with_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def fail(argv: object) -> int | None:
        raise ConfigError("x: y.")

    assert fail() == 2 and capsys.readouterr().err == "titanlite: error: x: y.\n"
    assert command(lambda argv: None)([]) == 0 and command(lambda argv: 1)([]) == 1


@pytest.mark.parametrize(
    ("name", "word", "nearest"),
    [
        ("check", "--worldsize=2", "--world-size"),
        ("data", "--sample=2", "--samples"),
        ("inspect", "--checksum", "--checksums"),
        ("export", "--mergee", "--merge"),
        ("generate", "--promt=x", "--prompt"),
    ],
)
def test_every_command_has_the_nearest_word(capsys, name: str, word: str, nearest: str) -> None:
    rest = ["--config", CONFIG] if name in ("check", "data") else ["x", *(["y"] if name == "export" else [])]
    assert main([name, word, *rest]) == 2
    assert f"Did you mean '{nearest}'?" in capsys.readouterr().err


def test_dtypes_of_settings() -> None:
    words = [
        "--training.dtype=bf16",
        "--training.mixed_precision_param=torch.bfloat16",
        "--checkpoint.export_dtype=FP32",
    ]
    job = load_config(["--config", CONFIG, *words])
    assert (job.training.dtype, job.training.mixed_precision_param) == ("bfloat16", "bfloat16")
    assert job.checkpoint.export_dtype == "float32"
    with pytest.raises(ConfigError, match=r'training.dtype = "bf17" is not one of "float32", "bfloat16"'):
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


def _fail_with_many_families() -> object:
    with patch.dict(cast(dict[str, Family], families()), dict.fromkeys(MANY, families()["llama"])):
        return resolve_model_config(ModelSection(name="zzz", flavor="debug"))


def _fail_with_many_keys_twice() -> object:
    return parse_json("{" + ", ".join(f'"{name}": 1, "{name}": 2' for name in MANY) + "}")


@pytest.mark.parametrize(
    "fail",
    [_fail_with_many_families, _fail_with_many_keys_twice],
)
def test_messages_do_not_grow_with_what_a_user_has(fail: Callable[[], object]):
    with pytest.raises((TitanliteError, ValueError)) as error:
        fail()
    assert 50 < len(str(error.value)) < 1500, str(error.value)[:3000]
