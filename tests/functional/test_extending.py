"""The blocks of docs/extending.md: each block runs, and its results equal the built-in ones, on one
rank and on several.
"""

import logging
import math
import re
import shlex
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from files import read_json, read_lines, write_json, write_lines
from planned import checked as planned
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import titanlite
from tests.functional.conftest import MESHES, run_forked, run_script, take_step, values_of, weekly
from titanlite.assemble import assemble, build_data
from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.checkpoint.folder import read_headers
from titanlite.config.data import DataSection
from titanlite.config.parallelism import Degrees
from titanlite.config.schema import OptimizerSection
from titanlite.features.api import make_config
from titanlite.features.custom import build_custom_objective, build_custom_optimizer
from titanlite.features.estimate.estimate import get_memory
from titanlite.features.estimate.trace import trace_step
from titanlite.features.estimate.tracker import STATES
from titanlite.features.sft.rows import open_rows
from titanlite.models.families import any_model_config_from_hf

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), flags=re.S))
FOUR = "--training.local_batch_size=4"  # two micro-batches, or one


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    """The blocks as importable files; ranks are forked from this process."""
    folder = tmp_path_factory.mktemp("extending")
    for name, text in BLOCKS.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in BLOCKS:
        sys.modules.pop(name, None)


@pytest.fixture
def built_in(warm_run, once):
    """`built_in(mesh)`: 4 steps without custom parts."""
    return lambda mesh: once(mesh, lambda: warm_run(MESHES[mesh], FOUR, steps=4)[0])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *(("my_losses:cross_entropy", mesh) for mesh in ("1", "CP2", "PP2")),
        ("my_losses:likelihood", "TP2xEP2 only"),
    ],
)
def test_a_loss_of_ones_own_is_the_built_in(warm_run, built_in, name, mesh):
    got = warm_run(MESHES[mesh], FOUR, f"--training.objective={name}", steps=3)[0]
    assert got.losses == pytest.approx(built_in(mesh).losses[:3], rel=1e-6)
    assert got.grad_norms == pytest.approx(built_in(mesh).grad_norms[:3], rel=1e-5)


def test_a_whole_objective_has_its_own_unit(warm_run, built_in):
    """Each of the 4 sequences of a step has the same weight, so without padding this is next-token
    prediction.
    """
    expected = built_in("FSDP2").losses[:2]
    got = warm_run(MESHES["FSDP2"], "--training.objective=my_losses:PerSequence", steps=2)[0]
    assert got.losses[0] == pytest.approx(expected[0], rel=0.05) and got.losses != expected


def test_an_optimizer_of_ones_own_is_the_built_in(warm_run, built_in):
    mesh = "TP2xEP2 only"
    got = warm_run(MESHES[mesh], FOUR, "--optimizer.name=my_optimizers:adamw", steps=4)[0]
    assert got.losses == pytest.approx(built_in(mesh).losses, rel=1e-6)


def test_its_state_is_saved_and_metrics_are_logged(config_file, tmp_path, run_ranks):
    """In one process, two steps and a resume to step four give the result of four steps, with a
    custom optimizer, objective and metric.
    """
    own = {
        "optimizer": {"name": "my_optimizers:sign_sgd", "momentum": 0.9},
        "training": {"objective": "my_losses:cross_entropy"},
        "lr_scheduler": {"warmup_steps": 0, "min_lr_factor": 1.0},
        "metrics": {
            "log_freq": 1,
            "enable_tensorboard": False,
            "function": "my_metrics:perplexity",
        },
    }

    def run(steps, name):
        sections = {
            **own,
            "training": {**own["training"], "steps": steps},
            "job": {"dump_folder": tmp_path / name},
        }
        result = titanlite.train(config_file, **sections)
        return result, read_lines(tmp_path / name / "metrics.jsonl")

    def rank_main():
        whole, points = run(4, "whole")
        run(2, "parts")
        parts, _ = run(4, "parts")
        assert (
            whole.loss == parts.loss
            and whole.step == 4
            and whole.checkpoint == tmp_path / "whole/checkpoint/step-4"
        )
        assert points[-1]["metric/perplexity"] == pytest.approx(math.exp(points[-1]["loss/train"]))
        assert 0 <= points[-1]["objective/accuracy"] <= 1
        assert "average.lm_head.weight" in read_headers(
            [whole.checkpoint / "titanlite/optimizer.safetensors"], "test"
        )
        with pytest.raises(titanlite.TitanliteError, match=r"another run.*training.objective"):
            titanlite.train(
                config_file, training={"steps": 6}, job={"dump_folder": tmp_path / "whole"}
            )
        with pytest.raises(
            titanlite.TitanliteError, match=r"unknown key 'training\.step'; did you mean"
        ):
            titanlite.train(config_file, training={"step": 6})

    run_ranks(1, rank_main)


