"""The checksum of a whole from the checksums of its parts, against zlib."""

import itertools
import random
import time
import zlib

import numpy as np
import pytest

from titanlite.checkpoint.crc import combine


def parts_of(data: bytes, cuts: list[int], order: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """Checksums of the parts between `cuts`, and the bytes after each, shuffled."""
    bounds = [0, *sorted(cuts), len(data)]
    parts = [(zlib.crc32(data[a:b]), len(data) - b) for a, b in itertools.pairwise(bounds)]
    order.shuffle(parts)
    return np.array([crc for crc, _ in parts], dtype=np.uint32), np.array([after for _, after in parts])


@pytest.mark.parametrize("seed", range(30))
def test_parts_in_any_order_make_the_whole(seed):
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([1, 2, 7, 100, 4096, 70_000]))
    cuts = [rng.randint(0, len(data)) for _ in range(rng.randint(0, 40))]  # equal ones make empty parts
    crcs, after = parts_of(data, cuts, rng)
    assert combine(crcs, after) == zlib.crc32(data)
    # The shares of two ranks, merged with an exclusive or.
    assert combine(crcs[::2], after[::2]) ^ combine(crcs[1::2], after[1::2]) == zlib.crc32(data)


def test_nothing():
    assert combine(np.array([], dtype=np.uint32), np.array([], dtype=np.int64)) == 0
    assert combine(np.array([zlib.crc32(b"")], dtype=np.uint32), np.array([10**12])) == 0


def test_one_part_is_itself():
    assert combine(np.array([zlib.crc32(b"titanlite")], dtype=np.uint32), np.array([0])) == zlib.crc32(b"titanlite")


def test_arguments_are_left_alone():
    crcs, after = np.array([1, 2, 3], dtype=np.uint32), np.array([5, 0, 7])
    combine(crcs, after)
    assert (crcs.tolist(), after.tolist()) == ([1, 2, 3], [5, 0, 7])


def bytewise(crc: int, num_zeros: int) -> int:
    """`crc` moved past `num_zeros` bytes, one after the other."""
    for _ in range(num_zeros * 8):
        crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc


@pytest.mark.parametrize("num_zeros", [0, 1, 2, 3, 255, 1000])
def test_moving_past_bytes(num_zeros):
    assert combine(np.array([0x12345678], dtype=np.uint32), np.array([num_zeros])) == bytewise(0x12345678, num_zeros)


def test_moves_beyond_32_bits():
    def move(crc: int, nbytes: int) -> int:
        return combine(np.array([crc], dtype=np.uint32), np.array([nbytes]))

    crc = zlib.crc32(b"far away")
    far = 2**34 + 12345
    assert move(crc, far) == move(move(crc, far - 2**33), 2**33)
    assert move(crc, 2**33) == move(move(move(move(crc, 2**31), 2**31), 2**31), 2**31)
    # x has the order 2**32 - 1 modulo this polynomial, so that many bytes further nothing has changed.
    assert move(crc, 2**32 - 1) == crc
    assert move(crc, 2**40 + (2**32 - 1) * 3) == move(crc, 2**40)
    assert move(crc, 2**32) == bytewise(crc, 1)


def test_many_parts_take_no_time():
    rng = random.Random(0)
    data = rng.randbytes(1 << 20)
    crcs, after = parts_of(data, [rng.randint(0, len(data)) for _ in range(10_000)], rng)
    start = time.perf_counter()
    assert combine(crcs, after) == zlib.crc32(data)
    assert combine(crcs, after + (2**32 - 1)) == zlib.crc32(data)
    assert time.perf_counter() - start < 2.0  # measured: 0.1 s
