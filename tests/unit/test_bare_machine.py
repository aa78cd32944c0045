"""What runs on GPUs needs no more than an image for them has: torch and what is installed with it
and transformers.
"""

from pathlib import Path

from processes import run_python

ROOT = Path(__file__).parents[2]
# Dependencies of titanlite and of its tests, and some more, that such an image lacked.
LACKING = (
    "omegaconf antlr4 datasets dill multiprocess importlinter grimp basedpyright wandb torchvision"
)

_CODE = f"""
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in {LACKING.split()} else self._finder.find_spec(name, *more)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
sys.path.insert(0, "scripts/bench")
import titanlite.ops
assert not any(name.startswith("titanlite.config") for name in sys.modules), "kernels need no configuration"
import moe_gpu, train_gpu
train_gpu.build_job(128, 1, "cuda")
import pytest

class Checks:
    def pytest_collection_finish(self, session):
        (conftest,) = (plugin for plugin in session.config.pluginmanager.get_plugins() if hasattr(plugin, "MESHES"))
        job = conftest.load_config(["--config", sys.argv[1], "--training.steps=7", "--data.sources.a.weight=2"])
        assert (job.training.steps, job.model.overrides.num_layers, job.data.sources["a"].weight) == (7, 3, 2.0)
        print("checked", len(session.items))

arguments = ["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", "tests/functional/test_gpu.py"]
sys.exit(pytest.main(arguments, [Checks()]))
"""  # noqa: E501


def test_scripts_and_tests_of_gpus_need_nothing_else(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text(
        "[model]\nflavor = 'debug'\n[model.overrides]\nnum_layers = 3\n[data.sources.a]\npath = "
        "'x'\n"
    )
    done = run_python(_CODE, str(config), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked " in done.stdout and "checked 0" not in done.stdout