def average_by_hand(job, shares):
    """Train 4 steps with the built-in AdamW; return the validation losses of the average after the
    second and the last step, and the last average. `shares` are the weights' shares of the average.
    """
    trainer = assemble(job)
    average = {}
    losses = []
    for step, share in enumerate(shares):
        take_step(trainer, step)
        weights = {name: param.detach() for name, param in trainer.model.named_parameters()}
        for name, weight in weights.items():
            average.setdefault(name, weight.clone()).lerp_(weight, share)
        if step in (1, 3):
            kept = {name: weight.clone() for name, weight in weights.items()}
            for name, weight in weights.items():
                weight.copy_(average[name])
            losses.append(trainer.validate()[0])
            for name, weight in weights.items():
                weight.copy_(kept[name])
    return losses, average


def train_parts(jobs):
    """Train each job to its end, in one folder; return the validation losses of the last."""
    for job in jobs:
        assemble(job).train()
    if torch.distributed.get_rank() > 0:
        return []
    losses = values_of(Path(jobs[-1].job.job.dump_folder), "loss/validation")
    return [losses[2], losses[4]]


@pytest.mark.parametrize(
    ("mesh", "name", "shares"),
    [
        ("FSDP2", "averaged_adamw", [0.1, 0.1, 0.1, 0.1]),
        weekly("TP2xEP2", "averaged_adamw", [0.1, 0.1, 0.1, 0.1]),
        # the last 2 steps of a run of 2 steps, and of the run that continues it to 4
        ("FSDP2", "tail_averaged_adamw", [1.0, 0.5, 1.0, 0.5]),
    ],
)
def test_an_average_is_validated_saved_and_resumed(checked, run_warm, tmp_path, mesh, name, shares):
    """The average equals the average of one rank's weights, and training continues from the weights
    themselves.
    """
    settings = [
        "--validation.enable=true",
        "--validation.freq=2",
        "--validation.steps=2",
        "--lr_scheduler.warmup_steps=0",
        "--lr_scheduler.min_lr_factor=1",
        "--checkpoint.export_dtype=float32",
    ]
    plain = checked(Degrees(), FOUR, *settings)
    ((expected, average),) = run_warm(1, average_by_hand, plain, shares)
    averaged = f"--optimizer.name=my_averages:{name}"
    folder = f"--job.dump_folder={tmp_path / 'average'}"
    parts = [
        checked(MESHES[mesh], FOUR, *settings, averaged, folder, f"--training.steps={steps}")
        for steps in (2, 4)
    ]
    losses, *_ = run_warm(MESHES[mesh].world_size, train_parts, parts)
    assert losses == pytest.approx(expected, rel=1e-6)
    saved = tmp_path / "average/checkpoint/step-4"
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    found = dict(model.named_parameters())
    assert found.keys() == average.keys()
    for key, value in average.items():
        torch.testing.assert_close(found[key].detach(), value, rtol=1e-4, atol=1e-6)


def test_a_plan_counts_the_average():
    states = {
        name: get_memory(trace_step(planned(1, 1, f"--optimizer.name={name}"))).by_purpose[STATES]
        for name in ("AdamW", "my_averages:tail_averaged_adamw")
    }
    assert states["my_averages:tail_averaged_adamw"] == pytest.approx(
        1.5 * states["AdamW"], rel=1e-3
    )


