"""Any model of transformers behind the interface of the native decoder.

The class of transformers is described on meta, and its tensors keep their names; this module adds the sources of
its tensors, packed documents, and the loss.

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.log import logger
from titanlite.config.model import TransformersConfig
from titanlite.config.schema import MoESection
from titanlite.features.transformers.cache import TransformersCache
from titanlite.features.transformers.experts import (
    DISPATCH,
    TransformersExpertCounter,
    build_counters,
    find_experts,
    use_titanlite_experts,
)
from titanlite.features.transformers.packing import (
    forget_longest_forward,
    inside_documents,
    register_document_masks,
    restarting_positions,
)
from titanlite.features.transformers.sources import find_sources
from titanlite.materialize.sources import Source
from titanlite.models.decoder import LossSums
from titanlite.models.interface import Model
from titanlite.models.moe import is_routed
from titanlite.ops import IGNORE_INDEX, linear_cross_entropy, local_tensor
from titanlite.ops.attention import AttentionBackend

_PROBE_TOKENS = 6
_FLAG = "tie_word_embeddings"


class TransformersModel(Model):
    """A model of transformers that takes batches and gives losses as `Decoder` does.

    Attributes:
        config: what the rest of titanlite asks about it.
        loss_chunk_tokens: tokens that are projected to the vocabulary at once.
        all_conversions: transformers' mapping from the keys of checkpoints to this model, those of old versions too.
        own_conversions: the same without those of old versions.
        conversions: what of it was used for loading; None before that. Saving reverts it.
        head_project: the head's own forward, if that is nothing but a matrix product with a weight of V rows, all of
            them or this rank's; else None. With labels, the loss is then computed without any logits.
        cross_entropy: `linear_cross_entropy` or, when the vocabulary is split over ranks, the version that reduces.
        loss_copies: ranks that compute the same loss; each gives an equal part of its gradient, unless
        has_split_head: this rank has a part of a plain head's rows, whose gradient is its own.
        counters: of the rows that each layer's experts are given; none where they cannot be counted.
        state_shapes: global shape of every tensor of a checkpoint, by name, as transformers has them in memory.
    """

    splits_inside_experts = False  # their dims need not divide

    def __init__(self, model: Any, config: TransformersConfig, sources: dict[str, Source] | None = None) -> None:
        super().__init__()
        from transformers.conversion_mapping import get_model_conversion_mapping

        # The name of this attribute is left out of the names of tensors, see `materialize.plan.clean_name`.
        self._transformers_model = model
        self.loss_chunk_tokens = 1024
        # All of these look at class names, which sharding changes, so they are asked now.
        self._sources = find_sources(model) if sources is None else sources
        # In plain containers: the modules are registered below `model` once.
        self._layers = tuple(_repeated_layers(model))
        self._experts = find_experts(model)
        self._counters = build_counters(self._experts)
        self.counters = nn.ModuleList(self._counters.values())
        self.state_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.all_conversions = get_model_conversion_mapping(model)
        self.own_conversions = get_model_conversion_mapping(model, add_legacy=False)
        self.conversions: list[Any] | None = None
        self.config = _with_sizes(config, self)
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._takes_positions = "position_ids" in self._arguments
        self._can_cache: bool | None = None  # not known before `can_cache`
        register_document_masks()
        self._has_plain_head: bool | None = None  # not known before `_probe`
        self._keeps_documents_apart = False
        self._labels: tuple[torch.Tensor, Literal["sum", "none"]] | None = None
        head: Any = model.get_output_embeddings()
        self._head = [head]  # in a list, so that it is no submodule a second time
        self.head_project: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.cross_entropy: Callable[..., torch.Tensor] = linear_cross_entropy
        self.loss_copies = 1
        self.has_split_head = False
        self._is_linear_head = isinstance(head, nn.Linear) and head.bias is None
        if self._is_linear_head:
            self.head_project = head.forward
            head.forward = self.head_forward  # type: ignore[method-assign]

    @property
    def transformers_model(self) -> Any:
        """The model of transformers inside."""
        return self._transformers_model

    def declare_sources(self) -> dict[str, Source]:
        return dict(self._sources)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        reduction: Any = "sum",
        cache: TransformersCache | None = None,
        **inputs: Any,
    ) -> torch.Tensor | LossSums:
        """Logits (B, S, V), with labels the `LossSums`, with a cache logits (B, V); arguments as those of `Decoder`.

        The first forward with labels or documents looks at how the model works, on a few fixed tokens; see `_probe`.

        Args:
            inputs: what the model's forward takes beside, such as `pixel_values` and `image_grid_thw`.
        """
        if cache is not None:
            return self._next_logits(tokens_BS, cache)
        if inputs and document_ids_BS is not None:
            raise ValueError("rows with images hold one document each; leave document_ids out")
        if (labels_BS is not None or document_ids_BS is not None) and self._has_plain_head is None:
            self._probe(tokens_BS.device)
        if document_ids_BS is not None:
            if not self._keeps_documents_apart:
                raise ConfigError(
                    f"model: {self.config.architecture} of transformers mixes documents that share a row: alone, the "
                    "same tokens give other logits. Give it rows of one document each."
                )
            positions_BS = restarting_positions(document_ids_BS, positions_BS)
            if self.config.rope_limit is not None:  # padding is not to be the longest run of the row
                positions_BS = positions_BS.where(document_ids_BS >= 0, 0)
        if labels_BS is None:
            return self._logits(tokens_BS, positions_BS, document_ids_BS, **inputs)
        if not self._has_plain_head:
            logits_TV = self._logits(tokens_BS, positions_BS, document_ids_BS, **inputs).flatten(0, 1)
            # In float32 as everywhere, and labels as they are: already the next token.
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            labels_T = labels_BS.flatten()
            if isinstance(reduction, str):
                loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction=reduction)
            else:
                loss = reduction.of_logits(logits_TV, labels_T)
        else:
            self._labels = (labels_BS, reduction)
            try:
                loss = self._logits(tokens_BS, positions_BS, document_ids_BS, **inputs)  # see `_head_forward`
            finally:
                self._labels = None
        in_parts = self._has_plain_head and self.has_split_head
        if self.loss_copies > 1 and not in_parts and loss.requires_grad:
            loss.register_hook(lambda grad: grad / self.loss_copies)
        # Cloned: FSDP2 wants no view as a module's result.
        loss = loss if reduction == "sum" else loss.unflatten(0, labels_BS.shape).clone()
        return LossSums(loss, loss.new_zeros(()))

    def _logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        **inputs: Any,
    ) -> torch.Tensor:
        if positions_BS is not None and self._takes_positions:
            inputs["position_ids"] = positions_BS
        if self.training:
            valid_BS = None if document_ids_BS is None else document_ids_BS >= 0
            for counter in self._counters.values():
                counter.begin(valid_BS)
        if self.config.rope_limit is not None:
            forget_longest_forward(self._transformers_model)
        with inside_documents(document_ids_BS):
            return self._transformers_model(input_ids=tokens_BS, use_cache=False, return_dict=True, **inputs).logits

    def _next_logits(self, tokens: torch.Tensor, cache: TransformersCache) -> torch.Tensor:
        if self.config.rope_limit is not None:
            forget_longest_forward(self._transformers_model)
        inputs = cache.inputs(tokens)
        if not self._takes_positions:
            del inputs["position_ids"]
        if "logits_to_keep" in self._arguments:  # of a long prompt only the last one is wanted
            inputs["logits_to_keep"] = 1
        return self._transformers_model(**inputs).logits[:, -1]

    def build_cache(self, lengths: Sequence[int], max_len: int, device: torch.device) -> TransformersCache:
        """An empty cache for prompts of these lengths; `forward` fills it. It grows as needed, whatever `max_len`."""
        return TransformersCache(self._transformers_model.config, lengths, device)

    @torch.no_grad()
    def can_cache(self, device: torch.device) -> bool:
        """True if the model computes the same with its keys and values kept as without, also for rows of two lengths.

        The first call looks, on a few fixed tokens: models with a state instead of keys, or ones that take padding for
        text, do not. In evaluation mode.

        Collectives: those of four forwards, on the first call; every rank must call.
        """
        if "past_key_values" not in self._arguments or getattr(self._transformers_model, "_is_stateful", False):
            return False
        if self._can_cache is None:
            tokens = _plain_tokens(self._transformers_model.config, 2 * _PROBE_TOKENS + 1)
            rows = [tokens[:_PROBE_TOKENS], tokens[_PROBE_TOKENS:]]  # each with the token that comes next
            lengths = [len(row) - 1 for row in rows]
            cache = self.build_cache(lengths, max(map(len, rows)), device)
            prompts = [row[:-1] + [0] * (max(lengths) - len(row) + 1) for row in rows]
            # Through `self`, for FSDP gathers what lies outside of layers there.
            first_BV = self(torch.tensor(prompts, device=device), cache=cache)
            second_BV = self(torch.tensor([[row[-1] for row in rows]], device=device), cache=cache)
            whole = [self(torch.tensor([row], device=device))[0, -2:] for row in rows]
            expected = torch.stack(whole).float()
            found = torch.stack([first_BV, second_BV], dim=1).float()
            bound = 1e-4 if first_BV.dtype == self._head[0].weight.dtype == torch.float32 else 0.05
            self._can_cache = bool((found - expected).norm() <= bound * expected.norm())  # synchronization point, once
        return self._can_cache

    def head_forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """In place of the head's own forward: the logits, or with labels the loss without any logits."""
        assert self.head_project is not None
        if self._labels is None:
            return self.head_project(hidden_BSD)
        labels_BS, reduction = self._labels
        weight_VD = local_tensor(self._head[0].weight)
        hidden_TD = hidden_BSD.flatten(0, 1)
        return self.cross_entropy(
            hidden_TD, weight_VD, labels_BS.flatten(), self.loss_chunk_tokens, reduction=reduction
        )

    @torch.no_grad()
    def _probe(self, device: torch.device) -> None:
        """Look at how the model computes, which its class does not tell, with two forwards on a few fixed tokens.

        Its head is plain if the object that the head module returns comes out as the logits: nothing scales, caps or
        casts them. It keeps documents apart if tokens give the same logits alone and behind another document in a row.

        Collectives: those of two forwards; all ranks come here at the same forward, with the same tokens, and so to the
        same conclusions.
        """
        head, returned, was_training = self._head[0], [], self.training
        tokens_1S = torch.tensor([_plain_tokens(self._transformers_model.config, 2 * _PROBE_TOKENS)], device=device)
        alone_1S = tokens_1S[:, _PROBE_TOKENS:]
        ids_1S = (torch.arange(2 * _PROBE_TOKENS, device=device) // _PROBE_TOKENS).unsqueeze(0)
        self.eval()
        handle = head.register_forward_hook(lambda module, args, output: returned.append(output))
        try:
            expected = self._logits(alone_1S, restarting_positions(torch.zeros_like(alone_1S), None), None)
        finally:
            handle.remove()
        packed = self._logits(tokens_1S, restarting_positions(ids_1S, None), ids_1S)[:, _PROBE_TOKENS:]
        self.train(was_training)
        self._has_plain_head = self.head_project is not None and len(returned) == 1 and returned[0] is expected
        # Experts get other numbers of rows, and kernels other shapes, so the last bits may differ.
        bound = 1e-4 if expected.dtype == torch.float32 and head.weight.dtype == torch.float32 else 0.05
        error = (packed.float() - expected.float()).norm() / expected.float().norm()
        self._keeps_documents_apart = bool(error <= bound)  # synchronization point, once

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated layers, those of a vision tower included, in the model's order."""
        return list(self._layers)

    def all_layers(self) -> list[nn.Module]:
        """As `decoder_layers`: there are no pipeline stages."""
        return self.decoder_layers()

    def moe_layers(self) -> dict[str, Any]:
        """None: routers of transformers have no bias to balance."""
        return {}

    def expert_counters(self) -> dict[int, TransformersExpertCounter]:
        """What counts the rows of each MoE layer, by the layer's number; empty where experts cannot be counted."""
        return dict(self._counters)

    def moe_layer_numbers(self) -> list[int]:
        """The numbers of the layers with experts that are counted."""
        return list(self._counters)

    def why_not_counted(self) -> str:
        """Why there are no `counters`, for the log."""
        found = sorted({getattr(module, "num_experts", 0) for module in self._experts.values()})
        if found:
            return f"no expert load is logged, for its layers have {' or '.join(map(str, found))} experts"
        return "no expert load is logged, for its experts do not run through transformers' experts interface"

    def experts_in(self, layer: nn.Module) -> list[nn.Module]:
        """The modules of `layer` that hold routed experts."""
        inside = set(layer.modules())
        return [module for module in self._experts.values() if module in inside]

    def outer_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Embedding and head, for FSDP units of their own; those that share a parameter belong into the root's."""
        model = self._transformers_model
        holders = Counter(param for m in model.modules() for param in m._parameters.values() if param is not None)
        in_layers = {module for layer in self._layers for module in layer.modules()}

        def alone(module: nn.Module | None) -> list[nn.Module]:
            if module is None or module in in_layers or any(holders[param] > 1 for param in module.parameters()):
                return []
            return [module] if list(module.parameters()) else []

        # A head with a bias returns a view, which FSDP warns of: an operation in place on it would lose FSDP's hook.
        return alone(model.get_input_embeddings()), alone(self._head[0]) if self._is_linear_head else []

    def embedding_and_head(self) -> tuple[nn.Module | None, nn.Module | None]:
        inner = self._transformers_model
        return inner.get_input_embeddings(), inner.get_output_embeddings()

    def configure(
        self, attention_backend: AttentionBackend, moe: MoESection, loss_chunk_tokens: int, device: torch.device
    ) -> None:
        self.loss_chunk_tokens = loss_chunk_tokens
        if self.config.num_experts or any(is_routed(name) for name, _ in self.named_parameters()):
            told = "its expert load is logged" if self.counters else self.why_not_counted()
            logger.info(
                "moe: transformers' %s routes by itself: no balancing is added; %s", self.config.architecture, told
            )

    def split_experts(self) -> list[nn.Module]:
        """The modules of experts; their parameters must have one slice per expert."""
        problems = [
            f"{name}.{leaf} {tuple(param.shape)} is not one slice for each of {getattr(module, 'num_experts', 0)} "
            "experts."
            for name, module in self._experts.items()
            for leaf, param in module.named_parameters()
            if param.shape[:1] != (getattr(module, "num_experts", 0),)
        ]
        if not self._experts:
            problems = [f"{self.config.architecture} does not run its experts through transformers' experts interface."]
        problems = [f"{problem} Set expert_parallel_degree to 1." for problem in problems]
        raise_problems(ConfigError, "parallelism: experts cannot be split over ranks", problems)
        return list(self._experts.values())

    def set_dispatch(self, dispatch: Callable[..., Any], mesh: DeviceMesh) -> None:
        """The experts run on titanlite's grouped GEMM from then on."""
        for experts in self._experts.values():
            setattr(experts, DISPATCH, dispatch)
        for counter in self._counters.values():
            counter.first_expert = mesh.get_local_rank() * counter.tokens_per_expert.numel() // mesh.size()
        use_titanlite_experts(self._transformers_model)

    def apply_tensor_parallel(self, mesh: DeviceMesh) -> None:
        from titanlite.features.transformers.tensor_parallel import apply_transformers_tensor_parallel

        apply_transformers_tensor_parallel(self, mesh)

    def draws_random(self) -> bool:
        """True: what the class does is not known."""
        return True

    @property
    def checkpoint_format(self) -> Any:
        from titanlite.features.transformers.files import TransformersFormat

        return TransformersFormat(self)

    def expert_modules(self) -> dict[str, nn.Module]:
        """Modules that hold fused experts and compute them through transformers' experts interface, by name."""
        return dict(self._experts)


def _plain_tokens(config: Any, count: int) -> list[int]:
    """Token ids without a meaning of their own, such as that of a place for an image."""
    values = {**vars(config), **vars(config.get_text_config())}
    special = {
        value
        for name, value in values.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    plain = sorted({*range(config.get_text_config().vocab_size)} - special) or [0]
    return [plain[(2 * i + 1) * len(plain) // (2 * count)] for i in range(count)]  # others, if there are so many


def _repeated_layers(model: Any) -> list[nn.Module]:
    """Modules of the classes that transformers says must not be split, outermost only."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and type(module).__name__ in model._no_split_modules:
            found.append(module)
            inside.update(module.modules())
    return found


def _with_sizes(config: TransformersConfig, model: TransformersModel) -> TransformersConfig:
    """The configuration with the numbers of parameters, all and those that work for one token."""
    total = sum(param.numel() for param in model.parameters())
    routed = sum(param.numel() for name, param in model.named_parameters() if is_routed(name))
    # Where the configuration does not say how many are chosen, none is taken for idle.
    idle = routed * max(config.num_experts - config.top_k, 0) // config.num_experts if config.top_k else 0
    return replace(config, num_params=total, num_active_params=total - idle)
