"""The checkpoint that load.py loads: made as `save_pretrained` writes it, kept between runs, and
read back to check.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Several files, and so an index, whatever the size.
_FILES, _MAX_FILE_BYTES = 3, 400_000_000
# (from this many GB on, hidden size, expert width, experts, vocabulary): the number of layers
# follows from the size. Qwen3-30B-A3B's own, and half as wide with as many experts.
_SHAPES = (
    (8.0, 2048, 768, 128, 65536),
    (0.5, 1024, 384, 128, 32768),
    (0.05, 512, 192, 32, 16384),
    (0.0, 64, 32, 8, 512),
)


def model_settings(size_gb: float) -> dict[str, Any]:
    """Settings of a Qwen3-MoE whose bf16 checkpoint has about `size_gb` * 1e9 bytes, at least one
    layer.
    """
    hidden, width, experts, vocab = next(shape[1:] for shape in _SHAPES if size_gb >= shape[0])
    heads, kv_heads, head_dim = hidden // 64, hidden // 256 or 1, 64
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer_bytes = 2 * (3 * hidden * width * experts + attention + hidden * experts)
    layers = max(1, round((size_gb * 1e9 - 2 * 2 * hidden * vocab) / layer_bytes))
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 8 if experts >= 32 else 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        # Explicit, so that no way warns about them.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def checkpoint_path(root: Path, size_gb: float) -> Path:
    """Where `make_checkpoint` keeps the checkpoint of this size."""
    return root / f"qwen3_moe-{size_gb:g}gb"


def is_made(root: Path, size_gb: float) -> bool:
    """Whether the checkpoint is there and complete, with the settings that this version of the
    script would use.
    """
    folder = checkpoint_path(root, size_gb)
    # beside the folder: a checkpoint has no such file
    marker = folder.with_suffix(folder.suffix + ".json")
    try:
        return json.loads(marker.read_text()) == model_settings(size_gb) and bool(
            weight_files(folder)
        )
    except (OSError, ValueError):
        return False


def make_checkpoint(root: Path, size_gb: float) -> None:
    """Write it with random bf16 weights. Needs about twice its size in memory: call it in a process
    of its own.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = model_settings(size_gb)
    folder = checkpoint_path(root, size_gb)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**settings), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for param in model.parameters():
        param.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size=min(_MAX_FILE_BYTES, int(size_gb * 1e9) // _FILES))
    folder.with_suffix(folder.suffix + ".json").write_text(json.dumps(settings))


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's weight files, in order of their names."""
    return sorted(folder.glob("*.safetensors"))


def weight_bytes(folder: Path) -> int:
    """Size of all weight files, headers included."""
    return sum(path.stat().st_size for path in weight_files(folder))


class Reference:
    """Reads any part of a model's parameter from a checkpoint, whether its experts are stored
    singly or fused.
    """

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in weight_files(folder)]
        self._file_of = {key: file for file in self._files for key in file.keys()}  # noqa: SIM118 - not a dict
        self.keys = frozenset(self._file_of)

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor under `key`."""
        return self._file_of[key].get_tensor(key)

    def _read(self, key: str, index: tuple[slice, ...]) -> torch.Tensor:
        if key not in self._file_of:
            raise ValueError(f"there is no {key}")
        return self._file_of[key].get_slice(key)[index]

    def compare(self, fqn: str, local: torch.Tensor, starts: Sequence[int]) -> None:
        """Compare `local`, which begins at `starts` in parameter `fqn`, bit for bit.

        Raises:
            ValueError: it differs.
        """
        index = tuple(
            slice(start, start + length) for start, length in zip(starts, local.shape, strict=True)
        )
        if fqn in self._file_of:
            pairs = [(fqn, self._read(fqn, index), local)]
        else:
            pairs = []
            for row in range(local.shape[0]):
                for key, part, view in expert_views(fqn, local[row], starts[0] + row):
                    pairs.append((key, self._read(key, (slice(0, part), index[2])), view))
        for key, expected, found in pairs:
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                raise ValueError(f"{key} differs from the checkpoint")


def expert_views(
    fqn: str, expert: torch.Tensor, number: int
) -> list[tuple[str, int, torch.Tensor]]:
    """(key on disk, rows, view) of the parts of one expert of a fused parameter; `expert` has whole
    rows.
    """
    prefix, _, leaf = fqn.rpartition(".")
    if leaf == "gate_up_proj":
        half = expert.shape[0] // 2
        return [
            (f"{prefix}.{number}.gate_proj.weight", half, expert[:half]),
            (f"{prefix}.{number}.up_proj.weight", half, expert[half:]),
        ]
    return [(f"{prefix}.{number}.{leaf}.weight", expert.shape[0], expert)]


def local_region(param: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's part of a sharded parameter, and where in the parameter it begins."""
    if not isinstance(param, DTensor):
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is not sharded")
    local = param.to_local()
    shape, starts = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    assert tuple(shape) == tuple(local.shape)
    return local, tuple(starts)


def shard_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards of all parameters."""
    return sum(local_region(param)[0].nbytes for param in model.parameters())


@torch.no_grad()
def check_model(model: nn.Module, folder: Path) -> None:
    """Compare every parameter of the sharded bf16 model with the checkpoint, this rank's part, bit
    for bit.

    Raises:
        ValueError: one differs, is not sharded, or a buffer holds no numbers.
    """
    reference = Reference(folder)
    for fqn, param in model.named_parameters():
        local, starts = local_region(param)
        if local.numel():
            reference.compare(fqn, local, starts)
    for name, buffer in model.named_buffers():
        if buffer.is_meta or not buffer.isfinite().all():
            raise ValueError(f"buffer {name} was not written")
