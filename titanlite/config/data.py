"""The settings of `[data]`, for one source or for several that are mixed
(`[data.sources.NAME]`).
"""

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from titanlite.base.errors import ConfigError
from titanlite.base.text import parse_object, suggest
from titanlite.config.model import overrides_of, setting

Format = Literal["auto", "messages", "prompt_completion", "text", "preference"]
TrainOn = Literal["assistant", "all"]
TooLong = Literal["error", "cut", "drop", "split"]
BadRows = Literal["error", "skip"]
DroppedParts = Literal["error", "warn"]
EXAMPLES = 'data.dataset = "examples"'  # `only_for` of settings for rows
# Fields that a column can be mapped to with `data.fields`.
FIELDS = (
    "messages",
    "conversations",
    "question",
    "answer",
    "instruction",
    "input",
    "output",
    "response",
    "context",
    "system",
    "tools",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
)


@dataclass
class _OneSource:
    dataset: Literal["stdlib", "text", "examples", "images", "none"] = setting(
        "stdlib",
        "'stdlib': the .py files of Python's standard library. 'text': files under data.path, one "
        "document each. 'examples': rows under data.path. 'images': a .jsonl file of chats with "
        "images, for a model with a processor. Not set: 'examples' or 'text', according to the "
        "files at path; 'stdlib' without a path.",
    )
    path: str = setting(
        "",
        "For 'text': a file or folder. For 'examples': a .jsonl (also compressed, such as "
        ".jsonl.gz), .json, .parquet or .csv file, a folder of such files, or the id of a dataset "
        "on the Hugging Face hub (owner/name or owner/name@revision). For 'images': a .jsonl file.",
    )
    pattern: str = setting(
        "",
        "File name pattern in the folder data.path. Empty: *.txt for 'text', all files with rows "
        "for 'examples'.",
    )
    document_separator: str = setting(
        "found",
        "Text between the documents of a file of plain text. 'found': the tokenizer's end token, "
        "or <|endoftext|>, where it begins or ends a line. 'none': a file is one document.",
        only_for='data.dataset = "text"',
    )
    split: str = setting(
        "train",
        "Split of a dataset of the hub.",
        only_for="a folder or a dataset of the hub in path",
    )
    subset: str = setting(
        "",
        "Subset (configuration) of a dataset of the hub; empty: its default.",
        only_for="a dataset of the hub in path",
    )
    validation_path: str = setting(
        "",
        "Held-out examples: like path, with validation_split for a hub dataset. Empty: some rows "
        "of path are held out.",
        only_for=EXAMPLES,
    )
    validation_share: float | None = setting(
        None,
        "Fraction of the rows (for plain text: of the sequences) that is held out if "
        "validation_path is empty. 0: none. Not set: none without validation and evaluation; "
        "otherwise 1%. If 1% is fewer than 64 rows: 64 rows, but not more than 10%.",
        lt=1,
        only_for="rows of path that are held out",
    )
    validation_split: str = setting(
        "validation",
        "Split of validation_path, if that is a dataset of the hub.",
        only_for="a folder or a dataset of the hub in validation_path",
    )
    format: Format = setting(
        "auto",
        "Row format: 'messages' (or ShareGPT's conversations), 'prompt_completion', 'text', "
        "'preference' (prompt, chosen, rejected). 'auto': by the fields of the first row.",
        only_for=EXAMPLES,
    )
    text_field: str = setting(
        "text", "Field with the text, in rows of the format 'text'.", only_for="rows with a text"
    )
    fields: str = setting(
        "",
        'Names of columns that differ from their fields: {question = "problem"} as a table, or '
        f"--data.fields.question=problem. Fields: {', '.join(FIELDS)}.",
        only_for=EXAMPLES,
    )
    converter: str = setting(
        "",
        "Function that turns each row into a row of one of these formats (docs/extending.md).",
        calls=("row",),
        only_for=EXAMPLES,
    )
    train_on: TrainOn = setting(
        "assistant",
        "Tokens in the loss: 'assistant': answers (assistant messages, completions); 'all': "
        "everything.",
        only_for=EXAMPLES,
    )
    too_long: TooLong = setting(
        "error",
        "Examples longer than training.seq_len: an 'error', or 'cut' off their end, 'drop' them, "
        "or 'split' them (text only).",
        only_for=EXAMPLES,
    )
    bad_rows: BadRows = setting(
        "error",
        "Rows that cannot be used: an 'error', or 'skip' them and report why.",
        only_for=EXAMPLES,
    )
    packing: bool = setting(
        True,
        "Put several examples into one sequence, without attention between them.",
    )
    streaming: bool = setting(
        False,
        "Tokenize examples during training, for datasets that are too large to tokenize before.",
        only_for=EXAMPLES,
    )
    streaming_block_rows: int = setting(
        1024,
        "Number of rows that streaming reads, packs and shuffles together in memory.",
        ge=1,
        only_for="rows that are streamed",
    )
    chat_template: str = setting(
        "",
        "Jinja file with a chat template that replaces the tokenizer's own. Saved with every "
        "checkpoint.",
        only_for=EXAMPLES,
    )
    chat_template_kwargs: str = setting(
        "",
        "Arguments of the chat template, as a JSON object or a TOML table "
        "({enable_thinking = false}); arguments in a row take precedence.",
        only_for=EXAMPLES,
    )
    skip_to_sample: int = setting(0, "Skip the samples of the data order before this one.")
    chat_date: str = setting(
        "",
        "Today's date for chat templates (YYYY-MM-DD). Empty: the day on which the run first "
        "started.",
        only_for=EXAMPLES,
    )
    dropped_parts: DroppedParts = setting(
        "error",
        "Parts of a chat that its template drops, such as a tool or the reasoning: an 'error', or "
        "'warn' with their number.",
        only_for=EXAMPLES,
    )
    tokenizer_path: str = setting(
        "",
        "Folder or tokenizer.json of a Hugging Face tokenizer (not a hub id). Empty: the "
        "tokenizer of the model; without one, 'text' and 'stdlib' train a byte-level BPE on the "
        "data.",
    )
    bpe_vocab_size: int = setting(
        4096, "Vocabulary size of the BPE tokenizer that is trained on first use.", ge=257
    )
    cache_folder: str = setting(
        "", "Folder of tokenizers and token files. Empty: ~/.cache/titanlite."
    )


