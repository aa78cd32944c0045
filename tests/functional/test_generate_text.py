"""`python -m titanlite generate`: transformers' text, on one process and many, and one clear error
otherwise.
"""

import re
import sys
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from files import write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.loading import save_random_model
from titanlite import __main__
from titanlite.assemble import build_data
from titanlite.config import load_config
from titanlite.preflight import check

NEW = 12
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}{% if messages[0].role == 'tool' %}{{ "
    "raise_exception('a tool cannot begin') }}{% endif %}"
)


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    def run(*argv):
        capsys.readouterr()
        code = __main__.main(["generate", *map(str, argv)])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(config_file, tmp_path_factory):
    """A random Qwen3-MoE with the tokenizer of the tests, clearly separated logits, and a chat
    template.
    """
    job = check(
        load_config(["--config", str(config_file), "--model.overrides.max_position_embeddings=64"]),
        1,
    )
    path = tmp_path_factory.mktemp("model")
    save_random_model(job, path)
    tokenizer, _ = build_data(job.job, 0, 1)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def expect(folder):
    """`expect(text)` -> transformers' greedy continuation of the text."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )

    def continue_text(text, **options):
        ids = tokenizer(text, return_tensors="pt", **options)["input_ids"]
        out = model.generate(
            ids, do_sample=False, max_new_tokens=NEW, attention_mask=torch.ones_like(ids)
        )
        return tokenizer.decode(out[0, ids.shape[1] :])

    return continue_text


def test_one_prompt(command, folder, expect):
    done = command(folder, "--prompt", "def f", "--max-new-tokens", NEW)
    assert (done.code, done.out) == (0, "def f" + expect("def f") + "\n")
    assert re.fullmatch(
        rf"generate: 1 prompt, {NEW} new tokens in [\d.]+ s, [\d.]+ tokens/s\n", done.err
    )
    assert not dist.is_initialized(), "one process needs no group"


def test_prompts_of_a_file(command, folder, expect, tmp_path):
    (tmp_path / "p.txt").write_text("return x\n\nself.\n", encoding="utf-8")
    arguments = ["--prompt", "def", "--prompts-file", tmp_path / "p.txt", "--max-new-tokens", NEW]
    done = command(folder, *arguments)
    expected = [
        f"--- {i}: {p}\n{p}{expect(p)}\n"
        for i, p in enumerate(["def", "return x", "self."], start=1)
    ]
    assert (done.code, done.out) == (0, "".join(expected))


def test_chat(command, folder, expect, tmp_path):
    """A chat is rendered by the template and encoded without a second BOS token; messages and
    single strings work.
    """
    first = expect("<|user|>x<|endoftext|><|assistant|>", add_special_tokens=False)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [{"messages": messages}, {"prompt": "x"}]
    write_lines(tmp_path / "p.jsonl", rows)
    text = "<|user|>a<|endoftext|><|assistant|>b<|endoftext|><|user|>c<|endoftext|><|assistant|>"
    second = expect(text, add_special_tokens=False)
    done = command(folder, "--chat", "--prompt", "x", "--max-new-tokens", NEW)
    assert (done.code, done.out) == (0, first + "\n")
    done = command(
        folder, "--chat", "--prompts-file", tmp_path / "p.jsonl", "--max-new-tokens", NEW
    )
    assert done.code == 0 and done.out.splitlines()[0].startswith("--- 1: [{")
    assert second in done.out and done.out.endswith(f"--- 2: x\n{first}\n")


@pytest.mark.slow
def test_several_ranks_print_once_what_one_prints(command, folder, run_process):
    arguments = [str(folder), "--prompt", "def f", "--prompt", "x yy", "--max-new-tokens", str(NEW)]
    one = command(*arguments)
    launch = [
        "-m",
        "titanlite.launch",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "titanlite",
        "generate",
    ]
    done = run_process(
        [sys.executable, *launch, *arguments, "--tp", "2", "--ep", "2"], timeout_s=240
    )
    assert (done.returncode, done.stdout) == (0, one.out), done.output
    assert done.stderr.count("tokens/s") == 1


BAD_ARGUMENTS = {
    "no prompt": ([], "generate: there is no prompt. Give --prompt TEXT or --prompts-file FILE."),
    "too long": (
        ["--prompt", "x " * 60, "--max-new-tokens", 8],
        "more than the model's max_position_embeddings (64). Shorten it, or lower "
        "--max-new-tokens.",
    ),
    "tp": (
        ["--prompt", "x", "--tp", 2, "--max-new-tokens", 3],
        "dp_replicate (1) * tp (2) = 2 does not divide",
    ),
    "no file": (
        ["--prompts-file", "/no/such/file"],
        "--prompts-file /no/such/file: cannot be read: No such file",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments(command, folder, case):
    arguments, words = BAD_ARGUMENTS[case]
    done = command(folder, *arguments)
    assert (done.code, done.out) == (2, "") and done.err.startswith("titanlite: error: ")
    assert words in done.err and done.err.count("\n") == 1, done.err