def test_a_metric_of_gradients_is_the_same_on_all_meshes(train_into, tmp_path):
    found = {}
    for mesh in ("1", "FSDP2"):
        degrees = MESHES[mesh]
        train_into(
            tmp_path / mesh,
            degrees,
            f"--training.local_batch_size={4 // degrees.dp}",
            "--training.steps=3",
            "--metrics.log_freq=2",
            "--metrics.function=my_metrics:noise_scale",
            "--checkpoint.enable=false",
        )
        lines = read_lines(tmp_path / mesh / "metrics.jsonl")
        found[mesh] = [
            [line[f"metric/{name}"] for name in ("gradient", "noise", "noise_scale")]
            for line in lines
        ]
    for mesh, points in found.items():
        assert len(points) == 3, "steps 1, 2 and 3 are logged"
        for point, expected in zip(points, found["1"], strict=True):
            assert point == pytest.approx(expected, rel=1e-3), mesh
            assert point[1] > 0


def test_a_converter_makes_the_rows_that_it_says(examples, tmp_path, checked, modules):
    """The tokens equal the tokens of the same rows in a file. If the function's file changes, the
    tokens are made again.
    """
    asked = [{"ask": f"what {i}", "say": f"one {i}", "score": 0.2 + i / 10} for i in range(9)]
    plain = [
        {"prompt": row["ask"], "completion": row["say"]} for row in asked if row["score"] >= 0.5
    ]
    tokens = {}
    for name, rows in (("asked", asked), ("plain", plain)):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    settings = [*examples, "--data.bad_rows=skip", "--validation.enable=false"]
    for name, more in (("asked", ["--data.converter=my_rows:convert"]), ("plain", [])):
        job = checked(Degrees(), *settings, f"--data.path={tmp_path / name}.jsonl", *more).job
        tokens[name] = build_data(job, 0, 1)[1].dataset.train.examples
    assert tokens["asked"].tokens.tolist() == tokens["plain"].tokens.tolist()
    (what, count), *_ = tokens["asked"].left_out.items()
    assert (what, count) == ("rows skipped (converter failed)", 3)
    assert "raised ValueError: bad answer" in tokens["asked"].firsts[what]
    rows = open_rows(DataSection(path=f"{tmp_path / 'asked'}.jsonl", converter="my_rows:convert"))
    before = rows.identity
    (modules / "my_rows.py").write_text(BLOCKS["my_rows"] + "\n# changed\n")
    assert rows.identity != before


def test_a_family_of_ones_own_trains_saves_and_loads(tmp_path, run_ranks):
    """As the page says, the family needs only default settings: in titanlite, in its transformers
    class, and by the name of that class.
    """
    (tmp_path / "poem.txt").write_text("To train is to repeat what is not known. " * 300)
    config = {
        "model": {"name": "my_models:FAMILY", "flavor": "small"},
        "training": {"steps": 2, "seq_len": 64},
        "data": {"dataset": "text", "path": tmp_path / "poem.txt", "bpe_vocab_size": 300},
        "metrics": {"enable_tensorboard": False},
        "job": {"dump_folder": tmp_path / "run"},
    }

    def rank_main():
        first = titanlite.train(config)
        assert first.checkpoint is not None
        saved = read_json(first.checkpoint / "config.json")
        assert (saved["model_type"], saved["architectures"]) == ("smollama", ["LlamaForCausalLM"])
        assert titanlite.train(config, training={"steps": 3}).step == 3, "resumed"
        model = {"name": "my_models:FAMILY", "path": first.checkpoint, "flavor": ""}
        again = titanlite.train({**config, "model": model}, job={"dump_folder": tmp_path / "again"})
        assert again.checkpoint is not None and again.loss < first.loss

        tokens = torch.arange(1, 9)[None]
        theirs = LlamaForCausalLM.from_pretrained(first.checkpoint).eval()
        saved["model_type"] = "llama"
        write_json(first.checkpoint / "config.json", saved)
        by_name = AutoModelForCausalLM.from_pretrained(first.checkpoint).eval()
        assert any_model_config_from_hf(first.checkpoint, "test").family == "llama", (
            "for `generate` and `export`"
        )
        assert (
            type(by_name) is LlamaForCausalLM
            and AutoTokenizer.from_pretrained(first.checkpoint)("train").input_ids
        )
        with torch.no_grad():
            assert theirs(tokens).logits.equal(by_name(tokens).logits)

    run_ranks(1, rank_main)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "WARNING" not in log


