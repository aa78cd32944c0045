"""Block-scaled FP8 is dequantized while it is read; any region has the values that a plain loop
computes.
"""

import os

import numpy as np
import pytest
import torch
from files import write_json
from processes import anonymous_bytes
from safetensors.torch import save_file

from tests.loading import hf_checkpoint
from titanlite.base.errors import CheckpointError, ConfigError, PlanError
from titanlite.checkpoint.folder import read_header
from titanlite.checkpoint.pieces import whole
from titanlite.checkpoint.quantized import attach_scales
from titanlite.checkpoint.reader import Placed, SafetensorsReader
from titanlite.materialize import ReadRequest, Region, build_plan, materialize
from titanlite.models.decoder import build_decoder
from titanlite.models.families import families

QWEN3_MOE = families()["qwen3_moe"].presets["debug"]


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


def plain_loop(weight, scale, block):
    values, factors = weight.to(torch.float32).tolist(), scale.to(torch.float32).tolist()
    return torch.tensor(
        [
            [
                np.float32(value) * np.float32(factors[r // block[0]][c // block[1]])
                for c, value in enumerate(row)
            ]
            for r, row in enumerate(values)
        ]
    )


def spread(weight, scale, block):
    """Compute what `plain_loop` does, fast enough for large weights."""
    factors = scale.to(torch.float32).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.to(torch.float32) * factors[: weight.shape[0], : weight.shape[1]]


def open_weight(folder, weight, scale, block, two_files=False):
    files = (
        [{"w": weight}, {"w_scale_inv": scale}]
        if two_files
        else [{"w": weight, "w_scale_inv": scale}]
    )
    paths = [folder / f"{i}.safetensors" for i in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path)
    stored = {key: tensor for path in paths for key, tensor in read_header(path).items()}
    tensor = attach_scales(stored, block)["w"]
    placed = Placed(tensor, whole("w", tensor.shape))
    return SafetensorsReader(
        "here",
        {"w": [placed]},
        {path: path.stat().st_size for path in paths},
        4,
    )


def read(reader, name, region, dtype=torch.float32):
    shard = torch.full(region.lengths, float("nan"), dtype=dtype)
    reader.read([ReadRequest(name, region, shard)])
    return shard


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_shards_that_cut_blocks(tmp_path, scale_dtype):
    block = (16, 24)
    weight, scale = quantized((70, 90), block, 2, scale_dtype)
    expected = plain_loop(weight, scale, block)
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
        assert torch.equal(read(reader, "w", region), expected[region.slices]), region
        cast = read(reader, "w", region, torch.bfloat16)
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
    assert torch.equal(read(reader, "w", region), spread(weight, scale, (128, 128))[region.slices])


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


def test_factors_may_lie_in_another_file_than_the_weight(tmp_path):
    # Files are split by size, so a weight can be the last tensor of a file and its scales the first
    # of the next.
    weight, scale = quantized((40, 50), (16, 24), 4)
    reader = open_weight(tmp_path, weight, scale, (16, 24), two_files=True)
    assert torch.equal(
        read(reader, "w", Region((3, 0), (30, 50))), plain_loop(weight, scale, (16, 24))[3:33]
    )


# ---- a model on disk ----


def fp8_files(config, block):
    """Return the stored tensors under Hugging Face's keys, and the values that the model must
    get.
    """
    model = build_decoder(config)
    materialize(model, "cpu", seed=3)
    stored, expected = {}, {}
    for seed, (name, param) in enumerate(model.named_parameters()):
        value = param.detach()
        if value.dim() == 3:
            prefix, leaf = name.rsplit(".", 1)
            expected[name] = torch.empty_like(value)
            inner = value.shape[1] // 2
            for expert in range(value.shape[0]):
                parts = {"down_proj": slice(None)}
                if leaf == "gate_up_proj":
                    parts = {"gate_proj": slice(0, inner), "up_proj": slice(inner, None)}
                for i, (part, rows) in enumerate(parts.items()):
                    key = f"{prefix}.{expert}.{part}.weight"
                    shape = value[expert, rows].shape
                    weight, scale = quantized(shape, block, 1000 * seed + 10 * expert + i)
                    stored[key], stored[f"{key}_scale_inv"] = weight, scale
                    expected[name][expert, rows] = spread(weight, scale, block)
        elif name.endswith("_proj.weight"):
            weight, scale = quantized(value.shape, block, 1000 * seed)
            stored[name], stored[f"{name}_scale_inv"] = weight, scale
            expected[name] = spread(weight, scale, block)
        else:  # embedding, norms, router and head are left as they were
            stored[name] = value.to(torch.bfloat16)
            expected[name] = stored[name].float()
    return stored, expected


def write_model(folder, stored, block):
    folder.mkdir(exist_ok=True)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    write_json(folder / "config.json", config)
    save_file(stored, folder / "model.safetensors")


def load(folder):
    model = build_decoder(QWEN3_MOE)
    materialize(model, "cpu", [hf_checkpoint(folder, QWEN3_MOE)])
    return {name: param.detach() for name, param in model.named_parameters()}


def test_model_with_stacked_experts(tmp_path):
    # The first block size divides no weight here; the second is the default without a config.json.
    for block in [(10, 24), (128, 128)]:
        folder = tmp_path / str(block[0])
        stored, expected = fp8_files(QWEN3_MOE, block)
        write_model(folder, stored, block)
        if block == (128, 128):
            (folder / "config.json").unlink()
        got = load(folder)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_factors_that_are_missing_or_do_not_fit_are_named(tmp_path):
    block = (16, 24)
    stored, _ = fp8_files(QWEN3_MOE, block)
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    expert, norm = "model.layers.2.mlp.experts.3.up_proj.weight", "model.norm.weight"
    del stored[f"{q}_scale_inv"]
    stored[k] = stored[k].to(torch.bfloat16)
    stored[f"{expert}_scale_inv"] = torch.ones(2, 2)
    stored |= {norm: torch.ones(64).to(torch.float8_e4m3fn), f"{norm}_scale_inv": torch.ones(3)}
    write_model(tmp_path, stored, block)
    with pytest.raises(PlanError) as error:
        build_plan(build_decoder(QWEN3_MOE), [hf_checkpoint(tmp_path, QWEN3_MOE)])
    text = str(error.value)
    for words in (
        "materialize: 4 problems:",
        f"{q}: checkpoint {tmp_path}: {q} is torch.float8_e4m3fn without scales ({q}_scale_inv).",
        f"{k}_scale_inv: unexpected, checkpoint {tmp_path} has it and the model does not.",
        f"{expert}_scale_inv has shape (2, 2), which does not fit (32, 64) in blocks of (16, 24).",
        f"{norm}_scale_inv has shape (3,), which does not fit (64,)",
    ):
        assert words in text


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_factor_per_tensor_where_declared(tmp_path, shape):
    stored, _ = fp8_files(QWEN3_MOE, (16, 24))
    factors = {key: torch.rand(shape) + 0.1 for key in stored if key.endswith("_scale_inv")}
    write_model(tmp_path, stored | factors, None)
    key = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(load(tmp_path)[key], stored[key].float() * factors[f"{key}_scale_inv"])


def test_other_quantization_is_refused(tmp_path):
    hf = families()["qwen3_moe"].to_hf(QWEN3_MOE)
    for block in ([128, 128], [64, 256], None):
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
        }
        assert (
            families()["qwen3_moe"].from_hf({**hf, "quantization_config": quantization}, "x")
            == QWEN3_MOE
        )
    blocks = [
        {"quant_method": "fp8", "weight_block_size": size}
        for size in ([128], [128, 0], ["128", "128"], 128)
    ]
    for quantization in (*blocks, {"quant_method": "compressed-tensors"}, {"load_in_8bit": True}):
        with pytest.raises(
            ConfigError,
            match=r"quantization_config: weights of quant_method .* cannot be read, only",
        ):
            families()["qwen3_moe"].from_hf({**hf, "quantization_config": quantization}, "x")
    # If the sizes come from a preset, config.json is read for its blocks only, and nothing has
    # checked them yet.
    write_model(tmp_path, fp8_files(QWEN3_MOE, (128, 128))[0], None)
    for quantization in blocks:
        write_json(tmp_path / "config.json", {"quantization_config": quantization})
        with pytest.raises((CheckpointError, PlanError), match="weight_block_size"):
            build_plan(build_decoder(QWEN3_MOE), [hf_checkpoint(tmp_path, QWEN3_MOE)])
