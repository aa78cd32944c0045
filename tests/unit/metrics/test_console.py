from titanlite.metrics.logger import format_line, format_rate

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


def test_line_tells_memory_of_gpu_and_host_apart():
    line = format_line(1, 10, {**VALUES, "memory/max_reserved_gib": 61.5})
    assert line.endswith("  mem 61.50 GiB  host mem 0.61 GiB")


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


def test_line_of_preferences_has_accuracy_and_margin() -> None:
    line = format_line(1, 10, VALUES | {"rewards/accuracy": 0.625, "rewards/margin": 0.0125})
    assert "loss  4.8123  accuracy 0.62  margin 0.013  grad norm" in line
