"""Facts about a model of transformers that its class does not state, found by forwards on a few
fixed tokens.

Each probe has a control: the same rows, compared where the answer is known to be yes. A forward
that raises counts as a no, and the log has the exception.

Shapes: S sequence; 2 rows in a batch.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from titanlite.base.errors import ConfigError
from titanlite.base.log import logger
from titanlite.base.text import describe_error
from titanlite.config.schema import JobConfig
from titanlite.distributed.fsdp import forward_only
from titanlite.features.transformers.packing import restarting_positions

if TYPE_CHECKING:
    from titanlite.features.transformers.model import TransformersModel

PROBE_TOKENS = 6
# How transformers' modules declare that a package has a kernel for one of their functions.
_FAST_PATH = re.compile(r'_with_fallback\(\s*"\w+",\s*"(\w+)"')
_LEAK = 0.05  # of the change in the next document if nothing separates them


@dataclass(frozen=True)
class Facts:
    """Results of the probes.

    Attributes:
        has_plain_head: True if the logits are the unchanged result of the head's module, not
            scaled, capped, masked or cast.
        is_causal: True if a different last token does not change earlier logits.
        keeps_apart: True if tokens have the same logits alone and after another document in a row.
        takes_boundaries: True if that requires passing the starts of documents
            (`packing.boundaries`).
        failure: exception of a forward on text alone, as text; empty if there is none.
        why_mixed: difference or exception because of which `keeps_apart` is False.
    """

    has_plain_head: bool = False
    is_causal: bool = True
    keeps_apart: bool = False
    takes_boundaries: bool = False
    failure: str = ""
    why_mixed: str = ""


@torch.inference_mode(False)  # in inference mode tensors have no versions
def find_facts(model: "TransformersModel", device: torch.device) -> Facts:
    """Find out how `model` computes, in evaluation mode.

    Collectives of two to five forwards, the same on all ranks, which have the same tokens.
    """
    size = PROBE_TOKENS
    tokens = plain_tokens(model.transformers_model.config, 3 * size)
    first = tokens[:size]
    second = tokens[size : 2 * size]
    other = tokens[2 * size :]
    alone_2S = torch.tensor([second, [*second[:-1], other[-1]]], device=device)
    both_2S = torch.tensor([first + second, other + second], device=device)
    ids_2S = (torch.arange(2 * size, device=device) // size).expand(2, -1)
    reasons: list[str] = []

    def run(tokens_2S: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor | None:
        try:
            return model.compute_logits(tokens_2S, *args, **options)
        except Exception as error:  # noqa: BLE001 - classes that cannot do this raise all kinds of them
            error = error.__cause__ if isinstance(error.__cause__, Exception) else error
            reasons.append(describe_error(error))
            return None

    returned: list[tuple[Any, int | None]] = []  # results of the head, with their versions

    def note(module: nn.Module, args: Any, output: Any) -> None:
        returned.append((output, getattr(output, "_version", None)))

    with (
        forward_only(model, reshard=False),  # inside of a forward of the whole model
        nullcontext() if model.head is None else model.head.register_forward_hook(note),
    ):
        alone = run(alone_2S)
        of_alone = list(returned)
        mixed = run(both_2S)  # the control: how much a document changes later logits
        if alone is None or mixed is None or not alone.isfinite().all():
            return Facts(failure=reasons[0] if reasons else "its logits on 6 tokens are not finite")
        if alone.shape[:2] != alone_2S.shape:
            return Facts(
                failure=f"it has logits {list(alone.shape)} for {list(alone_2S.shape)} tokens"
            )
        # A different version means logits that were changed in place: Chameleon masks some.
        is_plain = [(id(output), version) for output, version in of_alone] == [
            (id(alone), alone._version)
        ]
        effect = (mixed[0, size:] - mixed[1, size:]).float().norm()
        expected = alone[0].float()
        moved = (alone[0, :-1] - alone[1, :-1]).float().norm()
        # Experts get different numbers of rows, and kernels different shapes, so the last bits may
        # differ.
        bound = tolerance_of(alone, model.head) * expected.norm()
        positions_2S = restarting_positions(ids_2S, None)
        for with_boundaries in [False, True] if model.may_take_boundaries else [False]:
            packed = run(both_2S, positions_2S, ids_2S, with_boundaries=with_boundaries)
            if packed is None:
                continue
            leak = (packed[0, size:] - packed[1, size:]).float().norm()
            error = (packed[0, size:].float() - expected).norm()
            if bool((leak <= _LEAK * effect) & (error <= bound)):  # synchronization point
                reasons.clear()
                break
            reasons.append(f"logits differ by {(error / expected.norm()).item():.1g}")
        else:
            with_boundaries = False
    return Facts(
        has_plain_head=is_plain and model.is_plain_head,
        is_causal=bool(moved <= _LEAK * effect),
        keeps_apart=not reasons,
        takes_boundaries=with_boundaries,
        why_mixed=reasons[-1] if reasons else "",
    )


def check_facts(facts: Facts, model: "TransformersModel", inputs: Collection[str] = ()) -> None:
    """Refuse a model that cannot be trained, or cannot continue text; `inputs` are further
    arguments of its forward.

    Raises ConfigError: its forward raises on text alone, if it gets no further inputs; or it is not
    causal, unless an input makes it so (`token_type_ids` of PaliGemma).
    """
    name = model.config.architecture
    if facts.failure and not inputs:
        raise ConfigError(
            f"model: {name} of transformers does not run on text alone: {facts.failure}. Use "
            "another model."
        )
    if "token_type_ids" in inputs:
        return
    if not facts.is_causal:
        raise ConfigError(
            f"model: {name} of transformers is not causal: later tokens change the logits of "
            "earlier ones, so it sees the tokens that it must predict. Use another model."
        )


def check_documents_per_row(job: JobConfig, model: nn.Module, device: torch.device) -> list[str]:
    """Return the problem of rows with several documents, if the model mixes them. The same on all
    ranks.

    Collectives of a few forwards; every rank must call. Raises ConfigError: the model cannot
    be trained on text at all. The same on all ranks.
    """
    from titanlite.features.transformers.model import TransformersModel

    if not isinstance(model, TransformersModel) or job.data.dataset == "images":
        return []
    facts = model.find_facts(device)
    if facts.keeps_apart:
        return []
    what = (
        f"{model.config.architecture} of transformers mixes documents that share a row "
        f"({facts.why_mixed})"
    )
    logger.info("model: %s", what)
    problems = []
    if job.data.packing:
        problems.append("data.packing = true puts several into one. Set data.packing = false.")
    if job.training.objective == "dpo":
        problems.append(
            'training.objective = "dpo" puts both sides of a pair into one. Set it to "next_token".'
        )
    return [f"model: {what}: {problem}" for problem in problems]


@torch.no_grad()
def is_same_with_cache(model: "TransformersModel", device: torch.device) -> bool:
    """Compare the logits of two rows of different lengths with and without a cache; a class that
    raises counts as a no.

    Models with a state instead of keys, or that treat padding as text, differ. Collectives of its
    forwards.
    """
    tokens = plain_tokens(model.transformers_model.config, 2 * PROBE_TOKENS + 1)
    rows = [tokens[:PROBE_TOKENS], tokens[PROBE_TOKENS:]]  # each with the token that comes next
    lengths = [len(row) - 1 for row in rows]
    prompts = [row[:-1] + [0] * (max(lengths) - len(row) + 1) for row in rows]
    try:  # Through `model`: FSDP gathers parameters outside of layers there.
        cache = model.build_cache(lengths, max(map(len, rows)), device)
        first_BV = model(torch.tensor(prompts, device=device), cache=cache)
        second_BV = model(torch.tensor([[row[-1] for row in rows]], device=device), cache=cache)
        expected = torch.stack(
            [model(torch.tensor([row], device=device))[0, -2:] for row in rows]
        ).float()
    except Exception as error:  # noqa: BLE001 - caches of other kinds raise all kinds of them
        logger.info(
            "generate: a cache does not fit %s: %s",
            model.config.architecture,
            describe_error(error),
        )
        return False
    found = torch.stack([first_BV, second_BV], dim=1).float()
    bound = tolerance_of(first_BV, model.head) * expected.norm()
    return bool((found - expected).norm() <= bound)  # synchronization point, once


def tolerance_of(logits: torch.Tensor, head: nn.Module | None) -> float:
    """Return the relative error of logits that were computed in float32 or, judged by their dtype
    and that of the head's weight, in fewer bits.
    """
    weight = getattr(head, "weight", logits)
    return 1e-4 if logits.dtype == weight.dtype == torch.float32 else 0.05


def plain_tokens(config: Any, count: int) -> list[int]:
    """Return ids of tokens without a special meaning, such as a placeholder for an image."""
    values = {**vars(config), **vars(config.get_text_config())}
    special = {
        value
        for name, value in values.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    # in some classes only a part of the configuration has it
    size = getattr(config.get_text_config(), "vocab_size", None) or 1
    plain = sorted({*range(size)} - special) or [0]
    # different ones, if there are enough
    return [plain[(2 * i + 1) * len(plain) // (2 * count)] for i in range(count)]


# --- without a forward


def find_head(model: Any) -> Any:
    """Return the output embedding of the model, or of the first model inside it that has one."""
    from transformers import PreTrainedModel

    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next(
        (head for part in parts if (head := part.get_output_embeddings()) is not None), None
    )


def find_missing_kernels(model: Any) -> list[str]:
    """Return the packages that transformers would use for kernels of layers of `model`, but has not
    found.
    """
    modules = {type(module).__module__ for module in model.modules()}
    packages = {
        package
        for name in modules
        if not name.startswith("torch.")
        for package in _FAST_PATH.findall(inspect.getsource(sys.modules[name]))
    }
    # Modules that transformers has imported without an error are in `sys.modules`.
    return sorted(packages - sys.modules.keys())


def find_embedding(model: Any) -> nn.Module | None:
    """Return the input embedding of the model; None if its class does not name one."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def repeated_layers(model: Any) -> list[nn.Module]:
    """Return the modules of the classes that transformers marks as not to be split, outermost only.

    A module that shares a parameter with a module outside (BERT's embeddings) is left out: FSDP
    would split the two.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    holders = count_holders(model)
    for module in model.modules():
        is_layer = module not in inside and type(module).__name__ in model._no_split_modules
        if is_layer and count_holders(module).items() <= holders.items():
            found.append(module)
            inside.update(module.modules())
    return found


def count_holders(model: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that hold each parameter."""
    return Counter(
        param for m in model.modules() for param in m._parameters.values() if param is not None
    )
