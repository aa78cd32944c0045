"""The benchmarks: command lines, arithmetic, and the GPU ones' measuring code on tiny sizes with a stand-in timer."""

import argparse
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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
import moe_gpu_checks  # noqa: E402
import moe_gpu_sweep  # noqa: E402
import step_gpu  # noqa: E402
import train_gpu  # noqa: E402

from titanlite.config import ModelConfig  # noqa: E402
from titanlite.features.estimate.estimate import get_hardware  # noqa: E402
from titanlite.features.estimate.tracker import PARTS  # noqa: E402
from titanlite.models.decoder import build_decoder  # noqa: E402
from titanlite.models.families import families  # noqa: E402
from titanlite.ops import launchers as launch  # noqa: E402

SCRIPTS = sorted(path.name for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text())
QWEN, QWEN_LARGE, DEEPSEEK = cases.SHAPES
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


# --- command lines


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


def test_arguments_that_make_no_sense_are_refused(capsys):
    for argv in (["--tokens", "4k"], ["--tokens", "8"], ["--shapes", "Llama"]):
        with pytest.raises(SystemExit, match="2"):
            moe_gpu.parse_arguments(argv)
    assert "there are Qwen3-30B-A3B, Qwen3-235B-A22B, DeepSeek-V3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        train_gpu.parse_arguments(["--layers", "0"])
    assert moe_gpu.parse_arguments(["--quick"]).tokens == [4096, 16384]
    assert [s.name for s in moe_gpu.parse_arguments(["--shapes", "Qwen3"]).shapes] == [QWEN.name, QWEN_LARGE.name]


# --- arithmetic


def test_flops_and_bytes_of_qwen3_30b_at_16k_tokens():
    """The numbers of a hand calculation: 131,072 rows through 2048 x 1536 and 768 x 2048."""
    assert cases.experts_flops(QWEN, 16384, backward=True) == 3 * 2 * 131072 * (2048 * 1536 + 768 * 2048)
    assert cases.experts_flops(QWEN, 16384, backward=True) / 1e12 == pytest.approx(3.711, abs=1e-3)
    assert cases.experts_flops(QWEN, 16384, backward=False) * 3 == cases.experts_flops(QWEN, 16384, backward=True)
    assert cases.kept_bytes(QWEN, 16384) / 1e6 == pytest.approx(402.7, abs=0.1)
    assert cases.gemm_flops(10, 3, 5) == 300
    assert cases.gemm_bytes(10, 3, 5, 2) == 2 * (30 + 50 + 30)
    assert QWEN.weight_bytes == 128 * 3 * 2048 * 768 * 2


@pytest.mark.parametrize(
    ("tokens", "unfused_ms", "fused_ms", "unfused_gb", "fused_gb"),
    [(16384, 5.68, 4.98, 12.9, 9.0), (32768, 11.36, 9.96, 22.2, 14.4), (65536, 22.72, 19.91, 40.7, 25.1)],
)
def test_floors_of_qwen3_30b(tokens, unfused_ms, fused_ms, unfused_gb, fused_gb):
    """At 790 TFLOP/s and 4.3 TB/s; computed before by another script for the design of the kernels."""
    listed = cases.operations(QWEN, tokens)
    assert sum(op.flops for op in listed) == cases.experts_flops(QWEN, tokens, backward=True)
    assert sum(op.unfused for op in listed) / 1e9 == pytest.approx(unfused_gb, abs=0.06)
    assert sum(op.fused for op in listed) / 1e9 == pytest.approx(fused_gb, abs=0.06)
    unfused, fused = (
        cases.floor_s(QWEN, tokens, 790e12, 4.3e12, fused=fused, backward=True) for fused in (False, True)
    )
    assert unfused * 1e3 == pytest.approx(unfused_ms, abs=0.01)
    assert fused * 1e3 == pytest.approx(fused_ms, abs=0.01)
    assert cases.floor_s(QWEN, tokens, 790e12, 4.3e12, fused=True, backward=False) < fused / 2


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.8, 2.0])
@pytest.mark.parametrize(
    ("rows", "num_experts", "most"), [(131072, 128, 16384), (1000, 7, 200), (5, 8, 5), (14, 7, 2), (0, 3, 1)]
)
def test_group_sizes(rows, num_experts, most, exponent):
    sizes = cases.group_sizes(rows, num_experts, exponent, most)
    assert len(sizes) == num_experts and sum(sizes) == rows
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 0 and sizes[0] <= most
    if exponent == 0:
        assert sizes[0] - sizes[-1] <= 1


