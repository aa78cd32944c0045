#!/usr/bin/env python
"""Results of `sweep_transformers.py`, counted.

python scripts/sweep_table.py RESULTS.jsonl
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    """What the stages said of one class, by stage."""

    model_type: str
    class_name: str
    words: dict[str, str]

    @property
    def is_wrong(self) -> bool:
        """True after a traceback, a difference, or too long a time."""
        return any(word.startswith(("TRACEBACK", "WRONG", "LIMIT")) for word in self.words.values())

    def __str__(self) -> str:
        return "| " + " | ".join([self.model_type, self.class_name, *self.words.values()]) + " |"


def table_of(results: Sequence[Result]) -> Iterator[str]:
    """Counts of the words of each stage."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for stage, word in result.words.items():
            first = re.split(r"[ :,]", word)[0]
            counts[stage]["built" if re.fullmatch(r"[\d.]+ M", word) else first] += 1
    for stage, found in counts.items():
        yield f"{stage}: {', '.join(f'{count} {word}' for word, count in found.most_common())}"


def read(path: Path) -> list[Result]:
    """The results in a file; of a class that is there twice, the later one."""
    found = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({(result.model_type, result.class_name): result for result in found}.values())


if __name__ == "__main__":
    print(*table_of(read(Path(sys.argv[1]))), sep="\n")
