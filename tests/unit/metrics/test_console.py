import io
import re
import sys

from rich.console import Console

from titanlite.metrics.console import ProgressBar, format_line

VALUES = {
    "loss/train": 4.8123,
    "grad_norm": 0.91,
    "lr": 1e-3,
    "throughput/tokens_per_s": 12345.0,
    "throughput/tflops_per_gpu": 4.1,
    "time/step_s": 2.0,
    "memory/host_peak_rss_gib": 0.61,
}
LAYERS = {"moe/load_max_over_mean": [1.2, 1.42]}


def test_line_of_an_moe_model():
    assert format_line(50, 300, VALUES | LAYERS) == (
        "step    50/300  loss  4.8123  grad norm  0.91  lr 1.0e-03     12,345 tok/s  4.1 TFLOP/s  "
        "host mem 0.61 GiB  expert load max/mean 1.42"
    )


def test_bar_begins_at_the_resumed_step_and_shows_the_latest_values():
    stream = io.StringIO()
    terminal = Console(
        file=stream, force_terminal=True, width=140, color_system=None, soft_wrap=True
    )
    with ProgressBar(300, 40, 80.0, terminal) as bar:
        bar.show(44, VALUES | {"rewards/accuracy": 0.625, "rewards/margin": 0.125})
        bar.show(45, VALUES)
    text = re.sub(r"\x1b\[[?0-9]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")
    lines = [
        re.sub(r"/300 [^a-z]+", "/300 | ", line).rstrip()
        for line in text.splitlines()
        if "step" in line
    ]
    assert lines[0].startswith("step 40/300 ")
    assert lines[1].startswith(
        "step 44/300 | epoch 0.55  loss 4.8123  accuracy 0.62  margin 0.125  12,345 tok/s 0:0"
    )
    assert re.fullmatch(
        r"step 45/300 \| epoch 0.56  loss 4.8123  12,345 tok/s 0:00:0\d 0:00:0\d", lines[2]
    ), lines[2]


def test_text_above_the_bar_is_spelled_out_too():
    file, before = io.StringIO(), (sys.stdout, sys.stderr)
    with ProgressBar(3, console=Console(file=file, force_terminal=True, width=80)) as bar:
        print("evil \x1b[31m\x9b text")
        print("also \x1b[31m there", file=sys.stderr)
        bar.show(1, VALUES)
    assert (
        "evil \\x1b[31m\\x9b text" in file.getvalue() and "also \\x1b[31m there" in file.getvalue()
    )
    assert (sys.stdout, sys.stderr) == before
