"""Checkpoints as they are published in FP8."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_fp8(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Rewrite the checkpoint in block-scaled FP8, as DeepSeek-V3's is; return what it must be read as, in float32."""
    tensors, expected, stored = load_file(folder / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if "norm" in key or "embed" in key or "lm_head" in key or key.endswith("gate.weight") or tensor.dim() < 2:
            stored[key], expected[key] = tensor, tensor.float()
            continue
        grid = [-(-size // length) for size, length in zip(tensor.shape, block, strict=True)]
        scale = torch.rand(grid, generator=torch.Generator().manual_seed(len(stored))) + 0.01
        spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        spread = spread[: tensor.shape[0], : tensor.shape[1]]
        stored[key] = (tensor.float() / spread).to(torch.float8_e4m3fn)
        stored[key + "_scale_inv"] = scale
        expected[key] = stored[key].float() * spread
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))
    return expected
