"""`python -m titanlite generate`: transformers' text, on one process and many, and one clear error
otherwise.
"""

import re
import sys
from functools import partial

import pytest
import torch
from files import write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.loading import save_random_model
from titanlite.assemble import build_data
from titanlite.config.parallelism import Degrees

NEW = 12
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}{% if messages[0].role == 'tool' %}{{ "
    "raise_exception('a tool cannot begin') }}{% endif %}"
)


@pytest.fixture
def generate(command):
    return partial(command, "generate")


@pytest.fixture(scope="module")
def folder(configure, tmp_path_factory):
    """A random Qwen3-MoE with the tokenizer of the tests, clearly separated logits, and a chat
    template.
    """
    job = configure(Degrees(), "--model.overrides.max_position_embeddings=64")
    path = tmp_path_factory.mktemp("model")
    save_random_model(job.model_config, path)
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


def test_one_prompt(generate, folder, expect):
    done = generate(folder, "--prompt", "def f", "--max-new-tokens", NEW)
    assert (done.returncode, done.stdout) == (0, "def f" + expect("def f") + "\n")
    assert re.fullmatch(
        rf"generate: 1 prompt, {NEW} new tokens in [\d.]+ s, [\d.]+ tokens/s\n", done.stderr
    )


def test_prompts_of_a_file(generate, folder, expect, tmp_path):
    (tmp_path / "p.txt").write_text("return x\n\nself.\n", encoding="utf-8")
    arguments = ["--prompt", "def", "--prompts-file", tmp_path / "p.txt", "--max-new-tokens", NEW]
    done = generate(folder, *arguments)
    expected = [
        f"--- {i}: {p}\n{p}{expect(p)}\n"
        for i, p in enumerate(["def", "return x", "self."], start=1)
    ]
    assert (done.returncode, done.stdout) == (0, "".join(expected))


def test_chat(generate, folder, expect, tmp_path):
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
    done = generate(folder, "--chat", "--prompt", "x", "--max-new-tokens", NEW)
    assert (done.returncode, done.stdout) == (0, first + "\n")
    done = generate(
        folder, "--chat", "--prompts-file", tmp_path / "p.jsonl", "--max-new-tokens", NEW
    )
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("--- 1: [{")
    assert second in done.stdout and done.stdout.endswith(f"--- 2: x\n{first}\n")


@pytest.mark.slow
def test_several_ranks_print_once_what_one_prints(generate, folder, run_process):
    arguments = [str(folder), "--prompt", "def f", "--prompt", "x yy", "--max-new-tokens", str(NEW)]
    one = generate(*arguments)
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
    assert (done.returncode, done.stdout) == (0, one.stdout), done.output
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
def test_bad_arguments(generate, folder, case):
    arguments, words = BAD_ARGUMENTS[case]
    done = generate(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        "titanlite: error: "
    )
    assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr
