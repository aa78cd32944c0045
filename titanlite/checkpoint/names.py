"""Keys of a checkpoint that differ from the model's: prefixes that transformers accepts, and one
prefix before all keys, which is reported.
"""

from collections.abc import Collection

from titanlite.checkpoint.folder import Stored, shown
from titanlite.checkpoint.pieces import BASE, EMBEDDING

_OUTSIDE = ("lm_head.", "mtp.")  # keys outside of the base model


def with_base_prefix(stored: Stored, larger_prefix: str) -> Stored:
    """Return `stored` with the native decoder's names: the prefix of the base model is added where
    it is missing, and removed once where it is doubled. If the text model is part of a larger model
    (image and text), `larger_prefix` is the prefix of its keys there.

    `AutoModel.save_pretrained` writes the base model without its prefix. `from_pretrained` adds or
    removes the prefix where that gives a name of the model.
    """
    embeddings = {prefix + EMBEDDING.removeprefix(BASE) for prefix in (BASE, larger_prefix)}
    if embeddings.isdisjoint(stored) and not embeddings.isdisjoint(BASE + key for key in stored):
        names = {key: BASE + key for key in stored if not key.startswith(_OUTSIDE)}
    elif BASE + EMBEDDING in stored:
        names = {key: key.removeprefix(BASE) for key in stored}
    else:
        return stored
    tensors = [tensor._replace(key=names.get(key, key)) for key, tensor in stored.items()]
    return {tensor.key: tensor for tensor in tensors}


def explain_absent_head(where: str) -> str:
    """Return why a checkpoint of only the base model does not fit a model whose head is not
    tied.
    """
    return (
        f"missing, {where} has the base model alone, as AutoModel saves it, and config.json does "
        "not tie the head to the embedding (tie_word_embeddings). Save the model with its head: "
        "AutoModelForCausalLM."
    )


def explain_names(stored: Collection[str], expected: Collection[str]) -> str:
    """Return a sentence about the prefix that `stored` has before most `expected` keys, with the
    remedy; "" if there is no such prefix.
    """
    wanted = list(expected)
    for anchor in wanted[:: max(1, len(wanted) // 8)]:
        for key in stored:
            prefix = key.removesuffix(anchor)
            is_prefix = prefix not in ("", key)
            if is_prefix and 2 * sum(prefix + name in stored for name in wanted) > len(wanted):
                return (
                    f"its keys begin with '{shown(prefix)}', which the model's do not. Write its "
                    f"files again with key.replace('{shown(prefix)}', '', 1) as keys (load_file, "
                    "save_file of safetensors.torch), and so its index."
                )
    return ""
