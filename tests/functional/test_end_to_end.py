"""The quick start's command with smaller numbers: the run leaves all its files, and they can be
used.
"""

import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from cluster import rank_pids, variables_of
from files import read_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from titanlite.checkpoint.commit import check_folder, list_steps
from titanlite.launch import rendezvous

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
    "data.dataset": "text",  # Python's library takes half a minute
    "data.path": "titanlite/models",
    "data.pattern": "*.py",
    "data.bpe_vocab_size": 512,
    "validation.freq": 2,
    "validation.steps": 1,
    "metrics.log_freq": 1,
}


@pytest.fixture(scope="module")
def run(run_process, tmp_path_factory):
    """One run of `NGPU=4 ./run_train.sh --config configs/qwen3_moe.toml`: (its output, its dump
    folder).
    """
    if shutil.which("bash") is None:
        pytest.skip("run_train.sh needs bash")
    dump, cache = tmp_path_factory.mktemp("runs") / "first", tmp_path_factory.mktemp("cache")
    command = ["./run_train.sh", "--config", "configs/qwen3_moe.toml", f"--job.dump_folder={dump}"]
    command += [
        f"--data.cache_folder={cache}",
        *(f"--{key}={value}" for key, value in OVERRIDES.items()),
    ]
    done = run_process(command, TIMEOUT_S, env={"NGPU": "4", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.output[-4000:]
    return done, dump


def test_log_is_one_plain_line_per_step_from_one_rank(run):
    done, _ = run
    lines = re.findall(rf"step +(\d+)/{STEPS}  +loss +([\d.]+)", done.stdout)
    trained = [(int(step), float(loss)) for step, loss in lines]
    assert [step for step, _ in trained] == [1, 2, 3, 4]
    # Random logits cost more than equal ones by half of their variance: 0.10 to 0.14 here.
    assert trained[0][1] == pytest.approx(math.log(512) + 0.12, abs=0.1), (
        "an untrained model knows nothing"
    )
    assert done.stdout.count("validation loss") == 3
    assert "dp_replicate 1 x dp_shard 2 x tp 2, ep 2, 4 ranks on cpu" in done.stdout
    for noise in ("Warning", "warning", "Traceback", "[rank"):
        assert noise not in done.output, done.output
    assert "\r" not in done.output and "\x1b" not in done.output, (
        "no progress bar outside a terminal"
    )


def test_metrics_file_has_every_step(run):
    points = read_lines(run[1] / "metrics.jsonl")
    training = [point for point in points if "loss/train" in point]
    assert [point["step"] for point in training] == [1, 2, 3, 4]
    for point in training:
        assert point["grad_norm"] > 0 and point["lr"] > 0 and point["throughput/tokens_per_s"] > 0
        assert (
            len(point["moe/load_max_over_mean"]) == 2 and min(point["moe/load_max_over_mean"]) >= 1
        )
    validation = [point for point in points if "loss/validation" in point]
    assert [point["step"] for point in validation] == [0, 2, 4]
    losses = [point["loss/validation"] for point in validation]
    assert losses == sorted(losses, reverse=True) and losses[2] < losses[0] - 0.1


def test_checkpoint_loads_in_transformers_and_has_learned(run):
    _, dump = run
    folder = dump / "checkpoint" / f"step-{STEPS}"
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {key: value for key, value in info.items() if value} == {}
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    ids = torch.tensor([tokenizer.encode((ROOT / "titanlite/trainer.py").read_text())[:512]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < math.log(512), "better than a guess"
    assert not (folder / "titanlite/expert_bias.safetensors").exists(), (
        "transformers routes as this run did"
    )


def test_run_ends_with_its_checkpoint_and_the_log_has_all_lines(run):
    done, dump = run
    folder = dump / "checkpoint" / f"step-{STEPS}"
    writing, verify = done.stdout.splitlines()[-2:]
    assert f"checkpoint: writing {folder}: " in writing
    assert f"python -m titanlite verify {folder}" in verify
    assert [
        line[20:] for line in (dump / "log.txt").read_text().splitlines() if "step " in line
    ] == [line[9:] for line in done.stdout.splitlines() if "step " in line and line[2] == ":"]


def finishing(number):
    return (
        f"titanlite: {number.name}: finishing this step and saving; send it again to end at once.\n"
    )


@pytest.mark.slow
def test_signals_end_a_run_with_a_checkpoint_from_which_the_same_command_goes_on(launch, tmp_path):
    """SIGINT goes to the launcher's process group, as a terminal sends it, and SIGKILL to one rank.
    The fault drill sends SIGTERM to the launcher.
    """
    folder = tmp_path / "run/checkpoint"
    command = (
        "run",
        "--checkpoint.async_mode=async",
        "--checkpoint.interval=100000",
        "--checkpoint.keep_latest_k=0",
    )
    run = launch(*command, served=False)
    run.wait_for_step(2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end(30) == 0, run.err
    assert run.err == finishing(signal.SIGINT) and "resuming from" not in run.out
    saved = run.steps()[-1]
    assert run.steps() == list(range(1, saved + 1))
    assert (
        f"stopped after step {saved} of 100000, saved; the same command resumes from {folder}"
        in run.out
    )
    assert check_folder(folder / f"step-{saved}", checksums=True) == []
    assert list_steps(folder) == [saved]

    run = launch(*command)
    run.wait_for_step(saved + 2)
    assert run.steps()[0] == saved + 1, "from the step after the one that was saved"
    assert f"resuming from {folder / f'step-{saved}'}" in run.out
    before = sorted(path.name for path in folder.iterdir())
    ranks = rank_pids(run.pid("launcher"))
    for pid in ranks:  # no connection could take it before rank 0 opened it
        assert int(variables_of(pid)["MASTER_PORT"]) in rendezvous.PORTS
    os.kill(ranks[1], signal.SIGKILL)
    assert run.end(15) != 0
    assert run.err == (
        "titanlite: rank 1 was ended by SIGKILL (often: out of memory); all ranks were stopped. "
        f"The same command resumes from the newest checkpoint in {folder.parent}, or begins anew "
        "without one.\n"
    )
    assert sorted(path.name for path in folder.iterdir()) == before
    assert check_folder(folder / f"step-{saved}", checksums=True) == []


ENDLESS_STEP = """
import time
from titanlite.train_step import TrainStep
def train_step(self, batches):
    print("endless step", flush=True)
    time.sleep(600)
TrainStep.train_step = train_step
"""


@pytest.mark.slow
def test_second_signal_and_a_run_that_cannot_save(launch, tmp_path):
    slow = launch("slow", misbehave=ENDLESS_STEP)
    lost = launch("lost", "--checkpoint.enable=false")
    slow.wait_for("the first step", lambda: slow.out.count("endless step") == 2)
    slow.process.terminate()
    slow.wait_for("the answer to the signal", lambda: slow.err)
    time.sleep(1)
    assert slow.process.poll() is None, "it finishes its step"
    slow.process.terminate()
    assert slow.end(15) == 128 + signal.SIGTERM
    assert slow.err.startswith(
        finishing(signal.SIGTERM)
        + "titanlite: stopped by SIGTERM, with all ranks. The same command resumes from "
    )
    assert not (tmp_path / "slow/checkpoint").exists() and "before the first step" not in slow.out

    lost.wait_for_step(2)
    lost.process.terminate()
    assert lost.end(30) != 0, "what was trained is lost"
    assert f"stopped after step {lost.steps()[-1]} of 100000, lost" in lost.out
    assert lost.err.startswith(finishing(signal.SIGTERM)) and "Traceback" not in lost.err
