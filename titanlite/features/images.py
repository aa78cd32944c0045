"""Chats with images: JSON lines that the model's own processor renders and converts to tokens and
pixels.

docs/fine_tuning.md shows a row. Every row is one sequence with at least one image: a rank without
images would skip the vision tower, and the other ranks would wait for it. The loss is on the
assistant's messages, which are found as in text chats; later messages must not change their
rendering. Before training all rows are checked, and each image is decoded.

Shape suffixes: B sequences in a batch, L tokens per sequence.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from titanlite.base.errors import DataError, raise_problems
from titanlite.base.files import open_regular
from titanlite.base.hf_objects import load_from_folder
from titanlite.base.log import logger
from titanlite.base.text import describe_error, first_line
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import (
    SequenceDataset,
    ShuffledSequences,
    copy_to,
    get_num_held_out,
)
from titanlite.data.tokenizer import count_ids
from titanlite.features.sft.build import get_padding
from titanlite.features.sft.chat import ChatRenderer
from titanlite.features.sft.forms import Chat, Messages, parse_image_chat
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import LocalRows
from titanlite.ops import IGNORE_INDEX

# Pillow reads 40 more formats. One of them, PostScript, starts a program.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
# This is 200 MB decoded. Processors use several times that, and then shrink the image.
_MOST_PIXELS = 2**26


@dataclass(frozen=True)
class ImageBatch:
    """B sequences of L tokens, and further inputs of the model; it has the same fields as `Batch`.

    Attributes:
        tokens, labels: int64 (B, L), padded at the end; a label is the next token, or -100.
        inputs: further inputs of the model's forward, such as pixel_values and image_grid_thw; they
            hold the images of all sequences.
        positions, document_ids: always None: the model computes positions in images itself, and a
            sequence is one document.
        num_padding: number of padding tokens in all sequences.
    """

    tokens: Tensor
    labels: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    positions: None = None
    document_ids: None = None
    num_padding: int = 0

    def count_tokens(self) -> Tensor:
        return torch.tensor(self.tokens.numel() - self.num_padding, device=self.tokens.device)

    def to(self, device: torch.device | str) -> "ImageBatch":
        inputs = {name: copy_to(device, value) for name, value in self.inputs.items()}
        return replace(
            self,
            tokens=copy_to(device, self.tokens),
            labels=copy_to(device, self.labels),
            inputs=inputs,
        )

    def with_rows(self, count: int) -> "ImageBatch":
        """Return the batch with labels only in the first `count` rows. Images stay: every rank must
        run the vision tower.
        """
        kept = torch.arange(len(self.labels), device=self.labels.device) < count
        return replace(self, labels=self.labels.where(kept.unsqueeze(1), IGNORE_INDEX))


class ImageRow(NamedTuple):
    """One chat, its file and row, and its images in order."""

    place: str
    chat: Chat
    images: list[Path]


class ImageDataset(ShuffledSequences):
    """A `SequenceDataset` of the rows of a file, which are processed when they are needed.

    `processor` is a transformers processor whose tokenizer has a chat template; `date` is the
    current date in the template (empty: today).

    Raises:
        DataError: lists all rows with an image that does not decode, without a trained token, with
            more than `seq_len` tokens, or that the template refuses. Also raised if rows should be
            held out and there are fewer than two.
    """

    form = "messages"

    def __init__(
        self,
        rows: Sequence[ImageRow],
        processor: Any,
        seq_len: int,
        validation_share: float | None = None,
        *,
        date: str = "",
    ) -> None:
        if len(rows) < 2 and validation_share != 0:
            raise DataError(
                f"data: {len(rows)} row(s) with images, but 2 are needed, one to train on, one "
                "held out."
            )
        self.seq_len = seq_len
        self._rows = rows
        self._processor = processor
        self._renderer = ChatRenderer(processor.tokenizer, date=date)
        self._padding = get_padding(processor.tokenizer) or 0
        digest = sha256()
        problems = []
        for row in rows:
            try:
                digest.update(self._process(row)[0].numpy().tobytes())
            except DataError as error:
                problems.append(str(error))
        raise_problems(DataError, "data", problems)
        self.fingerprint = (
            f"{len(rows)} rows with images (checksum {digest.hexdigest()[:8]}), sequences of "
            f"{seq_len}"
        )
        self.num_validation_sequences = get_num_held_out(len(rows), validation_share)
        if validation_share is not None:
            self.fingerprint += f", {self.num_validation_sequences} held out"
        self.num_train_sequences = len(rows) - self.num_validation_sequences

    @property
    def vocab_size(self) -> int:
        return count_ids(self._processor.tokenizer)

    def batch(self, indices: Sequence[int] | np.ndarray) -> ImageBatch:
        parts = [self._process(self._rows[int(index)]) for index in indices]
        tokens = torch.full((len(parts), self.seq_len), self._padding)
        labels = torch.full((len(parts), self.seq_len), IGNORE_INDEX)
        inputs: dict[str, list[Tensor]] = {}
        for i, (ids, trained, extra) in enumerate(parts):
            length = len(ids)
            tokens[i, :length] = ids
            labels[i, : length - 1] = torch.where(trained, ids, IGNORE_INDEX)[1:]
            for name, value in extra.items():
                if value.shape == (1, length):  # a value per token, such as a mask of image tokens
                    value = torch.nn.functional.pad(value, (0, self.seq_len - length))
                inputs.setdefault(name, []).append(value)
        num_padding = tokens.numel() - sum(len(ids) for ids, _, _ in parts)
        return ImageBatch(
            tokens,
            labels,
            {n: _join(values) for n, values in inputs.items()},
            num_padding=num_padding,
        )

    def get_document(self, index: int) -> tuple[ImageRow, list[int], list[bool]]:
        """Return row `index`, its token ids without padding, and which of them are trained."""
        ids, trained, _ = self._process(self._rows[index])
        return self._rows[index], ids.tolist(), trained.tolist()

    def _process(self, row: ImageRow) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        images = [load_image(row.place, path) for path in row.images]
        try:
            turns, text = self._renderer.render(row.chat)
        except RowError as error:
            raise DataError(f"{row.place}: {error}") from None
        if turns[-1].text.startswith(text):
            text = turns[-1].text  # with the end of turn that the next message would add
        ids, extra = self._encode(row, len(row.chat.messages), text, images)
        trained = torch.zeros_like(ids, dtype=torch.bool)
        for i, turn in zip(row.chat.answers, turns, strict=True):
            before, _ = self._encode(row, i, turn.prompt, images)
            done, _ = self._encode(row, i + 1, turn.text, images)
            is_alike = torch.equal(done[: len(before)], before)
            if not (is_alike and torch.equal(ids[: len(done)], done)):
                raise DataError(
                    f"{row.place}: the chat template renders messages[{i}] differently in the "
                    "whole chat than after its prompt, so the model would learn text that "
                    "inference never produces. Split the row, or use another template."
                )
            trained[len(before) : len(done)] = True
        if not trained[1:].any():
            raise DataError(f"{row.place}: no token of the row is trained. Remove it.")
        if len(ids) > self.seq_len:
            raise DataError(
                f"{row.place}: {len(ids)} tokens with the images, but training.seq_len is "
                f"{self.seq_len}. Raise it, or shrink the images."
            )
        return ids, trained, extra

    def _encode(
        self, row: ImageRow, num_messages: int, text: str, images: list[Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tokens of `text`, the rendering of the first `num_messages` messages, and the
        further inputs of the model.
        """
        count = len(_list_images(row.chat.messages[:num_messages]))
        try:
            found = self._processor(text=[text], images=images[:count] or None, return_tensors="pt")
        except Exception as error:  # a tokenizer or image processor may raise any error
            raise DataError(
                f"{row.place}: the model's processor refuses it: {first_line(error)}"
            ) from error
        extra = {
            name: value
            for name, value in found.items()
            if name not in ("input_ids", "attention_mask")
        }
        return found["input_ids"][0], extra


