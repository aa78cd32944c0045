"""Checkpoints as published in FP8 and MXFP4, made from the definitions of both formats in
float64.
"""

import torch
from files import read_json, write_json
from safetensors.torch import load_file, save_file

from titanlite.materialize import ReadRequest

_PLAIN = ("norm", "embed", "lm_head", "gate.weight", "conv1d")
_E2M1 = [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def write_fp8(
    folder,
    block,
    suffix="_scale_inv",
    edit=lambda scale: scale,
):
    """Rewrite the checkpoint in FP8, in DeepSeek-V3's layout; return the expected values in
    float32.

    Args:
        folder: A folder with a model in one file.
        block: `weight_block_size` in config.json, the block of one scale; None: one scale per
            tensor.
        suffix: The key of the scales is the weight's key with this suffix.
        edit: Changes the scales, which are then powers of 2.
    """
    tensors, expected, stored = load_file(folder / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if any(part in key for part in _PLAIN) or tensor.dim() not in (2, 3):
            stored[key] = tensor.bfloat16()
            expected[key] = stored[key].float()
            continue
        rows, cols = tensor.shape[-2:]
        size = block or (rows, cols)
        grid = (*tensor.shape[:-2], -(-rows // size[0]), -(-cols // size[1]))
        scale = torch.rand(grid, generator=torch.Generator().manual_seed(len(stored))) + 0.01
        scale = scale if edit(scale) is scale else 2.0 ** scale.log2().round()
        spread = scale.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[
            ..., :rows, :cols
        ]
        stored[key] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected[key] = (stored[key].double() * spread.double()).float()
        stored[key + suffix] = edit(
            scale.reshape(()) if block is None and len(grid) == 2 else scale
        )
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": block and list(block),
    }
    _edit_config(folder, quantization)
    return expected


def write_mxfp4(folder, exponents=(90, 140)):
    """Rewrite a gpt-oss with random experts in MXFP4, with scales from the range `exponents`;
    return the expected values in float32, by key.
    """
    tensors, expected = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for key in [
        key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, cols, rows = tensors.pop(key).shape
        codes = torch.randint(0, 16, (experts, rows, cols), generator=generator)
        scales = torch.randint(*exponents, (experts, rows, cols // 32), generator=generator)
        values = torch.tensor(_E2M1, dtype=torch.float64)[codes] * 2.0 ** (
            scales.double() - 127
        ).repeat_interleave(32, -1)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{key}_blocks"] = packed.view(experts, rows, cols // 32, 16)
        tensors[f"{key}_scales"] = scales.to(torch.uint8)
        expected[key] = values.mT.float().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _edit_config(
        folder,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )
    return expected


def read_region(reader, name, region, dtype=torch.float32):
    """Return what `reader` reads of a region of the tensor `name`."""
    shard = torch.full(region.lengths, float("nan"), dtype=dtype)
    reader.read([ReadRequest(name, region, shard)])
    return shard


def _edit_config(folder, quantization):
    config = read_json(folder / "config.json")
    config["quantization_config"] = quantization
    write_json(folder / "config.json", config)
