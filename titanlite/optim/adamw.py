"""AdamW (arXiv:1711.05101) over parameters that may live on two meshes."""

from typing import Any

import torch

from titanlite.materialize.layout import local_of


class LocalAdamW(torch.optim.AdamW):
    """torch's AdamW, computed on this rank's shards; parameters and states stay the DTensors that they are.

    The update of an element needs nothing of other elements, so DTensor has nothing to add. It refuses two meshes in a
    fused call, and to find the layout of the first one's results takes it longer than ten updates of a small model.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            group["state_names"] = ("step", "exp_avg", "exp_avg_sq")  # what a checkpoint must have of each parameter

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists` with the tensors of a group, in the order of the update's arguments; private to torch."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return has_complex
