"""Tensors that tests make, compare and store."""

from contextlib import contextmanager

import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.materialize import Region


def bits(tensor):
    """Return the bytes of all elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def everything(shape):
    """Return the region of a whole tensor."""
    return Region((0,) * len(shape), tuple(shape))


def random_tensor(shape, dtype=torch.float32, seed=0):
    """Return random bits without NaN, which would not equal itself."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return (values > 0) if dtype == torch.bool else values.to(dtype)


@contextmanager
def changed(path):
    """The tensors of a file, which is written again with what the body has changed in them."""
    tensors = load_file(path)
    yield tensors
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"format": "pt"})


class Watch(TorchDispatchMode):
    """Shows each operator that has run to `look(func, args, out)`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.look(func, args, out)
        return out
