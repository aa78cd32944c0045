"""Loss and gradients on images are those of transformers, from the processors that models are
published with.

Some need torchvision, and are skipped where it does not import: PyPI has it for the CUDA builds of
torch alone.
"""

import json
from functools import cache

import pytest
import torch
from files import read_json
from PIL import Image
from tiny_transformers import CLIP_SIZES, TEXT_SIZES, VISION_SIZES, word_tokenizer

from titanlite.checkpoint.hf_model import weights_of
from titanlite.features.images import ImageDataset, load_processor, read_image_rows
from titanlite.features.transformers.build import build_transformers
from titanlite.materialize import materialize
from titanlite.models.families.config_json import transformers_config

SEQ_LEN = 96
# The image's own place in a chat, and the tokens that a processor or a model knows.
TEMPLATE = (
    "{{% for m in messages %}}<{{{{ m['role'] }}}}> {{% if m['content'] is string %}}{{{{ "
    "m['content'] }}}} {{% else %}}{{% for c in m['content'] %}}{{% if c['type'] == 'image' "
    "%}}{image} {{% else %}}{{{{ c['text'] }}}} {{% endif %}}{{% endfor %}}{{% endif %}}<eos> {{% "
    "endfor %}}{{% if add_generation_prompt %}}<assistant> {{% endif %}}"
)


@cache
def find_torchvision():
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError):  # the latter where it does not go with torch
        return False
    return True


def tokenizer_of(*tokens, **named):
    return word_tokenizer(
        ["<user>", "<assistant>", *tokens], **({"extra_special_tokens": named} if named else {})
    )


def image_processor(name, **options):
    """Pillow's where torchvision does not import, as transformers chooses."""
    import transformers as hf

    return getattr(hf, f"{name}ImageProcessor" + ("" if find_torchvision() else "Pil"))(**options)


def qwen(version):
    import transformers as hf

    tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = tokenizer_of(*tokens)
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(tokens))
    sizes = {"size": {"shortest_edge": 8 * 8, "longest_edge": 16 * 24}, "patch_size": 4}
    videos = "Qwen3VLVideoProcessor" if version == "3" else "Qwen2VLVideoProcessor"
    processor = getattr(hf, "Qwen3VLProcessor" if version == "3" else "Qwen2_5_VLProcessor")(
        hf.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        getattr(hf, videos)(patch_size=4),
        chat_template=TEMPLATE.format(image="<|vision_start|> <|image_pad|> <|vision_end|>"),
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**TEXT_SIZES, "vocab_size": len(tokenizer), "head_dim": 8, "rope_parameters": rope}
    vision = dict(VISION_SIZES)
    vision |= (
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        if version == "3"
        else {"window_size": 16, "fullatt_block_indexes": [1]}
    )
    ids = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    kind = hf.Qwen3VLConfig if version == "3" else hf.Qwen2_5_VLConfig
    return kind(text_config=text, vision_config=vision, **ids), processor


def gemma3():
    import transformers as hf

    named = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = tokenizer_of(*named.values(), **named)
    processor = hf.Gemma3Processor(
        image_processor("Gemma3", size={"height": 16, "width": 16}),
        tokenizer,
        chat_template=TEMPLATE.format(image="<start_of_image>"),
        image_seq_length=4,
    )
    text = {**TEXT_SIZES, "vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 16}
    config = hf.Gemma3Config(
        text_config={**text, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=CLIP_SIZES | {"image_size": 16},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
    )
    return config, processor


def clip_and_llama(config, tokenizer, **options):
    return config(
        text_config={"model_type": "llama", **TEXT_SIZES, "vocab_size": len(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **CLIP_SIZES},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        **options,
    )


def llava_next():
    import transformers as hf

    tokenizer = tokenizer_of("<image>")
    processor = hf.LlavaNextProcessor(
        image_processor(
            "LlavaNext",
            size={"shortest_edge": 8},
            crop_size={"height": 8, "width": 8},
            image_grid_pinpoints=[[8, 16], [16, 16]],
        ),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    return clip_and_llama(
        hf.LlavaNextConfig, tokenizer, image_grid_pinpoints=[[8, 16], [16, 16]]
    ), processor


FAMILIES = {
    "qwen2_5_vl": lambda: qwen("2.5"),
    "qwen3_vl": lambda: qwen("3"),
    "gemma3": gemma3,
    "llava_next": llava_next,
}


def write_rows(folder):
    """Two chats, of one image and of two turns with one each; no two are of one size."""
    images = [Image.effect_noise(size, 90).convert("RGB") for size in ((20, 9), (10, 12), (16, 16))]
    for i, image in enumerate(images):
        image.save(folder / f"{i}.png")

    def ask(i):
        content = [{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "what is this"}]
        return {"role": "user", "content": content}

    def answer(text):
        return {"role": "assistant", "content": text}

    rows = [[ask(0), answer("red")], [ask(1), answer("w1 blue"), ask(2), answer("w2")]]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return path, [images[:1], images[1:]]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # of processors and towers; the comparison is the test
def test_loss_and_gradients_are_those_of_transformers(tmp_path, name):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if name in ("qwen2_5_vl", "qwen3_vl") and not find_torchvision():
        pytest.skip("its processor needs a torchvision that goes with this torch")
    config, processor = FAMILIES[name]()
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    path, images = write_rows(tmp_path)

    rows = read_image_rows(path)
    dataset = ImageDataset(rows, load_processor(str(tmp_path)), SEQ_LEN)
    batch = dataset.batch([0, 1])
    hf = read_json(tmp_path / "config.json")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).train()
    ours = build_transformers(transformers_config(hf, "config.json"))
    materialize(ours, "cpu", [weights_of(tmp_path, ours)])
    ours.train()
    loss = ours(batch.tokens, batch.labels, **batch.inputs).cross_entropy
    loss.backward()

    reference = AutoProcessor.from_pretrained(tmp_path)
    texts = [reference.apply_chat_template(row.chat.messages, tokenize=False) for row in rows]
    inputs = reference(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    length = inputs["input_ids"].shape[1]
    assert torch.equal(
        batch.tokens[:, :length][inputs["attention_mask"] == 1],
        inputs["input_ids"][inputs["attention_mask"] == 1],
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, 1:] = batch.labels[:, : length - 1]
    expected = theirs(**inputs, labels=labels).loss * (labels >= 0).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    gradients = {key: param.grad for key, param in theirs.named_parameters()}
    for key, param in ours.transformers_model.named_parameters():
        expected = gradients[key]
        assert (param.grad is None) == (expected is None), key
        if expected is not None:  # None: what this class does not use of its vision tower
            torch.testing.assert_close(
                param.grad, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item() + 1e-7
            )
