import io
import logging
import sys

from rich.console import Console

from titanlite.base.log import logger
from titanlite.metrics.console import ProgressBar, format_line, format_rate

VALUES = {
    "loss/train": 4.8123,
    "grad_norm": 0.91,
    "lr": 1e-3,
    "throughput/tokens_per_s": 12345.0,
    "throughput/tflops_per_gpu": 4.1,
    "time/step_s": 2.0,
    "memory/host_peak_rss_gib": 0.61,
}
LAYERS = {"moe/load_max_over_mean": [1.2, 1.42], "moe/dropped_rows": [0, 0]}


def test_line_of_an_moe_model():
    assert format_line(50, 300, VALUES, LAYERS) == (
        "step    50/300  loss  4.8123  grad norm  0.91  lr 1.0e-03     12,345 tok/s  4.1 TFLOP/s"
        "  mem 0.61 GiB  expert load max/mean 1.42"
    )


def test_lines_align_over_steps():
    other = {**VALUES, "loss/train": 10.25, "grad_norm": 12.5, "throughput/tokens_per_s": 999.0}
    first, second = format_line(1, 30000, VALUES), format_line(30000, 30000, other)
    assert first.index("tok/s") == second.index("tok/s")


def test_line_leaves_out_what_is_unknown_and_shows_mfu_when_known():
    assert "expert" not in format_line(1, 10, VALUES)
    assert "MFU" not in format_line(1, 10, VALUES)
    assert "MFU 41.2%" in format_line(1, 10, {**VALUES, "throughput/mfu": 0.412})


def test_line_shows_padding_where_there_is_much_of_it():
    full = format_line(1, 10, VALUES)
    assert format_line(1, 10, {**VALUES, "data/padding": 0.099}) == full
    assert "4.1 TFLOP/s  padding 63%  mem" in format_line(1, 10, {**VALUES, "data/padding": 0.634})


def test_line_names_a_slow_rank_and_lost_rows_only_where_there_are_any():
    ranks = {**VALUES, "ranks/slowest": 3.0, "ranks/slowest_over_median": 1.29}
    assert "slow" not in format_line(1, 10, ranks, LAYERS, "data")
    slow = format_line(1, 10, {**ranks, "ranks/slowest_over_median": 1.84}, LAYERS, "data")
    assert slow.endswith("rank 3 slow (data, 1.8x)")
    assert "ROWS" not in slow
    assert "5 ROWS LOST OR TWICE" in format_line(1, 10, ranks, {**LAYERS, "moe/dropped_rows": [2, 3]})


def test_line_shows_a_loss_that_is_not_finite():
    assert "loss     nan" in format_line(1, 10, {**VALUES, "loss/train": float("nan")})


def test_format_rate_keeps_small_rates_readable():
    assert [format_rate(x) for x in (4.123e14, 3.51e10, 2e6)] == ["412.3 TFLOP/s", "35.1 GFLOP/s", "2.0 MFLOP/s"]


def test_bar_fits_a_terminal_of_100_columns_and_log_lines_scroll_above_it(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, legacy_windows=False)
    try:
        with ProgressBar(300, console) as bar:
            assert handler.stream is not stream
            bar.show(50, {**VALUES, "throughput/mfu": 0.41})
            logger.warning("a line of the log")
        assert handler.stream is stream
        assert sys.stdout is stream
    finally:
        logger.removeHandler(handler)
    lines = stream.getvalue().replace("\r", "\n").splitlines()
    bars = [line for line in lines if "step 50/300" in line]
    assert any("loss 4.8123 lr 1.0e-03 grad norm 0.91 12,345 tok/s MFU 41% 0:08:20" in line for line in bars)
    assert any(line.rstrip().endswith("a line of the log") and "step" not in line for line in lines)


def test_text_above_the_bar_is_spelled_out_too():
    file, before = io.StringIO(), (sys.stdout, sys.stderr)
    with ProgressBar(3, Console(file=file, force_terminal=True, width=80)) as bar:
        print("evil \x1b[31m\x9b text")
        print("also \x1b[31m there", file=sys.stderr)
        bar.show(1, VALUES)
    assert "evil \\x1b[31m\\x9b text" in file.getvalue() and "also \\x1b[31m there" in file.getvalue()
    assert (sys.stdout, sys.stderr) == before
