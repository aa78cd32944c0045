"""The memory of a tensor as bytes, and keys of tensors outside of the model's files."""

import pytest
import torch

from titanlite.checkpoint.pieces import Layout, bytes_of, checkpoint_pieces
from titanlite.models.families import families


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


def test_a_tensor_of_the_sidecar_has_its_own_name_in_any_layout():
    name = "model.layers.0.mlp.gate.expert_bias"
    config = families()["qwen3_5_moe_text"].presets["debug"]
    layout = Layout(prefix="model.language_model.")
    assert [piece.key for piece in checkpoint_pieces(name, (4,), config, layout)] == [name]
    (norm,) = checkpoint_pieces("model.norm.weight", (4,), config, layout)
    assert norm.key == "model.language_model.norm.weight"
