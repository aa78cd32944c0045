"""The programs of docs/verify.md run unchanged, and do not import the trainer."""

import os
import re
import sys
from pathlib import Path

import pytest
from cluster import Launched
from tiny_transformers import save_tiny

from tests.functional.conftest import run_script
from titanlite.launch.rendezvous import find_free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/verify.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.S))
ALONE = """
import sys

class Without:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("transformers", "omegaconf", "datasets", "tokenizers"):
            raise ImportError(name)

sys.meta_path.insert(0, Without())
import titanlite.features.verify
import titanlite.materialize
assert not any(name.startswith(("titanlite.trainer", "titanlite.assemble")) for name in sys.modules)
"""


def test_fsdp2_with_torch_and_safetensors_alone(tmp_path):
    """Two processes have the variables that torchrun sets; a third one would take seconds to import
    torch.
    """
    path = tmp_path / "with_fsdp2.py"
    path.write_text(ALONE + BLOCKS["with_fsdp2"])
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    ranks = [
        Launched(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.end() for rank in ranks] == [0, 0], [rank.report() for rank in ranks]
    assert "saved: sound" in ranks[0].out


@pytest.mark.filterwarnings("default")  # of other trainers
def test_trainer_of_transformers(tmp_path):
    save_tiny("qwen3", tmp_path / "base")
    path = tmp_path / "with_trainer.py"
    path.write_text(BLOCKS["with_trainer"])
    shown = run_script(path)
    assert "out/final: sound" in shown
    assert re.search(r"attention +8 +float32 +8 of 8", shown), shown
