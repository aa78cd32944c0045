"""The benchmarks: `--help`, and a run of each of those for GPUs on tiny sizes with a stand-in timer."""

import argparse
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import varlen_kernel  # noqa: F401  torch's operator, on the CPU
from triton_interpreter import repair

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.append(str(BENCH))  # where the scripts find one another

import gpu_common  # noqa: E402
import moe_gpu  # noqa: E402
import moe_gpu_cases as cases  # noqa: E402
import moe_gpu_sweep  # noqa: E402
import step_cpu  # noqa: E402
import step_gpu  # noqa: E402
import train_gpu  # noqa: E402

from titanlite.config import ModelConfig  # noqa: E402
from titanlite.features.estimate.estimate import get_hardware  # noqa: E402
from titanlite.features.estimate.tracker import PARTS  # noqa: E402
from titanlite.models.families import families  # noqa: E402
from titanlite.ops import launchers as launch  # noqa: E402

SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text())
SMALL_TILE = launch.Tile(32, 32, 16, 4, 2, 1)
TINY = cases.MoEShape("tiny", 32, 16, 4, 2)
MACHINE = gpu_common.Machine("NVIDIA H200", "1", 140 << 30, 60 << 20, {"torch": "0"}, "today", 790e12, 4.3e12)
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")
if launch.INTERPRETED:
    repair()


class OneRun:
    """Calls once and says that it took a millisecond."""

    def measure(self, call, seconds=None):
        call(0)
        return gpu_common.Sample(1e-3, 1e-3, 1e-3, 1)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(BENCH / script), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(BENCH / script), run_name="__main__")
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"usage: {script}")


@pytest.mark.parametrize("script", ["moe_gpu.py", "step_gpu.py", "train_gpu.py"])
def test_without_a_gpu_one_line_says_so(script, capsys, monkeypatch):
    """In this process; test_bare_machine.py imports such scripts in one of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(BENCH / script)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(BENCH / script), run_name="__main__")
    line = f"{script}: no CUDA device was found. Run this on a machine with an NVIDIA GPU.\n"
    assert capsys.readouterr() == ("", line)


@interpreted
def test_a_whole_run_of_moe_gpu(tmp_path):
    budget = gpu_common.Budget(1e6)
    rows = []
    for skew in cases.SKEWS:
        rows += moe_gpu.measure_case(TINY, 20, skew, MACHINE, budget, OneRun(), "cpu", torch.float32)
    assert [row for row in rows if row["problem"]] == []
    assert len(rows) == 2 * (6 * 3 + 5 + 4 * 2)
    assert rows[0]["tflops"] == pytest.approx(2 * 40 * 32 * 32 / 1e-3 / 1e12)
    budget.skipped.append("the rest")
    paths, text = moe_gpu.save(tmp_path, MACHINE, rows, budget, 7e14)
    assert {path.name for path in tmp_path.iterdir()} == {"moe_gpu.md", "moe_gpu.json"}
    assert "NVIDIA H200" in text and "- the rest" in text
    assert "## tiny, 20 tokens, zipf (40 rows" in text and "| forward + backward: titanlite fused " in text
    assert json.loads(paths[1].read_text())["rows"] == rows


@interpreted
def test_sweep_prints_lines_for_the_table(monkeypatch, capsys):
    monkeypatch.setattr(moe_gpu_sweep, "candidates", lambda kernel: [launch.TILES["large"][kernel], SMALL_TILE])
    times = iter(range(10**6))

    class Falling(OneRun):
        def measure(self, call, seconds=None):
            super().measure(call)
            return gpu_common.Sample(1.0 / (1 + next(times)), 0, 0, 1)

    budget = gpu_common.Budget(1e6)
    lines = moe_gpu_sweep.sweep(
        TINY, budget, Falling(), 1e12, "cpu", torch.float32, ("wgrad", "swiglu"), (16, 20), jobs=0
    )
    assert len(lines) == 2 and budget.skipped == []
    for line, kernel in zip(lines, ("wgrad", "swiglu"), strict=True):
        assert eval("{" + line + "\n}", {"Tile": launch.Tile}).keys() == {kernel}
        assert " at 16, " in line and " at 20 tokens" in line


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


def few_tiles() -> ModelConfig:
    """One layer whose experts are one tile wide: kernels are interpreted."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    return replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=1, **sizes)


