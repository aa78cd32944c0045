"""transformers' own mixture-of-experts models with titanlite's grouped GEMM: the same logits and
gradients.
"""

import pytest
import torch
import transformers
from tensors import Watch
from tiny_transformers import TEXT_SIZES

from titanlite.features.transformers.experts import experts_forward, use_titanlite_experts
from titanlite.ops import group_by_expert

SIZES = TEXT_SIZES | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 6)
SIZES |= {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
# Plain SwiGLU, biases with clamped and interleaved gates, a sigmoid router with shared experts,
# GELU or other gates.
MODELS = {
    "Qwen3Moe": {},
    "GptOss": {},
    "Dots1": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1},
}


def build(name):
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for param in model.parameters():
        param.data.normal_(std=0.3)  # at 0.02 the experts would hardly show in the logits
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_the_eager_experts(name, monkeypatch):
    model = build(name)
    tokens = torch.arange(40).view(2, 20) * 7 % 96
    runs, calls = [], []

    def counted(*args):
        calls.append(1)
        return group_by_expert(*args)

    monkeypatch.setattr("titanlite.models.moe.group_by_expert", counted)
    for switch in (
        lambda: model.set_experts_implementation("eager"),
        lambda: use_titanlite_experts(model),
    ):
        switch()
        model.zero_grad()
        out = model(tokens, labels=tokens)
        out.loss.backward()
        runs.append(
            (
                out.logits.detach(),
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
            )
        )
    assert len(calls) == 2, (
        "each of the two layers must have used titanlite's experts in the second run"
    )
    (eager, eager_grads), (mine, my_grads) = runs
    # float32 sums in another order; logits are of order 10.
    torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-4)
    assert my_grads.keys() == eager_grads.keys()
    for key, grad in my_grads.items():
        torch.testing.assert_close(
            grad,
            eager_grads[key],
            rtol=1e-4,
            atol=1e-4 * eager_grads[key].abs().max().item() + 1e-7,
        )


@pytest.mark.parametrize("name", ["GptOss"])
def test_ids_beyond_the_last_expert_add_nothing(name):
    """Expert parallelism in transformers marks rows of other ranks so."""
    experts = build(name).model.layers[0].mlp.experts
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 2], [3, 4]])
    mine = experts_forward(experts, x, ids, weights)
    kept = experts_forward(experts, x, ids.clamp(max=5), torch.where(ids < 6, weights, 0.0))
    torch.testing.assert_close(mine, kept)
    assert not mine[1].any()


def test_gradients_of_biases_are_summed_in_float32():
    """On CUDA `index_add` adds in the dtype that it is given: a thousand bfloat16 rows lose what is
    small.
    """

    added = []

    class Additions(Watch):
        def look(self, func, args, out):
            if "index_add" in str(func) and args[0].shape[0] == SIZES["num_experts"]:
                added.append(args[0].dtype)

    model = build("GptOss").bfloat16()
    use_titanlite_experts(model)
    tokens = torch.arange(20).view(1, 20)
    with Additions():
        model(tokens, labels=tokens).loss.backward()
    assert added == [torch.float32] * 4, "gate_up_proj_bias and down_proj_bias of two layers"
    experts = model.model.layers[0].mlp.experts
    assert (
        experts.down_proj_bias.grad.dtype == torch.bfloat16
        and experts.down_proj_bias.grad.abs().max() > 0
    )
