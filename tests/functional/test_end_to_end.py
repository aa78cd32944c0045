"""The quick start's command with smaller numbers: everything that a run leaves behind is there and can be used."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from titanlite.config import load_config
from titanlite.config.parallelism import resolve_degrees

ROOT = Path(__file__).parents[2]
STEPS = 4
TIMEOUT_S = 240  # 25 s on 2 idle cores
OVERRIDES = {
    "training.steps": STEPS,
    "training.seq_len": 64,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,  # with 2 data-parallel ranks: 2 micro-batches
    "lr_scheduler.warmup_steps": 1,
    "model.overrides.num_layers": 2,
    "model.overrides.hidden_size": 64,
    "model.overrides.num_heads": 4,
    "model.overrides.vocab_size": 512,
    "data.bpe_vocab_size": 512,
    "validation.freq": 2,
    "validation.steps": 1,
    "metrics.log_freq": 1,
}


@pytest.fixture(scope="module")
def run(run_process, tmp_path_factory):
    """One run of `NGPU=4 ./run_train.sh --config configs/qwen3_moe.toml`: (its output, its dump folder)."""
    if shutil.which("bash") is None:
        pytest.skip("run_train.sh needs bash")
    dump, cache = tmp_path_factory.mktemp("runs") / "first", tmp_path_factory.mktemp("stdlib-cache")
    command = ["./run_train.sh", "--config", "configs/qwen3_moe.toml", f"--job.dump_folder={dump}"]
    command += [f"--data.cache_folder={cache}", *(f"--{key}={value}" for key, value in OVERRIDES.items())]
    done = run_process(command, TIMEOUT_S, env={"NGPU": "4", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.output[-4000:]
    return done, dump


def read_metrics(dump: Path) -> list[dict]:
    return [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]


def test_log_is_one_plain_line_per_step_from_one_rank(run):
    done, _ = run
    lines = re.findall(rf"step +(\d+)/{STEPS}  +loss +([\d.]+)", done.stdout)
    trained = [(int(step), float(loss)) for step, loss in lines]
    assert [step for step, _ in trained] == [1, 2, 3, 4]
    assert trained[0][1] == pytest.approx(math.log(512), rel=0.02), "an untrained model knows nothing"
    assert done.stdout.count("validation loss") == 2
    assert "dp_replicate 1 x dp_shard 2 x tp 2, ep 2, 4 ranks on cpu" in done.stdout
    for noise in ("Warning", "warning", "Traceback", "[rank"):
        assert noise not in done.output, done.output
    assert "\r" not in done.output and "\x1b" not in done.output, "no progress bar outside a terminal"


def test_metrics_file_has_every_step(run):
    points = read_metrics(run[1])
    training = [point for point in points if "loss/train" in point]
    assert [point["step"] for point in training] == [1, 2, 3, 4]
    for point in training:
        assert point["grad_norm"] > 0 and point["lr"] > 0 and point["throughput/tokens_per_s"] > 0
        assert point["moe/load_max_over_mean/layer_00"] >= 1 and point["moe/load_max_over_mean/layer_01"] >= 1
    assert training[-1]["loss/train"] < training[0]["loss/train"] - 0.1
    validation = [point for point in points if "loss/validation" in point]
    assert [point["step"] for point in validation] == [2, 4]
    assert validation[1]["loss/validation"] < validation[0]["loss/validation"]


def test_tensorboard_shows_the_same_numbers(run):
    _, dump = run
    events = EventAccumulator(str(dump / "tb"), size_guidance={"images": 0})
    events.Reload()
    expected = [point["loss/train"] for point in read_metrics(dump) if "loss/train" in point]
    # TensorBoard stores float32.
    assert [event.value for event in events.Scalars("loss/train")] == pytest.approx(expected, rel=1e-6)
    assert {"grad_norm", "lr", "loss/validation", "throughput/tokens_per_s"} <= set(events.Tags()["scalars"])
    assert len(events.Images("moe/expert_load")) == STEPS


def test_resolved_configuration_is_the_one_that_ran(run):
    job = load_config(["--config", str(run[1] / "config.toml")])
    again = load_config(
        [
            *("--config", str(ROOT / "configs/qwen3_moe.toml"), f"--job.dump_folder={run[1]}"),
            f"--data.cache_folder={job.data.cache_folder}",
            *(f"--{key}={value}" for key, value in OVERRIDES.items()),
        ]
    )
    assert job == again
    degrees = resolve_degrees(job.parallelism, 4)
    assert (degrees.tp, degrees.ep, degrees.dp_shard) == (2, 2, 2)


def test_checkpoint_loads_in_transformers_and_has_learned(run):
    _, dump = run
    folder = dump / "checkpoint" / f"step-{STEPS}"
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {key: value for key, value in info.items() if value} == {}
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    ids = torch.tensor([tokenizer.encode((ROOT / "titanlite/trainer.py").read_text())[:512]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < math.log(512) - 0.1, "better than a guess"
    assert not (folder / "titanlite/expert_bias.safetensors").exists(), "transformers routes as this run did"


def test_run_ends_with_sample_checkpoint_and_tensorboard_command(run):
    done, dump = run
    end = done.stdout[done.stdout.index("sample (temperature") :]
    assert "def __init__(self" in end
    assert f"checkpoint: {dump / 'checkpoint' / f'step-{STEPS}'}" in end
    assert f"tensorboard --logdir {dump / 'tb'}" in end
    assert end.index("def __init__") < end.index("checkpoint: ") < end.index("tensorboard --logdir")


def test_run_leaves_nothing_else_behind(run):
    _, dump = run
    assert sorted(path.name for path in dump.iterdir()) == ["checkpoint", "config.toml", "metrics.jsonl", "tb"]
    assert [path.name for path in (dump / "checkpoint").iterdir()] == [f"step-{STEPS}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_all_ranks_in_one_line(tmp_path, number):
    arguments = [
        sys.executable,
        "-m",
        "titanlite.launch",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "titanlite.train",
    ]
    arguments += ["--config", str(ROOT / "configs/qwen3_moe.toml"), "--training.steps=100000"]
    arguments += ["--model.flavor=debug", "--model.overrides.vocab_size=512", "--data.bpe_vocab_size=512"]
    arguments += [f"--job.dump_folder={tmp_path / 'run'}", f"--data.cache_folder={tmp_path / 'cache'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    try:
        assert launcher.stdout is not None
        while "step" not in (line := launcher.stdout.readline()):
            assert line, launcher.communicate()[1]
        os.killpg(launcher.pid, number)  # as a terminal does: to the launcher and to all ranks
        _, errors = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number
    assert errors.splitlines() == [f"titanlite: stopped by {number.name}, with all ranks."]
