#!/usr/bin/env python
"""Results of `sweep_transformers.py`, counted; and the part of docs/models.md that shows them,
written anew.

python tests/sweep/sweep_table.py RESULTS.jsonl            # counts
python tests/sweep/sweep_table.py RESULTS.jsonl --write    # and docs/models.md
"""

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_BEGINNING, _WIDTH = "## All classes, tried", 120  # where the part begins, and its columns
# What the page says of a stage, and the words that stand for "as in transformers".
_STAGES = {
    "reads": ("config.json of transformers leads to the same class", "yes"),
    "builds": ("on the meta device it has the same tensors", "yes"),
    "loads": ("parameters, buffers and ties are those of `from_pretrained`, bit for bit", "equal"),
    "trains": (
        "losses of 2 optimizer steps to 1e-6, gradients to 1e-4, each document alone",
        "packed|apart|inputs",
    ),
    "exports": ("transformers reads what was trained, bit for bit, under the same keys", "equal"),
    "generates": (
        "greedy tokens in a batch are those of `generate`, with and without a cache",
        "cached|whole",
    ),
    "scratch": ("means and deviations of drawn parameters; buffers bit for bit", "equal"),
}
# Reasons for which a class is not trained, and how a message tells. For the first two it cannot be.
_NOT_CAUSAL, _NO_TEXT = (
    "sees later tokens, so it predicts nothing",
    "no text alone: sound, images, a robot's state, a canvas",
)
_REASONS = {
    _NOT_CAUSAL: r"is not causal",
    _NO_TEXT: r"does not run on text alone",
    "transformers does not read what it saves of it": r"^lost",
    "not built: a package is missing here": r"ImportError|ModuleNotFoundError",
    "not built: no small configuration of it was found": r"^not built",
    "other": r"refused|WRONG|TRACEBACK|LIMIT",
}


@dataclass
class Result:
    """What the stages said of one class, by stage."""

    model_type: str
    class_name: str
    words: dict[str, str]

    @property
    def is_wrong(self):
        """True after a traceback, a difference, or too long a time."""
        return any(word.startswith(("TRACEBACK", "WRONG", "LIMIT")) for word in self.words.values())

    @property
    def is_built(self):
        """True if transformers builds the small model."""
        return not self.words.get("built", "not").startswith("not")

    @property
    def why_untrained(self):
        """The reason in `_REASONS` for which it is not trained; empty if it is."""
        words = [self.words.get(stage, "") for stage in ("built", "loads", "trains")]
        if words[2].startswith(("packed", "apart", "inputs")):
            return ""
        return next(
            (why for why, told in _REASONS.items() if any(re.search(told, word) for word in words)),
            "",
        )

    def __str__(self):
        return "| " + " | ".join([self.model_type, self.class_name, *self.words.values()]) + " |"


def table_of(results):
    """Counts of the words of each stage."""
    counts = defaultdict(Counter)
    for result in results:
        for stage, word in result.words.items():
            first = re.split(r"[ :,]", word)[0]
            counts[stage]["built" if re.fullmatch(r"[\d.]+ M", word) else first] += 1
    for stage, found in counts.items():
        yield f"{stage}: {', '.join(f'{count} {word}' for word, count in found.most_common())}"


def part_of_page(results, where):
    """The lines of the page from its heading on; `where` is what was tried with what."""
    built = [result for result in results if result.is_built]
    trained = [result for result in built if not result.why_untrained]
    wrong = sum(result.is_wrong for result in results)
    possible = sum(result.why_untrained not in (_NOT_CAUSAL, _NO_TEXT) for result in built)
    yield from (_BEGINNING, "")
    yield from _filled(
        "`tests/sweep/sweep_transformers.py` builds each class of transformers' auto mappings for "
        "text, images with text, and text to text, except encoder-decoders, tiny and random, and "
        f"compares it with transformers, in float32. Of {len(results)} entries {len(built)} are "
        f"built, and {len(trained)} of those trained: {len(trained) / len(built):.1%}, and of "
        f"those that can predict tokens after text or images {len(trained) / possible:.1%}; "
        f"{wrong or 'none'} ended in a traceback, in a difference or after 60 s."
    )
    yield from ("", "| stage | compared | as in transformers |", "|---|---|---|")
    for stage, (text, good) in _STAGES.items():
        of = trained if stage in ("exports", "generates") else built
        count = sum(bool(re.match(good, result.words.get(stage, ""))) for result in of)
        yield f"| {stage} | {text} | {count} of {len(of)} |"
    yield ""
    yield from _named(
        "Trained on rows of one document each (`data.packing = false`)", results, _is("apart")
    )
    yield from _named("Trained with images only (tried with random ones)", results, _is("inputs"))
    for why in _REASONS:
        yield from _named(
            f"Refused: {why}", results, lambda result, why=why: result.why_untrained == why
        )  # type: ignore[misc]
    yield from ("", where)


def _is(word):
    return lambda result: result.words.get("trains", "").startswith(word)


def _named(what, results, chosen):
    names = sorted({result.model_type for result in results if chosen(result)})
    if names:
        yield from _filled(f"- **{what}**, {len(names)}: {', '.join(names)}.", "  ")


def _filled(text, indent=""):
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def read(path):
    """The results in a file; of a class that is there twice, the later one."""
    found = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(result.model_type, result.class_name): result for result in found}.values())


def main():
    """Print the counts; with `--write` replace the part of the page, too."""
    results = read(Path(sys.argv[1]))
    print(*table_of(results), sep="\n")
    if "--write" in sys.argv:
        import torch
        import transformers

        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        where = (
            f"Tried with transformers {transformers.__version__} and torch {torch.__version__}, "
            f"commit {commit}."
        )
        kept = _PAGE.read_text().partition(_BEGINNING)[0]
        _PAGE.write_text(kept + "\n".join(part_of_page(results, where)) + "\n")


if __name__ == "__main__":
    main()