def test_zipf_sizes_follow_the_law_and_too_many_rows_are_refused():
    sizes = cases.group_sizes(131072, 128, 0.8, 16384)
    for e in (1, 3, 15, 63):
        assert sizes[e] / sizes[0] == pytest.approx((e + 1) ** -0.8, rel=0.02)
    assert sizes[0] / 131072 == pytest.approx(0.11, abs=0.01)  # as SKEWS says
    with pytest.raises(ValueError, match="3 experts with at most 4 rows cannot hold 13"):
        cases.group_sizes(13, 3, 0.0, 4)


def test_routing_gives_the_sizes_and_no_token_the_same_expert_twice():
    sizes = cases.group_sizes(64 * 4, 8, 0.8, 64)
    ids = cases.route(sizes, 64, 4, seed=0, device="cpu")
    assert sorted(ids.flatten().bincount(minlength=8).tolist(), reverse=True) == sizes
    assert all(len(set(row)) == 4 for row in ids.tolist())


def test_a_model_too_large_is_measured_as_one_of_eight_ranks():
    assert cases.fitting(QWEN, 65536, 140 << 30) == (QWEN, 65536)
    assert cases.fitting(DEEPSEEK, 16384, 140 << 30) == (DEEPSEEK, 16384)
    rank, tokens = cases.fitting(DEEPSEEK, 16384, 40 << 30)
    assert (rank.num_experts, rank.top_k, tokens) == (32, 1, 131072)
    same_rows = replace(DEEPSEEK, num_experts=32)
    for backward in (False, True):
        assert cases.experts_flops(rank, tokens, backward) == cases.experts_flops(same_rows, 16384, backward)


def test_copies_outgrow_the_cache_and_leave_memory():
    assert gpu_common.num_copies(200 << 20, 60 << 20, 100 << 30) == 2
    assert gpu_common.num_copies(60 << 20, 60 << 20, 100 << 30) == 4
    assert gpu_common.num_copies(1 << 20, 60 << 20, 100 << 30) == 8
    assert gpu_common.num_copies(40 << 30, 60 << 20, 100 << 30) == 1
    tiny = cases.build_inputs(TINY, 12, 0.0, "cpu", torch.bfloat16, copies=1).copies[0]
    held = sum(t.numel() * t.element_size() for t in vars(tiny).values())
    assert cases.copy_bytes(TINY, 12) == held


def test_budget():
    now = 0.0
    budget = gpu_common.Budget(10, clock=lambda: now)
    assert budget.left() == 10 and budget.allows("a", reserve=9)
    now = 8.0
    assert not budget.allows("b", reserve=2) and budget.allows("c")
    now = 11.0
    assert budget.left() == 0 and not budget.allows("d") and not budget.allows("d")
    assert budget.skipped == ["b", "d"]


