"""The first configuration that a newcomer writes trains what its author meant, or is refused with
one message.
"""

import json
import shutil
from pathlib import Path

import pytest
from processes import run_to_end

from titanlite.checkpoint.train_state import STATE_FILE

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {a} and {b}"},
            {"role": "assistant", "content": f"{a + b}"},
        ]
    }
    for a in range(10)
    for b in range(10)
]
PAIRS = [
    {"prompt": f"what is {a} and {b}", "chosen": f"{a + b}", "rejected": f"{a + b + 1}"}
    for a in range(10)
    for b in range(10)
]


@pytest.fixture
def home(tmp_path, monkeypatch, pretrained, examples):
    """A folder as a newcomer has it: a model of the hub's form, and data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained("tiny", 0.02, "--model.name=qwen3"), tmp_path / "model")
    tokenizer = Path(next(text for text in examples if "tokenizer_path" in text).partition("=")[2])
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, tmp_path / "model" / file)
    for name, rows in {"chats": CHATS, "pairs": PAIRS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "book.txt").write_text("what is one and two\n" * 500)
    return tmp_path


@pytest.fixture
def train(home, server):
    def run(text, *overrides, code=0):
        (home / "mine.toml").write_text(
            f"{text}\n[metrics]\nlog_freq = 1\nenable_tensorboard = false\n"
        )
        arguments = [server.python, "-m", "titanlite.rank", "--config", "mine.toml"]
        overrides = ("--training.seq_len=64", f"--data.cache_folder={home}/cache", *overrides)
        server.wait_until_it_serves()
        env = server.environment()
        done = run_to_end(
            [*arguments, *overrides], cwd=home, env=env, timeout_s=120, join_outputs=True
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


MODEL = '[model]\npath = "model"\n'


def test_a_folder_is_of_one_run(train, home):
    text = f'{MODEL}[data]\npath = "{{}}"\n'
    train(text.format("chats.jsonl"), "--training.steps=2")
    (home / "other").mkdir()
    for path in ("more.jsonl", "other/chats.jsonl"):
        shutil.copy(home / "chats.jsonl", home / path)
        said = train(text.format(path), "--training.steps=4", code=2)
        assert (
            f'outputs/mine holds another run, at step 2: data.path "chats.jsonl" -> "{path}"'
            in said
        )
        assert "there with model.path = outputs/mine/checkpoint/step-2" in said
    (home / "outputs/mine/config.toml").unlink()  # the checkpoint knows it, too
    said = train(
        text.format("more.jsonl"), "--training.steps=2", "--checkpoint.resume=force", code=2
    )
    assert (
        "holds another run" in said
        and "train more than 2 steps in all with --checkpoint.resume=force" in said
    )
    said = train(text.format("chats.jsonl"), "--training.steps=1", code=2)
    assert "ask for 1 steps, but the checkpoint in outputs/mine is of step 2" in said
    train(text.format("more.jsonl"), "--training.steps=4", "--checkpoint.resume=force")
    assert (home / "outputs/mine/checkpoint/step-4" / STATE_FILE).exists()
