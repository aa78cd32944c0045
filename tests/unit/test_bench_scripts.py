"""The benchmarks: `--help`, and a run of each of those for GPUs on tiny sizes with a stand-in
timer.
"""

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

SCRIPTS = sorted(
    path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text()
)
TINY = cases.MoEShape("tiny", 32, 16, 4, 2)
MACHINE = gpu_common.Machine(
    "NVIDIA H200", "1", 140 << 30, 60 << 20, {"torch": "0"}, "today", 790e12, 4.3e12
)
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")
if launch.INTERPRETED:
    repair()


class OneRun:
    """Calls once and says that it took a millisecond."""

    def measure(self, call, seconds=None):
        call(0)
        return gpu_common.Sample(1e-3, 1e-3, 1e-3, 1)


def run_script(script, monkeypatch, *arguments):
    """Its exit code, in this process; test_bare_machine.py imports such scripts in one of its
    own.
    """
    monkeypatch.setattr(sys, "argv", [str(BENCH / script), *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    return end.value.code


def test_help(capsys, monkeypatch):
    for script in SCRIPTS:
        assert run_script(script, monkeypatch, "--help") == 0
        out, err = capsys.readouterr()
        assert err == "" and out.startswith(f"usage: {script}")


def test_without_a_gpu_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in ["moe_gpu.py", "step_gpu.py", "train_gpu.py"]:
        assert run_script(script, monkeypatch) == 2
        line = f"{script}: no CUDA device was found. Run this on a machine with an NVIDIA GPU.\n"
        assert capsys.readouterr() == ("", line)


@interpreted
def test_moe_gpu(tmp_path):
    budget = gpu_common.Budget(1e6)
    rows = list(
        moe_gpu.measure_case(TINY, 20, "zipf", MACHINE, budget, OneRun(), "cpu", torch.float32)
    )
    assert [row["problem"] for row in rows] == [None] * (6 * 3 + 5 + 4 * 2)
    assert rows[0]["tflops"] == pytest.approx(2 * 40 * 32 * 32 / 1e-3 / 1e12)
    paths, text = moe_gpu.save(tmp_path, MACHINE, rows, budget, 7e14)
    assert (
        "## tiny, 20 tokens, zipf (40 rows" in text
        and json.loads(paths[1].read_text())["rows"] == rows
    )


@interpreted
def test_sweep_prints_lines_for_the_table(monkeypatch):
    tile = launch.Tile(32, 32, 16, 4, 2, 1)
    monkeypatch.setattr(
        moe_gpu_sweep, "candidates", lambda kernel: [launch.TILES["large"][kernel], tile]
    )
    budget = gpu_common.Budget(1e6)
    (line,) = moe_gpu_sweep.sweep(
        TINY, budget, OneRun(), 1e12, "cpu", torch.float32, ("wgrad",), (16, 20), jobs=0
    )
    assert budget.skipped == [] and eval("{" + line + "\n}", {"Tile": launch.Tile}).keys() == {
        "wgrad"
    }


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


def few_tiles() -> ModelConfig:
    """One layer whose experts are one tile wide: kernels are interpreted."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    return replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=1, **sizes)


TINY_CASE = step_cpu.Case(
    ranks=2, vocab_size=64, hidden_size=32, expert_size=16, layers=1, sequences=1, seq_len=16
)


def test_step_cpu_on_two_ranks():
    *_, name, ours, theirs, ratio, _, _ = step_cpu.compare(TINY_CASE, steps=3).split("|")
    assert (
        name == " 2 ranks, 1 x 16 tokens, hidden size 32 "
        and min(map(float, (ours, theirs, ratio))) > 0
    )


@interpreted
def test_step_gpu(request):
    case, hardware = step_gpu.Case("tiny", few_tiles(), 16, 2), get_hardware("h200")
    expected = step_gpu.expect(case, hardware)
    found = step_gpu.measure(case, 1, hardware, request.getfixturevalue("one_rank"))
    copies = {"FSDP copies"}  # over one rank there are none in float32
    assert set(found["parts_ms"]) == set(PARTS) - copies and min(found["parts_ms"].values()) > 0
    assert sum(found["parts_ms"].values()) == pytest.approx(sum(found["rates_ms"].values()))
    assert step_gpu.render(found, expected).startswith(f"## tiny: {found['launches']} launches")


@interpreted
def test_train_gpu(one_rank, tmp_path):
    config = few_tiles()
    arguments = argparse.Namespace(seq_len=16, sequences=2, steps=1, out=tmp_path)
    budget, rows = gpu_common.Budget(1e6), []

    def add(row):
        rows.append(train_gpu.complete(row, config, arguments, MACHINE))

    variants = [train_gpu.Variant("triton"), train_gpu.Variant("torch", "full")]
    variants.append(train_gpu.Variant("torch", attention="documents, varlen"))
    train_gpu.measure_titanlite(variants, config, arguments, one_rank, budget, add)
    train_gpu.measure_transformers(
        list(train_gpu.HF_VARIANTS[1:2]), config, arguments, one_rank, budget, add
    )
    assert [row["name"] for row in rows if row["problem"]] == []
    triton, torch_, varlen, theirs = (row["loss"] for row in rows)
    assert torch_ == pytest.approx(triton, rel=1e-3), (
        "the same batch; weights move by 1e-7 per step"
    )
    assert theirs == pytest.approx(triton, rel=0.1) and varlen != pytest.approx(triton, rel=1e-4)
    assert rows[0]["tokens_per_s"] == pytest.approx(32 / rows[0]["step_s"])
    paths, text = train_gpu.save(arguments, config, MACHINE, rows, budget)
    assert (
        "transformers, FSDP2, float32 states" in text
        and json.loads(paths[1].read_text())["rows"] == rows
    )
