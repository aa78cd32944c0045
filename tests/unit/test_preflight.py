"""Preflight: model, degrees and batch checked against one another, without torch, one error with
everything.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from files import error_of
from processes import run_python

from tests.loading import hf_config
from titanlite import __version__
from titanlite.__main__ import main as run_command
from titanlite.base.errors import ConfigError
from titanlite.config import RopeScaling, load_config
from titanlite.models.families import families
from titanlite.preflight import check, main

ROOT = Path(__file__).parents[2]
TOML = '[model]\nname = "qwen3_moe"\nflavor = "debug"\n[training]\nseq_len = 64\n'


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(TOML)
    return str(file)


def run_check(path, *overrides):
    return check(load_config(["--config", path, *overrides]), 4)


def test_does_not_wait_for_torch(path):
    code = (
        "import sys; from titanlite.preflight import main; code = main(['--world-size', '4', "
        f"'--config', {path!r}]); sys.exit(code or ('torch' in sys.modules or 'transformers' in "
        "sys.modules))"
    )
    result = run_python(code, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_machines_that_may_be_lost(path, capsys):
    """The most and the fewest ranks must fit; numbers between them that do not are said, for they
    would end the run.
    """
    batch = ["--training.global_batch_size=16", "--training.local_batch_size=1"]
    for sizes, code, said in (
        ("8,4,2", 0, ""),
        ("8,6,4", 0, "titanlite: warning: with 6 ranks this run would end: configuration: "),
        ("8,6", 2, "titanlite: error: with 6 ranks: configuration: "),
    ):
        assert main(["--world-size", sizes, "--config", path, *batch]) == code
        assert capsys.readouterr().err.startswith(said)


def test_absent_files_are_said_before_a_model_is_downloaded(path, capsys, monkeypatch):
    monkeypatch.setattr("titanlite.preflight.check", lambda *_, **__: pytest.fail("it went on"))
    overrides = (
        "--data.dataset=examples",
        "--data.path=nothere.jsonl",
        "--data.validation_path=owner/held-out",
    )
    overrides += ("--data.chat_template=t.jinja", "--data.tokenizer_path=tok")
    overrides += ("--evaluation.enable=true", "--evaluation.path=eval.jsonl")
    assert main(["--world-size=1", "--config", path, *overrides]) == 2
    said = capsys.readouterr().err
    for missing in (
        "data.path: nothere.jsonl",
        "data.chat_template: t.jinja",
        "data.tokenizer_path: tok",
        "evaluation.path: eval.jsonl",
    ):
        assert f"{missing} does not exist" in said
    assert "owner/held-out" not in said
    text = ["--data.dataset=text", "--data.path=owner/texts"]  # text is never on the hub
    assert main(["--world-size=1", "--config", path, *text]) == 2
    assert "data.path: owner/texts does not exist" in capsys.readouterr().err


def test_an_unknown_command_gets_the_nearest_one(capsys):
    assert run_command(["inspct"]) == 2
    assert "there is no command 'inspct'. Did you mean 'inspect'?" in capsys.readouterr().err
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"titanlite {__version__}\n"


def test_a_python_without_the_packages_says_so(path):
    code = (
        "import sys; sys.modules['omegaconf'] = None; from titanlite.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    result = run_python(code, "check", "--config", path, "--world-size", "1", cwd=ROOT)
    assert result.returncode == 2
    assert "has no package 'omegaconf'. Activate the environment" in result.stderr
    assert "Traceback" not in result.stderr


SCALING = "model.overrides.rope_scaling"


@pytest.mark.parametrize(
    ("family", "changes", "overrides", "different"),
    [
        ("qwen3_moe", {"max_position_embeddings": 4096, "initializer_range": 0.01}, [], ""),
        (
            "qwen3_moe",
            {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
            [],
            "1e-06, there 1e-05; norm_topk_prob is",
        ),
        (
            "llama",
            {"rope_scaling": RopeScaling("llama3", 32.0, low_freq_factor=2.0)},
            [f"--{SCALING}.factor=16.0", f"--{SCALING}.low_freq_factor=2.0"],
            "",
        ),
    ],
)
def test_a_flavor_must_be_the_model_whose_weights_are_loaded(
    path, tmp_path, family, changes, overrides, different
):
    """Weights of the same shapes fit, and yet would compute something else. What is overridden is
    not compared.
    """
    theirs = replace(families()[family].presets["debug"], **changes)
    hf_config(theirs).save_pretrained(tmp_path / "folder")
    arguments = [path, f"--model.name={family}", *overrides]
    arguments += [f"--checkpoint.initial_load_path={tmp_path / 'folder'}"]
    if not different:
        assert run_check(*arguments).model_config.family == family
        return
    text = error_of(ConfigError, run_check, *arguments)
    assert "model.flavor = 'debug' is not the model" in text and different in text
    assert "Leave model.name and model.flavor out: then its config.json counts." in text
