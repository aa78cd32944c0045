"""What a configuration means where it is silent."""

import json
from pathlib import Path

import pytest
from files import write_json

from titanlite.config import load_config, save_resolved
from titanlite.config.defaults import find_kind


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with data of each kind and a model."""
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "rows.jsonl.gz", "rows.csv", "notes.md"):
        (tmp_path / name).write_text("")
    for name, files in {
        "rows": ["a.jsonl", "README.md"],
        "books": ["a/b.txt"],
        "both": ["a.txt", "b.jsonl"],
    }.items():
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("")
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", {"model_type": "qwen3"})
    return tmp_path


def load(text, *overrides):
    Path("mine.toml").write_text(text)
    return load_config(["--config", "mine.toml", *overrides])


MODEL = '[model]\npath = "model"\n'
DATA = '[data]\npath = "chats.jsonl"\n'
NEW = '[model]\nflavor = "debug"\n'


# --- the model


# The file, and the folders that configuration and tokenizer, and weights, are read from.
MODELS = [
    (f"{MODEL}{DATA}", "model", "model"),
    (f'{MODEL}init = "random"\n', "model", ""),
    (f'{MODEL}flavor = "8B"\n{DATA}', "", "model"),  # the flavor has the sizes
    (f'{MODEL}flavor = "8B"\ninit = "random"\n', "model", ""),  # for its tokenizer
    ('[model]\nhf_assets_path = "model"\n', "model", ""),
    ('[model]\nhf_assets_path = "model"\ninit = "pretrained"\n' + DATA, "model", "model"),
]


def test_one_key_names_configuration_tokenizer_and_weights():
    for text, assets, weights in MODELS:
        job = load(text)
        found = job.model.hf_assets_path, job.checkpoint.initial_load_path
        assert found == (assets, weights), text


# --- the data


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("rows.jsonl.gz", "examples"),
        ("rows.csv", "examples"),
        ("notes.md", "text"),
        ("rows", "examples"),
        ("books", "text"),
        ("both", "mixed"),
        ("owner/dataset", "examples"),
        ("nothere.jsonl", "examples"),
        ("/nothere", "text"),
    ],
)
def test_the_kind_of_data_follows_from_the_path(path, kind):
    assert find_kind(path) == kind
    if kind != "mixed":  # that is refused: refusals.toml
        assert load(f'{NEW}[data]\npath = "{path}"\n').data.dataset == kind


def test_what_is_mixed_can_be_told():
    for more in ('pattern = "*.jsonl"', 'dataset = "examples"\npattern = "*.jsonl"'):
        assert load(f'{NEW}[data]\npath = "both"\n{more}\n').data.dataset == "examples"
    assert load(f'{NEW}[data]\npath = "both"\ndataset = "text"\n').data.dataset == "text"


# --- the optimizer and the length


@pytest.mark.parametrize(
    ("more", "lr"),
    [
        ("", 2e-5),
        ("[lora]\nrank = 8\n", 2e-4),
        ('[training]\nobjective = "dpo"\n', 5e-7),
        ('[training]\nobjective = "dpo"\n[lora]\nrank = 8\n', 5e-6),
    ],
)
def test_defaults_of_fine_tuning(more, lr):
    optimizer = load(f'{MODEL}[data]\npath = "chats.jsonl"\n{more}').optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta2) == (lr, 0.0, 0.999)
    optimizer = load(
        f'{MODEL}[data]\npath = "chats.jsonl"\n{more}[optimizer]\nlr = 1.0\nbeta2 = 0.5\n'
    ).optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta2) == (1.0, 0.0, 0.5)


def test_defaults_of_pretraining():
    optimizer = load(f'{MODEL}init = "random"\n').optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta2) == (3e-4, 0.1, 0.95)


def test_the_command_line_says_how_long():
    text = f"{NEW}[training]\nepochs = 3\nsteps = 7\n"
    job = load(text, "--training.steps=5")
    assert (job.training.steps, job.training.epochs) == (5, 0)
    job = load(text, "--training.epochs=2")
    assert job.training.epochs == 2


def test_the_folder_has_the_name_of_the_configuration():
    assert load(NEW).job.dump_folder == "outputs/mine"
    assert load(f'[job]\ndump_folder = "x"\n{NEW}').job.dump_folder == "x"


@pytest.mark.parametrize(
    "text", [f'{MODEL}[data]\npath = "chats.jsonl"\n[training]\nepochs = 2\n', NEW]
)
def test_what_was_filled_in_is_saved(text, folder):
    job = load(text)
    job.training.steps = 123 if job.training.epochs else 1000  # as many as the epochs are
    save_resolved(job, folder / "saved.toml")
    saved = ["--config", str(folder / "saved.toml")]
    again = load_config(saved)
    again.training.steps = job.training.steps
    assert again == job
    if job.model.path:  # what follows from it is not written down
        assert load_config([*saved, "--model.path=other"]).checkpoint.initial_load_path == "other"


def test_columns_are_named_in_the_file_and_on_the_command_line():
    text = f'{MODEL}{DATA}fields.question = "q"\n'
    job = load(text, "--data.fields.answer=a", "--data.chat_template_kwargs.enable_thinking=false")
    assert json.loads(job.data.fields) == {"question": "q", "answer": "a"}
    assert json.loads(job.data.chat_template_kwargs) == {"enable_thinking": False}
    save_resolved(job, "saved.toml")
    assert load_config(["--config", "saved.toml"]).data == job.data
    for name in ("a", "b"):
        text += f'[data.sources.{name}]\npath = "rows.csv"\nfields.answer = "{name}"\n'
    job = load(text.replace(DATA, "[data]\n"), "--data.sources.b.fields.question=d")
    assert json.loads(job.data.sources["b"].fields or "") == {"answer": "b", "question": "d"}
