"""The texts and tables of the page, its size and what it needs; without a browser."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_run import NASTY, write_run

from titanlite.__main__ import main
from titanlite.features.report.page import describe_end, render_page
from titanlite.features.report.read import read_run


def render(folder: Path, *arguments: str) -> str:
    output = folder / "page.html"
    assert main(["report", str(folder), "--output", str(output), *arguments]) == 0
    return output.read_text()


def own(page: str) -> str:
    """The page without its scripts."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.S)


def tiles_of(page: str) -> dict[str, str]:
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>.*?</small></dd>", page))


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
    assert tiles["Time in steps"] == "1.0 min"
    assert "best 0.1467 at step 60" in page and "median; 768 per rank" in page


def test_headline_numbers_of_dpo(tmp_path: Path):
    lines = [{"step": s, "loss/train": 0.7, "rewards/accuracy": 0.25 * s, "rewards/margin": s} for s in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiles = tiles_of(render(tmp_path))
    assert tiles == {"Steps": "3", "Training loss": "0.7000", "DPO accuracy": "75%", "DPO margin": "3.000"}


def test_every_plot_has_a_place(page: str):
    names = re.findall(r'<figure id="plot-(\w+)"', page)
    assert len(names) == len(set(names)) == 14 and names[0] == "loss"
    assert page.count("data-root-id=") == 14
    assert re.findall(r'max="(\d+)" value="(\d+)"', page) == [("59", "59")], "the slider of the expert load"


@pytest.mark.parametrize(("number", "columns"), [(1, 1), (7, 7), (8, 4), (9, 5), (15, 5)])
def test_tiles_fill_their_rows(tmp_path: Path, number: int, columns: int):
    point = {"step": 1, "time": 1.0, "loss/train": 2.0 if number > 1 else None}
    point |= {f"eval/score_{i}": 0.5 for i in range(number - 2)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    page = render(tmp_path)
    assert len(tiles_of(page)) == number and f'style="--columns: {columns}"' in page


def test_the_newest_checkpoint_is_linked_with_how_to_load_it(tmp_path: Path):
    run = write_run(tmp_path / "my run", steps=3)
    assert "Newest checkpoint" not in render(run)
    for step in (9, 10):
        (run / f"checkpoint/step-{step}").mkdir(parents=True)
    (run / "checkpoint/.step-11.a.tmp").mkdir()
    page = render(run)
    assert '<a href="checkpoint/step-10/">step-10</a>' in page and "Newest checkpoint" in page
    assert "AutoModelForCausalLM.from_pretrained" in page and "titanlite generate &#x27;/" in page
    (run / "checkpoint/step-10/adapter_config.json").write_text("{}")
    assert "AutoPeftModelForCausalLM.from_pretrained" in render(run)
    assert main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert 'href="my%20run/checkpoint/step-10/"' in (tmp_path / "page.html").read_text()


def test_texts_of_a_run_are_never_markup(page: str, tmp_path: Path):
    assert NASTY not in page and "<img" not in own(page)
    assert page.count("<script>") == page.count("</script>") == 4
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page
    assert "<h1>a &lt;b&gt; run</h1>" in page and "<title>a &lt;b&gt; run - " in page
    write_run(tmp_path, steps=3)
    with (tmp_path / "events.jsonl").open("a") as file:  # goes into a tooltip
        file.write(json.dumps({"time": 1, "step": 2, "kind": "spike", "text": NASTY}) + "\n")
    assert render(tmp_path).count("</script>") == 4


def test_the_page_loads_nothing_and_runs_no_script_but_its_own(page: str):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-(.*?)'", policy) == digests
    assert policy.startswith("default-src 'none'; img-src data:") and "unsafe-eval" not in policy
    assert re.findall(r'(?:src|href)="(?!#|data:)(.*?)"', own(page)) == [] and "://" not in own(page)


def test_configuration_environment_plan_warnings_and_events(page: str):
    changed = page.partition('id="configuration"')[2].split("All ")[0]
    assert "training.steps" in changed and "default 1000" in changed
    assert "optimizer.beta1" not in changed and "optimizer.beta1" in page
    assert "host: 4 x H100, ranks 0 to 3" in page and "12,345,678" in page
    assert "read from checkpoints" in page and "2.00 MiB" in page
    assert "8x4" in page and "fsdp Shard(0)" in page and ">float32<" in page and ">1.00 MiB<" in page
    assert "WARNING data: " in page and ">start</td>" in page
    assert "Ended after step 60 of 60" in page


def test_a_run_without_an_end_says_so(tmp_path: Path):
    write_run(tmp_path, steps=3)
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text(events[0] + "\n")
    assert "No end recorded: it is running, or it was killed. Last point at step 3" in render(tmp_path)


def test_a_run_that_ended_with_an_error_says_so_until_it_starts_again(tmp_path: Path):
    write_run(tmp_path, steps=3)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "step": 2, "kind": "error", "text": "memory: rank 0 ran out of memory"}\n')
    assert describe_end(read_run(tmp_path)) == "Ended with an error at step 2: memory: rank 0 ran out of memory."
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 2, "step": 2, "kind": "restart", "text": "restart 1 of 3"}\n')
    assert describe_end(read_run(tmp_path)).startswith("No end recorded")


