"""Tiny random models of transformers, made on the spot: one per architecture that the tests go
through.
"""

from functools import partial

import pytest
import torch

VOCAB_SIZE = 128
TEXT_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# of a tower whose results are as wide as the text model
VISION_SIZES = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
CLIP_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 32,
}

_ODD = VOCAB_SIZE + 1  # split over two ranks it does not go round
_SLIDING = ["sliding_attention", "full_attention"]
_FEW_EXPERTS = {
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def _make(kind, **changes):
    import transformers

    return getattr(transformers, f"{kind}Config")(**{**TEXT_SIZES, **changes})


def _qwen2_5_vl():
    from transformers import Qwen2_5_VLConfig

    text = {
        **TEXT_SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {**VISION_SIZES, "window_size": 16, "fullatt_block_indexes": [1]}
    ids = {
        "image_token_id": 10,
        "video_token_id": 11,
        "vision_start_token_id": 12,
        "vision_end_token_id": 13,
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, tie_word_embeddings=True)


TEXT_MODELS = {
    "qwen3": partial(_make, "Qwen3", head_dim=8, tie_word_embeddings=True),
    "gemma3_text": partial(_make, "Gemma3Text", head_dim=8, sliding_window=4, layer_types=_SLIDING),
    "llama": partial(_make, "Llama"),
    "mistral": partial(_make, "Mistral", vocab_size=_ODD, sliding_window=4),
    "phi": partial(_make, "Phi", vocab_size=_ODD, resid_pdrop=0.0, partial_rotary_factor=0.5),
    "phi3": partial(_make, "Phi3", resid_pdrop=0.0),
    "gpt_oss": partial(
        _make,
        "GptOss",
        hidden_size=64,  # MXFP4 has blocks of 32
        intermediate_size=64,
        head_dim=8,
        sliding_window=4,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": partial(_make, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": partial(
        _make,
        "DeepseekV3",
        **_FEW_EXPERTS,
        num_key_value_heads=4,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "glm4_moe": partial(_make, "Glm4Moe", **_FEW_EXPERTS, head_dim=8),
}
ALL_MODELS = {**TEXT_MODELS, "qwen2_5_vl": _qwen2_5_vl}


def save_tiny(name, folder):
    """A random model of architecture `name`, saved to `folder` as transformers does; returned in
    evaluation mode.

    Every tensor of the checkpoint, norms and biases too, is random, so that a mistaken default
    shows.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = ALL_MODELS[name]()
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(folder)
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def mapping_of(kind):
    """How transformers would read a Llama whose feed-forward is stored transposed, or whose gate
    and up are side by side, or whose q, k and v are fused.
    """
    from transformers import core_model_loading
    from transformers.core_model_loading import Chunk, Transpose, WeightConverter

    if kind == "side_by_side":
        targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
        return [WeightConverter("mlp.gate_up.weight", targets, [Chunk(dim=1)])]
    if kind != "transposed" and not hasattr(core_model_loading, "Split"):
        pytest.skip("needs transformers 5.23")
    if kind == "transposed":
        return [WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)])]
    from transformers.core_model_loading import Split

    targets = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    return [WeightConverter("self_attn.qkv.weight", targets, [Split(dim=0)])]


def store_as(kind, tensors):
    """Change the tensors of a Llama to the layout that `mapping_of(kind)` reads."""
    for key in [*tensors]:
        if kind == "transposed" and "down_proj.weight" in key:
            tensors[key] = tensors[key].T
        elif kind == "fused" and ".q_proj." in key:
            parts = [tensors.pop(key.replace(".q_", f".{part}_")) for part in "qkv"]
            tensors[key.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
        elif kind == "side_by_side" and ".gate_proj." in key:
            parts = [tensors.pop(key.replace(".gate_", f".{part}_")) for part in ("gate", "up")]
            tensors[key.replace(".gate_proj.", ".gate_up.")] = torch.cat(parts, dim=1)


_CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['content'] is string %}{{ m['content'] }} {% "
    "else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] "
    "}} {% endif %}{% endfor %}{% endif %}<eos> {% endfor %}{% if add_generation_prompt "
    "%}<assistant> {% endif %}"
)


def word_tokenizer(special, **options):
    """A tokenizer of words between spaces, with `special` tokens from the fourth id on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", *special]
    words = [*tokens, "what", "is", "this", "red", "blue", *(f"w{i}" for i in range(50))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="w0",
        additional_special_tokens=special,
        **options,
    )


def save_tiny_processor(folder):
    """A processor of LLaVA: 8 x 8 pixels in patches of 4, words for tokens. It needs Pillow and no
    torchvision.
    """
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = word_tokenizer(["<image>", "<user>", "<assistant>"])
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)


def save_tiny_llava(folder):
    """A random LLaVA with its processor."""
    from transformers import AutoModelForImageTextToText, CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(**CLIP_SIZES)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**TEXT_SIZES), image_token_id=3
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    save_tiny_processor(folder)


def shift_adapters(model, scale):
    """Move adapters, whose product begins at zero, by normal noise: always the same."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.add_(torch.randn_like(param) * scale)
