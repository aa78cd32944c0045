"""What became of the rows, in words: how many examples and tokens, what is trained, what was left out and why."""

from collections import Counter
from collections.abc import Mapping

from titanlite.features.sft.chat import DROPPED, NO_END, SPELLED
from titanlite.features.sft.dataset import ExampleDataset


def get_left_out(dataset: ExampleDataset) -> list[str]:
    """Rows skipped and examples cut or dropped, counted by reason; empty if everything is used as it is."""
    found: Counter[tuple[str, str]] = Counter()
    for source in dataset.sources:
        for reason, skipped in source.examples.header.skipped.items():
            found["row", f"skipped: {reason}"] += skipped.count
        for reason, count in source.dropped.items():
            found["example", f"dropped: {reason}"] += count
        if source.num_cut:
            found["example", f"cut to {dataset.seq_len} tokens"] += source.num_cut
    return [f"{count} {noun}{'' if count == 1 else 's'} {what}" for (noun, what), count in found.items()]


def get_num_split(dataset: ExampleDataset) -> int:
    """Documents that were split into several examples."""
    return sum(source.num_split for source in dataset.sources)


def get_first_skipped(dataset: ExampleDataset) -> list[str]:
    """For each reason to skip a row, what was said of the first such row."""
    headers = [source.examples.header for source in dataset.sources]
    return [skipped.first for header in headers for skipped in header.skipped.values()]


def get_trained_share(dataset: ExampleDataset) -> float:
    """Share of the training tokens, without padding, that the loss is taken on."""
    return dataset.train.num_trained / dataset.train.num_tokens


def describe(dataset: ExampleDataset) -> str:
    """One line for the log of a run."""
    train = dataset.train
    kind = "pairs" if dataset.form == "preference" else "examples"
    left_out = "; ".join(get_left_out(dataset))
    num_split = get_num_split(dataset)
    return (
        f"{len(train.selected)} {kind} to train on ({dataset.form}), {len(dataset.held_out.selected)} held out"
        f"{f', {num_split} longer documents split' if num_split else ''}; "
        f"{train.num_tokens} tokens, {get_trained_share(dataset):.1%} trained; {dataset.num_train_sequences} sequences "
        f"of {dataset.seq_len}, {dataset.packing_efficiency:.1%} full; left out: {left_out or 'nothing'}"
    )


def get_warnings(dataset: ExampleDataset) -> list[str]:
    """Return warnings about what is no error but most likely not meant."""
    headers = [source.examples.header for source in dataset.sources]
    return [f"{header.names[0]}: {text}" for header in headers for text in get_chat_warnings(header.counts)]


def get_chat_warnings(counts: Mapping[str, int]) -> list[str]:
    """Return warnings about what in `ExampleHeader.counts` is no error but most likely not meant."""
    remedies = {
        NO_END: "the model will not learn to stop. Use a chat template that closes the assistant's turn with a token.",
        SPELLED: "they are trained as letters. Give such chats as messages, or as prompt and completion.",
    }
    found = [f"{count} {what}: {remedies[what]}" for what, count in counts.items() if what in remedies]
    dropped = [f"{count} {what}" for what, count in counts.items() if what.startswith(DROPPED)]
    return found + [f"{text}. Use a chat template that shows them." for text in dropped]
