"""Every marked command of the README and the documents runs, and prints the documented output; see
document_blocks.py.
"""

import shutil
import subprocess
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from document_blocks import read_blocks
from processes import run_to_end
from rank_server import COPY

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    if read_blocks(path)
]
# The first page compares whole runs, for minutes. The README has the command of the second page,
# and the parity ladder has the meshes of the other two.
WEEKLY = ("debugging.md", "faults.md", "long_sequences.md", "pipeline.md")
RANKS = "2"  # the documents use 4
QUICK_START = "configs/qwen3_moe.toml"
STDLIB, DOCUMENTATION = 'dataset = "stdlib"', 'dataset = "text"\npath = "docs"\npattern = "*.md"'


@pytest.fixture(scope="module")
def tree(tmp_path_factory, pytestconfig):
    """A copy of the checkout as it is now: all files that git tracks or would add. The pages share
    it: a page finds the runs of earlier pages.

    The quick start reads the documentation: tokenization of Python's library, which is left to
    `--full`, takes half a minute.
    """
    tmp_path = tmp_path_factory.mktemp("documents")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"this is no git checkout: {found.stderr.strip()}")
    for name in filter(None, found.stdout.split("\0")):
        if (ROOT / name).is_file():
            copies = [name]
            if name.endswith(".py"):  # with its bytecode: no process compiles it anew
                copies.append(str(Path(cache_from_source(ROOT / name)).relative_to(ROOT)))
            for copy in filter(lambda each: (ROOT / each).is_file(), copies):
                (tmp_path / "tree" / copy).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / copy, tmp_path / "tree" / copy)
    if not pytestconfig.getoption("--full"):
        config = tmp_path / "tree" / QUICK_START
        text = config.read_text()
        assert STDLIB in text
        config.write_text(text.replace(STDLIB, DOCUMENTATION))
    return tmp_path / "tree"


def run_block(block, tree, server):
    """Run the block and return its standard output and error. The server starts titanlite;
    test_end_to_end.py starts it as a reader would.
    """
    server.wait_until_it_serves()
    cache = str(tree.with_name("cache"))
    env = server.environment(NGPU=RANKS, XDG_CACHE_HOME=cache, **{COPY: str(tree)})
    env |= {
        f"GIT_{who}_{what}": f"{what}@test"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    done = run_to_end(
        ["bash", "-euo", "pipefail", "-c", block.script],
        cwd=tree,
        env=env,
        timeout_s=float(block.options.get("timeout", "300")),
    )
    expected = int(block.options.get("exit", "0"))
    assert done.returncode == expected, f"{block.where}:\n{block.script}\n{done.output[-4000:]}"
    return done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [pytest.param(path, marks=[pytest.mark.full] * (path.name in WEEKLY)) for path in DOCUMENTS],
    ids=lambda path: path.name,
)
def test_marked_commands_run_and_show_what_the_document_says(document, tree, server, pytestconfig):
    for block in read_blocks(document):
        if "contained" in block.options and not pytestconfig.getoption("--full"):
            continue
        output = run_block(block, tree, server)
        missing = block.missing_lines(output)
        report = [block.where, block.script, "did not write", *missing, "but", output[-4000:]]
        assert not missing, "\n".join(report)


def test_enough_is_marked():
    """If an edit loses a mark, no other test fails."""
    counts = {path.name: len(read_blocks(path)) for path in DOCUMENTS}
    expected = {
        "README.md",
        "checkpoints.md",
        "debugging.md",
        "fine_tuning.md",
        "generate.md",
        "lora_dpo.md",
    }
    expected |= {"faults.md", "plan.md"}
    assert expected <= set(counts)
    assert sum(counts.values()) >= 19, counts
