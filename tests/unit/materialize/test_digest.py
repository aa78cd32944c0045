"""Digests see every change of a tensor, and are sums over any partition of it."""

import random

import pytest
import torch

from titanlite.materialize.digest import MODULUS, bytes_in, digest, shift
from titanlite.materialize.layout import Region

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.uint8)


def values_of(dtype, *shape):
    if dtype == torch.uint8:
        return torch.randint(256, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def of(values):
    return digest(bytes_in(values.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (300, 131), (3, 4, 65), (40_003,)])
def test_parts_add_up_to_the_whole(dtype, shape):
    values = values_of(dtype, *shape)
    choose = random.Random(5)
    for _ in range(4):
        regions = [Region((0,) * len(shape), shape)]
        for _ in range(6):  # cut one of the parts in two, along any dim
            part = regions.pop(choose.randrange(len(regions)))
            dim = choose.randrange(len(shape))
            cut = choose.randrange(part.lengths[dim] + 1)
            for start, length in ((0, cut), (cut, part.lengths[dim] - cut)):
                starts, lengths = list(part.starts), list(part.lengths)
                starts[dim] += start
                lengths[dim] = length
                regions.append(Region(tuple(starts), tuple(lengths)))
        total = 0
        for region in regions:
            memory = bytes_in(values[region.slices].contiguous())
            for first, count in region.runs(shape) if region.numel else ():
                size = count * dtype.itemsize
                total += digest(memory[:size], first * dtype.itemsize)
                memory = memory[size:]
        assert total % MODULUS == of(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_lost_bit_is_seen(dtype):
    values = values_of(dtype, 70_000)
    before = of(values)
    for seed in range(200):
        changed = values.clone()
        memory = bytes_in(changed)
        memory[random.Random(seed).randrange(len(memory))] ^= 1 << seed % 8
        assert of(changed) != before


def test_values_of_earlier_certificates_stay():
    assert of(torch.arange(300_000, dtype=torch.float32)) == 0xB798EF644239FE00
    assert of(torch.arange(301, dtype=torch.bfloat16)) == 0xBEC83D66707C6BC5


def test_zeros_have_the_digest_of_nothing():
    assert of(torch.zeros(1000)) == of(torch.empty(0)) == 0


def test_a_place_is_a_factor():
    memory = bytes_in(values_of(torch.bfloat16, 1 << 16))
    for words in (1, 1000, 1 << 15, 40_000):
        assert digest(memory, 8 * words) == digest(memory) * shift(words) % MODULUS
        assert digest(memory) == digest(memory, 8 * words) * shift(-words) % MODULUS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("distance", [1, 2, 4, 64, 1 << 15, 1 << 17])
def test_every_exchange_and_every_two_signs_are_seen(dtype, distance):
    values = values_of(dtype, 1 << 18)
    before = of(values)
    for first in range(5):
        pair = [first, first + distance]
        changed = values.clone()
        changed[pair] = values[pair[::-1]]
        assert torch.equal(changed, values) or of(changed) != before
        changed = values.clone()
        changed[pair] *= -1
        assert of(changed) != before
