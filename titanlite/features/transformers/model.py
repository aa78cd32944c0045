"""Any model of transformers with the interface of the native decoder.

The class of transformers is built on meta, and its tensors keep their names; this module adds the
sources of its tensors, packed documents, and the loss.

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.base.errors import ConfigError, raise_problems
from titanlite.base.log import logger, warn_once
from titanlite.config.model import TransformersConfig
from titanlite.config.schema import MoESection
from titanlite.distributed.fsdp import forward_only
from titanlite.features.transformers import packing, probes
from titanlite.features.transformers.experts import (
    DISPATCH,
    TransformersExpertCounter,
    TransformersMoE,
    build_counters,
    find_experts,
    find_router,
    is_plain_swiglu,
    use_titanlite_experts,
)
from titanlite.materialize.sources import Alias, Source
from titanlite.models.decoder import LossSums
from titanlite.models.interface import Model
from titanlite.models.moe import is_routed
from titanlite.ops import IGNORE_INDEX, linear_cross_entropy, local_tensor
from titanlite.ops.attention import AttentionBackend

# Names in the package index that differ from the modules' names.
_DISTRIBUTIONS = {"fla": "flash-linear-attention"}


class TransformersModel(Model):
    """A model of transformers that takes batches and returns losses as `Decoder` does.

    Attributes:
        all_conversions: transformers' mapping from the keys of checkpoints to this model, including
            keys of old versions.
        own_conversions: the same without the keys of old versions.
        conversions: the entries used for loading; None before that. Saving reverts them.
        may_take_boundaries: True if the forward accepts further arguments, which may be the
            boundaries of documents.
        is_plain_head: True if the head is only a matmul with a weight of V rows. With labels, the
            loss is then computed without any logits.
        counters: counters of the rows that each layer's experts get; empty if they cannot be
            counted.
        expert_modules: modules with fused experts that transformers' experts interface computes, by
            name.
        sources: sources of all its tensors, by name; sources of adapters are added.
        state_shapes: global shape of every tensor of a checkpoint, by name, in transformers' layout
            in memory.
    """

    splits_inside_experts = False  # their dims need not be divisible
    reads_local_tensors = False

    def __init__(self, model: Any, config: TransformersConfig, sources: dict[str, Source]) -> None:
        super().__init__()
        from transformers.conversion_mapping import get_model_conversion_mapping

        # Names of tensors omit this attribute's name, see `materialize.plan.clean_name`.
        self._transformers_model = model
        self.sources = sources
        self.loss_chunk_tokens = 1024
        # All of these check class names, which sharding changes, so they are called now. Not
        # containers: the modules are registered below `model`.
        self._layers = tuple(probes.repeated_layers(model))
        self.expert_modules = find_experts(model)
        self._counters = build_counters(self.expert_modules)
        self.counters = nn.ModuleList(self._counters.values())
        self._routers = [find_router(model, *item) for item in self.expert_modules.items()]
        self.state_shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        self.all_conversions = get_model_conversion_mapping(model)
        self.own_conversions = get_model_conversion_mapping(model, add_legacy=False)
        self.conversions: list[Any] | None = None
        self.config = config
        parameters = inspect.signature(model.forward).parameters
        self._arguments = frozenset(parameters)
        self._takes_positions = "position_ids" in self._arguments
        self._cache_argument = next(
            (name for name in packing.CACHE_ARGUMENTS if name in self._arguments), ""
        )
        self.may_take_boundaries = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._can_cache: bool | None = None  # unknown before `can_cache`
        packing.register_document_masks()
        self._facts: probes.Facts | None = None  # unknown before the first forward
        # of a forward that computes the loss in the head
        self._labels: tuple[torch.Tensor, Any] | None = None
        self._hidden_BSD: torch.Tensor | None = None
        head = probes.find_head(model)
        self._head = [head]  # in a list, so that it is not registered a second time
        self.is_plain_head = isinstance(head, nn.Linear) and head.bias is None
        if self.is_plain_head:
            head.register_forward_pre_hook(self._keep_hidden)
            head.register_forward_hook(self._compute_loss)

    @property
    def head(self) -> Any:
        """The module that computes the logits; None if the class does not name one."""
        return self._head[0]

    @property
    def transformers_model(self) -> Any:
        return self._transformers_model

    def declare_sources(self) -> dict[str, Source]:
        return dict(self.sources)

    def ties(self) -> dict[str, str]:
        """Return, for each tied name, the name of the tensor that it refers to. The tensor's own
        name is not included.
        """
        return {name: s.target for name, s in self.sources.items() if isinstance(s, Alias)}

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        reduction: Any = "sum",
        cache: packing.TransformersCache | None = None,
        **inputs: Any,
    ) -> torch.Tensor | LossSums:
        """Return logits (B, S, V); with labels the `LossSums`; with a cache logits (B, V). The
        arguments are as in `Decoder.forward`.

        The first forward with labels or documents finds out how the model works: see `probes`.

        Args:
            inputs: further arguments of the model's forward, such as `pixel_values` and
                `image_grid_thw`. Their rows hold one document each, without `document_ids_BS`.

        Raises ConfigError: text for a model that is not causal.
        """
        if cache is not None:
            return self._next_logits(tokens_BS, cache)
        inputs.pop("starts_N1", None)  # for titanlite's own attention
        valid_BS = None if document_ids_BS is None else document_ids_BS >= 0
        if labels_BS is not None or valid_BS is not None:
            self._facts = self._facts or probes.find_facts(self, tokens_BS.device)
            probes.check_facts(self._facts, self, inputs)
        facts = self._facts or probes.Facts()
        if document_ids_BS is not None:
            positions_BS = packing.restarting_positions(document_ids_BS, positions_BS)
            if self.config.rope_limit is not None:
                # otherwise padding could be the longest document of the row
                positions_BS = positions_BS.where(document_ids_BS >= 0, 0)
            if facts.keeps_apart:
                inputs["with_boundaries"] = facts.takes_boundaries
            else:
                # Each row has one document (`check_documents_per_row`). Padding on the right
                # changes nothing before it. The class sets positions itself.
                document_ids_BS = None
                positions_BS = None if self.config.rope_limit is None else positions_BS
        if self.training:
            for counter in self._counters.values():
                counter.begin(valid_BS)
        if labels_BS is None:
            return self.compute_logits(tokens_BS, positions_BS, document_ids_BS, **inputs)
        if not facts.has_plain_head:
            logits_TV = self.compute_logits(
                tokens_BS, positions_BS, document_ids_BS, **inputs
            ).flatten(0, 1)
            # In float32, as everywhere. Labels are not shifted here: each one is already the next
            # token.
            logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
            labels_T = labels_BS.flatten()
            if isinstance(reduction, str):
                loss = F.cross_entropy(
                    logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction=reduction
                )
            else:
                loss = reduction.of_logits(logits_TV, labels_T)
        else:
            self._labels = (labels_BS, reduction)
            try:
                # see `_compute_loss`
                loss = self.compute_logits(tokens_BS, positions_BS, document_ids_BS, **inputs)
            finally:
                self._labels = self._hidden_BSD = None
        # Cloned, because FSDP2 does not accept a view as a module's result.
        if reduction != "sum":
            loss = loss.unflatten(0, labels_BS.shape).clone()
        return LossSums(loss, loss.new_zeros(()))

    def compute_logits(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        *,
        with_boundaries: bool = False,
        **inputs: Any,
    ) -> torch.Tensor:
        """Return the logits of the class's own forward, in which a token sees no other document of
        its row.

        Args:
            with_boundaries: also pass the starts of documents to the class, in one row (1, B * S),
                as its kernels require.

        Raises ConfigError: the class reports that it does not take these inputs.
        """
        shape = tokens_BS.shape
        if with_boundaries and document_ids_BS is not None:
            document_ids_BS, told = packing.boundaries(document_ids_BS)
            tokens_BS = tokens_BS.view(1, -1)
            inputs |= told
        if positions_BS is not None and self._takes_positions:
            inputs["position_ids"] = positions_BS.reshape(tokens_BS.shape)
        try:
            with packing.inside_documents(document_ids_BS):
                found = self._transformers_model(
                    input_ids=tokens_BS, use_cache=False, return_dict=True, **inputs
                )
        # errors of the class about its inputs; errors of torch have other types
        except (TypeError, ValueError) as error:
            text = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"model: {self.config.architecture} of transformers refuses a forward of "
                f"{list(tokens_BS.shape)} tokens: {text}. Set training.seq_len or the data so that "
                "it takes them, or use another model."
            ) from error
        found = found.logits
        # or the result is a loss
        return found.view(*shape, -1) if found.shape[:-1] == (1, shape.numel()) != shape else found

    def find_facts(self, device: torch.device) -> probes.Facts:
        """Run the probes, once. Collectives of a few forwards; every rank must call.

        Raises ConfigError: as `check_facts`. The same on all ranks.
        """
        if self._facts is None:
            tokens = probes.plain_tokens(self._transformers_model.config, probes.PROBE_TOKENS)
            tokens_1S = torch.tensor([tokens], device=device)
            # Through `self`, because FSDP gathers parameters outside of layers there.
            with forward_only(self):
                self(tokens_1S, None, None, torch.zeros_like(tokens_1S))
        assert self._facts is not None
        probes.check_facts(self._facts, self)
        return self._facts

    def _next_logits(self, tokens: torch.Tensor, cache: packing.TransformersCache) -> torch.Tensor:
        inputs = cache.inputs(tokens, self._cache_argument)
        if not self._takes_positions:
            del inputs["position_ids"]
        if "logits_to_keep" in self._arguments:  # only the last logits of a long prompt are needed
            inputs["logits_to_keep"] = 1
        return self._transformers_model(**inputs).logits[:, -1]

    def build_cache(
        self, lengths: Sequence[int], max_len: int, device: torch.device
    ) -> packing.TransformersCache:
        return packing.TransformersCache(self._transformers_model.config, lengths, device)

    def can_cache(self, device: torch.device) -> bool:
        """Return True if the model computes the same with cached keys and values, even for rows of
        two lengths.

        Raises ConfigError: as `find_facts`.

        Collectives of a few forwards, on the first call; every rank must call.
        """
        self.find_facts(device)
        if not self._cache_argument or self._transformers_model._is_stateful:
            return False
        if self._can_cache is None:
            self._can_cache = probes.is_same_with_cache(self, device)
        return self._can_cache

    def _keep_hidden(self, head: nn.Module, args: tuple[torch.Tensor]) -> Any:
        """Let the head project no token if there are labels."""
        if self._labels is None:
            return None
        (self._hidden_BSD,) = args
        return self._hidden_BSD[:0]

    def _compute_loss(self, head: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        """Replace the head's result by the loss if there are labels."""
        if self._labels is None or self._hidden_BSD is None:
            return logits
        labels_BS, reduction = self._labels
        weight_VD = local_tensor(head.weight)
        hidden_TD = self._hidden_BSD.flatten(0, 1)
        return linear_cross_entropy(
            hidden_TD, weight_VD, labels_BS.flatten(), self.loss_chunk_tokens, reduction=reduction
        )

    def decoder_layers(self) -> list[nn.Module]:
        return list(self._layers)

    def all_layers(self) -> list[nn.Module]:
        return self.decoder_layers()

    def expert_counters(self) -> dict[int, TransformersExpertCounter]:
        return dict(self._counters)

    def moe_layer_numbers(self) -> list[int]:
        return list(self._counters)

    def moe_layers(self) -> dict[int, TransformersMoE]:
        """Return the layers whose router has a bias for balancing, by number; empty if rows are not
        counted.
        """
        pairs = zip(self._counters, self._routers, strict=False)
        return {number: TransformersMoE(router) for number, router in pairs if router is not None}

    def experts_in(self, layer: nn.Module) -> list[nn.Module]:
        inside = set(layer.modules())
        return [module for module in self.expert_modules.values() if module in inside]

    def outer_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return embedding and head, which get their own FSDP units. A module that shares a
        parameter belongs to the root's unit.
        """
        model = self._transformers_model
        holders = probes.count_holders(model)
        in_layers = {module for layer in self._layers for module in layer.modules()}

        def alone(module: nn.Module | None) -> list[nn.Module]:
            if (
                module is None
                or module in in_layers
                or any(holders[param] > 1 for param in module.parameters())
            ):
                return []
            return [module] if list(module.parameters()) else []

        # A head with a bias returns a view, about which FSDP warns: an in-place operation on it
        # would lose FSDP's hook.
        return alone(probes.find_embedding(model)), alone(self.head) if self.is_plain_head else []

    def core_flops(self, seq_len: int) -> list[int]:
        """Return the FLOPs of attention, causal-halved, regardless of the layers' kind."""
        return [2 * self.config.attention_width * seq_len] * self.config.num_layers

    def embedding_and_head(self) -> tuple[nn.Module | None, nn.Module | None]:
        return probes.find_embedding(self._transformers_model), self.head

    def configure(
        self,
        attention_backend: AttentionBackend,
        moe: MoESection,
        loss_chunk_tokens: int,
        device: torch.device,
    ) -> None:
        self.loss_chunk_tokens = loss_chunk_tokens
        name = self.config.architecture
        is_cuda = device.type == "cuda"
        if is_cuda and (missing := probes.find_missing_kernels(self._transformers_model)):
            warn_once(
                f"model: the fast path of transformers' {name} on GPUs needs "
                f"{' and '.join(missing)}, which cannot be imported: plain operations are used, "
                "which are slower. Install it with pip: "
                f"{' '.join(_DISTRIBUTIONS.get(package, package) for package in missing)}"
            )
        if self.config.num_experts or any(
            is_routed(parameter) for parameter, _ in self.named_parameters()
        ):
            logger.info(
                "moe: transformers' %s routes by itself: %s; its expert load %s",
                name,
                "its own bias balances" if moe.expert_bias_update_rate else "no balancing is added",
                "is logged" if self.counters else "cannot be counted",
            )
        if moe.expert_bias_update_rate and not self.moe_layers():
            raise ConfigError(
                f"moe.expert_bias_update_rate = {moe.expert_bias_update_rate} moves the bias of "
                f"routers, but routers of transformers' {name} have no such buffer. Leave it out."
            )
        experts = self.expert_modules.values()
        if is_cuda and experts and all(map(is_plain_swiglu, experts)):
            use_titanlite_experts(self._transformers_model)

    def split_experts(self) -> list[nn.Module]:
        problems = [
            f"{name}.{leaf} {tuple(param.shape)} is not one slice for each of {count} experts. Set "
            "expert_parallel_degree to 1."
            for name, module in self.expert_modules.items()
            for count in [getattr(module, "num_experts", 0)]
            for leaf, param in module.named_parameters()
            if param.shape[:1] != (count,)
        ]
        if not self.expert_modules:
            name = self.config.architecture
            problems = [
                f"transformers' {name} has none that are stored together. Set "
                "expert_parallel_degree to 1."
            ]
        raise_problems(ConfigError, "parallelism: experts cannot be split over ranks", problems)
        return list(self.expert_modules.values())

    def set_dispatch(self, dispatch: Callable[..., Any]) -> None:
        for experts in self.expert_modules.values():
            setattr(experts, DISPATCH, dispatch)
        use_titanlite_experts(self._transformers_model)

    def draws_random(self) -> bool:
        return True  # unknown: the class decides

    @property
    def checkpoint_format(self) -> Any:
        from titanlite.features.transformers.checkpoint import TransformersFormat

        return TransformersFormat(self)
