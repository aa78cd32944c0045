#!/usr/bin/env python
"""Score a model on the held-out additions of configs/recipes/sft_arithmetic.toml, with nothing but
transformers.

python scripts/arithmetic/score_arithmetic.py outputs/sft_arithmetic/checkpoint/step-1000 [--rows
FILE]
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

_BATCH = 50


@torch.no_grad()
def score(folder: Path, rows: list[dict[str, Any]]) -> float:
    """Share of `rows` whose answer the model in `folder` generates exactly, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    right = 0
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        prompts = [
            tokenizer.apply_chat_template(
                row["messages"][:1], tokenize=False, add_generation_prompt=True
            )
            for row in batch
        ]
        inputs = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answers = tokenizer.batch_decode(
            out[:, inputs.input_ids.shape[1] :], skip_special_tokens=True
        )
        right += sum(
            a.strip() == row["messages"][1]["content"]
            for a, row in zip(answers, batch, strict=True)
        )
    return right / len(rows)


def main() -> int:
    """Print the score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="a Hugging Face folder, such as a checkpoint of the run"
    )
    rows = "outputs/sft_arithmetic/made/heldout.jsonl"
    parser.add_argument("--rows", type=Path, default=Path(rows), help="(%(default)s)")
    arguments = parser.parse_args()
    for path in (arguments.folder, arguments.rows):
        if not path.exists():
            parser.error(f"{path} does not exist")
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    print(
        f"transformers: exact match {score(arguments.folder, rows):.4f} of {len(rows)} held-out "
        "additions"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
