"""What a recomputation of a layer takes from the forward; what a layer's compilation looks at."""

from pathlib import Path

import pytest
import torch

from titanlite.base.errors import ConfigError
from titanlite.config import JobConfig
from titanlite.distributed import parallelize
from titanlite.ops.recompute import once_per_forward


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """A cache folder where others can write."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o775)


@pytest.mark.usefixtures("chosen")
def test_all_that_compiles_has_looked_before():
    job = JobConfig()
    job.compile.enable = True

    class Model:
        def decoder_layers(self):
            return [torch.nn.Linear(2, 2)]

    with pytest.raises(ConfigError, match="loads libraries from"):
        parallelize.wrap_layers(Model(), job, experts_on_own_mesh=False)
    package = Path(parallelize.__file__).parents[1]
    calls = [
        p.name for p in package.rglob("*.py") if "torch.compile(" in p.read_text(encoding="utf-8")
    ]
    assert calls == ["parallelize.py"], "the only place that calls it"


def test_what_is_kept_is_made_once_however_often_a_layer_is_recomputed():
    made = []

    def layer(x, weight):
        number = once_per_forward(lambda: len(made))  # another one, if it were made again
        factor = once_per_forward(lambda: made.append(None) or weight * 2)
        return (x.sin() * factor * (number + 1)).sin().sin()

    x, weight = (torch.linspace(0.1, 1.0, 5, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(layer(x, weight).sum(), (x, weight))
    made.clear()
    out = [parallelize._checkpoint(layer, x, weight).sum()]
    assert len(made) == 1
    # a layer's next micro-batch has values of its own
    out.append(parallelize._checkpoint(layer, x, weight).sum())
    assert len(made) == 2
    for _ in range(2):
        torch.testing.assert_close(
            torch.autograd.grad(out[0], (x, weight), retain_graph=True), expected, rtol=0, atol=0
        )
    assert len(made) == 2
    expected = torch.autograd.grad(out[1], (x, weight))
    made.pop()
    torch.testing.assert_close(
        torch.autograd.grad(layer(x, weight).sum(), (x, weight)), expected, rtol=0, atol=0
    )
