"""AdamW with moments in bfloat16: right in the mean, and a shard rounds as the whole does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from triton_interpreter import DEVICE, NEEDS_KERNELS

from titanlite.config.schema import OptimizerSection
from titanlite.features.rounded_adamw import adamw
from titanlite.features.rounded_adamw.optimizer import build_rounded_adamw
from titanlite.launch.process_group import fake_ranks
from titanlite.materialize.layout import local_of, region_of
from titanlite.optim.optimizer import build_adamw

SECTION = OptimizerSection(state_dtype="bfloat16", lr=1e-2, beta2=0.999)


@pytest.mark.parametrize("scale", [-3e-4, 1e-30])
def test_the_mean_of_roundings_is_the_value_itself(scale):
    """In float64; whichever part of the 32 bits is taken, and for places beyond 2 ** 32."""
    count = 1 << 18
    values = scale * (1 + torch.rand(8, dtype=torch.float64)).float()
    near = values.bfloat16()
    unit = (values.abs().bfloat16().view(torch.int16) & ~127).view(torch.bfloat16).double() / 128
    places = (1 << 32) - count // 2 + torch.arange(count)
    bits = adamw.random_bits(places, (5, -7), 3)
    for part in (bits & 0xFFFF, adamw._shift(bits, 16), adamw._mix(bits) & 0xFFFF):
        for value, nearest, step in zip(values, near, unit, strict=True):
            out = torch.empty(count, dtype=torch.bfloat16)
            adamw._write(out, value.expand(count).contiguous(), part)
            assert len(out.unique()) <= 2 and (out.double() - value.double()).abs().max() < step
            # the standard error of a mean of coins is at most half a step / sqrt(count)
            error = (out.double().mean() - value.double()).abs()
            assert error < 4.5 * step * 0.5 / count**0.5, (value, error / step)
            adamw._write(out, nearest.float().expand(count).contiguous(), part)
            assert (out == nearest).all()


class Model(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.first, self.second = (nn.Parameter(param) for param in params)


def draw(*shape):
    return torch.randn(*shape) * 0.1


def train(params, grads, resume_at=None, seed=0):
    """Return parameters and states after a step for each of `grads`, (first, second) each."""
    model = Model(params)
    optimizer = build_rounded_adamw(model, SECTION, seed)
    for number, some in enumerate(grads):
        if number == resume_at:
            state = optimizer.state
            optimizer = build_rounded_adamw(model, SECTION, seed)
            optimizer.state.update(state)
        for param, grad in zip(model.parameters(), some, strict=True):
            param.grad = grad
        optimizer.step()
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        found += [param.detach(), state["exp_avg"], state["exp_avg_sq"]]
    return found


@pytest.mark.parametrize(
    ("sizes", "shapes", "layouts", "dtype"),
    [
        (
            (2, 2),
            [(10, 12), (3, 5, 8)],
            [[Shard(0), Shard(1)], [Replicate(), Shard(2)]],
            torch.float32,
        ),
        ((3,), [(10, 12), (3, 5, 8)], [[Shard(1)], [Shard(1)]], torch.bfloat16),
        ((3,), [(37,), (2,)], [[Shard(0)], [Shard(0)]], torch.bfloat16),
    ],
    ids=["FSDP2xTP2", "FSDP3 of rows", "FSDP3 of vectors"],
)
def test_every_rank_has_the_bits_of_one_process_after_a_resume_too(sizes, shapes, layouts, dtype):
    params = [draw(*shape).to(dtype) for shape in shapes]
    grads = [[draw(*shape).to(dtype) for shape in shapes] for _ in range(4)]
    whole = train([param.clone() for param in params], grads)
    other = train([param.clone() for param in params], grads, seed=1)
    assert all((a != b).any() for a, b in zip(whole[1::3], other[1::3], strict=True))
    world = torch.Size(sizes).numel()
    for rank in range(world):
        with fake_ranks(world, rank):
            axes = tuple("abc"[: len(sizes)])
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)

            def split(tensors, mesh=mesh):
                for tensor, placements in zip(tensors, layouts, strict=True):
                    like = DTensor.from_local(
                        tensor, mesh, [Replicate()] * mesh.ndim, run_check=False
                    ).redistribute(placements=placements)
                    yield like.detach().clone()

            split_grads = [[*split(some)] for some in grads]
            found = train([*split(params)], split_grads, resume_at=2)
            for shard, expected in zip(found, whole, strict=True):
                wanted = expected[region_of(shard).slices]
                assert torch.equal(local_of(shard), wanted), rank


def test_it_is_adamw_but_for_rounding():
    """A first step reads no moment that was rounded, and gives torch's AdamW."""
    shapes = (10, 12), (3, 5, 8)
    params, grads = [draw(*shape) for shape in shapes], [draw(*shape) for shape in shapes]
    found = train([param.clone() for param in params], [grads])
    model = Model([param.clone() for param in params])
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    reference = build_adamw(model, OptimizerSection(lr=1e-2, beta2=0.999))
    reference.step()
    for param, new in zip(model.parameters(), found[::3], strict=True):
        torch.testing.assert_close(new, param.detach(), rtol=1e-6, atol=1e-7)