def test_failures_are_results_and_a_broken_device_is_not():
    def fail(error: Exception):
        raise error

    assert gpu_common.attempt(lambda: 7) == (7, None)
    assert gpu_common.attempt(lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))) == (None, "out of memory")
    assert gpu_common.attempt(lambda: fail(ValueError("a\n b"))) == (None, "failed: ValueError: a b")
    with pytest.raises(gpu_common.DeviceLostError, match="illegal memory access"):
        gpu_common.attempt(lambda: fail(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(gpu_common.DeviceLostError, match="misaligned address"):
        gpu_common.attempt(lambda: fail(RuntimeError("Triton Error [CUDA]: misaligned address")))
    assert gpu_common.attempt(lambda: fail(RuntimeError("CUDA error: invalid argument")))[0] is None


def test_ceilings_count_both_directions_and_multiply_with_add():
    assert gpu_common.measure_flops(OneRun(), 16, "cpu", torch.float32) == 2 * 16**3 / 1e-3
    assert gpu_common.measure_bandwidth(OneRun(), 4096, "cpu") == 2 * 4096 / 1e-3


def test_sweep_candidates_fit_a_hopper_multiprocessor():
    for kernel in moe_gpu_sweep.USES:
        found = moe_gpu_sweep.candidates(kernel)
        assert found[0] == launch.TILES["large"][kernel] and 10 < len(found) < 60
        for tile in found:
            shared = (tile.rows + tile.cols * (2 if kernel == "swiglu" else 1)) * tile.depth * 2 * tile.stages
            assert shared * tile.per_sm <= 227 << 10
    assert moe_gpu_sweep.USES.keys() == launch.TILES["large"].keys()


def test_floors_of_a_training_step():
    config = replace(families()["qwen3_moe"].presets["30B-A3B"], num_layers=4)
    found = train_gpu.floors(config, 4096, 16384, 790e12, 4.3e12)
    assert found["experts_s"] == pytest.approx(4 * 4.98e-3, rel=2e-3)
    # 4 layers of 18.9 M attention weights and 0.26 M of the router, and the head's 311 M: 6 FLOPs each; attention.
    matmuls = 6 * (4 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 2 * 2048 + 2 * 128) + 151936 * 2048 + 2048)
    attention = 6 * 4 * 32 * 128 * 4096
    assert found["others_s"] == pytest.approx((matmuls + attention) * 16384 / 790e12, rel=1e-6)
    assert found["states_s"] == pytest.approx(3.11e9 * 44 / 4.3e12, rel=5e-3)
    assert found["floor_s"] == pytest.approx(sum(found.values()) / 2)


# --- the measuring code, on tiny sizes


def expected_gemm(name: str, inputs: cases.Inputs) -> torch.Tensor:
    c, of_expert = inputs.copies[0], list(enumerate(inputs.slices))
    x, w = {
        "forward gate_up": (c.rows_x, c.gate_up.mT),
        "forward down": (c.h, c.down.mT),
        "dgrad gate_up": (c.z, c.gate_up),
        "dgrad down": (c.rows_x, c.down),
        "wgrad gate_up": (c.rows_x, c.z),
        "wgrad down": (c.h, c.rows_x),
        "gather + gate_up": (c.x[inputs.token], c.gate_up.mT),
        "gather + wgrad gate_up": (c.x[inputs.token], c.z),
        "gather + wgrad down": (c.h, c.dout[inputs.token]),
    }[name]
    if "wgrad" in name:
        return torch.stack([x[where].T @ w[where] for _, where in of_expert])
    return torch.cat([x[where] @ w[e] for e, where in of_expert])


@interpreted
def test_all_ways_of_a_matmul_and_of_a_layer_agree():
    inputs = cases.build_inputs(TINY, 20, 0.8, "cpu", torch.float32, copies=1)
    assert inputs.copy(5) is inputs.copies[0]
    for name, gemm in cases.gemms(inputs).items():
        if "SwiGLU" in name:
            continue  # a tuple; compared as a part of the layer
        expected = expected_gemm(name, inputs)
        assert gemm.flops == 2 * inputs.num_rows * 32 * (32 if "gate_up" in name else 16)
        for way, call in gemm.ways.items():
            torch.testing.assert_close(call(inputs.copies[0]), expected, rtol=1e-4, atol=1e-4, msg=f"{name}: {way}")
    c = inputs.copies[0]
    for tensor in (c.x, c.gate_up, c.down, c.row_weight):
        tensor.requires_grad_()
    results = [[out := call(c), *cases.differentiate(out, c)] for call in cases.layers(inputs).values()]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-4)


