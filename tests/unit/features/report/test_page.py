"""The numbers in the page, its texts, its size; without a browser."""

import base64
import hashlib
import json
import re
import time
from pathlib import Path

import pytest
from report_run import EXPERTS, LAYERS, NASTY, write_run

from titanlite.__main__ import main
from titanlite.features.report.headline import format_count, format_duration
from titanlite.features.report.page import render_page
from titanlite.features.report.read import read_run


def render(folder: Path, *arguments: str) -> str:
    output = folder / "page.html"
    assert main(["report", str(folder), "--output", str(output), *arguments]) == 0
    return output.read_text()


def charts_of(page: str) -> dict[str, dict]:
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', page, flags=re.S)
    return {chart["name"]: chart for chart in json.loads(data)}


def lines_of(chart: dict) -> dict[str, dict]:
    return {line["name"]: dict(zip(line["x"], line["y"], strict=True)) for line in chart["series"]}


def tiles_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)(?:<small>.*?</small>)?</dd>", page))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(write_run(tmp_path_factory.mktemp("report") / "a <b> run", steps=60))


def test_headline_numbers(page: str):
    tiles = tiles_of(page)
    assert tiles["Steps"] == "60"
    assert tiles["Training loss"] == f"{sum(8 / step for step in range(55, 61)) / 6:.4f}"
    assert tiles["Validation loss"] == f"{1.1 * 8 / 60:.4f}"
    assert tiles["Evaluation: exact match"] == "1.0000"
    assert tiles["Tokens per second"] == "3,072"  # of 4,096, a quarter padding
    assert tiles["Peak memory"] == "1.50 GiB"
    assert tiles["Time in steps"] == "1 min"
    assert "best 0.1467 at step 60" in page and "median; 768 per rank" in page


def test_every_plot_has_the_values_of_the_run(page: str):
    charts = charts_of(page)
    loss = lines_of(charts["loss"])
    assert loss["train"][4] == 2.0 and len(loss["train"]) == 60
    assert loss["validation"] == {20: 0.44, 40: 0.22, 60: 0.14667}
    assert loss["largest of a step"][4] == 4.0
    assert lines_of(charts["validation"]) == {
        "math": {20: 0.4, 40: 0.2, 60: 0.13333},
        "web": {20: 0.48, 40: 0.24, 60: 0.16},
    }
    assert all(f'id="plot-{name}"' in page for name in charts), "a plot without a place"
    assert list(lines_of(charts["grad_norm"])) == ["Gradient norm"], "no second line of the same values"
    assert [name for name in charts if name.startswith("other_")] == ["other_0"], "no plot of the steps"
    assert lines_of(charts["grad_groups"])["experts"][30] == 1.2
    time_split = lines_of(charts["time"])
    assert sum(line[10] for line in time_split.values()) == pytest.approx(1.0)
    assert time_split["backward"][10] == 0.4
    assert lines_of(charts["ranks"]) == {
        "data": {0: 0.1, 1: 0.1, 2: 0.4, 3: 0.1},
        "compute": {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5},
    }
    assert "Slowest: rank 2, 1.50 x the median." in page
    assert lines_of(charts["bias"]) == {
        "smallest": dict.fromkeys(range(1, 61), -0.25),
        "largest": dict.fromkeys(range(1, 61), 0.5),
    }
    assert "lost_rows" not in charts and "none was dropped or duplicated" in page
    assert lines_of(charts["padding"])["Padding"][10] == 25.0
    assert lines_of(charts["other_0"])["aux"][10] == 0.2
    assert set(charts) >= {"lr", "grad_norm", "throughput", "busy", "memory", "entropy", "evaluation"}
    for name in charts:
        assert f'id="plot-{name}"' in page


def test_full_rows_have_no_plot_of_padding(tmp_path: Path):
    write_run(tmp_path, steps=5)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text.replace('"data/padding": 0.25', '"data/padding": 0.0'))
    assert "padding" not in charts_of(render(tmp_path))


