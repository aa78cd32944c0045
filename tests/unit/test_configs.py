"""Every file in configs/ loads and passes the preflight; recipes: test_recipes.py."""

import re
from pathlib import Path

import pytest

from titanlite.config import load_config
from titanlite.preflight import check

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.toml"))


def world_size_of(path):
    """What the file states in a line `# world size: N` among its first lines, or 4."""
    head = "".join(
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)[:12]
        if line[:1] == "#"
    )
    stated = re.search(r"^#\s*world size:\s*(\d+)", head, re.MULTILINE)
    return int(stated.group(1)) if stated else 4


@pytest.mark.parametrize("path", FILES)
def test_config_passes_preflight(path):
    job = load_config(["--config", str(path)])
    checked = check(job, world_size_of(path))
    assert checked.degrees.world_size == world_size_of(path)
    assert job.job.description


def test_quick_start_is_the_mesh_that_the_readme_promises():
    checked = check(load_config(["--config", str(ROOT / "configs" / "qwen3_moe.toml")]), 4)
    degrees = checked.degrees
    assert (degrees.dp_shard, degrees.tp, degrees.ep) == (2, 2, 2)
    assert checked.model_config.vocab_size == checked.job.data.bpe_vocab_size
