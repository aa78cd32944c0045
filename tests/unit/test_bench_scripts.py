"""The benchmarks: `--help`, and a run of each of those for GPUs on tiny sizes with a stand-in
timer.
"""

import argparse
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton_interpreter  # noqa: F401  makes bfloat16 right in the interpreter
import varlen_kernel  # noqa: F401  torch's operator, on the CPU
from files import read_json

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
sys.path.append(str(BENCH))  # where the scripts find one another

import fused_gpu  # noqa: E402
import gpu_common  # noqa: E402
import probes_gpu  # noqa: E402
import train_gpu  # noqa: E402

from titanlite.models.families import families  # noqa: E402

SCRIPTS = sorted(
    path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text()
)
MACHINE = gpu_common.Machine(
    "NVIDIA H200", "1", 140 << 30, 60 << 20, {"torch": "0"}, "today", 790e12, 4.3e12
)


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
    for script in (name for name in SCRIPTS if name.endswith("_gpu.py")):
        assert run_script(script, monkeypatch) == 2
        line = f"{script}: no CUDA device was found. Run this on a machine with an NVIDIA GPU.\n"
        assert capsys.readouterr() == ("", line)


def few_tiles():
    """One layer whose experts are one tile wide: kernels are interpreted."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    return replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=1, **sizes)


def test_train_gpu(one_rank, tmp_path):
    config = few_tiles()
    arguments = argparse.Namespace(seq_len=16, sequences=2, steps=1, out=tmp_path)
    budget, rows = gpu_common.Budget(1e6), []

    def add(row):
        rows.append(train_gpu.complete(row, config, arguments, MACHINE))

    variants = [train_gpu.Variant("torch", "full")]
    train_gpu.measure_titanlite(variants, config, arguments, one_rank, budget, add)
    train_gpu.measure_transformers(
        list(train_gpu.HF_VARIANTS[1:2]), config, arguments, one_rank, budget, add
    )
    assert [row["name"] for row in rows if row["problem"]] == []
    ours, theirs = (row["loss"] for row in rows)
    assert theirs == pytest.approx(ours, rel=0.1)
    paths, text = train_gpu.save(arguments, config, MACHINE, rows, budget)
    assert "transformers, FSDP2, float32 states" in text and read_json(paths[1])["rows"] == rows


class OneRun:
    """Stand-in for `CudaTimer`: calls once."""

    def measure(self, call, seconds=None):
        call(0)
        return gpu_common.Sample(1e-6, 1e-6, 1e-6, 1)


def test_fused_gpu():
    rows = fused_gpu.compare(OneRun(), 4, "cpu", 1e12)
    assert [row[0].split(":")[0] for row in rows][-1] == "4 inputs of a delta net"
    assert all(row[1:5] == ["1"] * 4 for row in rows) and len(rows) == 7


def test_probes(one_rank):
    rows = probes_gpu.compare_attention(OneRun(), "cpu", [(2, 8)])
    assert rows[0] == ["2 x 8", "varlen", "1, 3"]
    (row,) = probes_gpu.compare_exchange(OneRun(), "cpu")
    assert float(row[0]) > 0 and row[1] == "1"
    config = replace(few_tiles(), num_experts=0, intermediate_size=16)
    launched, replayed = probes_gpu.compare_graph(OneRun(), config, one_rank, 8)
    assert launched == ["launched", "0.0"] and replayed[0] == "replayed" and replayed[1]
