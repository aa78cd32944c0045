"""Examples as memory-mapped token ids, made once per machine, with counts and reasons of all that
was skipped.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from titanlite.base.errors import DataError, raise_problems
from titanlite.base.files import write_atomic
from titanlite.base.log import logger
from titanlite.base.text import list_names
from titanlite.config.data import DataSection, get_fields
from titanlite.data.corpus import get_cache_folder, get_code_digest, load_or_build
from titanlite.data.tokenizer import count_ids, serialize
from titanlite.features.sft.chat import ChatRenderer
from titanlite.features.sft.chat_template import set_date
from titanlite.features.sft.encode import Document, ExampleEncoder
from titanlite.features.sft.forms import FORM_FIELDS, Form, detect_form
from titanlite.features.sft.readers import RowError
from titanlite.features.sft.rows import Row, Rows, describe_place, merge_row_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CODE = Path(__file__).parent, Path(__file__).parents[2] / "data"  # turns rows into tokens
_BATCH_ROWS = 512  # texts and encodings of this many rows are in memory at once
_FILE_SHIFT = 40  # a place is file << 40 | number
_SKIP_REMEDY = 'To leave such rows out and count them, set data.bad_rows = "skip".'


@dataclass(frozen=True)
class Skipped:
    """Rows left out for one reason: how many, and the message about the first."""

    count: int
    first: str


@dataclass(frozen=True)
class ExampleHeader:
    """Header of a file of tokenized examples, kept in a JSON file next to it.

    `documents_per_example` is 2 for preference pairs. `vocab_size` is one more than the largest id
    among the tokens. `counts` are as in `ChatRenderer`; `stop_token_ids` the tokens that answers
    end with.
    """

    form: Form
    dtype: str
    documents_per_example: int
    num_examples: int
    num_tokens: int
    vocab_size: int
    num_rows: int
    stop_token_ids: tuple[int, ...]
    names: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizedExamples:
    """All examples of a set of rows; the arrays are read-only and memory-mapped.

    Attributes:
        tokens: (num_tokens,) uint16, or uint32 for a vocabulary above 65536.
        flags: (num_tokens,) uint8, the bits TRAINED and ANSWER of `titanlite.features.sft.chat`.
        offsets: (num_documents + 1,) int64, where documents begin.
        num_trained: (num_documents,) int64, trained tokens of each document that are labels.
        places: (num_examples,) int64, the row of each example; examples of one row follow each
            other.
        content: digest of rows, tokenizer, template and options, wherever the rows are.
    """

    tokens: np.ndarray
    flags: np.ndarray
    offsets: np.ndarray
    num_trained: np.ndarray
    places: np.ndarray
    header: ExampleHeader
    content: str

    def describe_place(self, example: int) -> str:
        place = int(self.places[example])
        return describe_place(
            self.header.names, place >> _FILE_SHIFT, place & (1 << _FILE_SHIFT) - 1
        )

    def get_documents(self, example: int) -> Iterator[slice]:
        """Yield the place in `tokens` and `flags` of each document of an example."""
        size = self.header.documents_per_example
        for document in range(example * size, (example + 1) * size):
            yield slice(int(self.offsets[document]), int(self.offsets[document + 1]))


def build_examples(
    data: DataSection, rows: Rows, tokenizer: "PreTrainedTokenizerFast"
) -> TokenizedExamples:
    """Render and tokenize `rows`, or map the files made by an earlier call for the same rows and
    settings.

    Raises:
        DataError: a row cannot be used and `data.bad_rows` is 'error' (all bad rows among the same
            512 are named); no row can be used; a file cannot be read; the tokenizer has no chat
            template; the cache cannot be written.
    """
    content = make_key(data, tokenizer, [rows.get_digest(get_cache_folder(data))])
    # Names of files are part of the key, because errors are reported by them.
    key = sha256(json.dumps([content, rows.names, get_code_digest(*CODE)]).encode()).hexdigest()[
        :32
    ]
    path = get_cache_folder(data) / "examples" / f"{key}.tokens"
    load, build = partial(_load, path, content), partial(_write, data, rows, tokenizer, path)
    examples, elapsed_s = load_or_build(path, load, build)
    if elapsed_s:
        header = examples.header
        logger.info(
            "data: tokenized %d rows, %d tokens, in %.1f s",
            header.num_rows,
            header.num_tokens,
            elapsed_s,
        )
    return examples


def make_key(
    data: DataSection, tokenizer: "PreTrainedTokenizerFast", rows: Sequence[object]
) -> str:
    """Return a digest of `rows`, which identifies them, and of all settings that their tokens
    depend on.
    """
    settings = [
        *(
            6,
            metadata.version("transformers"),
            data.format,
            data.train_on,
            data.bad_rows,
            data.dropped_parts,
            *rows,
        ),
        # The date only where the template shows one.
        *(
            tokenizer.special_tokens_map,
            set_date(tokenizer.chat_template, data.chat_date),
            get_fields(data),
        ),
        *(tokenizer.eos_token_id, serialize(tokenizer)),
    ]
    return sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _write(data: DataSection, rows: Rows, tokenizer: "PreTrainedTokenizerFast", path: Path) -> None:
    """Tokenize the rows and write the files of `path`."""
    dtype = "uint16" if count_ids(tokenizer) <= 2**16 else "uint32"
    encoder, num_rows = None, 0
    headers: list[ExampleHeader] = []
    lengths, num_trained, places = [], [], []
    skipped: dict[str, Skipped] = {}
    stream = iter(rows)
    with ExitStack() as stack:
        tokens, flags, index = (
            stack.enter_context(write_atomic(path.with_suffix(suffix)))
            for suffix in (".tokens", ".flags", ".index")
        )
        while batch := list(islice(stream, _BATCH_ROWS)):
            encoder = make_encoder(data, tokenizer, batch) if encoder is None else encoder
            block = encode_block(encoder, batch, rows.names)
            num_rows += len(batch)
            for reason, text in block.problems:
                before = skipped.get(reason, Skipped(0, text))
                skipped[reason] = Skipped(before.count + 1, before.first)
            if data.bad_rows == "error" and block.problems:
                refuse_rows([text for _, text in block.problems])
            if (found := block.examples) is not None:
                tokens.write(found.tokens.astype(dtype).tobytes())
                flags.write(found.flags.tobytes())
                headers.append(found.header)
                lengths.append(np.diff(found.offsets))
                num_trained.append(found.num_trained)
                places.append(found.places)
        if not headers:
            raise _no_usable_row(rows.names, num_rows, skipped)
        index.write(np.cumsum(np.concatenate([[0], *lengths]), dtype=np.int64).tobytes())
        for column in (num_trained, places):
            index.write(np.concatenate(column).astype(np.int64).tobytes())
    header = replace(
        headers[-1],  # its stop tokens are those of all
        dtype=dtype,
        num_examples=sum(header.num_examples for header in headers),
        num_tokens=sum(header.num_tokens for header in headers),
        vocab_size=max(header.vocab_size for header in headers),
        num_rows=num_rows,
        counts=dict(sum((Counter(header.counts) for header in headers), Counter())),
        skipped=skipped,
    )
    # last: only with it are the other files valid
    with write_atomic(path.with_suffix(".json")) as file:
        file.write(json.dumps(asdict(header)).encode())


def _no_usable_row(names: tuple[str, ...], num_rows: int, skipped: dict[str, Skipped]) -> DataError:
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    if not num_rows:
        return DataError(f"data: {where} holds no row. Set data.path to examples.")
    reasons = "; ".join(f"{rows.count} rows: {reason}" for reason, rows in skipped.items())
    first = next(iter(skipped.values())).first
    return DataError(
        f"data: {where}: none of {num_rows} rows can be used ({reasons}). The first: {first}"
    )


@dataclass(frozen=True)
class EncodedBlock:
    """The examples of some rows, in memory, None if no row can be used; `problems` are (reason,
    place and text) of each bad row.
    """

    examples: TokenizedExamples | None
    problems: list[tuple[str, str]]


def encode_block(
    encoder: ExampleEncoder | None, batch: list[Row], names: tuple[str, ...]
) -> EncodedBlock:
    """Render and tokenize rows. Without an encoder, no row has a known form."""
    places: list[int] = []
    documents: list[Document] = []
    problems = []
    for row, result in encode_rows(encoder, batch):
        if isinstance(result, RowError):
            problems.append(
                (result.reason, f"{describe_place(names, row.file, row.number)}: {result}")
            )
        else:
            places += [row.file << _FILE_SHIFT | row.number] * len(result)
            documents += [document for example in result for document in example]
    if encoder is None or not places:
        return EncodedBlock(None, problems)
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)])
    header = ExampleHeader(
        form=encoder.form,
        dtype="uint32",
        documents_per_example=len(documents) // len(places),
        num_examples=len(places),
        num_tokens=int(offsets[-1]),
        vocab_size=max(int(document.ids.max()) for document in documents) + 1,
        num_rows=len(batch),
        stop_token_ids=tuple(sorted(encoder.stop_token_ids)),
        counts=encoder.renderer.take_counts(),
        names=names,
    )
    examples = TokenizedExamples(
        tokens=np.concatenate([document.ids for document in documents]).astype(np.uint32),
        flags=np.concatenate([document.flags for document in documents]),
        offsets=offsets,
        num_trained=np.array([document.num_trained for document in documents]),
        places=np.array(places),
        header=header,
        content="",
    )
    return EncodedBlock(examples, problems)


def refuse_rows(problems: list[str]) -> None:
    """Raise a DataError for rows that cannot be used, one line for equal problems, and how to leave
    them out.
    """
    *others, last = merge_row_problems(problems)
    raise_problems(DataError, "data", [*others, f"{last} {_SKIP_REMEDY}"])


def make_encoder(
    data: DataSection, tokenizer: "PreTrainedTokenizerFast", batch: list[Row]
) -> ExampleEncoder | None:
    """Build the encoder for the configured form, or that of the first row of `batch` with a known
    one; None without.

    Raises:
        DataError: `data.train_on` is 'all' for preference pairs, or `data.text_field` is set and
            the rows are no text.
    """
    form, fields = data.format, get_fields(data)
    if form == "auto":
        own = detect_form(fields)  # columns in `data.fields` take precedence
        forms = (own or detect_form(row.content) for row in batch if isinstance(row.content, dict))
        form = next((form for form in forms if form is not None), None)
        if form is None:
            return None
    form = cast(Form, form)
    if unused := [
        f"{name} = {column}" for name, column in fields.items() if name not in FORM_FIELDS[form]
    ]:
        raise DataError(
            f"data.fields: {list_names(unused)} cannot be used in rows of form '{form}', which "
            f"take {', '.join(FORM_FIELDS[form])}. Remove what is not meant, or set data.format."
        )
    if form == "preference" and data.train_on == "all":
        raise DataError(
            'data: train_on = "all" does not go with preference pairs: the prompt is the same on '
            "both sides. "
            'Set data.train_on = "assistant".'
        )
    renderer = ChatRenderer(
        tokenizer,
        train_all=data.train_on == "all",
        warn_of_dropped=data.dropped_parts == "warn",
        date=data.chat_date,
    )
    return ExampleEncoder(tokenizer, form, renderer=renderer)


def encode_rows(
    encoder: ExampleEncoder | None, batch: list[Row]
) -> Iterator[tuple[Row, list[tuple[Document, ...]] | RowError]]:
    """Yield each row of `batch` with its examples or its error. Without an encoder, no row has a
    known form.
    """
    good: list[dict[str, Any]] = [row.content for row in batch if isinstance(row.content, dict)]
    encoded = (
        iter(encoder.encode(good))
        if encoder is not None
        else (_unknown_form(content) for content in good)
    )
    for row in batch:
        yield row, row.content if isinstance(row.content, RowError) else next(encoded)


def _unknown_form(content: dict[str, Any]) -> RowError:
    found = list_names(map(repr, sorted(content))) or "none"
    return RowError(
        "missing field",
        f"the fields are {found}, which is no known form. Rename them: messages, question and "
        "answer, prompt and completion, text, or prompt, chosen and rejected; or say which they "
        "are: --data.fields.question=COLUMN.",
    )


def read_header(table: dict[str, Any]) -> ExampleHeader:
    """Return the header from `table`, its `asdict` after a round trip through JSON."""
    table["skipped"] = {reason: Skipped(**entry) for reason, entry in table["skipped"].items()}
    table |= {name: tuple(table[name]) for name in ("names", "stop_token_ids")}
    return ExampleHeader(**table)


def _load(path: Path, content: str) -> TokenizedExamples | None:
    """Map the arrays; None if a file is missing, cut off, or contradicts its header."""
    try:
        header = read_header(json.loads(path.with_suffix(".json").read_bytes()))
        num_documents = header.num_examples * header.documents_per_example
        index = np.fromfile(path.with_suffix(".index"), dtype=np.int64)
        sizes = (path.stat().st_size, path.with_suffix(".flags").stat().st_size, len(index))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    expected = (
        header.num_tokens * np.dtype(header.dtype).itemsize,
        header.num_tokens,
        2 * num_documents + 1 + header.num_examples,
    )
    if sizes != expected or header.num_examples == 0:
        return None
    offsets, num_trained, places = np.split(index, [num_documents + 1, 2 * num_documents + 1])
    if offsets[0] != 0 or offsets[-1] != header.num_tokens or (np.diff(offsets) < 1).any():
        return None
    tokens = np.memmap(path, dtype=header.dtype, mode="r")
    flags = np.memmap(path.with_suffix(".flags"), dtype=np.uint8, mode="r")
    return TokenizedExamples(tokens, flags, offsets, num_trained, places, header, content)
