"""`python -m titanlite plan`: what it prints and writes, and what it refuses."""

import functools
import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import titanlite.features.estimate.sweep
from titanlite.__main__ import main
from titanlite.config import load_config
from titanlite.features.estimate.stages import trace_stages
from titanlite.preflight import check

ROOT = Path(__file__).parents[4]
TINY = (
    *("--config", str(ROOT / "configs" / "qwen3_moe.toml"), "--model.flavor=debug", "--model.overrides.num_layers=3"),
    *("--model.overrides.vocab_size=310", "--training.seq_len=64", "--training.local_batch_size=2"),
    *("--training.global_batch_size=-1", "--parallelism.tensor_parallel_degree=2"),
    *("--parallelism.expert_parallel_degree=2", "--activation_checkpoint.mode=none"),
)


def test_a_plan_that_fits(capsys, tmp_path):
    code = main(["plan", *TINY, "--world-size=4", "--rank=3", f"--json={tmp_path / 'plan.json'}"])
    out = capsys.readouterr().out
    assert code == 0
    name, placement = r"model\.layers\.\{0-2\}\.mlp\.experts\.down_proj", "efsdp 2: shard 0, ep 2: shard 0"
    assert re.search(rf"{name} +3 +\(\d+, \d+, \d+\) +float32 +{placement}", out)
    assert "tensors on rank 3 of 4" in out and "memory of rank 3: fits" in out and "routing is balanced" in out
    # Of each of 3 layers counts, rows, weights and results in forward, and all but the counts in backward.
    assert re.search(r"\n +ep +2 +inside a node +all_to_all +21 ", out)
    assert "floor with full overlap" in out and "checkpoint: none, weights are random" in out
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["rank"], data["world_size"], data["read_bytes"]) == (3, 4, 0)
    memory = data["memory"]
    assert memory["optimizer"] == 2 * memory["gradients"] + 4 * sum(t["count"] for t in data["tensors"] if t["trained"])
    assert sum(t["local_bytes"] for t in data["tensors"]) == memory["weights"] + memory["buffers"]
    working = sum(value for name, value in memory["at_peak"].items() if name != "where")
    assert memory["total"] == memory["weights"] + memory["padding"] + memory["optimizer"] + memory["buffers"] + working


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    small = ("--memory-gib=0.0014", "--reserved-gib=0")
    code = main(["plan", *TINY, "--world-size=4", *small])
    out = capsys.readouterr().out
    assert code == 1 and "does not fit" in out
    assert re.search(r'\nto fit: .*set activation_checkpoint.mode = "full" \(now "none"\), .* --sweep tries all', out)


STAGES = (
    "--parallelism.tensor_parallel_degree=1",
    "--parallelism.expert_parallel_degree=1",
    "--training.local_batch_size=1",
)


def plan_of(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["plan", *TINY, *STAGES, *arguments])
    return code, capsys.readouterr().out


def test_a_pipeline_is_as_full_as_its_fullest_stage(capsys, tmp_path):
    """Of 2 stages the second has 5 of 6 layers; whichever rank is looked at, the run does not fit."""
    uneven = ("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_layers=1,5")
    uneven += ("--model.overrides.num_layers=6", "--world-size=2", "--reserved-gib=0", "--training.global_batch_size=4")
    _, out = plan_of(capsys, *uneven)
    totals = [float(found) for found in re.findall(r"\n  [01]  .* ([\d.]+) MiB  fits", out)]
    assert len(totals) == 2 and totals[0] < totals[1]
    room = f"--memory-gib={sum(totals) / 2 / 1024}"
    floors = []
    for rank in (0, 1):
        file = tmp_path / f"{rank}.json"
        code, out = plan_of(capsys, *uneven, room, f"--rank={rank}", f"--json={file}")
        data = json.loads(file.read_text())
        assert code == 1 and "to fit: " in out and "done in layers 1 to 5" in out
        assert [stage["fits"] for stage in data["stages"]] == [True, False]
        assert [stage["layers"] for stage in data["stages"]] == [1, 5]
        assert data["memory"]["total"] == data["stages"][rank]["total"]
        floors += re.findall(r"floor with .*", out)
    assert floors[:2] == floors[2:], "the run's, not the rank's"
    code, out = plan_of(capsys, *uneven, room, "--sweep", f"--json={tmp_path / 'sweep.json'}")
    rows = json.loads((tmp_path / "sweep.json").read_text())
    modes = {row["activation_checkpoint"] for row in rows["too_large"]}
    assert "none" in modes, "not judged by its first stage"


