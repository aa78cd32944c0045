#!/usr/bin/env python
"""Compare what transformers 4.57, 5 and llama.cpp read of saved folders, for every native family.

    python scripts/check_readers.py FOLDER [--families llama qwen2]

Makes a tiny random model of each family with a BPE of its own, saves it as checkpoints are saved, and compares what
they compute from the folder with what transformers here does. Prints a table; exits with 1 if anything differs.

FOLDER keeps the models and the readers' environments, which are made from PyPI on the first call (2 GB). They have the
version of torch that is installed here. llama.cpp is that of the package cyllama, and its converter is that of
llama-cpp-python's source package.

tensors     of the folder, and whether the reader takes each to be one of the model's
logits      largest difference, and the largest of all; float32, 48 tokens
greedy      of 32 tokens after 16, those that are the same up to the first that is not
ids         paragraphs of docs/*.md that the reader splits into the same tokens
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMERS, CYLLAMA, CONVERTER = "4.57.1", "0.2.18", "0.3.36"
PROMPT, NEW, LENGTH = 16, 32, 48
MOST_DIFFERENCE = 1e-5  # of the logits, relative to the largest: of another order of sums in float32


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--read-as", choices=("transformers", "llama.cpp"), help=argparse.SUPPRESS)
    known = parser.parse_args()
    folder = known.folder.absolute()
    if known.read_as:  # inside the environment of that reader
        read = read_with_transformers if known.read_as == "transformers" else read_with_llama_cpp
        print(json.dumps(read(folder, json.loads((folder / "ours.json").read_text()))))
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    pythons = {"transformers": make_transformers(folder), "llama.cpp": make_llama_cpp(folder)}
    sys.path.insert(0, str(ROOT))
    import torch.distributed as dist

    from titanlite.models.families import families

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # saving asks for the rank
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    print(
        f"written by transformers {versions['transformers']}, torch {versions['torch']}; read by transformers ", end=""
    )
    print(f"{TRANSFORMERS} and llama.cpp {get_llama_cpp_version(pythons['llama.cpp'])}\n")
    print("| family | reader | tensors | logits | greedy | ids |\n|---|---|---|---|---|---|")
    is_good = True
    for family in known.families or families():
        model = folder / "models" / family
        ours = save_model(family, model)
        expected = ours | read_with_transformers(model, ours)
        found = {"titanlite": ours} | {reader: run_reader(python, reader, model) for reader, python in pythons.items()}
        for reader, values in found.items():
            row, same = compare(expected, values)
            print(f"| {family} | {reader} | {' | '.join(row)} |{'' if same else '  <-- differs'}", flush=True)
            is_good &= same
    return 0 if is_good else 1


def save_model(family: str, folder: Path) -> dict[str, Any]:
    """A random model in `folder`, and what titanlite computes with it."""
    import torch

    from tests.saving import save_hf_model
    from titanlite.assemble import build_model
    from titanlite.config.data import DataSection
    from titanlite.data import build_corpus
    from titanlite.data.tokenizer import build_tokenizer
    from titanlite.materialize import materialize

    torch.manual_seed(0)
    config = get_config(family)
    data = DataSection(dataset="text", path=str(ROOT / "docs"), pattern="*.md", bpe_vocab_size=config.vocab_size)
    corpus = build_corpus(data)
    tokenizer = build_tokenizer(data, corpus, family)
    texts = [text for _, document in corpus for text in document.split("\n\n") if text]
    model = build_model(config)
    save_hf_model(model, materialize(model, "cpu", seed=1), tokenizer, folder, torch.float32)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    tokens = [token for paragraph in ids for token in paragraph][:LENGTH]
    greedy = tokens[:PROMPT]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens]))[0]
        for _ in range(NEW):
            greedy.append(int(model(torch.tensor([greedy]))[0, -1].argmax()))
    ours = {"texts": texts, "ids": ids, "tokens": tokens, "logits": logits.tolist(), "greedy": greedy[PROMPT:]}
    (folder / "ours.json").write_text(json.dumps(ours))
    return {**ours, "tensors": "all"}


def get_config(family: str) -> Any:
    """The debug flavor with large weights and scaled rotary embeddings, which show if a reader misses them.

    Without what llama.cpp lacks: unequal mscale, and in dots1 fewer key heads than query heads, which it refuses.
    """
    from dataclasses import replace

    from titanlite.config import RopeScaling
    from titanlite.models.families import families

    config = replace(families()[family].presets["debug"], initializer_range=0.1)
    if family == "dots1":
        config = replace(config, num_kv_heads=config.num_heads)
    if family == "deepseek_v3":
        return replace(config, rope_scaling=replace(config.rope_scaling, mscale=1.0, mscale_all_dim=1.0))
    yarn = RopeScaling("yarn", 4.0, original_max_position_embeddings=512)
    return replace(config, rope_theta=300000.0, rope_scaling=config.rope_scaling or yarn)


def compare(expected: dict[str, Any], found: dict[str, Any]) -> tuple[list[str], bool]:
    """A row of the table, and whether it shows no difference."""
    if "error" in found:
        return [found["error"], "", "", ""], False
    largest = max(abs(value) for row in expected["logits"] for value in row)
    pairs = zip(expected["logits"], found["logits"], strict=True)
    difference = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    greedy = next(
        (i for i, pair in enumerate(zip(expected["greedy"], found["greedy"], strict=True)) if len({*pair}) > 1), NEW
    )
    same = sum(a == b for a, b in zip(expected["ids"], found["ids"], strict=True))
    row = [
        found["tensors"],
        f"{difference:.1e} of {largest:.1f}",
        f"{greedy} of {NEW}",
        f"{same:,} of {len(expected['ids']):,}",
    ]
    is_good = difference <= MOST_DIFFERENCE * largest and greedy == NEW and same == len(expected["ids"])
    return row, is_good and "not" not in found["tensors"]


def run_reader(python: Path, reader: str, model: Path) -> dict[str, Any]:
    """What `reader` finds in the folder `model`, in its own environment; or its error."""
    done = subprocess.run(
        [python, Path(__file__).resolve(), model, "--read-as", reader], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def read_with_transformers(folder: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """Run with the transformers of this environment."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([ours["tokens"]])).logits[0].tolist()
        prompt = torch.tensor([ours["tokens"][:PROMPT]])
        new = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), eos_token_id=None, **new)
    wrong = [f"{len(keys)} {what}" for what, keys in info.items() if keys]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {
        "tensors": f"not all: {', '.join(wrong)}" if wrong else "all",
        "logits": logits,
        "greedy": greedy[0, PROMPT:].tolist(),
        "ids": [tokenizer(text)["input_ids"] for text in ours["texts"]],
    }


