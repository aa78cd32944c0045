"""The values in the plots, without a browser."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from report_run import EXPERTS, LAYERS, write_run

from titanlite.features.report.plots import Plot, build_plots, smooth, thin
from titanlite.features.report.read import read_run


def plots_of(folder: Path) -> dict[str, Plot]:
    return build_plots(read_run(folder))


def lines_of(plot: Plot) -> dict[str, dict[int, float]]:
    """Values by step and name; of areas and bars by position."""
    found = {}
    for renderer in plot.figure.renderers:
        data, glyph = renderer.data_source.data, renderer.glyph
        name = renderer.name
        if name is not None:
            column = glyph.y if hasattr(glyph, "y") else name
            values = (round(float(value), 5) for value in data[column])
            found[name] = dict(zip(np.asarray(data[glyph.x]).tolist(), values, strict=True))
    return found


def scale_of(plot: Plot) -> str:
    return type(plot.figure.y_scale).__name__


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plot]:
    return plots_of(write_run(tmp_path_factory.mktemp("report") / "run", steps=60))


def test_every_plot_has_the_values_of_the_run(plots: dict[str, Plot]):
    loss = lines_of(plots["loss"])
    assert loss["train"][4] == 2.0 and len(loss["train"]) == 60
    assert loss["validation"] == {20: 0.44, 40: 0.22, 60: 0.14667}
    assert loss["largest of a step"][4] == 4.0
    assert lines_of(plots["validation"]) == {
        "math": {20: 0.4, 40: 0.2, 60: 0.13333},
        "web": {20: 0.48, 40: 0.24, 60: 0.16},
    }
    assert list(lines_of(plots["grad_norm"])) == ["grad norm"], "no second line of the same values"
    assert [name for name in plots if name.startswith("other_")] == ["other_0"], "no plot of the steps"
    assert plots["other_0"].title == "loss/aux" and lines_of(plots["other_0"])["aux"][10] == 0.2
    assert lines_of(plots["grad_groups"])["experts"][30] == 1.2
    time_split = lines_of(plots["time"])
    assert sum(line[10] for line in time_split.values()) == pytest.approx(1.0)
    assert time_split["backward"][10] == 0.4
    assert lines_of(plots["ranks"]) == {
        "data": {0: 0.1, 1: 0.1, 2: 0.4, 3: 0.1},
        "compute": {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5},
    }
    assert "Slowest: rank 2, 1.50 x the median." in plots["ranks"].note
    assert lines_of(plots["padding"])["padding"][10] == 25.0
    assert set(plots) >= {"lr", "throughput", "busy", "memory", "evaluation"}


def test_scales_have_units_and_those_over_steps_move_together(plots: dict[str, Plot]):
    labels = {name: plot.figure.yaxis[0].axis_label for name, plot in plots.items()}
    assert labels["throughput"] == "tokens/s" and labels["memory"] == "GiB" and labels["padding"] == "% of tokens"
    assert labels["loss"] == "nats per token" and labels["time"] == labels["ranks"] == "s"
    other = ("ranks", "expert_load")
    assert {name for name, plot in plots.items() if plot.figure.x_range is not plots["loss"].figure.x_range} == {*other}
    assert {plot.figure.xaxis[0].axis_label for plot in plots.values()} == {"step", "rank", "expert"}


def test_gradient_norms_that_differ_much_are_on_a_logarithmic_scale(tmp_path: Path, plots: dict[str, Plot]):
    assert scale_of(plots["grad_norm"]) == scale_of(plots["loss"]) == "LinearScale"
    write_run(tmp_path, steps=5)
    text = (tmp_path / "metrics.jsonl").read_text().replace('"grad_norm": 1.5', '"grad_norm": 150.0', 1)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert scale_of(plots_of(tmp_path)["grad_norm"]) == "LogScale"


def test_rewards_and_accuracy_of_dpo(tmp_path: Path):
    names = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "logps/chosen")
    lines = [{"step": step, "loss/train": 0.7} | dict.fromkeys(names, step / 4) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plots = plots_of(tmp_path)
    assert list(plots) == ["loss", "rewards", "accuracy", "logps"]
    assert plots["loss"].figure.yaxis[0].axis_label == "nats per pair"
    assert lines_of(plots["rewards"])["margin"] == {1: 0.25, 2: 0.5, 3: 0.75}
    assert lines_of(plots["accuracy"])["accuracy"] == {1: 25, 2: 50, 3: 75}


def test_events_are_marked(tmp_path: Path):
    write_run(tmp_path, steps=5)
    events = [("spike", 3), ("save", 4), ("resume", 4), ("error", 2**60), ("skip", "x")]
    with (tmp_path / "events.jsonl").open("a") as file:
        for kind, step in events:
            file.write(json.dumps({"time": 1, "step": step, "kind": kind, "text": "why"}) + "\n")
    (spans,) = [r for r in plots_of(tmp_path)["loss"].figure.renderers if type(r.glyph).__name__ == "VSpan"]
    assert spans.data_source.data["step"] == [3, 4] and spans.data_source.data["text"] == ["spike: why", "resume: why"]


def test_full_rows_have_no_plot_of_padding(tmp_path: Path):
    write_run(tmp_path, steps=5)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace('"data/padding": 0.25', '"data/padding": 0.0'))
    assert "padding" not in plots_of(tmp_path)


def test_rows_of_layers_with_gaps_have_their_numbers(tmp_path: Path):
    write_run(tmp_path, steps=5)
    text = (tmp_path / "metrics.jsonl").read_text()
    changed = text.replace('"moe/first_layer": 1', '"moe/first_layer": 1, "moe/layers": [1, 3, 5]')
    (tmp_path / "metrics.jsonl").write_text(changed)
    plots = plots_of(tmp_path)
    assert plots["expert_load"].figure.yaxis[0].major_label_overrides == {0: "1", 1: "3", 2: "5"}
    assert plots["expert_load"].figure.renderers[0].glyph.y == -0.5
    assert [name for name in plots if name.startswith("other_")] == ["other_0"], "no plot of the numbers"


def test_expert_load_has_every_cell_of_every_step(tmp_path: Path, plots: dict[str, Plot]):
    plot = plots["expert_load"]
    (cells,) = plot.figure.renderers
    images = cells.data_source.data["image"]
    assert plot.frames == list(range(1, 61)) and len(images) == 60 and images[-1].shape == (LAYERS, EXPERTS)
    loads = read_run(write_run(tmp_path, steps=1)).loads[0][1]
    percent = 100 * np.array(loads) / np.mean(loads, axis=1, keepdims=True)
    assert np.abs(images[0] - percent).max() <= 1
    assert images[0][0, 3] == 0 and (images[0][1:] > 0).all(), "expert 3 of the first layer got no token"
    assert cells.view.filter.indices == [59]
    assert cells.glyph.y == 0.5 and (plot.figure.y_range.start, plot.figure.y_range.end) == (3.5, 0.5), "1 is on top"


def test_thinning_keeps_ends_and_spikes():
    steps = np.arange(100_000)
    values = np.ones(len(steps))
    values[[0, 77_777, 12_345, -1]] = 5.0, 99.0, -99.0, 7.0
    kept = thin([values, values])
    assert len(kept) <= 800 and (np.diff(kept) > 0).all()
    assert {0, 77_777, 12_345, 99_999} <= set(kept.tolist())
    assert thin([values[:800]]).tolist() == list(range(800))


def test_thinning_keeps_a_gap_where_values_are_not_finite():
    values = np.ones(10_000)
    values[5_000] = math.nan
    kept = thin([values])
    assert 5_000 in kept and np.isnan(values[kept]).sum() == 1
    assert len(thin([np.full(10_000, math.nan)])) <= 800


def test_smoothing_does_not_shift_a_slope_and_leaves_nan_out():
    line = np.arange(200.0)
    smoothed = smooth(line)
    assert smoothed[4:196] == pytest.approx(line[4:196]) and smoothed[0] == 2.0
    assert smooth([3.0] * 20) == pytest.approx([3.0] * 20)
    assert smooth([1.0, math.nan, 1.0]) == pytest.approx([1.0] * 3)
    assert np.isnan(smooth([math.nan])).all()