@interpreted
def test_a_whole_run_of_moe_gpu(tmp_path):
    budget = gpu_common.Budget(1e6)
    rows = []
    for skew in cases.SKEWS:
        rows += moe_gpu.measure_case(TINY, 20, skew, MACHINE, budget, OneRun(), "cpu", torch.float32)
    assert [row for row in rows if row["problem"]] == []
    assert len(rows) == 2 * (6 * 3 + 5 + 4 * 2)
    assert rows[0]["tflops"] == pytest.approx(2 * 40 * 32 * 32 / 1e-3 / 1e12)
    checks = [moe_gpu_checks.Check("wrong one", 1.0, 0.1), moe_gpu_checks.Check("right one", 0.0, 0.1)]
    budget.skipped.append("the rest")
    paths, text = moe_gpu.save(tmp_path, MACHINE, checks, rows, budget, 7e14)
    assert {path.name for path in tmp_path.iterdir()} == {"moe_gpu.md", "moe_gpu.json"}
    assert "NVIDIA H200" in text and "WRONG: wrong one" in text and "1 of 2 passed" in text and "- the rest" in text
    assert "## tiny, 20 tokens, zipf (40 rows" in text and "| forward + backward: titanlite fused " in text
    assert json.loads(paths[1].read_text())["rows"] == rows


def test_no_time_and_no_memory_are_reported(monkeypatch):
    budget = gpu_common.Budget(0)
    assert not list(moe_gpu.measure_case(TINY, 20, "zipf", MACHINE, budget, OneRun(), "cpu", torch.float32))
    assert budget.skipped == ["tiny, 20 tokens, zipf"]

    def build(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(moe_gpu, "build_inputs", build)
    budget = gpu_common.Budget(1e6)
    rows = list(moe_gpu.measure_case(TINY, 20, "zipf", MACHINE, budget, OneRun(), "cpu", torch.float32))
    assert [row["problem"] for row in rows] == ["out of memory"]
    assert "out of memory" in moe_gpu.report(MACHINE, [], rows, budget, None)


@pytest.fixture
def fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no order of threads that could change."""
    monkeypatch.setattr(moe_gpu_checks, "repeat_error", partial(moe_gpu_checks.repeat_error, repeats=1))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checks_pass_on_right_kernels(dtype, capsys, fewer_repeats):
    checks = moe_gpu_checks.run_checks([(TINY, 10)], "cpu", dtype, large=False, matmuls=[(40, 24)])
    assert [check for check in checks if not check.ok] == [] and len(checks) == 2 * 4 + 5 + 1
    for errors in (
        moe_gpu_checks.large_rows_errors("cpu", dtype, rows=90, k=24, last=20),
        moe_gpu_checks.large_z_errors("cpu", dtype, TINY, 20),
    ):
        assert all(error <= (1.5e-2 if dtype == torch.bfloat16 else 5e-6) for _, error in errors)


@interpreted
def test_checks_fail_on_wrong_kernels(monkeypatch, capsys, fewer_repeats):
    right = launch.row_grouped_gemm
    monkeypatch.setattr(launch, "row_grouped_gemm", lambda *args, **kwargs: right(*args, **kwargs) * 1.02)
    checks = moe_gpu_checks.run_checks([(TINY, 10)], "cpu", torch.bfloat16, large=False, matmuls=[(40, 24)])
    wrong = {check.name for check in checks if not check.ok}
    assert {"matmuls 40 x 24, pointers forward", "tiny, 10 tokens: out", "tiny, 10 tokens: dx"} <= wrong
    assert moe_gpu_checks.error_of(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


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


SMALL_TILE = launch.Tile(32, 32, 16, 4, 2, 1)


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


def few_tiles() -> ModelConfig:
    """One layer whose experts are one tile wide: kernels are interpreted."""
    sizes = {"hidden_size": 32, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
    return replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=1, **sizes)


@interpreted
def test_a_step_by_operators(monkeypatch):
    config = few_tiles()
    case, hardware = step_gpu.Case("tiny", config, 16, 2), get_hardware("h200")
    expected = step_gpu.expect(case, hardware)
    assert {"attention", "grouped GEMM", "optimizer"} <= expected.keys()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = step_gpu.measure(case, 1, hardware, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert set(found["parts_ms"]) == set(PARTS) and min(found["parts_ms"].values()) > 0
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


def test_measured_peaks_are_compared_with_planned_ones():
    config = replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=2)
    variants = [train_gpu.Variant("triton", mode) for mode in ("none", "full")]
    variants += [train_gpu.Variant("triton", attention="documents"), train_gpu.Variant("triton", compiled=True)]
    planned = train_gpu.plan_peaks(variants, config, 256, 4)
    none, full, documents = (planned[str(variant)] for variant in variants[:3])
    states = 12 * sum(param.numel() for param in build_decoder(config).parameters())
    assert states < full < none < documents and str(variants[3]) not in planned
    row = {"name": str(variants[0]), "problem": None, "step_s": 1.0, "peak_bytes": 1.05 * none, "planned_bytes": none}
    row |= {"loss": 1.0, "load": None}
    arguments = argparse.Namespace(seq_len=256, sequences=4)
    train_gpu.complete(row, config, arguments, MACHINE)
    assert row["of_plan"] == pytest.approx(1.05) and "1.05" in train_gpu.cells(row)
    assert len(train_gpu.cells(row)) == len(train_gpu.cells({"name": "", "problem": "out of memory"}))


def test_variants_more_than_a_tenth_off_the_plan_are_named():
    rows: list[dict] = [{"name": "failed", "problem": "out of memory"}]
    for name, of_plan in {"a": 1.0, "b": 1.09, "c": 1.11, "d": 0.91, "e": 0.88, "compiled": None}.items():
        peak = 2**34 if of_plan is None else of_plan * 2**34
        rows.append({"name": name, "problem": None, "peak_bytes": peak, "planned_bytes": 2**34, "of_plan": of_plan})
    rows.append({"name": "on the CPU", "problem": None, "peak_bytes": 0, "planned_bytes": 2**34, "of_plan": 0.0})
    assert train_gpu.misplanned(rows) == [
        "c: measured 17.76 GiB, planned 16.00 GiB",
        "e: measured 14.08 GiB, planned 16.00 GiB",
    ]


def test_choosing_a_variant_wraps_and_unwraps(one_rank):
    config = replace(families()["qwen3_moe"].presets["debug"], vocab_size=64, num_layers=2)
    trainer = train_gpu.BenchTrainer(config, 16, 2, one_rank)

    def wrapped() -> set[str]:
        return {type(m).__name__ for m in trainer.model.modules() if {"forward", "recompute"} & vars(m).keys()}

    trainer.choose(train_gpu.Variant("torch", "full"))
    assert wrapped() == {"FSDPDecoderLayer"}
    trainer.choose(train_gpu.Variant("torch", "selective"))
    assert wrapped() == {"Attention"}, "experts without adapters keep what backward needs, nothing else"
    trainer.choose(train_gpu.Variant("reference", compiled=True, attention="documents, varlen"))
    assert wrapped() == {"FSDPDecoderLayer"} and trainer.model.model.attention_backend == "varlen"
    trainer.choose(train_gpu.Variant("torch"))
    assert wrapped() == set() and trainer.model.model.attention_backend == "sdpa"


def test_packed_documents_restart_their_positions():
    config = families()["qwen3_moe"].presets["debug"]
    (batch,) = train_gpu.make_batches(config, 64, 3, torch.device("cpu"), documents=True, count=1)
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    for ids, positions in zip(batch.document_ids.tolist(), batch.positions.tolist(), strict=True):
        assert positions == [i - ids.index(document) for i, document in enumerate(ids)]
    plain = train_gpu.make_batches(config, 64, 3, torch.device("cpu"), documents=False, count=1)[0]
    assert plain.document_ids is None and torch.equal(plain.tokens, batch.tokens)
