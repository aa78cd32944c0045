#!/usr/bin/env python
"""Make what configs/recipes/sft_arithmetic.toml trains with: a tiny random Qwen3-MoE and a chat set
of additions.

    python scripts/arithmetic/make_arithmetic.py [--folder outputs/sft_arithmetic/made]

FOLDER/model            a Qwen3-MoE with random weights in Hugging Face format, with a tokenizer and its chat template
FOLDER/train.jsonl      9,500 of the 10,000 additions of two numbers below 100, as conversations
FOLDER/heldout.jsonl    the other 500

Everything follows from a seed. What is there already, made by this version of the script, is left
alone.
"""  # noqa: E501

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

_VERSION = 1
_HELD_OUT = 500
_SEED = 0
_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
_PIECES = ["system", "user", "assistant", "\n", " ", "+", "=", *"0123456789"]


def make_tokenizer() -> Any:
    """A tokenizer of one token per digit, sign and role, with ChatML as its template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    vocabulary = {piece: number for number, piece in enumerate([*special, *_PIECES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"system|user|assistant|[\s\S]"), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped


def make_model(folder: Path) -> None:
    """Save a random model and its tokenizer in `folder`."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(_SEED)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, vocab_size=32, **ids))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All additions as conversations, shuffled: those to train on, and those that are held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(_SEED).shuffle(pairs)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{a}+{b}"},
                {"role": "assistant", "content": str(a + b)},
            ]
        }
        for a, b in pairs
    ]
    return rows[_HELD_OUT:], rows[:_HELD_OUT]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/sft_arithmetic/made"), help="(%(default)s)"
    )
    folder: Path = parser.parse_args().folder
    done = folder / "version"
    if done.is_file() and done.read_text() == str(_VERSION):
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = make_rows()
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", held_out)
    make_model(folder / "model")
    done.write_text(str(_VERSION))
    print(
        f"made a random Qwen3-MoE, {len(train)} additions to train on and {len(held_out)} held out "
        f"in {folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
