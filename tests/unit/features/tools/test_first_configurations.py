"""What people write first, also those who come from another trainer: it trains what they meant, or
is refused.
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import datasets
import pytest
from files import read_table, write_json, write_lines

from titanlite.assemble import build_data, build_unsharded, refuse
from titanlite.base.log import logger
from titanlite.base.text import command
from titanlite.config import load_config
from titanlite.data.loader import check_form
from titanlite.features.dpo import check_pairs
from titanlite.features.estimate.trace import count_micro_batches
from titanlite.optim.optimizer import count_parameters, lr_multipliers
from titanlite.preflight import check_arguments

TABLE = read_table("first_configurations")
TRAINED, REFUSED = TABLE["trained"], TABLE["refused"]
ALPACA = [{"instruction": f"add {i}", "input": "", "output": "yes"} for i in range(30)]
ROWS = {name: [json.loads(row)] * 30 for name, row in TABLE["rows"].items()} | {"alpaca": ALPACA}
MODEL = '[model]\npath = "model"\n'
SHORT = "[training]\nseq_len = 64\nsteps = 10\n"


def data(path, *more):
    return "\n".join([f'{MODEL}[data]\npath = "{path}"', *more, SHORT])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _chat_tokenizer_json):
    """A folder as people have it: a model and data in the usual forms."""
    return tmp_path_factory.mktemp("first")


@pytest.fixture
def run(
    folder,
    make_tokenizer,
    monkeypatch,
    caplog,
):
    """Check a configuration, given as text; gives the exit code and what was said."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    caplog.set_level("INFO", logger=logger.name)
    if not (folder / "model").exists():
        make_tokenizer().save_pretrained("model")
        write_json(Path("model/config.json"), TABLE["config_json"])
        for name, rows in ROWS.items():
            write_lines(Path(f"{name}.jsonl"), rows)
        dataset = datasets.Dataset.from_list(ALPACA)
        dataset.to_parquet("alpaca.parquet")
        dataset.to_csv("alpaca.csv")
        datasets.DatasetDict({"train": dataset}).save_to_disk("saved")
        for name, text in TABLE["files"].items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text)
        Path("latin.csv").write_bytes(
            ("instruction,output\n" + "caf\xe9,b\n" * 30).encode("latin-1")
        )

    def run_check(text, *overrides, world_size=1):
        Path("mine.toml").write_text(text)
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            cache = f"--data.cache_folder={folder / 'cache'}"
            code = begin([f"--world-size={world_size}", "--config=mine.toml", cache, *overrides])
        return code, said.getvalue() + caplog.text

    return run_check


@command
def begin(argv):
    """Check a configuration and read its data, as a run does before it reads weights; print what it
    would train.
    """
    checked = check_arguments(argv, weights=False)
    job = checked.job
    model = build_unsharded(job, checked.model_config, "cpu")
    lr_multipliers(model, job.optimizer)
    total, trained = count_parameters(model)
    if job.data.dataset != "stdlib":  # thousands of files
        _, loader = build_data(job, 0, checked.degrees.dp)
        form = loader.dataset.form
        refuse(check_form(job, form) + check_pairs(job, form))
        print(f"form {form}, batch {loader.global_batch_size} of {job.training.seq_len}")
    weights = (
        f"weights of {job.checkpoint.initial_load_path}"
        if job.checkpoint.initial_load_path
        else "random weights"
    )
    share = "all" if trained == total else "some"
    print(
        f"{checked.model_config.family}, {weights}, {share} trained, adapters of rank "
        f"{job.lora.rank}"
    )
    optimizer = job.optimizer
    print(
        f"lr {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, beta2 {optimizer.beta2:g}"
    )
    print(
        f"{job.training.objective}, {job.training.steps} steps or {job.training.epochs:g} epochs, "
        f"{job.job.dump_folder}"
    )


@pytest.mark.parametrize("name", TRAINED)
def test_it_is_what_was_meant(run, name):
    code, said = run(TRAINED[name]["text"])
    assert code == 0, said
    assert [
        part
        for part in TRAINED[name]["says"]
        if part.replace("~HOME~", str(Path.home())) not in said
    ] == [], said


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("case", TABLE["batches"])
def test_the_batch_that_a_run_takes(case, tmp_path):
    kind, batch = case["kind"], case["batch"]
    Path("many.jsonl").write_text(
        "".join(json.dumps(ROWS[kind][0]) + "\n" for _ in range(case["rows"]))
    )
    overrides = [f"--data.{setting}" for setting in case["settings"]] + [
        f"--data.cache_folder={tmp_path}"
    ]
    if kind == "pairs":
        overrides += ["--training.objective=dpo", "--data.format=preference"]
    Path("mine.toml").write_text(data("many.jsonl"))
    job = load_config(["--config=mine.toml", *overrides])
    most = {"pairs": 32}.get(kind, 16)  # a plan knows no data
    for world_size in (1, 4):
        found = build_data(job, 0, world_size)[1].global_batch_size
        assert found == max(batch // world_size, 1) * world_size
        assert count_micro_batches(job, world_size) == most // world_size
    job = load_config(["--config=mine.toml", *overrides, "--training.global_batch_size=12"])
    assert build_data(job, 0, 4)[1].global_batch_size == 12


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_do(run, name):
    code, said = run(REFUSED[name]["text"])
    assert code == 2 and said.startswith("titanlite: error: "), said
    assert [part for part in REFUSED[name]["says"] if part not in said] == [], said


@pytest.mark.parametrize(("override", "expected"), TABLE["command_line"].items())
def test_the_command_line(run, override, expected):
    _, said = run(data("chats.jsonl"), override, world_size=4)
    assert expected in said
