"""The native decoder: one config-driven transformer for Qwen, Llama 3, GLM-4.5, DeepSeek-V3 and
similar models.

This is single-device code: parallelism is applied from outside (`titanlite.distributed`). Modules
and parameters have the names of the Hugging Face models, so that checkpoint keys need no table.

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from titanlite.base.log import logger
from titanlite.config.model import ModelConfig
from titanlite.config.schema import MoESection
from titanlite.materialize.layout import is_remote
from titanlite.materialize.sources import Alias, Source
from titanlite.models.attention import SelfAttention
from titanlite.models.families import layers_of
from titanlite.models.families.parts import Layer
from titanlite.models.interface import Cache, Context, LayerCache, Model, Part
from titanlite.models.layers import Embedding, OutputHead, ResidualNorm, RMSNorm, RotaryEmbedding
from titanlite.models.moe import ExpertCounter, Experts, MoE, TokenDispatcher
from titanlite.ops.attention import AttentionBackend, build_attention_mask
from titanlite.ops.matmul import resolve_backend


class LossSums(NamedTuple):
    """Losses summed over this rank's tokens, float32; divide by the global number of valid
    tokens.
    """

    # sum over the tokens with a label; with `reduction` "none" the value of each token, (B, S)
    cross_entropy: torch.Tensor
    aux: torch.Tensor  # sum of the MoE layers' balance losses; zero without any


class DecoderLayer(nn.Module):
    """The family's residual blocks; each is x + part(norm(x)) or x + norm(part(x))."""

    def __init__(self, config: ModelConfig, layer: Layer) -> None:
        super().__init__()
        self.blocks = layer
        for block in layer:
            norm = RMSNorm if block.is_norm_last else ResidualNorm
            sizes = config.hidden_size, config.rms_norm_eps, config.norm_offset
            setattr(self, block.norm, norm(*sizes))
            setattr(self, block.name, block.part.build(config))

    def forward(
        self, x_BSD: torch.Tensor, context: Context, cache: LayerCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states and the sum of the parts' balance losses, or None."""
        aux_loss = out_BSD = None
        for block in self.blocks:
            norm, part = getattr(self, block.norm), getattr(self, block.name)
            if block.is_norm_last:
                x_BSD = x_BSD if out_BSD is None else x_BSD + out_BSD
                out = part(x_BSD, context, cache)
            else:
                x_BSD, normed_BSD = norm(x_BSD, out_BSD)
                out = part(normed_BSD, context, cache)
            out_BSD, aux = out if isinstance(out, tuple) else (out, None)
            if block.is_norm_last:
                out_BSD = norm(out_BSD)
            if aux is not None:
                aux_loss = aux if aux_loss is None else aux_loss + aux
        return x_BSD if out_BSD is None else x_BSD + out_BSD, aux_loss


class Backbone(nn.Module):
    """Embedding, layers and final norm (Hugging Face's `model`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            std=config.initializer_range,
            padding_idx=config.pad_token_id,
        )
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in layers_of(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.rotary_emb = RotaryEmbedding(config)
        self.window_rotary_emb = (
            None
            if config.has_scaled_windows
            else RotaryEmbedding(replace(config, rope_scaling=None))
        )
        self.attention_backend: AttentionBackend = "sdpa"
        self.has_sinks = config.attention_sinks
        self.windows = {part.window for part in self.modules() if isinstance(part, SelfAttention)}

    def forward(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        cache: Cache | None = None,
        starts_N1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the final hidden states (B, S, D) and the sum of the layers' balance losses, or
        None.
        """
        if positions_BS is None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(
                tokens_BS
            )
        x_BSD = self.embed_tokens(tokens_BS)
        masking = document_ids_BS, self.attention_backend, x_BSD.dtype, starts_N1
        by_window = {
            window: (
                self._table_of(window)(positions_BS, x_BSD.dtype),
                build_attention_mask(*masking, window, tokens_BS, has_sinks=self.has_sinks),
            )
            for window in self.windows
        }
        valid_BS = None if document_ids_BS is None else document_ids_BS >= 0
        context = Context(by_window, document_ids_BS, valid_BS)
        aux_losses = []
        layer_caches = [None] * len(self.layers) if cache is None else cache.layers
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            x_BSD, aux_loss = layer(x_BSD, context, layer_cache)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
        x_BSD = self.norm(x_BSD)
        return x_BSD, torch.stack(aux_losses).sum() if aux_losses else None

    def _table_of(self, window: int) -> RotaryEmbedding:
        own = self.window_rotary_emb if window else None
        return self.rotary_emb if own is None else own


class Decoder(Model):
    """Decoder-only language model with Hugging Face's parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = OutputHead(
            config.hidden_size,
            config.vocab_size,
            std=config.initializer_range,
            tied=config.tie_word_embeddings,
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def declare_sources(self) -> dict[str, Source]:
        return (
            {"lm_head.weight": Alias("model.embed_tokens.weight")}
            if self.config.tie_word_embeddings
            else {}
        )

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        reduction: Literal["sum", "none"] | Callable[..., torch.Tensor] = "sum",
        cache: Cache | None = None,
        starts_N1: torch.Tensor | None = None,
    ) -> torch.Tensor | LossSums:
        """Return logits (B, S, V); with labels, the `LossSums`; with a cache, the logits (B, V) of
        each row's next token.

        Args:
            tokens_BS: int64 token ids.
            labels_BS: int64 target of each position (the next token), or -100 for positions without
                a loss.
            positions_BS: int64 positions, which restart in each packed document; None: 0, 1, 2, ...
            document_ids_BS: int64 document of each token in packed rows, -1 for padding; None: one
                document per row.
            reduction: "none" returns the cross entropy of every token, (B, S), 0 for tokens without
                a label. A function replaces the cross entropy of every token: see
                `linear_cross_entropy`.
            cache: for generation, with tokens as the only other argument and without gradients. The
                first call takes the prompts, (B, S), padded on the right. Each later call takes one
                new token per row, side by side in one sequence, (1, B), which may be padded.
            starts_N1: result of `find_starts(document_ids_BS)` on the host; if it is missing,
                varlen waits for the device.
        """
        if cache is not None:
            hidden_BSD, _ = self.model(tokens_BS, cache.positions(tokens_BS), None, cache)
            logits_BV = self.lm_head(hidden_BSD, select=cache.newest)
            cache.advance()
            return logits_BV
        hidden_BSD, aux = self.model(tokens_BS, positions_BS, document_ids_BS, starts_N1=starts_N1)
        out = self.lm_head(hidden_BSD, labels_BS, reduction)
        if labels_BS is None:
            return out
        return LossSums(out, out.new_zeros(()) if aux is None else aux)

    def configure(
        self,
        attention_backend: AttentionBackend,
        moe: MoESection,
        loss_chunk_tokens: int,
        device: torch.device,
    ) -> None:
        self.model.attention_backend = attention_backend
        self.lm_head.chunk_tokens = loss_chunk_tokens
        for layer in self.moe_layers().values():
            layer.experts.grouped_gemm_backend = moe.grouped_gemm
        if self.moe_layers():
            backend = resolve_backend(moe.grouped_gemm, device, torch.float32)
            logger.info("moe: grouped GEMM backend: %s", backend)

    def set_loss_coeffs(self, *, aux: float, z: float) -> None:
        for layer in self.moe_layers().values():
            layer.gate.aux_loss_coeff = aux
            layer.gate.z_loss_coeff = z

    def float32_parameters(self) -> set[nn.Parameter]:
        parts = (module for module in self.modules() if isinstance(module, Part))
        return {getattr(part, name) for part in parts for name in part.float32}

    def all_layers(self) -> list[nn.Module]:
        return list(self.model.layers)

    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    def experts_in(self, layer: nn.Module) -> list[nn.Module]:
        return [module for module in layer.modules() if isinstance(module, Experts)]

    def outer_units(self) -> tuple[list[nn.Module], list[nn.Module]]:
        if self.config.tie_word_embeddings:
            return [], []
        before = [self.model.embed_tokens]
        after = [self.model.norm, self.lm_head]
        # Modules of other pipeline stages are not called here.
        return [m for m in before if not is_remote(m.weight)], [
            m for m in after if not is_remote(m.weight)
        ]

    def embedding_and_head(self) -> tuple[nn.Module, nn.Module]:
        return self.model.embed_tokens, self.lm_head

    def _find_moe(self) -> dict[int, MoE]:
        return {
            i: part
            for i, layer in enumerate(self.model.layers)
            for part in layer.children()
            if isinstance(part, MoE)
        }

    def moe_layers(self) -> dict[int, MoE]:
        layers = self.model.layers
        return {
            i: moe for i, moe in self._find_moe().items() if isinstance(layers[i], DecoderLayer)
        }

    def moe_layer_numbers(self) -> list[int]:
        return [*self._find_moe()]

    def split_experts(self) -> list[nn.Module]:
        return [moe.experts for moe in self.moe_layers().values()]

    def set_dispatch(self, dispatch: TokenDispatcher) -> None:
        for moe in self.moe_layers().values():
            moe.dispatch = dispatch

    def draws_random(self) -> bool:
        return any(getattr(module, "dropout", 0.0) > 0.0 for module in self.modules())

    def core_flops(self, seq_len: int) -> list[int]:
        return [
            sum(block.part.sizes(self.config).core_flops(seq_len) for block in layer)
            for layer in layers_of(self.config)
        ]

    def expert_counters(self) -> dict[int, ExpertCounter]:
        return {i: moe.gate for i, moe in self.moe_layers().items()}


def build_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the model on the meta device, without memory and values; parameters have `dtype`,
    buffers their declared dtypes.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return Decoder(config)
    finally:
        torch.set_default_dtype(previous)