TINY_CASE = step_cpu.Case(ranks=2, vocab_size=64, hidden_size=32, expert_size=16, layers=1, sequences=1, seq_len=16)


def test_two_ranks_of_step_cpu_make_the_same_steps(tmp_path, monkeypatch):
    *_, name, ours, theirs, ratio, spread, _ = step_cpu.compare(TINY_CASE, steps=3).split("|")
    assert name == " 2 ranks, 1 x 16 tokens, hidden size 32 " and " - " in spread
    assert float(ours) > 0 and float(theirs) > 0 and float(ratio) > 0
    monkeypatch.setattr(step_cpu, "_LOSS_TOLERANCE", -1.0)
    with pytest.raises(ValueError, match=r"2 ranks.*: in step 0 titanlite's loss is 4\.\d+, transformers' 4\."):
        step_cpu.compare(TINY_CASE, steps=3)


def test_a_rank_of_step_cpu_that_fails_is_an_error(tmp_path):
    def build(folder: Path, ranks: int) -> step_cpu.Step:
        raise ZeroDivisionError

    with (
        step_cpu.Team(TINY_CASE, build, tmp_path, "broken") as team,
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
    ):
        team.run(0)


@interpreted
def test_a_step_by_operators(request):
    config = few_tiles()
    case, hardware = step_gpu.Case("tiny", config, 16, 2), get_hardware("h200")
    expected = step_gpu.expect(case, hardware)
    assert {"attention", "grouped GEMM", "optimizer"} <= expected.keys()
    found = step_gpu.measure(case, 1, hardware, request.getfixturevalue("one_rank"))
    copies = {"FSDP copies and casts"}  # over one rank there are none in float32
    assert set(found["parts_ms"]) == set(PARTS) - copies and min(found["parts_ms"].values()) > 0
    assert sum(found["parts_ms"].values()) == pytest.approx(sum(found["rates_ms"].values()))
    names = {name for _, name, *_ in found["operators"]}
    assert {"titanlite::gather_sum", "aten::mm"} & names and found["launches"] > 100
    text = step_gpu.render(found, expected)
    assert text.startswith(f"## tiny: {found['launches']} launches") and "routing and permutation" in text


@interpreted
def test_a_whole_run_of_train_gpu(one_rank, tmp_path):
    config = few_tiles()
    arguments = argparse.Namespace(seq_len=16, sequences=2, steps=1, out=tmp_path)
    budget, rows = gpu_common.Budget(1e6), []

    def add(row):
        rows.append(train_gpu.complete(row, config, arguments, MACHINE))

    # Kernels are interpreted, so that few variants take them.
    variants = [v for v in train_gpu.VARIANTS if not v.compiled]
    variants.remove(train_gpu.Variant("triton", "selective"))
    variants = [v if v.attention == "causal" else replace(v, backend="torch") for v in variants]
    broken = train_gpu.Variant("cuda")  # fails in the middle of a step: the next one gets a new model
    train_gpu.measure_titanlite([broken, *variants], config, arguments, one_rank, budget, add)
    train_gpu.measure_transformers(list(train_gpu.HF_VARIANTS), config, arguments, one_rank, budget, add)
    assert [row["name"] for row in rows if row["problem"]] == []
    losses = [row["loss"] for row in rows]
    assert len(losses) == len(variants) + 3 + 1
    first = losses[1]
    for variant, loss in zip(variants, losses[1:], strict=False):
        if variant.attention == "causal":  # the same batch; weights move by 1e-7 per step
            assert loss == pytest.approx(first, rel=1e-3)
    assert all(abs(loss - first) < 0.5 for loss in losses)
    masked, varlen = (
        loss for variant, loss in zip(variants, losses[1:], strict=False) if variant.attention.startswith("documents")
    )
    assert varlen == pytest.approx(masked, rel=1e-3) and masked != pytest.approx(first, rel=1e-4)
    assert rows[1]["tokens_per_s"] == pytest.approx(32 / rows[1]["step_s"])
    paths, text = train_gpu.save(arguments, config, MACHINE, rows, budget)
    assert "transformers, FSDP2, float32 states" in text and json.loads(paths[1].read_text())["rows"] == rows