def test_rows_of_layers_with_gaps_have_their_numbers(page: str, tmp_path: Path):
    assert charts_of(page)["expert_load"]["extra"]["layers"] == []
    write_run(tmp_path, steps=5)
    text = (tmp_path / "metrics.jsonl").read_text()
    changed = text.replace('"moe/first_layer": 1', '"moe/first_layer": 1, "moe/layers": [1, 3, 5]')
    (tmp_path / "metrics.jsonl").write_text(changed)
    charts = charts_of(render(tmp_path))
    assert charts["expert_load"]["extra"]["layers"] == charts["layer_load"]["extra"]["layers"] == [1, 3, 5]
    assert [name for name in charts if name.startswith("other_")] == ["other_0"], "no plot of the numbers"


def test_expert_load_map_holds_every_cell(page: str):
    grid = charts_of(page)["expert_load"]["extra"]
    assert (grid["rows"], grid["columns"], grid["first_row"], len(grid["frames"])) == (LAYERS, EXPERTS, 1, 60)
    cells = base64.b64decode(grid["frames"][-1]["cells"])
    assert len(cells) == LAYERS * EXPERTS
    assert cells[3] == 0 and all(cell > 0 for cell in cells[4:]), "expert 3 of the first layer got no token"
    layers = charts_of(page)["layer_load"]["extra"]
    assert len(layers["values"]) == LAYERS and len(layers["values"][0]) == len(layers["steps"]) == 60
    assert all(value >= 1 for row in layers["values"] for value in row)


def test_lost_rows_are_told(tmp_path: Path):
    write_run(tmp_path, steps=5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        path.read_text().replace('"moe/dropped_rows": [0.0, 0.0, 0.0]', '"moe/dropped_rows": [0.0, 7.0, 0.0]', 1)
    )
    page = render(tmp_path)
    assert "7 rows were dropped and 0 duplicated" in page
    assert lines_of(charts_of(page)["lost_rows"])["dropped"] == {1: 7, 2: 0, 3: 0, 4: 0, 5: 0}


def test_texts_of_a_run_are_never_markup(page: str):
    assert NASTY not in page and "<img" not in page
    assert page.count("<script") == 2 == page.count("</script>")
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "<h1>a &lt;b&gt; run</h1>" in page and "<title>a &lt;b&gt; run - " in page


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(page: str):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and policy.startswith("default-src 'none'")
    assert re.findall(r'(?:src|href)="(?!#|data:)(.*?)"', page) == []
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}, "the name of a namespace"


def test_configuration_environment_plan_warnings_and_events(page: str):
    changed = page.split("All ")[0]
    assert "training.steps" in changed and "default 1000" in changed
    assert "optimizer.beta1" not in changed and "optimizer.beta1" in page
    assert "host: 4 x H100, ranks 0 to 3" in page and "12,345,678 (12.35 M)" in page
    assert "8x4" in page and "fsdp Shard(0)" in page and "2.00 MiB" in page
    assert "WARNING data: " in page and ">start</td>" in page
    assert "Ended after step 60 of 60" in page


def test_a_run_without_an_end_says_so(tmp_path: Path):
    write_run(tmp_path, steps=3)
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text(events[0] + "\n")
    assert "No end recorded: it is running, or it was killed. Last point at step 3" in render(tmp_path)


def test_runs_compare_on_the_same_plots(tmp_path: Path):
    write_run(tmp_path / "one", steps=50)
    write_run(tmp_path / "two", steps=60, loss=6.0)
    page = render(tmp_path / "one", "--compare", str(tmp_path / "two"))
    charts = charts_of(page)
    assert lines_of(charts["loss"])["one: train"][10] == 0.8
    assert lines_of(charts["loss"])["two: train"][10] == 0.6
    assert set(lines_of(charts["grad_norm"])) == {"one", "two"}
    assert not any("largest" in name for name in lines_of(charts["loss"]))
    differences = page[page.index("Settings that differ") :].partition("</table>")[0]
    assert re.findall(r'class="code">(.*?)<', differences) == ["training.steps", "50", "60"]


