"""CPU time that it takes to prepare a short chat, for this checkout and another one in turn.

    python scripts/bench/chats.py [--against OTHER_CHECKOUT] [--template FILE.jinja] [--turns 1 3] [--rows 10000]

One process and one thread; each figure is microseconds of rendering and tokenizing, not of reading, in the quickest of
all batches: those that share the processor with other work take longer.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import titanlite

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BATCH_ROWS = 512
WORDS = "the quick brown fox jumps over a lazy dog what is your answer to this question please explain how it works"


def measure(template: str, turns: int, num_rows: int) -> float:
    """Microseconds per chat of `turns` turns, in the quickest batch."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    moved = (Path(titanlite.__path__[0]) / "features").is_dir()
    encode: Any = import_module("titanlite.features.sft.encode" if moved else "titanlite.data.encode")
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([WORDS] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=template)
    pick = random.Random(0).choice
    words = WORDS.split()
    rows = [
        {"messages": [{"role": role, "content": " ".join(pick(words) for _ in range(20))} for role in roles]}
        for roles in [("user", "assistant") * turns] * num_rows
    ]
    encoder = encode.ExampleEncoder(tokenizer, "messages", train_all=False)
    batches = []
    for i in range(0, num_rows - _BATCH_ROWS + 1, _BATCH_ROWS):
        start_s = time.process_time()
        list(encoder.encode(rows[i : i + _BATCH_ROWS]))
        batches.append(time.process_time() - start_s)
    return min(batches) / _BATCH_ROWS * 1e6


def main() -> int:
    """Print a line for each number of turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout to compare with")
    parser.add_argument("--template", type=Path, help="a Jinja file (default: ChatML)")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rows", type=int, default=5120)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    template = options.template.read_text(encoding="utf-8") if options.template else CHATML
    if options.one:
        print(measure(template, options.turns[0], options.rows))
        return 0
    for turns in options.turns:
        found: dict[str, list[float]] = {}
        for folder in [Path(__file__).parents[2], *([options.against] if options.against else [])] * 3:
            arguments = [sys.executable, __file__, *sys.argv[1:], "--turns", str(turns), "--one"]
            environment = os.environ | {"PYTHONPATH": str(folder), "TOKENIZERS_PARALLELISM": "false"}
            shown = subprocess.run(arguments, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.setdefault(str(folder), []).append(float(shown))
        best = [min(times) for times in found.values()]
        ratio = f"; {best[0] / best[1]:.2f} times" if options.against else ""
        shown = ", ".join(f"{folder} {us:.0f} us" for folder, us in zip(found, best, strict=True))
        print(f"chats of {turns} turns: {shown}{ratio}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