def read_with_llama_cpp(folder: Path, ours: dict[str, Any]) -> dict[str, Any]:
    """Run llama.cpp, in its environment."""
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):
        n_vocab = property(lambda self: self.get_vocab().n_vocab)  # the package asks for it, and lacks it

    file = folder / "model.gguf"
    convert(folder, file)
    params = llama_cpp.LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = params.flash_attn_type = 0  # keys and values in float32
    model = Model(str(file), llama_cpp.LlamaModelParams())
    context, vocabulary = llama_cpp.LlamaContext(model, params), model.get_vocab()

    def compute(tokens: list[int]) -> list[list[float]]:
        context.kv_cache_clear()
        batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        batch.set_batch(tokens, 0, True)
        context.decode(batch)
        return [list(context.get_logits_ith(i)) for i in range(len(tokens))]

    greedy = ours["tokens"][:PROMPT]
    for _ in range(NEW):
        last = compute(greedy)[-1]
        greedy.append(last.index(max(last)))
    return {
        "tensors": "all",  # the converter raises for one that it does not know, and llama.cpp for one that is missing
        "logits": compute(ours["tokens"]),
        "greedy": greedy[PROMPT:],
        "ids": [list(vocabulary.tokenize(text, True, False)) for text in ours["texts"]],
    }


def convert(folder: Path, file: Path) -> None:
    """Run llama.cpp's converter, which knows pre-tokenizers by a hash of the ids that each published vocabulary gives.

    A vocabulary of our own has another hash, so the name of the splitting is given: docs/checkpoints.md.
    """
    source = next((Path(sys.prefix) / "source").glob("*/vendor/llama.cpp"))
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import conversion.base
    import convert_hf_to_gguf

    splitting = json.loads((folder / "tokenizer.json").read_text())["pre_tokenizer"]["type"]
    text_model: Any = conversion.base.TextModel
    text_model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2" if splitting == "ByteLevel" else "qwen2"
    text_model._set_vocab_glm = text_model._set_vocab_gpt2  # GLM's special tokens are not in this vocabulary
    arguments, sys.argv = sys.argv, ["convert", str(folder), "--outfile", str(file), "--outtype", "f32"]
    convert_hf_to_gguf.main()
    sys.argv = arguments


def make_transformers(folder: Path) -> Path:
    """Python of an environment with transformers 4.57 and the torch of this one."""
    torch = metadata.version("torch").partition("+")[0]
    return make_environment(
        folder / f"transformers-{TRANSFORMERS}", [f"torch=={torch}", f"transformers=={TRANSFORMERS}"]
    )


def make_llama_cpp(folder: Path) -> Path:
    """Python of an environment with llama.cpp, and the source of its converter with what that needs."""
    torch = metadata.version("torch").partition("+")[0]
    packages = [f"torch=={torch}", "transformers", "sentencepiece", "pyyaml", "requests", "scikit-build-core"]
    python = make_environment(folder / f"cyllama-{CYLLAMA}", [f"cyllama=={CYLLAMA}", *packages])
    source = python.parents[1] / "source"
    if not source.exists():
        download = ("download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(source))
        subprocess.run([python, "-m", "pip", *download, f"llama-cpp-python=={CONVERTER}"], check=True)
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
    return python


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Python of the environment in `folder`, with `packages`."""
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        ready.touch()
    return python


def get_llama_cpp_version(python: Path) -> str:
    """The build of llama.cpp in the package, such as b9190."""
    code = "import cyllama, pathlib; print((pathlib.Path(cyllama.__file__).parent / 'build_config.json').read_text())"
    text = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return f"{json.loads(text)['versions']['llama_cpp_version']} (cyllama {CYLLAMA})"


if __name__ == "__main__":
    sys.exit(main())