def test_stages_that_differ_are_looked_at(capsys):
    """9 layers on 8 stages: the 7th has two. Of those with one the first two and the last."""
    eight = ("--parallelism.pipeline_parallel_degree=8", "--model.overrides.num_layers=9", "--world-size=8")
    _, out = plan_of(capsys, *eight, "--training.global_batch_size=8")
    assert re.findall(r"\n  (\d)  +\d  +(\d-\d)", out) == [("0", "0-0"), ("1", "1-1"), ("6", "6-7"), ("7", "8-8")]
    assert "4 more have as many layers as the one before, and fewer micro-batches open" in out


def test_a_sweep_needs_ranks_for_all_stages(capsys):
    code = main(["plan", *TINY, "--sweep", "--world-size=6", "--parallelism.pipeline_parallel_degree=4"])
    assert code == 2 and "pipeline_parallel_degree (4) does not divide the world size (6)" in capsys.readouterr().err


def test_a_sweep(capsys, tmp_path):
    heads = ("--model.overrides.num_kv_heads=1", "--model.overrides.num_experts=4")
    code = main(["plan", *TINY, *heads, "--world-size=2", "--sweep", f"--json={tmp_path / 'sweep.json'}"])
    out = capsys.readouterr().out
    assert code == 0 and "not legal:" in out and "tensor_parallel_degree does not divide num_kv_heads" in out
    data = json.loads((tmp_path / "sweep.json").read_text())
    times = [row["floor_overlapped_s"] / row["tokens"] for row in data["fitting"]]
    assert times == sorted(times) and data["too_large"] == []
    rows = {(row["dp_replicate"], row["dp_shard"], row["tp"], row["ep"]) for row in data["fitting"]}
    assert rows == {(1, 2, 1, 1), (1, 2, 1, 2), (2, 1, 1, 1)}  # one head of keys: no tp
    assert len(data["fitting"]) == 3 * len(rows) > data["traced"]


def test_a_sweep_of_long_sequences(capsys, tmp_path, monkeypatch):
    """Pieces have 4096 tokens or more, except with the degree of the configuration."""
    trace_once = functools.cache(lambda: trace_stages(job.job, job.model_config, job.degrees))
    job = check(load_config(TINY), 4)
    monkeypatch.setattr(titanlite.features.estimate.sweep, "trace_stages", lambda *_: trace_once())
    long = ("--training.seq_len=8192", "--model.overrides.max_position_embeddings=8192")
    for more, expected in (((), {(1, 1), (1, 2), (2, 1)}), (("--parallelism.context_parallel_degree=4",), {(4, 1)})):
        file = tmp_path / f"{len(more)}.json"
        assert main(["plan", *TINY, *long, *more, "--world-size=4", "--sweep", f"--json={file}"]) == 0
        rows = json.loads(file.read_text())["fitting"]
        found = {(row["cp"], row["tp"]) for row in rows}
        assert found == {(1, 1), (1, 2), (2, 1)} | expected
        assert all(row["dp_replicate"] * row["dp_shard"] * row["cp"] * row["tp"] == 4 for row in rows)
    assert "cp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size=4", "--gpu=h1000"], "--gpu=h1000: not in the table. Known are a100-40gb"),
        (["--world-size=4", "--rank=4"], "--rank=4: with --world-size=4 there are ranks 0 to 3."),
        (["--world-size=4", "--flops=-1"], "--flops=-1.0: a rate, size or number is more than 0. Correct it."),
        *(([f"--{name}=-1"], f"--{name}=-1.0: a rate") for name in ("intra-node-gbps", "inter-node-gbps")),
        *(([f"--{name}=-1"], f"--{name}=-1.0: a rate") for name in ("memory-gib", "reserved-gib")),
        (["--gpus-per-node=0"], "--gpus-per-node=0: a rate"),
        (["--world-size=3"], "dp_replicate (1) * tp (2) = 2 does not divide the world size (3)"),
        (["--world-size=4", "--training.step=1"], "did you mean 'training.steps'?"),
        (["--world-size=4", "--json=/nowhere/plan.json"], "--json=/nowhere/plan.json: cannot be written: No such file"),
    ],
)
def test_refusals(arguments, message, capsys):
    assert main(["plan", *TINY, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_of_the_readme_meets_the_limits():
    """Qwen3-235B-A22B on 512 ranks: under 60 s on 2 cores, and 4 GB; time of the processor, for tests share theirs."""
    (line,) = re.findall(r"^python -m titanlite plan .*--world-size 512.*$", (ROOT / "README.md").read_text(), re.M)
    assert line in (ROOT / "docs" / "plan.md").read_text()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "model.layers.{0-93}.mlp.experts.gate_up_proj" in done.stdout and "64 nodes" in done.stdout
    assert re.search(r"^planned in [\d.]+ s, [\d.]+ s of processor time, 5 layers traced$", done.stdout, re.M)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    assert after.ru_maxrss * 1024 < 4e9  # of the largest child so far
