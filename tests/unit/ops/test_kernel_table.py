"""The kernel table: with the CPU's kernels and without them operators compute the same, and plans leave no trace."""

from dataclasses import replace

import pytest
import torch
from expert_layer import NAMES, ExpertLayer

from titanlite.features.cpu import install_kernels
from titanlite.materialize import materialize
from titanlite.models.decoder import Decoder, build_decoder
from titanlite.models.families import families
from titanlite.ops import kernels, linear
from titanlite.ops.attention import attention, build_attention_mask
from titanlite.ops.kernels import find_kernel, install_kernel, plan_for_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_CPU = {"attention", "moe_experts", "transport"}


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})


def test_installing_again_changes_nothing(no_kernels):
    install_kernels()
    once = dict(kernels._kernels)
    install_kernels()
    assert kernels._kernels == once and {operator for operator, device in once if device == "cpu"} >= ON_CPU
    assert torch.ops.titanlite.host_attention.default in kernels.get_costly()
    assert torch.ops.aten.mul.Tensor not in kernels.get_costly()


def test_where_a_kernel_declines_the_operator_computes(no_kernels):
    asked = []
    install_kernel("linear", "cpu", lambda *args: asked.append(len(args)))
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(linear(x, weight), x @ weight.T) and asked == [3]
    assert find_kernel("linear", CUDA) is None


def test_a_plan_has_kernels_of_its_own_and_leaves_no_trace(no_kernels):
    install_kernel("linear", "cpu", torch.add)
    with pytest.raises(RuntimeError, match="inside"), plan_for_device("cuda", {"linear": torch.mul}):
        assert find_kernel("linear", CPU) is torch.mul
        raise RuntimeError("inside")
    assert find_kernel("linear", CPU) is torch.add and find_kernel("linear", CUDA) is None


def run(model: Decoder) -> list[torch.Tensor]:
    """The loss and all gradients for packed documents."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(97, (2, 40), generator=generator)
    documents = torch.randint(2, (2, 40), generator=generator).cumsum(1)
    model.zero_grad()
    loss = model(tokens, tokens, document_ids_BS=documents).cross_entropy
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


def test_a_model_trains_alike_without_the_kernels_of_the_cpu(monkeypatch):
    model = build_decoder(replace(families()["qwen3_moe"].presets["debug"], num_layers=2))
    materialize(model, "cpu", seed=0)
    with_kernels = run(model)
    monkeypatch.setattr(kernels, "_kernels", {})
    for actual, expected in zip(run(model), with_kernels, strict=True):
        assert (actual - expected).norm() <= 3e-6 * expected.norm()  # float32, sums in another order


@pytest.mark.usefixtures("no_kernels")
def test_operators_without_kernels():
    layer = ExpertLayer([5, 0, 17, 1], 2, torch.float64, spare_tokens=1)
    for name, got, want in zip(NAMES, layer.results(layer.run("torch")), layer.expected(), strict=True):
        assert (got - want).norm() <= 1e-13 * want.norm(), name
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64)
    out = attention(q, q, q, build_attention_mask(None), 1.0)
    torch.testing.assert_close(out[:, 0], q[:, 0])
