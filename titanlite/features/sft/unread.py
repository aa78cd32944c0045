"""Columns of rows and keys of messages that are not read.

A column that would change what is learned is refused by name; other columns are counted, for one
line of the log.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from titanlite.base.text import list_names
from titanlite.features.sft.readers import RowError

UNREAD = "not read: "  # prefix of these counts
KEYS = "messages[]."  # prefix of keys of messages, after it
_EMPTY = (None, "", [], {})
_ONE = ("1", "1.0", "True", "true")
_FLAGS = (*_ONE, "0", "0.0", "False", "false")  # strings, because CSV files have no other values
# "<image>" marks the position of an image in LLaVA, LLaMA-Factory and ms-swift; HTML has a closing
# tag.
_PLACES = ("image", "audio", "video")


class _Refused(NamedTuple):
    """Columns, or keys of messages, that change what is learned.

    Attributes:
        what: the meaning of the column, and what to do.
        forms: the row formats for which it is refused; None: all.
        values: the only values, as strings, for which it is refused; None: all.
        harmless: values, as strings, for which it is not refused.
    """

    names: tuple[str, ...]
    what: str
    forms: tuple[str, ...] | None = ("messages", "prompt_completion", "images")
    values: tuple[str, ...] | None = None
    harmless: tuple[str, ...] = ()


_REFUSED = {
    name: refused
    for refused in (
        _Refused(
            ("image", "images", "audio", "audios", "video", "videos"),
            "rows of text show none of it. Write images as parts of messages for data.dataset = "
            '"images" (docs/fine_tuning.md), or remove the column.',
            forms=("messages", "prompt_completion", "text", "preference"),
        ),
        _Refused(
            ("weight", "weights", "loss_weight", "sample_weight", "loss_scale", "loss_mask"),
            "rows all have the same weight. Give sources a weight (data.sources.NAME.weight), or "
            "messages of the assistant the weight 0; or remove the column.",
            forms=None,
            harmless=_ONE,
        ),
        _Refused(
            ("label", "kto_tag"),
            "a label of KTO says whether the answer is wanted, and all answers would be learned. "
            "Keep the rows with wanted answers and remove the column, or write pairs of chosen and "
            "rejected.",
            values=_FLAGS,
        ),
        _Refused(
            ("rejected_response", "rejected_messages"),
            "the answer that is not wanted is part of a pair. Write prompt, chosen and rejected, "
            "or remove the column.",
        ),
        _Refused(
            ("history",),
            "earlier turns would be left out. Write the turns as messages, or remove the column.",
            forms=("messages", "prompt_completion", "preference", "images"),
        ),
        _Refused(
            ("mask", "masked", "train_detail", "training_detail"),
            "which part of an answer is trained is not read. Write 'weight': 0 in messages that "
            "are not trained, and remove it.",
        ),
    )
    for name in refused.names
}


def refuse_unread(entry: Mapping[str, Any], form: str, where: str = "") -> None:
    """Raise a RowError if a column, or a key of the message at `where`, is not read although it
    changes what is learned.
    """
    for name in sorted(entry.keys() & _REFUSED.keys()):
        refused = _REFUSED[name]
        value = str(entry[name])
        is_meant = refused.values is None or value in refused.values
        if entry[name] in _EMPTY or value in refused.harmless or not is_meant:
            continue
        if refused.forms is None or form in refused.forms:
            place = f"{where}.{name}" if where else f"field '{name}'"
            raise RowError(f"'{name}' is not read", f"{place}: {refused.what}")


def refuse_placeholder(text: str, where: str) -> None:
    """Raise a RowError if a text that is not an answer begins or ends with a placeholder such as
    `<image>`.
    """
    stripped = text.strip()
    for kind in _PLACES:
        place = f"<{kind}>"
        stands = stripped.startswith(place) or stripped.endswith(place)
        if stands and f"</{kind}>" not in text:
            raise RowError(
                f"{place} in a text",
                f"{where} has a place for {kind}s, and rows of text show none. Write images as "
                'parts of messages for data.dataset = "images" (docs/fine_tuning.md), or remove '
                "the row.",
            )


def list_unread(
    row: Mapping[str, Any], fields: Collection[str], keys: Collection[str]
) -> Iterator[str]:
    """Yield the columns of `row` except `fields`, and the keys of its messages except `keys`, each
    with the prefix `UNREAD`.
    """
    unread = [name for name, value in row.items() if name not in fields and value not in _EMPTY]
    for name in fields:
        messages = row.get(name)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                unread += [
                    f"{KEYS}{key}"
                    for key, value in message.items()
                    if key not in keys and value not in _EMPTY
                ]
    return (f"{UNREAD}{name}" for name in unread)


def describe_unread(counts: Mapping[str, int]) -> str:
    """Return the counts of columns and keys from `list_unread` in one line; empty if there are
    none.
    """
    found = [
        f"{name.removeprefix(UNREAD)} ({count:,})"
        for name, count in counts.items()
        if name.startswith(UNREAD)
    ]
    return f"{UNREAD}{list_names(found)}" if found else ""