_PER_SOURCE = (
    "pattern",
    "document_separator",
    "split",
    "subset",
    "validation_path",
    "validation_share",
    "validation_split",
    "format",
    "text_field",
    "fields",
    "converter",
    "train_on",
    "too_long",
    "bad_rows",
    "streaming",
)
SourceSection: Any = overrides_of(
    "SourceSection",
    [each for each in fields(_OneSource) if each.name in _PER_SOURCE],
    ("path", str, setting("", "A file, folder or hub id, like data.path.")),
    (
        "weight",
        float | None,
        setting(
            None,
            "Share of the sequences: its weight divided by all weights. Unset for all: every "
            "sequence once per epoch.",
            gt=0,
        ),
    ),
    module=__name__,
)


@dataclass
class DataSection(_OneSource):
    sources: dict[str, SourceSection] = setting(  # type: ignore[valid-type]
        dict,
        "Data from several sources, each under a name of your choice, instead of path; see "
        "`titanlite.config.data`.",
    )


def holds_rows(name: str) -> bool:
    """Return True if `name` is the name of a file of rows, packed or not."""
    for packed in (".gz", ".zst", ".bz2", ".xz"):
        name = name.removesuffix(packed)
    return name.endswith((".jsonl", ".json", ".parquet", ".csv", ".arrow"))


def get_sources(data: DataSection) -> dict[str, DataSection]:
    """Return a complete `[data]` section for each source, by name; without sources, `data` itself
    under "".
    """
    if not data.sources:
        return {"": data}
    return {
        name: replace(data, sources={}, **_get_given(source))
        for name, source in sorted(data.sources.items())
    }


def get_source_key(data: DataSection, source: str, name: str) -> str:
    """Return the key under which setting `name` of a source is set; it may be in `[data]`."""
    own = source and name in _get_given(data.sources[source])
    return f"data.sources.{source}.{name}" if own else f"data.{name}"


def get_fields(data: DataSection, key: str = "data.fields") -> dict[str, str]:
    """Return the column of each field that `data.fields` or `data.text_field` names; `key` is where
    they are set.

    Raises ConfigError: the value is not a table of names, or has an unknown field.
    """
    own = parse_object(key, data.fields)
    for name, column in own.items():
        if name not in FIELDS or not isinstance(column, str) or not column:
            hint = suggest(name, FIELDS) or f" Fields are {', '.join(FIELDS)}."
            raise ConfigError(f'{key}.{name} = {json.dumps(column)} is not FIELD = "column".{hint}')
    return ({} if data.text_field == DataSection.text_field else {"text": data.text_field}) | own


def _get_given(source: Any) -> dict[str, object]:
    given = {
        field.name: getattr(source, field.name)
        for field in fields(source)
        if field.name != "weight"
    }
    return {name: value for name, value in given.items() if value is not None}
