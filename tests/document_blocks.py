"""Code blocks of documents that say of themselves that they can be run.

A mark is an HTML comment in the line before a fenced block, so the rendered page does not show it:

    <!-- run: append="--training.steps=4" -->
    ```bash
    ./run_train.sh --config configs/qwen3_moe.toml
    ```

    <!-- output -->
    ```
    10:12:35 step     1/200  loss  8.7544  ...
    ```

`run` takes these options, all of them with a value:

    append    words added to every command of the block that calls run_train.sh, or to a plan: fewer steps, or no
              proposals
    replace   OLD->NEW: what follows from fewer steps, such as the name of a checkpoint
    prepare   a command that runs before, for files that the reader is supposed to have
    timeout   seconds, default 300
    exit      exit code of the block, default 0
    contained page whose block has these commands, too: they run with --full alone

`<!-- file: NAME -->` before a block of any language writes it to NAME before the next run block.

Every line of a block marked `output` must be in what the last run block wrote, but for numbers and
the white space between words; a line of only `...` stands for any others.
"""  # noqa: E501

import re
import shlex
from dataclasses import dataclass, field

_MARK = re.compile(r"<!-- (run|output|file)(?:: (.*?))? -->")
_OPTIONS = {"append", "replace", "prepare", "timeout", "exit", "contained"}
_TAKES_MORE = re.compile(r"run_train\.sh|titanlite plan")
_NUMBER = re.compile(r"\d[\d.,:]*(?:e[-+]?\d+)?")
_SLOW_RANK = re.compile(r"rank # slow \([^)]*\)")


@dataclass
class Block:
    """One marked block, and the outputs shown for it.

    Attributes:
        where: document and line of the mark.
        text: what the document shows.
        options: of the mark.
        outputs: blocks of expected lines.
        files: text of the files that the document shows before it, by name.
    """

    where: str
    text: str
    options: dict[str, str]
    outputs: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def script(self):
        """What is run."""
        text = self.text
        for pair in self.options.get("replace", "").split():
            old, _, new = pair.partition("->")
            assert old in text, f"{self.where}: replace: the block has no '{old}'"
            text = text.replace(old, new)
        if append := self.options.get("append"):
            lines = text.splitlines()
            assert any(map(_TAKES_MORE.search, lines)), (
                f"{self.where}: append: nothing calls run_train.sh or plan"
            )
            text = "\n".join(
                f"{line.rstrip()} {append}" if _TAKES_MORE.search(line) else line for line in lines
            )
        files = [
            f"cat > {shlex.quote(name)} <<'END'\n{text}\nEND" for name, text in self.files.items()
        ]
        return "\n".join(filter(None, [*files, self.options.get("prepare"), text]))

    def missing_lines(self, output):
        """Lines that the document shows and `output` lacks."""
        there = {_normal(line) for line in output.splitlines()}
        shown = [line for text in self.outputs for line in text.splitlines()]
        return [
            line for line in shown if line.strip() not in ("", "...") and _normal(line) not in there
        ]


def read_blocks(document):
    """The marked blocks of `document`, in order. Fails on marks that mean nothing: they would skip
    a test.
    """
    lines = document.read_text(encoding="utf-8").splitlines()
    blocks = []
    files = {}
    for number, line in enumerate(lines):
        if not re.match(r"<!-- *(run|output|file)\b", line):
            continue
        where = f"{document.name}:{number + 1}"
        mark = _MARK.fullmatch(line)
        assert mark, f"{where}: '{line}' is not a mark"
        words = shlex.split("" if mark[1] == "file" else mark[2] or "")
        options = {key: value for key, _, value in (word.partition("=") for word in words)}
        assert set(options) <= _OPTIONS and all(options.values()), (
            f"{where}: options are {sorted(_OPTIONS)}"
        )
        assert lines[number + 1].startswith("```"), (
            f"{where}: a fenced block must follow in the next line"
        )
        end = next(i for i in range(number + 2, len(lines)) if lines[i].startswith("```"))
        text = "\n".join(lines[number + 2 : end])
        if mark[1] == "file":
            assert mark[2], f"{where}: the name of the file is missing"
            files[mark[2]] = text
        elif mark[1] == "run":
            assert lines[number + 1] == "```bash", f"{where}: only bash blocks are run"
            blocks.append(Block(where, text, options, files=files))
            files = {}
        else:
            assert blocks and not options, f"{where}: the output of which block?"
            blocks[-1].outputs.append(text)
    return blocks


def _normal(line):
    """Without what differs from run to run: numbers, spaces, and which rank had less of a busy
    machine.
    """
    return " ".join(_SLOW_RANK.sub("", _NUMBER.sub("#", line)).split())