def _join(values: list[Tensor]) -> Tensor:
    """Concatenate along the first dim. Smaller images are padded with zeros at the end, as
    processors do in a batch.
    """
    rows = [row for value in values for row in value]
    shape = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    joined = rows[0].new_zeros(len(rows), *shape)
    for place, row in zip(joined, rows, strict=True):
        place[tuple(map(slice, row.shape))] = row
    return joined


def load_processor(folder: str) -> Any:
    """Return the processor of the model in `folder`, with its chat template in its tokenizer, too.
    DataError: it is missing, or has no chat template.
    """
    try:
        processor = load_from_folder("AutoProcessor", folder)
    except Exception as error:  # transformers hardly checks these files
        raise DataError(
            f"data: cannot load the processor of {folder}: {describe_error(error)}."
        ) from error
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        raise DataError(
            f"data: {folder} has no processor for images, only {type(processor).__name__}."
        )
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if not template:
        raise DataError(f"data: the processor of {folder} has no chat template.")
    processor.tokenizer.chat_template = template
    return processor


def load_image(place: str, path: Path) -> Any:
    """Return the decoded image, RGB. DataError: the file is missing or does not decode; names
    `place` and the file.
    """
    from PIL import Image  # a processor for images needs it, too

    try:
        with open_regular(path) as file, warnings.catch_warnings():
            # our limit is lower
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                return _to_rgb(image)
    except Exception as error:  # on a damaged file a decoder may raise any error
        if isinstance(error, OSError) and error.filename is not None:
            raise DataError(
                f"{place}: cannot read {path}: {error.strerror}. Correct the path."
            ) from None
        raise DataError(
            f"{place}: {path} does not decode: {first_line(error)}. Replace it by an "
            f"image that does ({', '.join(_FORMATS)}), or remove the row."
        ) from error


