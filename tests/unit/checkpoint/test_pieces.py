"""Keys of tensors outside of the model's files."""

from titanlite.checkpoint.pieces import Layout, checkpoint_pieces
from titanlite.models.families import families


def test_a_tensor_of_the_sidecar_has_its_own_name_in_any_layout():
    name = "model.layers.0.mlp.gate.expert_bias"
    config = families()["qwen3_5_moe_text"].presets["debug"]
    layout = Layout(prefix="model.language_model.")
    assert [piece.key for piece in checkpoint_pieces(name, (4,), config, layout)] == [name]
    (norm,) = checkpoint_pieces("model.norm.weight", (4,), config, layout)
    assert norm.key == "model.language_model.norm.weight"
