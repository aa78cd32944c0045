"""Examples as memory-mapped token ids, built once per machine, with counts and reasons of skipped
rows.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np

from titanlite.base.errors import DataError
from titanlite.base.files import write_atomic
from titanlite.base.log import logger
from titanlite.base.text import list_names
from titanlite.config.data import DataSection, get_fields
from titanlite.data.corpus import get_cache_folder, get_code_digest, load_or_build
from titanlite.data.tokenizer import HFTokenizer, serialize
from titanlite.features.sft.chat import ChatRenderer
from titanlite.features.sft.chat_template import set_date
from titanlite.features.sft.encode import TOKEN, ExampleEncoder, count_trained
from titanlite.features.sft.forms import FORM_FIELDS, Form, detect_form
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import Row, Rows, describe_place, open_rows, refuse_rows

CODE = Path(__file__).parent, Path(__file__).parents[2] / "data"  # turns rows into tokens
_BATCH_ROWS = 512  # texts and encodings of this many rows are in memory at once


@dataclass(frozen=True)
class Examples:
    """The examples of a set of rows, and what was left out of them.

    Attributes:
        form: format of the rows; None if no row could be used.
        names: files of the rows, as in `Rows.names`.
        tokens: (num_tokens,) of `TOKEN`, memory-mapped if they are read from the cache.
        offsets: (num_documents + 1,) int64, where documents begin.
        num_trained: (num_documents,) int64, trained tokens of each document that are labels.
        places: (num_examples,) int64, the row of each example; examples of one row are consecutive.
        num_rows: rows that were read.
        vocab_size: one more than the largest id among the tokens.
        stop_token_ids: tokens that answers end with.
        counts: remarks about chats, as in `ChatRenderer`.
        left_out: number of rows that were left out, by reason.
        firsts: the message about the first row of each reason.
        content: digest of rows, tokenizer, template and options, independent of the rows' paths.
    """

    form: Form | None
    names: Sequence[str]
    tokens: np.ndarray
    offsets: np.ndarray
    num_trained: np.ndarray
    places: np.ndarray
    num_rows: int
    vocab_size: int
    stop_token_ids: Sequence[int]
    counts: Mapping[str, int]
    left_out: Mapping[str, int]
    firsts: Mapping[str, str]
    content: str = ""

    @property
    def documents_per_example(self) -> int:
        return 2 if self.form == "preference" else 1

    def describe_place(self, example: int) -> str:
        return describe_place(self.names, int(self.places[example]))

    def get_documents(self, example: int) -> Iterator[slice]:
        """Yield the slice of `tokens` for each document of an example."""
        size = self.documents_per_example
        for document in range(example * size, (example + 1) * size):
            yield slice(int(self.offsets[document]), int(self.offsets[document + 1]))


def sum_counts(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Add up counts by name."""
    return sum(map(Counter, counts), Counter[str]())


def concatenate(parts: Sequence[Examples]) -> Examples:
    """Join the examples of consecutive rows, which one encoder has encoded in this order."""
    lengths = [np.diff(part.offsets) for part in parts]
    return replace(
        parts[-1],  # has the format, and the stop tokens of all parts
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64),
        num_trained=np.concatenate([part.num_trained for part in parts]),
        places=np.concatenate([part.places for part in parts]),
        num_rows=sum(part.num_rows for part in parts),
        vocab_size=max(part.vocab_size for part in parts),
        counts=sum_counts(part.counts for part in parts),
        left_out=sum_counts(part.left_out for part in parts),
        firsts=dict(chain.from_iterable(part.firsts.items() for part in reversed(parts))),
    )


def build_examples(data: DataSection, tokenizer: HFTokenizer) -> Examples:
    """Render and tokenize the rows of `data.path`, or map the files of an earlier call for the same
    rows and settings.

    Raises:
        DataError: a row cannot be used and `data.bad_rows` is 'error' (names all bad rows among the
            same 512); no row can be used; a file cannot be read; the tokenizer has no chat
            template; the cache cannot be written.
    """
    rows = open_rows(data)
    content = make_key(data, tokenizer, [rows.get_digest(get_cache_folder(data))])
    # File names are part of the key, because errors name them.
    key = sha256(json.dumps([content, rows.names, get_code_digest(*CODE)]).encode()).hexdigest()
    path = get_cache_folder(data) / "examples" / f"{key[:32]}.tokens"
    examples, elapsed_s = load_or_build(
        path, partial(_load, path), partial(_write, data, rows, tokenizer, path)
    )
    if elapsed_s:
        logger.info(
            "data: tokenized %d rows, %d tokens, in %.1f s",
            examples.num_rows,
            len(examples.tokens),
            elapsed_s,
        )
    return replace(examples, content=content)


