"""Groups of parameters, FLOPs per token and peak FLOP/s: for gradient norms per group, throughput
and MFU.
"""

import re

import torch
from torch import nn

from titanlite.materialize.layout import num_values
from titanlite.materialize.plan import clean_name
from titanlite.models.interface import Model, is_adapter
from titanlite.models.moe import is_routed

# Dense (not sparse) bfloat16 tensor-core TFLOP/s from the vendors' data sheets; for an MI250X per
# graphics die, which is one device for torch. The first entry whose words all occur in the device
# name counts, so special cases come first.
_PEAK_BF16_TFLOPS = (
    "GB200 2500, B200 2250, H200 NVL 835, H200 989, GH200 989, H100 NVL 835, H100 PCIE 756, H100 "
    "989, H800 989, H20 148, A100 312, A800 312, L40S 362, L40 181, L4 121, A40 150, A10 125, "
    "MI355X 2500, MI350X 2300, MI325X 1307, MI300X 1307, MI250X 191.5"
)
# A parameter belongs to the first group with a word in its name. The words cover titanlite's and
# transformers' models.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norm", ("norm", ".ln_", ".ln1.", ".ln2.", "layer_norm")),
    ("experts", ("experts",)),
    ("router", (".gate.", ".router.", ".e_score_correction_bias")),
    ("attention", ("attn", "attention")),
    ("feed_forward", ("mlp", "feed_forward", "ffn", ".fc1.", ".fc2.")),
)


def train_flops_per_token(model: Model, seq_len: int) -> int:
    """Return the FLOPs of forward and backward per token, without recomputation (PaLM,
    arXiv:2204.02311, app. B).

    The result is 6 FLOPs per active parameter of a matmul (including the output projection,
    excluding the embedding table), plus the FLOPs of operations in which tokens interact. Attention
    is counted causally, `6 * heads * head_dim * seq_len`: half of the 12 in PaLM and torchtitan,
    whose MFU is higher for that reason. If the heads of keys and values differ in width, head_dim
    is their mean.

    The 6 are 2 for forward, 2 for the gradient of the input, and 2 for the gradient of the weight.
    A frozen weight has no gradient, and backward ends at the first layer that contains or follows a
    trained parameter; that layer is counted whole. With LoRA on all layers 4 of the 6 remain, and
    the adapters' own matmuls are not counted. Parameters are visited in the model's order, so a
    trained parameter comes before the layers that its gradient passes through.
    """
    config = model.config
    layers = model.all_layers()
    cores = model.core_flops(seq_len)
    layer_of = {param: i for i, layer in enumerate(layers) for param in layer.parameters()}
    trained_layers = {layer_of[param] for param in layer_of if param.requires_grad}
    embedding, head = outer_parameters(model)
    flops = 0
    reached = False
    unreached_layers = set[int]()
    is_sparse = 0 < config.top_k < config.num_experts

    def count(name: str, param: nn.Parameter) -> int:
        active = num_values(param)
        if is_sparse and is_routed(name):
            active = active * config.top_k // config.num_experts
        return 2 * active * (1 + param.requires_grad + reached)

    for name, param in model.named_parameters():
        layer = layer_of.get(param)
        reached = reached or layer in trained_layers
        if layer is not None and not reached:
            unreached_layers.add(layer)
        if param not in embedding and not is_adapter(name):  # a table is only looked up
            flops += count(name, param)
        reached = reached or param.requires_grad
    if embedding & head or (not head and config.tie_word_embeddings):
        flops += sum(count("", param) for param in embedding)  # as the head, which comes last
    # A vision tower's layers come first; their attention is not counted.
    num_unreached = max(len(unreached_layers) - (len(layers) - config.num_layers), 0)
    return flops + 3 * sum(cores) - 2 * sum(cores[:num_unreached])


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak dense FLOP/s of the named GPU in bfloat16 or float16.

    None for an unknown device, a slice of a device (MIG), or any other dtype: no MFU is better than
    a wrong one.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    pairs = (entry.rpartition(" ") for entry in _PEAK_BF16_TFLOPS.split(", "))
    return next(
        (float(tflops) * 1e12 for model, _, tflops in pairs if words.issuperset(model.split())),
        None,
    )


def group_parameters(model: Model) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of `model`, each in one group; empty groups are omitted.

    `embedding` and `head` are found by their modules (a tied weight is in `embedding`), adapters by
    their names (`lora`), and the others by words in their names: `norm`, `experts` (shared ones
    too), `router`, `attention`, `feed_forward`, else `other`. Call it after sharding, which
    replaces the parameter objects.
    """
    embedding, head = outer_parameters(model)
    groups: dict[str, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.setdefault(_group_of(clean_name(name), param, embedding, head), []).append(param)
    return groups


def outer_parameters(model: Model) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return the parameters of the embedding and of the head; a tied weight is in both."""
    found = [
        set() if module is None else set(module.parameters())
        for module in model.embedding_and_head()
    ]
    return found[0], found[1]


def _group_of(
    name: str, param: nn.Parameter, embedding: set[nn.Parameter], head: set[nn.Parameter]
) -> str:
    if is_adapter(name):
        return "lora"
    if param in embedding or param in head:
        return "embedding" if param in embedding else "head"
    return next(
        (group for group, words in _WORDS if any(word in f".{name}" for word in words)), "other"
    )
