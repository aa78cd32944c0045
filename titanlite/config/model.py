"""`ModelConfig`: the sizes and switches of the native decoder; `TransformersConfig`: a model that
transformers implements.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, Literal, cast


def setting(default: Any, doc: str = "", **metadata: Any) -> Any:
    """Return a dataclass field with its documentation; mutable defaults are copied per instance.

    `choices`: values of a string setting that may also name an extension; a setting without
    extensions has a Literal type. `calls`: parameter lists with which the extension
    (`base.extension`) may be called; None: no extension is allowed. `is_list`: a comma-separated
    string, also accepted as a list. `ge, gt, le, lt`: bounds of a number, by default 0 or more;
    `also`: one value accepted outside of them. `only_for`: the condition without which the setting,
    or the whole section, has no effect, such as 'checkpoint.enable = true' or "lora.rank"
    (`check.find_ignored`).
    """
    metadata["doc"] = doc
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def size(doc: str, default: Any = None, *, override: bool = True) -> Any:
    """Return a ModelConfig field with its documentation; `override=False` keeps it out of
    `[model.overrides]`.
    """
    return setting(default, doc, override=override)


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings, for longer sequences than in pretraining.

    `linear` (arXiv:2306.15595) divides all frequencies by `factor`. `llama3` and `yarn`
    (arXiv:2309.00071) divide low frequencies and keep high ones, with different transitions; `yarn`
    also scales queries and keys. `ROPE_FIELDS` lists the fields of each type.
    """

    rope_type: Literal["linear", "llama3", "yarn"] = size("Type of frequency scaling.", "linear")
    factor: float = size("How many times longer sequences may be than in pretraining.", 1.0)
    low_freq_factor: float = size("Wavelengths above original / this are divided (llama3).", 1.0)
    high_freq_factor: float = size("Wavelengths below original / this are kept (llama3).", 4.0)
    original_max_position_embeddings: int = size(
        "Longest sequence of pretraining (llama3, yarn).", 8192
    )
    beta_fast: float = size(
        "Frequencies with more turns in the original length are kept (yarn).", 32.0
    )
    beta_slow: float = size(
        "Frequencies with fewer turns in the original length are divided (yarn).", 1.0
    )
    attention_factor: float | None = size(
        "Factor on queries and keys (yarn). Unset: see mscale, or else 0.1 * ln(factor) + 1."
    )
    mscale: float | None = size(
        "With mscale_all_dim and without attention_factor, the factor on queries and keys is (0.1 "
        "* mscale * ln(factor) + 1) / (0.1 * mscale_all_dim * ln(factor) + 1) (yarn)."
    )
    mscale_all_dim: float | None = size("See mscale (yarn).")
    truncate: bool = size("Round the ends of the transition to whole frequencies (yarn).", True)

    @property
    def attention_scaling(self) -> float:
        """Factor on queries and keys that keeps attention sharp over longer sequences; 1 for types
        other than yarn.
        """
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.get_sharpness(self.mscale) / self.get_sharpness(self.mscale_all_dim)
        return self.get_sharpness(1.0)

    def get_sharpness(self, weight: float) -> float:
        """Return YaRN's factor on queries and keys: 1 + 0.1 * `weight` * ln(`factor`), or 1 for
        factors up to 1.
        """
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


