"""Chats with images: what is trained, and what is refused with its file and line."""

import copy
import json
import random
import resource
import struct
import subprocess
import warnings
import zlib

import numpy as np
import pytest
import torch
from files import read_table
from PIL import Image
from tiny_transformers import save_tiny_processor
from transformers.image_utils import load_image as transformers_load_image

from titanlite.base.errors import DataError
from titanlite.features.images import ImageDataset, load_image, load_processor, read_image_rows
from titanlite.features.tools.preview_data import get_shown_documents


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    save_tiny_processor(folder)
    return load_processor(str(folder))


def chat(image, answer="red", **changes):
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what is this"}]
    return {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    } | changes


def write(folder, *rows):
    for color in ("red", "blue"):
        Image.new("RGB", (10, 12), color).save(folder / f"{color}.png")
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:40])
    path = folder / "chats.jsonl"
    path.write_bytes(
        b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    )
    return path


def test_loss_is_on_answers_and_inputs_follow_the_rows(processor, tmp_path):
    rows = read_image_rows(write(tmp_path, chat("red.png"), b"", chat("blue.png", "blue w1")))
    dataset = ImageDataset(rows, processor, 20)
    batch = dataset.batch([1, 0])
    decode = processor.tokenizer.convert_ids_to_tokens
    shown = [decode([int(t) for t in labels if t >= 0]) for labels in batch.labels]
    assert shown == [["blue", "w1", "<eos>"], ["red", "<eos>"]]
    assert decode(batch.tokens[1].tolist()) == (
        ["<user>", *["<image>"] * 4, "what", "is", "this", "<eos>", "<assistant>", "red", "<eos>"]
        + ["<pad>"] * 8
    )
    assert batch.num_padding == 7 + 8 == (batch.tokens == processor.tokenizer.pad_token_id).sum()
    labelled = batch.labels[:, :-1] >= 0
    assert torch.equal(batch.labels[:, :-1][labelled], batch.tokens[:, 1:][labelled]), (
        "the token that follows"
    )
    assert batch.inputs["pixel_values"].shape == (2, 3, 8, 8)
    red, blue = (dataset.batch([i]).inputs["pixel_values"] for i in (0, 1))
    assert torch.equal(batch.inputs["pixel_values"], torch.cat([blue, red]))
    (shown,) = get_shown_documents(dataset, 0)
    assert shown.ids == batch.tokens[1, : shown.num_tokens].tolist()
    assert shown.num_trained == 2 and shown.place.endswith(f"row 1, with {tmp_path / 'red.png'}")
    assert dataset.get_train_indices(0, 0, 2).tolist() == [0, 0]
    assert dataset.get_validation_indices(0, 2).tolist() == [1, 1]


HEADS = (
    "{% for m in messages %}{{ '<assistant>' if m.role == 'assistant' else '<user>' }} {% if "
    "m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ '<image>' if c.type "
    "== 'image' else c.text }} {% endfor %}{% endif %}"
)
ASK = "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (HEADS + "<eos> <pad> " + ASK, "<eos>"),  # the model stops at the first of two
        (HEADS + " " + ASK, "<user>"),  # what the next message begins with
    ],
)
def test_answers_end_as_those_of_text_do(processor, tmp_path, template, end):
    changed = copy.copy(processor)
    changed.tokenizer = copy.copy(processor.tokenizer)
    changed.tokenizer.chat_template = template
    more = [
        {"role": "user", "content": "what"},
        {"role": "assistant", "content": [{"type": "text", "text": "w1 w2"}]},
    ]
    row = chat("red.png")
    dataset = ImageDataset(
        read_image_rows(write(tmp_path, row | {"messages": row["messages"] + more})),
        changed,
        30,
        validation_share=0,
    )
    _, ids, trained = dataset.get_document(0)
    shown = processor.tokenizer.convert_ids_to_tokens(
        [one for one, used in zip(ids, trained, strict=True) if used]
    )
    assert shown == ["red", end, "w1", "w2", end]


@pytest.mark.parametrize("case", read_table("rows")["bad_images"])
def test_a_bad_row_is_named(processor, tmp_path, case):
    path = write(tmp_path, chat("red.png"), case["row"].encode())
    with pytest.raises(DataError, match=rf"chats\.jsonl, row 2: {case['says']}"):
        ImageDataset(read_image_rows(path), processor, 20)


def test_rows_that_fill_a_batch_keep_their_images_and_no_label(processor, tmp_path):
    dataset = ImageDataset(read_image_rows(write(tmp_path, *[chat("red.png")] * 3)), processor, 20)
    batch = dataset.batch([0, 1])
    padded = batch.with_rows(1)
    assert torch.equal(padded.labels[0], batch.labels[0]) and (padded.labels[1] == -100).all()
    assert torch.equal(padded.tokens, batch.tokens) and padded.inputs.keys() == batch.inputs.keys()
    assert (batch.with_rows(0).labels == -100).all() and torch.equal(
        batch.with_rows(2).labels, batch.labels
    )


def save(folder, name, **options):
    def write_one(image):
        image.save(folder / name, **options)
        return folder / name

    return write_one


def test_what_is_no_picture_is_not_given_to_programs_that_could_show_it(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    postscript = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n9 9 moveto "
        b"showpage\n%%EOF\n"
    )
    others = {
        "x.png": postscript,
        "y.jpg": b"%PDF-1.4\n%%EOF\n",
        "z.gif": b"P6 9 9 255 " + bytes(243),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            DataError, match=rf"row: .*{name} does not decode: .* \(BMP, .*, WEBP\)"
        ):
            load_image("row", tmp_path / name)


def write_huge_png(path, side):
    """Some kilobytes that say they are `side` x `side` pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    size = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(2**20))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [8193, 60000])
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path, side):
    write_huge_png(tmp_path / "x.png", side)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        DataError, match=rf"row: .*x\.png does not decode: .*({side} x {side}|exceeds limit)"
    ):
        load_image("row", tmp_path / "x.png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB"


def test_color_spaces_and_animations_give_one_rgb_picture(tmp_path):
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    pictures = [save(tmp_path, "cmyk.jpg", quality=100)(red.convert("CMYK"))]
    for name in ("a.gif", "a.png", "a.webp", "a.tiff"):
        pictures.append(
            save(tmp_path, name, save_all=True, append_images=[blue], lossless=True)(red)
        )
    for path in pictures:
        assert np.abs(np.asarray(load_image("row", path), int) - [255, 0, 0]).max() <= 2, path.name


def test_a_photograph_stands_upright_as_at_inference(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees
    photograph = Image.new("RGB", (16, 8), "red")
    path = save(tmp_path, "x.png", exif=exif)(photograph)
    assert load_image("row", path).size == (8, 16) == transformers_load_image(str(path)).size


@pytest.mark.parametrize("ending", ["bmp", "gif", "jpg", "png", "tiff", "webp"])
def test_damaged_pictures_are_the_errors_of_their_rows(tmp_path, ending):
    """Cut off anywhere, and with any bytes changed, a picture decodes or is named."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    whole = save(tmp_path, f"x.{ending}")(Image.fromarray(noise)).read_bytes()
    draw = random.Random(0)
    refused = 0
    for i in range(60):
        content = bytearray(whole[: draw.randrange(len(whole))] if i % 2 else whole)
        for _ in range(0 if i % 2 else 8):
            content[draw.randrange(min(len(content), 200))] = draw.randrange(256)
        (tmp_path / "y").write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_image("row", tmp_path / "y")
        except DataError as error:
            refused += str(error).startswith(f"row: {tmp_path / 'y'} ")
    assert refused >= 25
