"""What an export says of the files that it copies."""

import pytest
import torch
from files import read_json, write_json
from safetensors.torch import load_file
from tensors import changed
from tiny_transformers import save_tiny

from tests.saving import model_files
from titanlite.assemble import build_model
from titanlite.base.errors import CheckpointError
from titanlite.checkpoint.hf_model import weights_of
from titanlite.features.tools.export import export_checkpoint
from titanlite.materialize import build_plan
from titanlite.models.families import any_model_config_from_hf


def test_what_an_export_left_that_was_killed_is_removed_by_the_next_to_the_same_folder(
    tmp_path,
):
    """And nothing else: out.b is another folder."""
    save_tiny("llama", tmp_path / "in")
    dead, other = (tmp_path / f".{name}.0123456789abcdef.tmp" for name in ("out", "out.b"))
    for left in (dead, other):
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"part")
    export_checkpoint(tmp_path / "in", tmp_path / "out", torch.float32)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", other.name}


def save_mixed(name, folder):
    """Save a tiny model in bfloat16 whose routers, or first norms, are float32 with all bits;
    return what is stored.
    """
    save_tiny(name, folder)
    with changed(folder / "model.safetensors") as stored:
        for key, tensor in stored.items():
            if ".gate." not in key and "layers.0.input_layernorm" not in key:
                stored[key] = tensor.bfloat16()
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"dtype": "bfloat16"})
    return stored


def test_values_beyond_float16_are_refused(tmp_path):
    save_tiny("llama", tmp_path / "in")
    with changed(tmp_path / "in/model.safetensors") as stored:
        stored["model.norm.weight"][0] = 1e5
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that float16"):
        export_checkpoint(tmp_path / "in", tmp_path / "out", torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v3", torch.bfloat16), ("gemma3_text", torch.float16)]
)
def test_what_a_folder_of_fewer_bits_has_in_float32_stays_so(tmp_path, name, dtype):
    stored = save_mixed(name, tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", dtype)
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == stored.keys() and {t.dtype for t in stored.values()} == {
        torch.float32,
        torch.bfloat16,
    }
    for key, tensor in stored.items():
        expected = tensor if tensor.dtype == torch.float32 else tensor.to(dtype)
        assert exported[key].dtype == expected.dtype and torch.equal(exported[key], expected), key


def test_a_checkpoint_has_the_dtypes_of_the_folder_and_no_tensor_in_float32_twice(tmp_path):
    stored = save_mixed("deepseek_v3", tmp_path)
    config = any_model_config_from_hf(tmp_path, "test")
    model = build_model(config)
    files = model_files(
        build_plan(model, [weights_of(tmp_path, model)]), config, torch.bfloat16, exact=True
    )
    found = {item.key: item.dtype for file in files for item in file.items}
    assert {key: found[key] for key in stored} == {
        key: tensor.dtype for key, tensor in stored.items()
    }
    masters = {key.removeprefix("master.") for key in found if key.startswith("master.")}
    wide = {key for key, tensor in stored.items() if tensor.dtype == torch.float32}
    assert masters and not masters & wide