def make_key(data: DataSection, tokenizer: HFTokenizer, rows: Sequence[object]) -> str:
    """Return a digest of `rows`, values that identify the rows, and of all settings that their
    tokens depend on.
    """
    settings = [
        6,
        metadata.version("transformers"),
        data.format,
        data.train_on,
        data.bad_rows,
        data.dropped_parts,
        *rows,
        tokenizer.special_tokens_map,
        set_date(tokenizer.chat_template, data.chat_date),  # only where the template shows a date
        get_fields(data),
        tokenizer.eos_token_id,
        serialize(tokenizer),
    ]
    return sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _write(data: DataSection, rows: Rows, tokenizer: HFTokenizer, path: Path) -> None:
    """Tokenize the rows and write the files of `path`."""
    encoder: ExampleEncoder | None = None
    parts: list[Examples] = []
    stream = rows.iterate_from()
    with write_atomic(path) as file:
        while batch := list(islice(stream, _BATCH_ROWS)):
            if encoder is None or encoder.form is None:
                encoder = make_encoder(data, tokenizer, batch)
            part = encode_rows(data, encoder, batch, rows.names)
            file.write(part.tokens.tobytes())
            parts.append(replace(part, tokens=part.tokens[:0]))
        if not any(len(part.places) for part in parts):
            raise _no_usable_row(rows.names, parts)
    whole = concatenate(parts)
    values = vars(whole)
    arrays: dict[str, Any] = {
        name: value for name, value in values.items() if isinstance(value, np.ndarray)
    }
    header = {name: value for name, value in values.items() if name not in arrays}
    # Written last: it makes the tokens valid.
    with write_atomic(path.with_suffix(".npz")) as file:
        np.savez(file, header=np.array(json.dumps(header)), **arrays)


def _load(path: Path) -> Examples | None:
    """Map the arrays; return None if a file is missing, damaged or cut off."""
    try:
        with path.with_suffix(".npz").open("rb") as file, np.load(file) as found:
            arrays = {name: found[name] for name in found.files}
        header = json.loads(str(arrays.pop("header")))
        arrays["tokens"] = np.memmap(path, TOKEN, "r", shape=(int(arrays["offsets"][-1]),))
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        return None
    return Examples(**arrays, **header)


def _no_usable_row(names: Sequence[str], parts: Sequence[Examples]) -> DataError:
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    if not parts:
        return DataError(f"data: {where} holds no row. Set data.path to examples.")
    whole = concatenate(parts)
    first = whole.firsts[next(iter(whole.left_out))]
    return DataError(
        f"data: {where}: none of {whole.num_rows} rows can be used; left out: "
        f"{describe_counts(whole.left_out)}. The first: {first}"
    )


def describe_counts(left_out: Mapping[str, int]) -> str:
    """Describe the rows and examples that were left out."""
    return "; ".join(f"{what}: {count}" for what, count in left_out.items()) or "nothing"


def encode_rows(
    data: DataSection, encoder: ExampleEncoder, batch: Sequence[Row], names: Sequence[str]
) -> Examples:
    """Render and tokenize rows.

    Raises:
        DataError: rows cannot be used, and `data.bad_rows` is 'error'; names all of them.
    """
    places: list[int] = []
    documents: list[np.ndarray] = []
    problems: list[tuple[int, str]] = []
    left_out = Counter[str]()
    firsts: dict[str, str] = {}
    encoded = encoder.encode([row.content for row in batch])
    for row, result in zip(batch, encoded, strict=True):
        if isinstance(result, RowError):
            problems.append((row.place, str(result)))
            what = f"rows skipped ({result.reason})"
            left_out[what] += 1
            firsts.setdefault(what, f"{describe_place(names, row.place)}: {result}")
        else:
            places += [row.place] * len(result)
            documents += chain.from_iterable(result)
    if problems and data.bad_rows == "error":
        remedy = 'To leave such rows out and count them, set data.bad_rows = "skip".'
        refuse_rows(names, problems, remedy)
    tokens = np.concatenate([np.empty(0, TOKEN), *documents])
    return Examples(
        form=encoder.form,
        names=names,
        tokens=tokens,
        offsets=np.cumsum([0, *map(len, documents)], dtype=np.int64),
        num_trained=np.array([*map(count_trained, documents)], dtype=np.int64),
        places=np.array(places, dtype=np.int64),
        num_rows=len(batch),
        vocab_size=int(tokens["id"].max(initial=0)) + 1,
        stop_token_ids=sorted(encoder.stop_token_ids),
        counts=encoder.renderer.take_counts(),
        left_out=left_out,
        firsts=firsts,
    )


def make_encoder(data: DataSection, tokenizer: HFTokenizer, batch: list[Row]) -> ExampleEncoder:
    """Build the encoder for the configured format, or else for the format of the first row of
    `batch` whose format is known.

    Raises:
        DataError: `data.train_on` is 'all' for preference pairs, or `data.text_field` is set and
            the rows are not text.
    """
    form: Form | None = None if data.format == "auto" else cast(Form, data.format)
    fields = get_fields(data)
    if form is None:
        own = detect_form(fields)  # columns in `data.fields` take precedence
        forms: Iterator[Form | None] = (
            own or detect_form(row.content) for row in batch if isinstance(row.content, dict)
        )
        form = next(filter(None, forms), None)
    known = fields if form is None else FORM_FIELDS[form]
    if unused := [f"{name} = {column}" for name, column in fields.items() if name not in known]:
        raise DataError(
            f"data.fields: {list_names(unused)} cannot be used in rows of format '{form}', which "
            f"take {', '.join(known)}. Remove what is not meant, or set data.format."
        )
    if form == "preference" and data.train_on == "all":
        raise DataError(
            'data: train_on = "all" cannot be combined with preference pairs: the prompt is the '
            'same on both sides. Set data.train_on = "assistant".'
        )
    renderer = ChatRenderer(
        tokenizer,
        train_all=data.train_on == "all",
        warn_of_dropped=data.dropped_parts == "warn",
        date=data.chat_date,
    )
    return ExampleEncoder(renderer, form)