def test_a_step_that_is_not_finite_changes_nothing():
    model = Model([draw(4, 3), draw(5)])
    optimizer = build_rounded_adamw(model, SECTION, seed=0)
    for found_inf in (0.0, 1.0):
        for param in model.parameters():
            param.grad = draw(*param.shape)
        optimizer.found_inf = torch.tensor(found_inf)
        before = [tensor.clone() for tensor in tensors_of(optimizer)]
        optimizer.step()
        after = tensors_of(optimizer)
    assert len(after) == 8
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def tensors_of(optimizer):
    return [t for param, state in optimizer.state.items() for t in (param, *state.values())]


def round_to_the_nearest(places, *_):
    """Give bits that round as a cast does; those of the second moment are the upper half."""
    return torch.full_like(places, -0x7FFF8000, dtype=torch.int32)


def decay():
    """Return second moments of 1.0 after 700 steps without a gradient."""
    moments = [torch.ones(1, 512, dtype=torch.bfloat16) for _ in range(2)]
    zeros, rates = torch.zeros(1, 512), adamw.Rates(1e-3, 0.9, 0.999, 1e-8, 0.0)
    for count in range(1, 701):
        step = torch.tensor(float(count))
        adamw.adamw_rounded(zeros.clone(), zeros, *moments, step, None, rates, (1, 2), 0, 512)
    return moments[1].double()


def test_changes_below_the_precision_are_not_lost(monkeypatch):
    """A step changes a moment by 0.1 %, and bfloat16 has nothing between 0.996 and 1."""
    assert decay().mean().item() == pytest.approx(0.999**700, rel=0.01)
    monkeypatch.setattr(adamw, "random_bits", round_to_the_nearest)
    assert (decay() == 1.0).all()


@NEEDS_KERNELS
@pytest.mark.parametrize(("row", "dtype"), [(12, torch.float32), (40, torch.bfloat16)])
def test_the_kernel_rounds_with_the_same_bits(dtype, row, monkeypatch):
    start = [draw(11, 12).to(dtype), draw(11, 12).to(dtype)]
    start += [draw(11, 12).bfloat16(), draw(11, 12).square().bfloat16()]
    rates = adamw.Rates(1e-2, 0.9, 0.999, 1e-8, 0.1)
    first = (1 << 32) - 50  # places on both sides
    found = []
    for is_kernel in (True, False):
        monkeypatch.setattr(adamw, "has_triton", lambda device, wanted=is_kernel: wanted)
        tensors = [tensor.clone().to(DEVICE) for tensor in start]
        for count, bad in ((7, 0.0), (8, 0.0), (9, 1.0)):
            flags = torch.tensor(float(count)), torch.tensor(bad)
            flags = (flag.to(DEVICE) for flag in flags)
            adamw.adamw_rounded(*tensors, *flags, rates, (77, -12345), first, row)
        found.append(tensors)
    for kernel, composed in zip(*found, strict=True):
        # float32 may round otherwise where products are fused, which moves few of the coins
        if kernel.dtype == torch.bfloat16:
            assert (kernel != composed).sum() <= 2
        torch.testing.assert_close(kernel, composed, rtol=1e-2, atol=1e-6)
        assert not torch.equal(kernel, start[0].to(DEVICE))