# Fields of `RopeScaling` that a config.json may omit.
OPTIONAL_ROPE_FIELDS = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
# Fields of `RopeScaling` for each type.
ROPE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *OPTIONAL_ROPE_FIELDS),
}


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only transformer. Dense if `num_experts` is 0."""

    family: str = size(
        "Model family; sets the Hugging Face class and checkpoint keys.", "qwen3", override=False
    )
    vocab_size: int = size("Rows of the embedding.", 151936)
    hidden_size: int = size("Width of the residual stream (D).", 1024)
    num_layers: int = size("Decoder layers.", 28)
    num_heads: int = size("Query heads.", 16)
    num_kv_heads: int = size("Key and value heads; num_heads is a multiple of it.", 8)
    head_dim: int = size(
        "Width of one head; with latent attention, width of its rotated part.", 128
    )
    intermediate_size: int = size("Inner width of dense SwiGLU layers.", 3072)
    max_position_embeddings: int = size("Longest sequence the model is meant for.", 40960)
    rms_norm_eps: float = size("Epsilon of RMSNorm.", 1e-6)
    rope_theta: float = size("Base of the rotary frequencies.", 1000000.0)
    # set as its own table
    rope_scaling: RopeScaling | None = size("Rotary frequency scaling.", None, override=False)
    partial_rotary_factor: float = size(
        "Fraction of each head that rotary embeddings rotate.", 1.0, override=False
    )
    qk_norm: bool = size("RMSNorm on each query and key head.", True)
    qk_norm_of_all_heads: bool = size(
        "With qk_norm, one norm over all heads together.", False, override=False
    )
    attention_bias: bool = size("Bias on q, k, v (and o) projections.", False)
    attention_output_bias: bool = size(
        "With attention_bias, the o projection has a bias too.", True, override=False
    )
    kv_lora_rank: int = size("Width of the latent of keys and values (MLA, arXiv:2405.04434).", 0)
    q_lora_rank: int = size("Width of the latent of queries; 0: no latent.", 0)
    qk_nope_head_dim: int = size(
        "With latent attention, width of the part of a query or key head that is not rotated.", 0
    )
    v_head_dim: int = size("With latent attention, width of a value head.", 0)
    rope_interleave: bool = size(
        "With latent attention, rotate pairs of neighbours instead of the two halves.", False
    )
    tie_word_embeddings: bool = size("lm_head shares the embedding's weight.", False)
    # Ignored when models are compared: saved configurations have the tokenizer's padding token,
    # even if a run did not use it.
    pad_token_id: int | None = field(
        default=None,
        compare=False,
        metadata={
            "doc": "Row of the embedding without a gradient, as in transformers.",
            "override": False,
        },
    )
    initializer_range: float = size("Standard deviation of the initial weights.", 0.02)
    num_experts: int = size("Experts per MoE layer (E); 0 makes every layer dense.", 0)
    top_k: int = size("Experts per token.", 8)
    moe_intermediate_size: int = size("Inner width of one expert (I).", 768)
    num_dense_layers: int = size("Leading layers that stay dense in an MoE model.", 0)
    num_shared_experts: int = size("Experts that every token passes, fused into one SwiGLU.", 0)
    score_func: Literal["softmax", "sigmoid"] = size("Router score function.", "softmax")
    norm_topk_prob: bool = size("Normalize the top-k scores of a token to a sum of 1.", True)
    biased_experts: bool = size(
        "Router and experts have biases; a clamped SwiGLU in experts alternates gate and up rows.",
        False,
        override=False,
    )
    routed_scaling_factor: float = size("Factor on the routed experts' weights.", 1.0)
    num_expert_groups: int = size("Groups of the group-limited router; 1 means no groups.", 1)
    num_limited_groups: int = size("Groups a token may choose experts from.", 1)
    shared_expert_intermediate_size: int = size(
        "Inner width of a shared expert that is scaled by a gate of the token; 0: no such expert.",
        0,
    )
    sliding_window: int = size(
        "Tokens that a query attends to, including its own; 0: all tokens up to its own.", 0
    )
    window_pattern: str = size(
        "Repeated pattern of layers: s has the window, f full attention. Empty: all have it.",
        "",
    )
    has_scaled_windows: bool = size(
        "rope_scaling also applies to layers with a window.", True, override=False
    )
    attention_sinks: bool = size(
        "Each head has an attention sink: a learned score in its softmax.", False, override=False
    )
    attention_gate: bool = size(
        "Each head's result has a sigmoid gate, computed by q_proj.", False, override=False
    )
    norm_offset: float = size("Added to the weights of norms.", 0.0, override=False)
    full_attention_interval: int = size(
        "Every Nth layer has attention, the others have a gated delta net. 0: all have attention.",
        0,
    )
    linear_num_key_heads: int = size("Key heads of a gated delta net.", 0)
    linear_num_value_heads: int = size(
        "Value heads of a gated delta net, a multiple of its key heads.", 0
    )
    linear_key_head_dim: int = size("Width of a gated delta net's queries and keys.", 0)
    linear_value_head_dim: int = size("Width of a gated delta net's values.", 0)
    linear_conv_kernel_dim: int = size("Width of a gated delta net's convolution, in tokens.", 0)

    def has_window(self, layer: int) -> bool:
        """Return True if attention in this layer uses the sliding window."""
        kinds = self.window_pattern or "s"
        return self.sliding_window > 0 and kinds[layer % len(kinds)] == "s"

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim + self.qk_nope_head_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on the scores. It applies YaRN's scaling to whole heads here, because scaled
        queries and keys would only cover the rotated part.
        """
        scaling = self.rope_scaling
        scale = self.qk_head_dim**-0.5
        if (
            self.kv_lora_rank
            and scaling is not None
            and scaling.rope_type == "yarn"
            and scaling.mscale_all_dim
        ):
            scale *= scaling.get_sharpness(scaling.mscale_all_dim) ** 2
        return scale