def test_runs_in_one_process_leave_its_hooks(config_file, tmp_path):
    """Otherwise each process group that a run makes would add one more `[rank0]:` to tracebacks."""

    def hooks():
        return [sys.excepthook, threading.excepthook, logging.root.handlers[:], logger.handlers[:]]

    def alone():
        before = hooks()
        for number in range(2):
            titanlite.train(
                config_file, training={"steps": 1}, job={"dump_folder": tmp_path / str(number)}
            )
            assert hooks() == before
        with pytest.raises(titanlite.TitanliteError):
            titanlite.train(config_file, training={"step": 1})
        assert hooks() == before

    run_forked(alone)


BAD = """
import torch
class Rows(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"], self.state[param]["n"] = param.detach()[0] * 0, 3
            group["k"] = group.get("k", 0) + 1
def rows(named_parameters, section):
    return Rows([param for _, param in named_parameters], lr=0.1)
def some(named_parameters, section):
    return torch.optim.SGD([named_parameters[0][1]], lr=0.1)
def nothing(named_parameters, section): pass
def scalar(logits, labels):
    return logits.sum()
def constant(logits, labels):
    return labels.float()
def fails(log_probs, batch):
    return log_probs.nothing
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "rows",
            r"(?s)step changes k of a group.*'rows' of a parameter .* is torch.float32.*'n' .* is "
            r"int",
        ),
        ("some", "leaves out"),
        ("nothing", "returned NoneType. Return a torch.optim.Optimizer"),
        ("scalar", r"the loss is a tensor of shape \(\), not a tensor of shape \(4,\)"),
        ("constant", "the loss depends on nothing that is trained"),
        ("fails", "a trial raised AttributeError"),
    ],
)
def test_what_a_trial_finds_wrong(modules, name, message):
    (modules / "bad.py").write_text(BAD)
    with pytest.raises(ConfigError, match=message):
        if name in ("rows", "some", "nothing"):
            build_custom_optimizer(torch.nn.Linear(2, 3), OptimizerSection(name=f"bad:{name}"))
        else:
            settings = (
                "--model.flavor=debug",
                "--training.seq_len=8",
                f"--training.objective=bad:{name}",
            )
            job = make_config({"data": {"dataset": "stdlib"}}, settings)
            build_custom_objective(job, 9)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, weekly(2)])
def test_the_script_trains_twice(ranks, tmp_path, run_process, modules):
    (tmp_path / "poem.txt").write_text("To train is to repeat what is not known. " * 300)
    script = shutil.copy(modules / "experiment.py", tmp_path)
    if ranks == 1:
        said = run_script(Path(script))
    else:
        words = shlex.join(
            [sys.executable, "-m", "titanlite.launch", "--nproc-per-node=2", "experiment.py"]
        )
        done = run_process(
            ["bash", "-c", f"cd {tmp_path} && {words}"], 200, {"PYTHONPATH": str(PAGE.parents[1])}
        )
        assert done.returncode == 0, done.output
        said = done.stdout
    for rate in (0.001, 0.003):
        folder = f"outputs/lr-{rate}/checkpoint/step-3"
        assert (tmp_path / folder / "config.json").exists()
        # Ranks print at the same time, and Python's print makes several writes, so their lines can
        # be mixed.
        assert len(re.findall(rf"{re.escape(folder)}(?!:| \()", said)) == ranks, said
