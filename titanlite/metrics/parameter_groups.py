"""Parameters by what they are for, so that a gradient norm can be told apart by group."""

import torch
from torch import nn

from titanlite.materialize.plan import clean_name
from titanlite.models.interface import Model, is_adapter

# The first group with a word that is in a parameter's name gets it; words of titanlite's and transformers' models.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norm", ("norm", ".ln_", ".ln1.", ".ln2.", "layer_norm")),
    ("experts", ("experts",)),
    ("router", (".gate.", ".router.", ".e_score_correction_bias")),
    ("attention", ("attn", "attention")),
    ("feed_forward", ("mlp", "feed_forward", "ffn", ".fc1.", ".fc2.")),
)


def group_parameters(model: Model, *, whole: bool = False) -> dict[str, list[nn.Parameter]]:
    """The trained parameters of `model`, each in one group; groups without any are left out.

    `embedding` and `head` are found by their modules (a tied weight is `embedding`), adapters by their names (`lora`),
    and the others by words in their names: `norm`, `experts` (shared ones too), `router`, `attention`, `feed_forward`,
    else `other`. With `whole` all are one group, `all`. Call it after sharding, which exchanges parameters.
    """
    if whole:
        return {"all": [param for param in model.parameters() if param.requires_grad]}
    embedding, head = outer_parameters(model)
    groups: dict[str, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.setdefault(_group_of(clean_name(name), param, embedding, head), []).append(param)
    return groups


def outer_parameters(model: Model) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Those of the embedding and of the head; a tied weight is in both."""
    found = [set() if module is None else set(module.parameters()) for module in model.embedding_and_head()]
    return found[0], found[1]


def _group_of(name: str, param: torch.nn.Parameter, embedding: set[nn.Parameter], head: set[nn.Parameter]) -> str:
    if is_adapter(name):
        return "lora"
    if param in embedding:
        return "embedding"
    if param in head:
        return "head"
    for group, words in _WORDS:
        if any(word in f".{name}" for word in words):
            return group
    return "other"