@dataclass(frozen=True)
class TransformersConfig:
    """A model that transformers implements, with the facts that the rest of titanlite needs. Sizes
    are those of the text model.
    """

    family: str  # `model_type` in its config.json
    architecture: str
    hf: Mapping[str, Any]  # the content of its config.json
    vocab_size: int
    hidden_size: int
    num_layers: int
    # query heads * head width; if keys and values differ in width, their mean
    attention_width: int
    max_position_embeddings: int | None
    num_experts: int  # routed experts of the largest MoE layer; 0 for a dense model
    top_k: int
    tie_word_embeddings: bool
    takes_images: bool = False
    # longest sequence for which rotary frequencies do not depend on the other sequences of a
    # forward
    rope_limit: int | None = None
    num_dense_layers: int = 0  # always 0: the class decides which layers are MoE
    why: str = ""  # why it is not the native decoder, for the log


AnyModelConfig = ModelConfig | TransformersConfig


def overrides_of(
    name: str, own: Iterable[Field[Any]], *more: tuple[str, Any, Any], module: str = __name__
) -> type:
    """Return a section class with the fields `own`, in which None means "not overridden", and the
    fields `more`. It is pickled as `name` in `module`.
    """
    optional = [
        (each.name, cast(type, each.type) | None, field(default=None, metadata=each.metadata))
        for each in own
    ]
    return make_dataclass(name, [*optional, *more], namespace={"__module__": module})


def _sizes(config: type) -> list[Field[Any]]:
    return [each for each in fields(config) if each.metadata.get("override", True)]


# Every size of the architecture may be overridden; None means the value of the flavor or
# config.json.
RopeOverrides = overrides_of("RopeOverrides", _sizes(RopeScaling))
ModelOverrides = overrides_of(
    "ModelOverrides",
    _sizes(ModelConfig),
    (
        "rope_scaling",
        RopeOverrides,
        setting(RopeOverrides, "Rotary scaling, for longer sequences than in pretraining."),
    ),
)


@dataclass
class ModelSection:
    path: str = setting(
        "",
        "Folder or hub id of the Hugging Face model to train: its config.json, tokenizer and "
        "weights.",
    )
    init: Literal["auto", "pretrained", "random"] = setting(
        "auto",
        "'random': weights from scratch, even with a path; 'auto': pretrained with a path, random "
        "without.",
    )
    name: str = setting(
        "qwen3_moe",
        "Family of the flavor: one of titanlite/models/families, or yours (docs/extending.md).",
        calls=(),
    )
    flavor: str = setting(
        "",
        "Preset sizes of the family, such as '30B-A3B'. Empty: sizes come from path. A new model "
        "gets the tokenizer's vocabulary size if the preset's is smaller, or more than twice as "
        "large.",
    )
    hf_assets_path: str = setting(
        "",
        "Like path, but only for config.json and tokenizer; with a flavor, only for the tokenizer.",
    )
    implementation: Literal["auto", "native", "transformers"] = setting(
        "auto",
        "'native': titanlite's decoder; 'transformers': the class of transformers; 'auto': native "
        "if it supports the model.",
    )
    attention_backend: Literal["auto", "sdpa", "varlen"] = setting(
        "auto",
        "'auto': 'varlen' where it is supported, otherwise 'sdpa'. 'sdpa': "
        "scaled_dot_product_attention; packed documents on CUDA need a dense mask, and masked "
        "parts are computed too. 'varlen': FlashAttention on each document, on CUDA in bfloat16; "
        "on Hopper 'auto' takes version 3 where flash_attn_interface is installed.",
    )
    delta_backend: Literal["auto", "triton", "torch", "fla"] = setting(
        "auto",
        "Kernels of a gated delta net. 'auto': 'triton' (titanlite's) on Hopper in bfloat16, "
        "otherwise 'torch'. 'fla': the package flash-linear-attention, on CUDA.",
    )
    overrides: ModelOverrides = setting(  # type: ignore[valid-type]
        ModelOverrides, "Single sizes to change, for example num_layers = 4."
    )
