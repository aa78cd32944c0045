"""From the model's tensor names to Hugging Face's checkpoint keys.

Run-time names are Hugging Face's already; on disk, experts are stored one by one, and the router's bias has the
family's own name, or none.
"""

from collections.abc import Iterator

import torch

from titanlite.models.families import Family

# Tensors for which the family's architecture has no key; kept in a file of their own, never dropped.
SIDECAR_FILE = "titanlite.safetensors"


def is_sidecar(name: str, family: Family) -> bool:
    """True if Hugging Face's architecture has no place for the tensor `name`."""
    return name.endswith(".expert_bias") and family.expert_bias_key is None


def checkpoint_tensors(name: str, tensor: torch.Tensor, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) pairs under which the full `tensor` is stored; views where possible."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        half = tensor.shape[1] // 2
        for expert, weight in enumerate(tensor):
            yield f"{prefix}.{expert}.gate_proj.weight", weight[:half]
            yield f"{prefix}.{expert}.up_proj.weight", weight[half:]
    elif leaf == "down_proj":
        for expert, weight in enumerate(tensor):
            yield f"{prefix}.{expert}.down_proj.weight", weight
    elif leaf == "expert_bias" and family.expert_bias_key is not None:
        yield f"{prefix}.{family.expert_bias_key}", tensor
    else:
        yield name, tensor
