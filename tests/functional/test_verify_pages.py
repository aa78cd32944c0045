"""The programs of docs/verify.md run unchanged, and do not import the trainer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

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


@pytest.fixture
def run(tmp_path):
    def run_block(name, *launcher, before=""):
        path = tmp_path / f"{name}.py"
        path.write_text(before + BLOCKS[name])
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *launcher, str(path)],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_block


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp2_with_torch_and_safetensors_alone(run, ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    assert "saved: sound" in run("with_fsdp2", *launcher, before=ALONE)


def test_trainer_of_transformers(run, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=64, **sizes, **heads, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    shown = run("with_trainer")
    assert "out/final: sound" in shown
    assert re.search(r"attention +8 +float32 +8 of 8", shown), shown
