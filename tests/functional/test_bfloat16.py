"""bf16 mixed precision on several ranks: some parts stay float32, and gradients have the size of
float32 gradients.
"""

import pytest
import torch
import torch.distributed as dist

from tests.functional.conftest import backward_once, weekly
from tests.saving import whole
from titanlite.assemble import assemble
from titanlite.config.parallelism import Degrees
from titanlite.models.gated_delta import CoreDelta
from titanlite.models.moe import Experts

BF16 = "--training.mixed_precision_param=bfloat16"
# With 1,024 tokens, one token that rounding routes to another expert has little weight.
LONG = "--training.seq_len=128"


def backward_of(checked, degrees, cls, dtypes_of, *overrides):
    """Take the backward of one micro-batch; return the trainer, the losses, and the set of what
    `dtypes_of` returned for the arguments of every forward of a `cls`.
    """
    trainer = assemble(
        checked(degrees, f"--training.local_batch_size={8 // degrees.dp}", *overrides)
    )
    found = set()
    for module in trainer.model.modules():
        if isinstance(module, cls):
            module.register_forward_pre_hook(lambda _, args: found.add(dtypes_of(args)))
    losses = backward_once(trainer, 997)  # a factor that bfloat16 cannot hold
    return trainer, losses, found


def gradients(checked, degrees, *overrides):
    """Return (full gradients of one micro-batch by name, dtypes of the experts' inputs), as every
    rank sees them.
    """
    trainer, _, entered = backward_of(
        checked, degrees, Experts, lambda args: (args[0].dtype, args[1].dtype), *overrides
    )
    params = trainer.model.named_parameters()
    return {name: whole(param.grad).double() for name, param in params}, entered


@pytest.mark.parametrize("mesh", ["TP2xEP4", weekly("CP2xTP2")])
def test_gradients_have_the_size_of_float32_gradients(run_ranks, checked, meshes, mesh):
    ((exact, _),) = run_ranks(1, lambda: gradients(checked, Degrees(), LONG))
    for rounded, entered in run_ranks(4, lambda: gradients(checked, meshes[mesh], LONG, BF16)):
        assert entered == {(torch.bfloat16, torch.float32)}, (
            "rows in bfloat16, the router's weights in float32"
        )
        assert rounded.keys() == exact.keys()
        for name, grad in rounded.items():
            # bfloat16 rounds each product and activation to 0.4 %, in both directions. Along the
            # exact gradient these errors average out, but a wrong factor (2 if a rank is missing)
            # does not. In small tensors fewer errors average out, and a token near a tie is routed
            # to another expert.
            along = (grad * exact[name]).sum() / exact[name].square().sum()
            assert along.item() == pytest.approx(1, abs=0.02), name
        products = sum((grad * exact[name]).sum() for name, grad in rounded.items())
        assert (
            products / sum(grad.square().sum() for grad in exact.values())
        ).item() == pytest.approx(1, abs=0.005)


DELTA = ["--model.name=qwen3_next", BF16]


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        weekly("FSDP4", []),
        ("TP2", ["--training.dtype=bfloat16"]),
        ("FSDP2", ["--model.overrides.tie_word_embeddings=true"]),
    ],
)
def test_decay_is_computed_in_float32(run_ranks, checked, meshes, mesh, overrides):
    def forward(degrees, *options):
        def dtypes_of(args):
            return args[0].dtype, *(weight.dtype for weight in args[3])

        _, losses, dtypes = backward_of(checked, degrees, CoreDelta, dtypes_of, *DELTA, *options)
        total = losses.cross_entropy.detach().clone()
        dist.all_reduce(total)
        return total.item() / degrees.ranks_per_sequence, dtypes

    expected, _ = run_ranks(1, lambda: forward(Degrees()))[0]
    degrees = meshes[mesh]
    for total, dtypes in run_ranks(degrees.world_size, lambda: forward(degrees, *overrides)):
        assert dtypes == {(*[torch.bfloat16] * 2, *[torch.float32] * 2)}
        if "tie" not in " ".join(overrides):
            assert total == pytest.approx(expected, rel=2e-3)
