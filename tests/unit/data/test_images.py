"""Chats with images: what is trained, and what is refused with its file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_transformers import save_tiny_processor

from titanlite.data.images import ImageDataset, load_processor, read_image_rows
from titanlite.errors import DataError


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processor")
    save_tiny_processor(folder)
    return load_processor(str(folder))


def chat(image: str, answer: str = "red", **changes: Any) -> dict[str, Any]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what is this"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]} | changes


def write(folder: Path, *rows: Any) -> Path:
    for color in ("red", "blue"):
        Image.new("RGB", (10, 12), color).save(folder / f"{color}.png")
    (folder / "broken.png").write_bytes((folder / "red.png").read_bytes()[:40])
    (folder / "text.png").write_text("no image")
    path = folder / "chats.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def test_loss_is_on_answers_and_inputs_follow_the_rows(processor: Any, tmp_path: Path) -> None:
    rows = read_image_rows(write(tmp_path, chat("red.png"), b"", chat("blue.png", "blue w1")))
    dataset = ImageDataset(rows, processor, 20)
    batch = dataset.batch([1, 0])
    decode = processor.tokenizer.convert_ids_to_tokens
    shown = [decode([int(t) for t in labels if t >= 0]) for labels in batch.labels]
    assert shown == [["blue", "w1", "<eos>"], ["red", "<eos>"]]
    assert decode(batch.tokens[1].tolist()) == (
        ["<user>", *["<image>"] * 4, "what", "is", "this", "<eos>", "<assistant>", "red", "<eos>"] + ["<pad>"] * 8
    )
    assert batch.num_padding == 7 + 8 == (batch.tokens == processor.tokenizer.pad_token_id).sum()
    labelled = batch.labels[:, :-1] >= 0
    assert torch.equal(batch.labels[:, :-1][labelled], batch.tokens[:, 1:][labelled]), "the token that follows"
    assert batch.inputs["pixel_values"].shape == (2, 3, 8, 8)
    red, blue = (dataset.batch([i]).inputs["pixel_values"] for i in (0, 1))
    assert torch.equal(batch.inputs["pixel_values"], torch.cat([blue, red]))
    assert dataset.get_train_indices(0, 0, 2).tolist() == [0, 0]
    assert dataset.get_validation_indices(0, 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", r"chats\.jsonl, line 2: is no JSON"),
        (b'{"messages": "\xff"}', r"chats\.jsonl, line 2: is not UTF-8 \(byte 14\)"),
        ({"text": "a"}, r"line 2: has no list of messages"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]\.content is neither text nor a list"),
        ({"messages": ["hello"]}, r"line 2: messages\[0\] is not an object"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, r"line 2: messages\[0\]\.content\[0\]"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"line 2: has no image"),
        (chat("nowhere.png"), r"line 2: there is no image .*nowhere\.png"),
        (chat("text.png"), r"line 2: .*text\.png is no image that can be decoded"),
        (chat("broken.png"), r"line 2: .*broken\.png (does not decode|is no image)"),
        (chat("red.png", "w1 " * 30), r"line 2: 41 tokens with the images, but training\.seq_len is 20"),
        (chat("red.png") | {"messages": chat("red.png")["messages"][:1]}, r"line 2: there is no message of the assis"),
    ],
)
def test_a_bad_row_is_named(processor: Any, tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageDataset(read_image_rows(write(tmp_path, chat("red.png"), bad)), processor, 20)


def test_all_bad_rows_come_at_once(processor: Any, tmp_path: Path) -> None:
    path = write(tmp_path, chat("red.png"), chat("text.png"), chat("nowhere.png"))
    with pytest.raises(DataError, match=r"2 problems:(.|\n)*line 2:(.|\n)*line 3:"):
        ImageDataset(read_image_rows(path), processor, 20)


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot load the processor"):
        load_processor(str(tmp_path))


def test_rows_that_fill_a_batch_keep_their_images_and_no_label(processor: Any, tmp_path: Path) -> None:
    dataset = ImageDataset(read_image_rows(write(tmp_path, *[chat("red.png")] * 3)), processor, 20)
    batch = dataset.batch([0, 1])
    padded = batch.with_rows(1)
    assert torch.equal(padded.labels[0], batch.labels[0]) and (padded.labels[1] == -100).all()
    assert torch.equal(padded.tokens, batch.tokens) and padded.inputs.keys() == batch.inputs.keys()
    assert (batch.with_rows(0).labels == -100).all() and torch.equal(batch.with_rows(2).labels, batch.labels)
