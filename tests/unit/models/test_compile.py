"""Every decoder layer is one graph for torch.compile, shared by all layers of its kind, and
computes the same.

Layers are traced as torch.compile does it, forward and backward, and run without code generation.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import varlen_kernel
from traced_layers import TORCH_COMPILE_WARNINGS, Graphs

from titanlite.config import JobConfig
from titanlite.config.schema import LoRASection
from titanlite.distributed.parallelize import wrap_layers
from titanlite.features.lora.block_formats import encode_weights
from titanlite.features.lora.layers import apply_lora
from titanlite.materialize import Init, Normal, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

pytestmark = TORCH_COMPILE_WARNINGS

# Traced operations are the same ones but for the norm's and for rotary positions, whose product and
# sum are two there, in another order where autograd sums (float32, 6e-8 each); gradients of biases
# are sums that cancel.
BOUND = 1e-5
LORA = LoRASection(rank=4, alpha=8.0, dropout=0.2, base_dtype="float32")


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=found.trace))
    return found


def job_of(checkpointing, *, compiled):
    job = JobConfig()
    job.compile.enable = compiled
    job.activation_checkpoint.mode = checkpointing
    return job


def batch_of(step):
    """Tokens and document ids (2, 32), packed and padded otherwise in each step."""
    generator = torch.Generator().manual_seed(step)
    documents = torch.randint(2, (2, 32), generator=generator).cumsum(1)
    documents[1, 28:] = -1
    return torch.randint(97, (2, 32), generator=generator), documents


def train(model, steps):
    """Losses and gradients of forwards and backwards."""
    results = []
    for step in range(steps):
        tokens, documents = batch_of(step)
        torch.manual_seed(step)
        sums = model(tokens, tokens, document_ids_BS=documents)
        loss = sums.cross_entropy if sums.aux is None else sums.cross_entropy + sums.aux
        model.zero_grad()
        loss.backward()
        results += [
            loss.detach(),
            *(param.grad for param in model.parameters() if param.grad is not None),
        ]
    return results


def assert_traced_alike(graphs, build, checkpointing="none"):
    plain, compiled = build(), build()
    wrap_layers(plain, job_of(checkpointing, compiled=False), experts_on_own_mesh=False)
    wrap_layers(compiled, job_of(checkpointing, compiled=True), experts_on_own_mesh=False)
    for actual, expected in zip(train(compiled, 2), train(plain, 2), strict=True):
        assert (actual - expected).norm() <= BOUND * expected.norm()
    kinds = {layer.blocks for layer in compiled.decoder_layers()}
    assert graphs.made == len(kinds)


def with_balance_losses(model):
    for moe in model.moe_layers().values():
        moe.gate.aux_loss_coeff, moe.gate.z_loss_coeff = 0.01, 0.001
    return model


CHECKPOINTING = {"llama": "full", "qwen3": "selective", "qwen3_moe": "full", "dots1": "selective"}
DAILY = {"qwen3", "gpt_oss", "qwen3_5_moe_text"}  # qwen3_moe: the tests below


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in DAILY)) for name in families()],
)
def test_families_without_and_with_checkpointing(tiny, graphs, family):
    build = partial(tiny.ours, tiny.config(family))
    assert_traced_alike(
        graphs, lambda: with_balance_losses(build()), CHECKPOINTING.get(family, "none")
    )


@pytest.mark.parametrize(
    "checkpointing", ["full", pytest.param("selective", marks=pytest.mark.full)]
)
def test_varlen_attention(tiny, graphs, checkpointing):
    """Every batch has another number of documents."""

    def build():
        model = tiny.ours(tiny.config("qwen3_moe"))
        model.model.attention_backend = "varlen"
        return model

    assert_traced_alike(graphs, build, checkpointing)


@pytest.mark.usefixtures("graphs")
def test_attention_that_is_kept_runs_once(tiny):
    """Its layer is several graphs."""
    plain, compiled = (tiny.ours(tiny.config("qwen3_moe")) for _ in range(2))
    for model in (plain, compiled):
        model.model.attention_backend = "varlen"
    wrap_layers(plain, job_of("full", compiled=False), experts_on_own_mesh=False)
    wrap_layers(compiled, job_of("keep_attention", compiled=True), experts_on_own_mesh=False)
    expected = train(plain, 3)
    varlen_kernel.forwards.clear()
    for actual, value in zip(train(compiled, 3), expected, strict=True):
        assert (actual - value).norm() <= BOUND * value.norm()
    assert len(varlen_kernel.forwards) == 3 * len(compiled.model.layers)


def test_adapters_of_encoded_weights_with_dropout(tiny, graphs):
    def build():
        model = build_decoder(tiny.config("dots1", num_layers=1, num_dense_layers=0))
        apply_lora(model, LORA, torch.float32)
        encode_weights(model, "nf4")
        # zeros hide the gradient of lora_A
        materialize(model, "cpu", [{"*lora_B": Init(Normal(std=0.1))}], seed=0)
        return model

    assert_traced_alike(graphs, build, "selective")


@torch._dynamo.config.patch(recompile_limit=1)
def test_more_kinds_of_calls_than_torch_has_graphs_for(tiny, graphs):
    """Graphs are counted for all layers together, for they are of the same code; torch's own limit
    is 8, here it is 1. On CUDA backward, which computes checkpointed layers again, is in a thread
    of its own; so are all calls here.
    """
    model = tiny.ours(tiny.config("qwen3_moe", num_layers=2))
    wrap_layers(model, job_of("none", compiled=True), experts_on_own_mesh=False)
    tokens, documents = batch_of(0)

    def calls():
        for training in (True, False):
            model.train(training)
            with torch.set_grad_enabled(training):
                model(tokens, tokens, document_ids_BS=documents if training else None)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(calls).result()
    assert graphs.made == 2, "one for training and one for evaluation"
