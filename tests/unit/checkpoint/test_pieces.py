"""The memory of a tensor as bytes."""

import pytest
import torch

from titanlite.checkpoint.pieces import bytes_of


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
)
def test_bytes_of_is_the_memory_itself(dtype):
    flat = torch.zeros(5, dtype=dtype)
    memory = bytes_of(flat)
    assert len(memory) == 5 * dtype.itemsize
    memory[dtype.itemsize : 2 * dtype.itemsize] = (
        torch.ones(1, dtype=dtype).view(torch.uint8).numpy().tobytes()
    )
    assert flat.to(torch.float32).tolist() == [0, 1, 0, 0, 0]
    assert len(bytes_of(torch.empty(0, dtype=dtype))) == 0