def test_the_least_that_a_run_can_have(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss/train": null}\n')
    page = render(tmp_path)
    assert "<figure" not in page and tiles_of(page) == {"Steps": "1"}
    assert "There is no config.toml." in page


def test_headline_values_of_which_none_is_finite_have_no_best(tmp_path: Path):
    values = {"loss/validation": None, "eval/exact_match": None, "memory/max_reserved_gib": None}
    point = {"step": 1, "time": 1.0, "loss/train": 2.0, **values}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(point) + "\n")
    page = render(tmp_path)
    missing = dict.fromkeys(["Validation loss", "Evaluation: exact match"], "nan")
    assert tiles_of(page) == {"Steps": "1", "Training loss": "2.0000"} | missing and "best " not in own(page)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval/exact_match": 0.25}\n')
    assert "best 0.2500 at step 2" in render(tmp_path)


def test_many_steps_and_experts_make_a_page_of_less_than_3_mb_quickly(tmp_path: Path):
    write_run(tmp_path, steps=200)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = next(line for line in lines if "loss/train" in line)
    training |= {
        name: values * 20 for name, values in training.items() if name.startswith("moe/") and type(values) is list
    }
    text = json.dumps(training)
    with (tmp_path / "expert_load.jsonl").open("w") as file:  # of a model with 58 layers of 256 experts
        for step in range(100):
            file.write(json.dumps({"step": step, "tokens_per_expert": [list(range(256))] * 58}) + "\n")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 5_001):
            file.write(text.replace('"step": 1,', f'"step": {step},', 1) + "\n")
    began = time.process_time()
    page = render(tmp_path)
    assert time.process_time() - began < 20  # 3 s on one core of 2026
    assert len(page) < 3_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"report: .*nowhere is no run, there is no metrics\.jsonl in it\. Give"),
        (["run", "--output", "no/such/page.html"], r"report: cannot write no/such/page\.html: No such file.* --output"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(tmp_path: Path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", steps=2)
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert re.match(f"titanlite: error: {message}", error) and "\n" not in error


def test_without_bokeh_one_message_says_how_to_install_it(tmp_path: Path):
    write_run(tmp_path, steps=2)
    code = "import sys, importlib.util as util; find = util.find_spec\n"
    code += "util.find_spec = lambda name, *rest: None if name == 'bokeh' else find(name, *rest)\n"
    code += "from titanlite.__main__ import main; code = main(sys.argv[1:])\n"
    code += "assert not {'torch', 'bokeh'} & sys.modules.keys(); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code, "report", str(tmp_path)], capture_output=True, text=True)
    wanted = f"`{sys.executable} -m pip install 'bokeh>=3.9'`."
    assert done.returncode == 2 and done.stderr.startswith("titanlite: error: report: the plots need bokeh")
    assert done.stderr.endswith(wanted + "\n") and done.stderr.count("\n") == 1


def test_broken_lines_are_said_on_the_console_too(tmp_path: Path, capsys):
    write_run(tmp_path, steps=2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    assert main(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "lines are broken and skipped (line 3)" in captured.err
    assert captured.out.startswith(str(tmp_path / "report.html"))


HUGE = 10**400
VALUES = [None, "x", [], {}, [None], ["x"], True, 1e308, -1, 2**70, HUGE, [HUGE], [[1, [2]]], {"a": {"b": 1}}]


@pytest.mark.parametrize("value", [*VALUES, float("nan")], ids=lambda value: str(value)[:12])
def test_values_of_any_kind_in_a_run_s_files_give_a_page(tmp_path: Path, value: object) -> None:
    """The files may be damaged, or a stranger's."""
    point = {"time": 1000.0, "loss/train": 3.0, "lr": 1e-3, "throughput/tokens_per_s": 1.0, "time/step_s": 0.1}
    keys = ("step", "time", "loss/train", "lr", "moe/first_layer", "moe/layers", "eval/examples", "eval/score")
    keys += ("moe/load_max_over_mean", "moe/load_entropy", "ranks/busy_s", "ranks/data_s", "memory/max_reserved_gib")
    lines = [point | {"step": 1}, *(point | {"step": 2, key: value} for key in keys), point | {"step": 3}]
    plan = dict.fromkeys(("tensors", "read_bytes", "memory", "rank"), value)
    files = {
        "metrics.jsonl": lines,
        "events.jsonl": [
            dict.fromkeys(("kind", "time", "step", "text"), value),
            {"kind": "start", "time": value},
            {"kind": "spike", "time": 1, "step": value, "text": value},
        ],
        "expert_load.jsonl": [{"step": 1, "tokens_per_expert": rows} for rows in (value, [value], [[value]])],
        "plan.json": [plan],
        "environment.json": [dict.fromkeys(("git", "packages", "gpus", "machines", "versions", "parameters"), value)],
    }
    for name, content in files.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    (tmp_path / "config.toml").write_text(f"[a]\nb = {'[' * 3000}\n")
    page = render_page(read_run(tmp_path))
    assert "<main>" in page and "config.toml cannot be read" in page
    plan["tensors"] = [dict.fromkeys(("name", "shape", "local_bytes", "count"), value)]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert "<main>" in render_page(read_run(tmp_path))


def test_a_page_replaces_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "loss/train": 1.0}\n')
    (tmp_path / "null").symlink_to("/dev/null")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "null")]) == 2
    assert "it is a device, not a regular file" in capsys.readouterr().err and (tmp_path / "null").is_symlink()