def _to_rgb(image: Any) -> Any:
    """Return the decoded first frame in RGB, rotated according to its EXIF data as transformers
    does at inference.
    """
    from PIL import ImageOps

    if image.width * image.height > _MOST_PIXELS:
        raise ValueError(
            f"it has {image.width} x {image.height} pixels, more than {_MOST_PIXELS}; shrink it"
        )
    # Pillow would convert all values above 255 to white
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        raise ValueError(
            f"its pixels are numbers of more than 8 bits (mode {image.mode}); convert it"
        )
    return ImageOps.exif_transpose(image).convert("RGB")


def read_image_rows(path: Path) -> list[ImageRow]:
    """Return the chats of a .jsonl file. DataError: lists all rows that are not chats with images,
    by line.
    """
    rows = []
    problems = []
    for number, row in LocalRows((path,)).read(0, 0):
        place = f"{path}, row {number}"
        try:
            rows.append(_parse(place, row, path.parent))
        except RowError as error:
            problems.append(f"{place}: {error}")
    raise_problems(DataError, "data", problems)
    return rows


def _parse(place: str, row: dict[str, Any] | RowError, folder: Path) -> ImageRow:
    if isinstance(row, RowError):
        raise row
    if "messages" not in row:
        raise RowError("missing field", "no field 'messages'. Add it.")
    if given := [name for name in ("tools", "chat_template_kwargs") if row.get(name)]:
        text = f"has '{given[0]}', which chats with images do not take. Remove it."
        raise RowError("not read", text)
    chat = parse_image_chat(row)
    images = [folder / name for name in _list_images(chat.messages)]
    if not images:
        raise RowError("no image", "has no image. Rows of text belong in a dataset without images.")
    return ImageRow(place, chat, images)


def _list_images(messages: Messages) -> list[str]:
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [part["image"] for part in parts if part["type"] == "image"]


def build_images(job: JobConfig) -> tuple[Any, SequenceDataset]:
    """Build the tokenizer and the dataset of `data.dataset` = "images"."""
    data = job.data
    processor = load_processor(data.tokenizer_path or job.model.hf_assets_path)
    rows = read_image_rows(Path(data.path).expanduser())
    dataset = ImageDataset(
        rows, processor, job.training.seq_len, data.validation_share, date=data.chat_date
    )
    logger.info("data: %s", dataset.fingerprint)
    # An `ImageBatch` has the fields of a `Batch`, and `inputs`.
    return processor.tokenizer, cast(SequenceDataset, dataset)
