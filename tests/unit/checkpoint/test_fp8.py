"""Block-scaled FP8 is dequantized while it is read, in any region, by its definition."""

import os
from functools import partial

import pytest
import torch
from files import error_of, write_json
from processes import anonymous_bytes
from quantized_folder import read_region, write_fp8
from safetensors.torch import save_file
from tensors import changed
from tiny_transformers import save_tiny

from tests.loading import hf_checkpoint
from titanlite.base.errors import CheckpointError, PlanError
from titanlite.checkpoint.folder import read_header
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.quantized import attach_scales
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.materialize import ReadRequest, Region, build_plan, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import model_config_from_hf


def scale_shape(shape, block):
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def quantized(shape, block, seed, scale_dtype=torch.float32):
    """Return a random FP8 weight and its scales."""
    generator = torch.Generator().manual_seed(seed)
    # Older versions of torch convert values above the largest one, 448, to NaN.
    weight = (
        (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    )
    scale = torch.rand(scale_shape(shape, block), generator=generator) * 0.01 + 1e-4
    return weight, scale.to(scale_dtype)


def spread(weight, scale, block):
    factors = scale.to(torch.float32).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.to(torch.float32) * factors[: weight.shape[0], : weight.shape[1]]


def open_weight(folder, weight, scale, block):
    """Files are split by size, so a weight can be the last tensor of a file and its scales the
    first of the next.
    """
    tensors = {"w": weight, "w_scale_inv": scale}
    paths = [folder / f"{key}.safetensors" for key in tensors]
    for path, key in zip(paths, tensors, strict=True):
        save_file({key: tensors[key]}, path)
    stored = {key: tensor for path in paths for key, tensor in read_header(path).items()}
    tensor = attach_scales(stored, block)["w"]
    placed = Placed(tensor, whole("w", tensor.shape))
    return SafetensorsReader("here", {"w": [placed]}, 4)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_shards_that_cut_blocks(tmp_path, scale_dtype):
    block = (16, 24)
    weight, scale = quantized((70, 90), block, 2, scale_dtype)
    expected = spread(weight, scale, block)
    reader = open_weight(tmp_path, weight, scale, block)
    regions = [
        Region((0, 0), (70, 90)),
        Region((7, 0), (9, 90)),  # rows inside one block, and up to its end
        Region((15, 0), (2, 90)),  # rows of two blocks
        Region((69, 0), (1, 90)),
        Region((0, 23), (70, 2)),
        Region((0, 89), (70, 1)),
        Region((33, 47), (30, 31)),
        Region((70, 0), (0, 90)),
    ]
    for region in regions:
        assert torch.equal(read_region(reader, "w", region), expected[region.slices]), region
        cast = read_region(reader, "w", region, torch.bfloat16)
        assert torch.equal(cast, expected[region.slices].to(torch.bfloat16)), region


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((3000, 700), Region((77, 300), (2900, 350))),
        ((3, 1_500_001), Region((0, 0), (3, 1_500_001))),  # a row is larger than one read
        ((3, 1_500_001), Region((1, 3), (2, 1_400_000))),
    ],
)
def test_weights_larger_than_a_staging_buffer(tmp_path, shape, region):
    weight, scale = quantized(shape, (128, 128), 3)
    reader = open_weight(tmp_path, weight, scale, (128, 128))
    assert torch.equal(
        read_region(reader, "w", region), spread(weight, scale, (128, 128))[region.slices]
    )


def test_memory_beyond_the_shard_stays_small(tmp_path, monkeypatch):
    def sampled(*args):
        seen.append(anonymous_bytes())
        return original(*args)

    shape, num_threads = (12000, 2048), 4
    weight = torch.ones(shape).to(torch.float8_e4m3fn)
    reader = open_weight(tmp_path, weight, torch.ones(scale_shape(shape, (128, 128))), (128, 128))
    shard = torch.zeros(shape, dtype=torch.bfloat16)  # 47 MiB
    seen, original, before = [], os.preadv, anonymous_bytes()
    monkeypatch.setattr(os, "preadv", sampled)
    reader.read([ReadRequest("w", Region((0, 0), shape), shard)])
    assert bool((shard == 1).all())
    # Each thread holds raw bytes, float32 values, their scales and the products; the threads'
    # allocator arenas also count.
    assert max(seen) - before < (4 * num_threads + 6) * 2**20


# ---- a model on disk ----


@pytest.fixture
def folder(tmp_path):
    save_tiny("qwen3", tmp_path / "qwen3")
    return tmp_path / "qwen3"


def load(folder, config):
    model = build_decoder(config)
    materialize(model, "cpu", [hf_checkpoint(folder, config)])
    return {name: param.detach() for name, param in model.named_parameters()}


# The first block size divides no weight here; the second is the default without a config.json. One
# factor for each tensor may have any of three shapes.
@pytest.mark.parametrize(
    ("block", "edit"),
    [
        ((10, 24), lambda scale: scale),
        ((128, 128), lambda scale: scale),
        *((None, partial(torch.Tensor.reshape, shape=shape)) for shape in [(), (1,), (1, 1)]),
    ],
)
def test_every_weight_of_a_model(folder, block, edit):
    config = model_config_from_hf(folder)
    expected = write_fp8(folder, block, edit=edit)
    if block == (128, 128):
        (folder / "config.json").unlink()
    for name, value in load(folder, config).items():
        assert torch.equal(value, expected[name]), name


def test_factors_that_are_missing_or_do_not_fit_are_named(folder):
    config = model_config_from_hf(folder)
    write_fp8(folder, (16, 24))
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    with changed(folder / "model.safetensors") as stored:
        del stored[f"{q}_scale_inv"]
        stored[k] = stored[k].to(torch.bfloat16)
        stored[f"{up}_scale_inv"] = torch.ones(2, 2)
        stored |= {norm: torch.ones(32).to(torch.float8_e4m3fn), f"{norm}_scale_inv": torch.ones(3)}
    text = error_of(PlanError, build_plan, build_decoder(config), [hf_checkpoint(folder, config)])
    for words in (
        "materialize: 4 problems:",
        f"{q}: checkpoint {folder}: {q} is torch.float8_e4m3fn without scales ({q}_scale_inv).",
        f"{k}_scale_inv: unexpected, checkpoint {folder} has it and the model does not.",
        f"{up}_scale_inv has shape (2, 2), which does not fit (48, 32) in blocks of (16, 24).",
        f"{norm}_scale_inv has shape (3,), which does not fit (32,)",
    ):
        assert words in text


def test_other_block_sizes_are_refused(folder):
    """If the sizes come from a preset, config.json is read for its blocks only, and nothing has
    checked them yet.
    """
    config = model_config_from_hf(folder)
    write_fp8(folder, (128, 128))
    for size in ([128], [128, 0], ["128", "128"], 128):
        table = {"quant_method": "fp8", "weight_block_size": size}
        write_json(folder / "config.json", {"quantization_config": table})
        with pytest.raises((CheckpointError, PlanError), match="weight_block_size"):
            load(folder, config)
