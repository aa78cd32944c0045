"""Layers that are recomputed in backward: equal losses and gradients, and the number of times that
attention runs.
"""

import gc
import weakref

import pytest
import torch
import varlen_kernel  # noqa: F401  torch's operator, on the CPU
from tensors import Watch

from titanlite.config import JobConfig
from titanlite.distributed.parallelize import wrap_layers
from titanlite.models.attention import CoreAttention
from titanlite.ops.attention import ATTENTION_OPERATORS

MODES = {"none": 1, "selective": 1, "keep_attention": 1, "full": 2}  # runs of attention in a layer


class Runs(Watch):
    """The results of attention's operators, without holding them."""

    def __init__(self):
        super().__init__()
        self.results = []

    def look(self, func, args, out):
        if func in ATTENTION_OPERATORS:
            self.results.append(weakref.ref(out[0].untyped_storage()))


def build(tiny, family, backend, mode):
    model = tiny.ours(tiny.config(family))
    model.model.attention_backend = backend
    job = JobConfig()
    job.activation_checkpoint.mode = mode
    wrap_layers(model, job, experts_on_own_mesh=False)
    return model


def train(model):
    """Losses and gradients of two micro-batches, forward and backward by turns as in a pipeline,
    and the number of runs of attention.
    """
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        documents = torch.randint(2, (2, 32), generator=generator).cumsum(1)
        documents[1, 28:] = -1
        batches.append((torch.randint(97, (2, 32), generator=generator), documents))
    with Runs() as runs:
        losses = [
            model(tokens, tokens, document_ids_BS=documents).cross_entropy
            for tokens, documents in batches
        ]
        for loss in losses:
            loss.backward()
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return [*(loss.detach() for loss in losses), *gradients], len(runs.results)


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_every_mode_computes_the_same(tiny, family, backend):
    """Grouped, latent and windowed attention, with sinks, and beside a gated delta net."""
    expected = None
    for mode, runs in MODES.items():
        model = build(tiny, family, backend, mode)
        found, count = train(model)
        expected = expected or found
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs), mode
        layers = sum(isinstance(module, CoreAttention) for module in model.modules())
        # torch has no operator on the CPU for values of a different width than keys
        is_composed = (family, backend) == ("deepseek_v3", "sdpa")
        assert count == (0 if is_composed else 2 * layers * runs), mode


def test_a_loss_without_backward_leaves_no_result(tiny):
    model, tokens = build(tiny, "qwen3_moe", "sdpa", "keep_attention"), torch.arange(64).view(2, 32)
    gc.disable()
    try:
        with Runs() as runs:
            loss = model(tokens, tokens).cross_entropy
        assert all(result() is not None for result in runs.results)
        del loss
        assert all(result() is None for result in runs.results)
    finally:
        gc.enable()