def test_the_least_that_a_run_can_have(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss/train": null}\n')
    page = render(tmp_path)
    assert charts_of(page) == {} and tiles_of(page) == {"Steps": "1"}
    assert "There is no config.toml." in page


def test_headline_values_of_which_none_is_finite_have_no_best(tmp_path: Path):
    values = {"loss/validation": None, "eval/exact_match": None, "memory/max_reserved_gib": None}
    point = {"step": 1, "time": 1.0, "loss/train": 2.0, **values}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    page = render(tmp_path)
    assert tiles_of(page) == {"Steps": "1", "Training loss": "2.0000"} | dict.fromkeys(
        ["Validation loss", "Evaluation: exact match"], "nan"
    )
    assert "best " not in page.partition("<figure")[0].partition("</style>")[2]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval/exact_match": 0.25}\n')
    assert "best 0.2500 at step 2" in render(tmp_path)


def test_a_hundred_thousand_steps_make_a_small_page_quickly(tmp_path: Path):
    write_run(tmp_path, steps=200)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = next(line for line in lines if "loss/train" in line)
    kept = ("step", "loss/train", "grad_norm", "throughput/tokens_per_s", "moe/load_max_over_mean")
    text = json.dumps({name: training[name] for name in kept})
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            file.write(text.replace('"step": 1,', f'"step": {step},', 1) + "\n")
    began = time.process_time()
    page = render(tmp_path)
    assert time.process_time() - began < 20  # 1.3 s on one core of 2026; 5 s with all that a run writes
    assert len(page) < 600_000
    assert charts_of(page)["loss"]["series"][0]["x"][-1] == 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"report: there is no folder .*nowhere\. Give"),
        (["run", "--compare", "run", "run", "run", "run"], r"report: --compare got 4 runs.* Give fewer\."),
        (["run", "--output", "no/such/page.html"], r"report: cannot write no/such/page\.html: No such file.* --output"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=2)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert re.match(f"titanlite: error: {message}", error) and "\n" not in error


def test_broken_lines_are_said_on_the_console_too(tmp_path: Path, capsys):
    write_run(tmp_path, steps=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "lines are broken and left out (line 3)" in captured.err
    assert captured.out.startswith(str(tmp_path / "report.html"))


def test_durations_and_counts_read_well():
    texts = [format_duration(s) for s in (3.21, 42, 60, 185, 7443, 270_000)]
    assert texts == ["3.2 s", "42 s", "1 min", "3 min 5 s", "2 h 4 min", "3 d 3 h"]
    assert [format_count(x) for x in (1.26, 12345.4, 1_234_567, 2.5e9)] == ["1.3", "12,345", "1.23 M", "2.50 B"]


VALUES = [None, "x", [], {}, [None], ["x"], True, 1e308, -1, 2**70, [[1, [2]]], {"a": {"b": 1}}, float("nan")]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_of_any_kind_in_a_run_s_files_give_a_page(tmp_path: Path, value: object) -> None:
    """The files may be damaged, or a stranger's."""
    point = {"time": 1000.0, "loss/train": 3.0, "lr": 1e-3, "throughput/tokens_per_s": 1.0, "time/step_s": 0.1}
    keys = ("step", "time", "loss/train", "moe/first_layer", "moe/layers", "eval/examples", "moe/load_max_over_mean")
    lines = [point | {"step": 1}, *(point | {"step": 2, key: value} for key in keys), point | {"step": 3}]
    plan = dict.fromkeys(("tensors", "read_bytes", "memory", "rank"), value)
    files = {
        "metrics.jsonl": lines,
        "events.jsonl": [dict.fromkeys(("kind", "time", "step", "text"), value), {"kind": "start", "time": value}],
        "expert_load.jsonl": [{"step": 1, "tokens_per_expert": rows} for rows in (value, [value], [[value]])],
        "plan.json": [plan],
        "environment.json": [dict.fromkeys(("git", "packages", "gpus", "machine", "versions"), value)],
    }
    for name, content in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    (tmp_path / "config.toml").write_text(f"[a]\nb = {'[' * 3000}\n")
    page = render_page([read_run(tmp_path)])
    assert "<main>" in page and "config.toml cannot be read" in page
    plan["tensors"] = [dict.fromkeys(("name", "shape", "local_bytes", "count"), value)]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert "<main>" in render_page([read_run(tmp_path)])


def test_a_page_replaces_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss/train": 1.0}\n')
    (tmp_path / "null").symlink_to("/dev/null")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "null")]) == 2
    assert "it is a device, not a regular file" in capsys.readouterr().err and (tmp_path / "null").is_symlink()
