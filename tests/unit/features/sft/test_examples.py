"""From rows to batches: cache, lengths, hold-out, packing, the order, and prompts for
evaluation.
"""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from files import write_lines
from unit.data.templates import CHATML, THINKING

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.features.generate.evaluate import (
    evaluation_prompts,
    read_evaluation_prompts,
)
from titanlite.features.sft import examples as examples_module
from titanlite.features.sft.chat import TRAINED
from titanlite.ops import IGNORE_INDEX


def make_rows(count=60, seed=0):
    rng = random.Random(seed)
    words = ["what", "is", "the", "answer", "to", "a"]

    def text():
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, 6)))

    return [{"prompt": f"{i} {text()}", "completion": text()} for i in range(count)]


def make_chats():
    roles = ["user", "assistant"] * 2
    return [
        {"messages": [{"role": r, "content": f"{r} {i} {k}"} for k, r in enumerate(roles)]}
        for i in range(20)
    ]


def make_pairs():
    return [
        {"prompt": f"{i}:", "chosen": " good" * (i % 5 + 1), "rejected": " bad"} for i in range(20)
    ]


def build(job):
    return build_data(job, 0, 1)[1].dataset


def documents_of(dataset):
    """(tokens, labels) of every document, and the checks that hold for all batches."""
    found = []
    batch = dataset.batch(range(dataset.num_sequences))
    for row in range(dataset.num_sequences):
        tokens, labels, positions, ids = (
            getattr(batch, name)[row].tolist()
            for name in ("tokens", "labels", "positions", "document_ids")
        )
        used = sum(i >= 0 for i in ids)
        assert used > 0 and ids[:used] == sorted(ids[:used]) and set(ids[used:]) <= {-1}
        assert set(tokens[used:]) <= {dataset.pad_token_id} and set(labels[used:]) <= {IGNORE_INDEX}
        assert set(positions[used:]) <= {0}
        for document in range(max(ids) + 1):
            start, length = ids.index(document), ids.count(document)
            assert positions[start : start + length] == list(range(length))
            found.append((tokens[start : start + length], labels[start : start + length]))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_in_one_sequence_with_its_labels(make_job, packing):
    dataset = build(make_job(make_rows(), seq_len=64, packing=packing))
    expected = []
    for part in (dataset.train, dataset.held_out):
        for example in part.selected.tolist():
            (place,) = part.examples.get_documents(example)
            tokens = part.examples.tokens[place]
            ids, flags = tokens["id"].tolist(), tokens["flags"].tolist()
            following = zip(ids[1:], flags[1:], strict=True)
            labels = [token if flag & TRAINED else IGNORE_INDEX for token, flag in following]
            expected.append((ids, [*labels, IGNORE_INDEX]))
    found = documents_of(dataset)
    assert sorted(found) == sorted(expected) and len(found) == 60
    if packing:
        assert dataset.num_sequences < 40 and dataset.packing_efficiency > 0.9
    else:
        assert dataset.num_sequences == 60
    batch = dataset.batch(range(dataset.num_sequences))
    labels = batch.labels
    assert dataset.vocab_size == int(batch.tokens.max()) + 1
    assert (
        int((labels[: dataset.num_train_sequences] != IGNORE_INDEX).sum())
        == dataset.train.num_trained
    )
    assert labels.dtype == torch.int64 and labels.is_contiguous()


def test_pairs_share_a_row_chosen_first(make_job):
    dataset = build(make_job(make_pairs(), seq_len=64))
    tokenizer = build_data(make_job(make_pairs(), seq_len=64), 0, 1)[0]
    documents = documents_of(dataset)
    assert dataset.form == "preference" and len(documents) == 40 and dataset.num_sequences < 20
    texts = [tokenizer.decode(tokens) for tokens, _ in documents]
    for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
        assert (
            chosen.split(":")[0] == rejected.split(":")[0]
            and " good" in chosen
            and " bad" in rejected
        )
    assert (dataset.batch(range(dataset.num_sequences)).document_ids.max(1).values % 2 == 1).all()


def test_answers_of_one_conversation_stay_together(make_job):
    dataset = build(make_job(make_chats(), THINKING, seq_len=128))
    assert len(dataset.train.selected) == 36 and len(dataset.held_out.selected) == 4
    train, held_out = (
        set(part.examples.places[part.selected]) for part in (dataset.train, dataset.held_out)
    )
    assert not train & held_out


def test_validation_path(make_job, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x", "completion": "y"}\n{"prompt": "x"}\n')
    job = make_job(make_rows(), validation_path=str(other))
    with pytest.raises(DataError, match=r"other\.jsonl, row 2: no field 'completion'"):
        build(job)
    job.data.bad_rows = "skip"
    dataset = build(job)
    assert (len(dataset.train.selected), len(dataset.held_out.selected)) == (60, 1)
    assert dataset.held_out.examples.describe_place(0) == f"{other}, row 1"


def test_too_long(make_job):
    rows = [
        *make_rows(20),
        {"prompt": "a", "completion": "b" * 50},
        {"prompt": "c" * 50, "completion": "d"},
    ]
    job = make_job(rows, seq_len=40)
    with pytest.raises(
        DataError, match=r"5\d tokens, but training\.seq_len is 40\.(.|\n)* to 5\d, the longest"
    ):
        build(job)
    for too_long, left in (("cut", 21), ("drop", 20)):
        job.data.too_long = too_long
        dataset = build(job)
        assert len(dataset.train.selected) + len(dataset.held_out.selected) == left
        labels = dataset.batch(range(dataset.num_train_sequences)).labels
        assert int((labels != IGNORE_INDEX).sum()) == dataset.train.num_trained


def make_texts():
    """Documents of very different lengths, no two alike."""
    rng = random.Random(0)
    return [
        {
            "text": f"{i}:"
            + "".join(rng.choice("abcdefgh ") for _ in range(rng.choice([1, 9, 60, 300])))
        }
        for i in range(40)
    ]


REFUSED = [
    (make_rows(), {"too_long": "split"}, r'too_long = "split" .* \'prompt_compl'),
    (make_rows(1), {}, r"1 usable row\(s\), but 2 are needed.*data\.validation_path"),
    (
        make_rows(4),
        {"too_long": "drop", "seq_len": 3},
        r"none of 4 examples fits into training\.seq_len \(3\)",
    ),
]


@pytest.mark.parametrize(("rows", "settings", "message"), REFUSED)
def test_data_that_cannot_be_used_names_the_setting(make_job, rows, settings, message):
    with pytest.raises(DataError, match=message):
        build(make_job(rows, **settings))


@pytest.mark.parametrize("seq_len", [2, 16])
def test_split_documents_predict_each_of_their_tokens_once(make_job, seq_len):
    job = make_job(make_texts(), seq_len=seq_len, too_long="split")
    dataset = build(job)
    (source,) = dataset.sources
    whole = [
        source.examples.tokens["id"][place].tolist()
        for i in range(40)
        for place in source.examples.get_documents(i)
    ]
    predicted = [pair for tokens in whole for pair in pairwise(tokens)]
    documents = documents_of(dataset)
    assert all(labels == [*tokens[1:], IGNORE_INDEX] for tokens, labels in documents)
    assert sorted(pair for tokens, _ in documents for pair in pairwise(tokens)) == sorted(predicted)
    assert dataset.train.num_trained + dataset.held_out.num_trained == len(predicted)
    # A piece is full but for the last of its document, and the pieces of a document are not apart
    # in the hold-out.
    assert sorted(map(tuple, (tokens for tokens, _ in documents))) == sorted(
        tuple(tokens[start : start + seq_len])
        for tokens in whole
        for start in range(0, max(len(tokens) - 1, 1), seq_len - 1)
    )
    rows = [
        set(part.examples.places[part.selected].tolist())
        for part in (dataset.train, dataset.held_out)
    ]
    assert not rows[0] & rows[1] and len(rows[0] | rows[1]) == 40
    assert source.num_split == sum(len(tokens) > seq_len for tokens in whole) > 0
    if seq_len > 2:
        assert dataset.packing_efficiency > 0.8


def test_cut_pairs_keep_both_sides(make_job):
    long, short = "g" * 60, "b"
    rows = [
        {"prompt": "p", "chosen": long, "rejected": short},
        {"prompt": "p", "chosen": long, "rejected": "h" * 61},
    ]
    dataset = build(make_job(rows, seq_len=21, too_long="cut"))
    lengths = np.concatenate([dataset.train.lengths, dataset.held_out.lengths]).tolist()
    assert sorted(lengths) == [[11, 10], [18, 3]] or sorted(lengths) == [[10, 11], [18, 3]]


def test_share_that_is_held_out(make_job):
    fingerprints = set()
    for share, held_out in ((None, 6), (0.0, 0), (0.001, 1), (0.999, 59)):
        dataset = build(make_job(make_rows(60), seq_len=64, validation_share=share))
        assert (len(dataset.train.selected), len(dataset.held_out.selected)) == (
            60 - held_out,
            held_out,
        )
        assert not set(dataset.train.selected) & set(dataset.held_out.selected)
        fingerprints.add(dataset.fingerprint)
        if share is None:
            chosen = dataset.held_out.selected.tolist()
            assert chosen != list(range(54, 60))  # not the end of the file
    assert len(fingerprints) == 4
    other = build(make_job(make_rows(60, seed=1), seq_len=32, too_long="cut", packing=False))
    assert other.held_out.selected.tolist() == chosen, "by the number of rows alone"
    alone = build(make_job(make_rows(1), seq_len=64, validation_share=0.0, packing=False))
    assert alone.batch([0]).labels.shape == (1, 64) and alone.num_sequences == 1


def test_second_build_maps_the_files_of_the_first(make_job):
    rows = [*make_rows(), {"prompt": "only", "text": "a"}]
    job = make_job(rows, bad_rows="skip")
    first = build(job).train.examples
    assert isinstance(first.tokens.base, np.memmap) or isinstance(first.tokens, np.memmap)
    files = {file: file.stat() for file in Path(job.data.cache_folder).glob("examples/*.tokens")}
    again = build(make_job(rows, bad_rows="skip", too_long="cut", seq_len=32)).train.examples
    assert files == {
        file: file.stat() for file in Path(job.data.cache_folder).glob("examples/*.tokens")
    }
    assert again.left_out == first.left_out == {"rows skipped (missing field)": 1}
    assert again.firsts == first.firsts
    keys = {first.content}
    for changes in ({"train_on": "all"}, {"format": "prompt_completion"}, {"template": THINKING}):
        keys.add(build(make_job(rows, bad_rows="skip", **changes)).train.examples.content)
    keys.add(build(make_job(rows[1:], bad_rows="skip")).train.examples.content)
    assert len(keys) == 5


@pytest.mark.parametrize("suffix", [".tokens", ".npz"])
def test_damaged_cache_is_rebuilt(make_job, suffix):
    job = make_job(make_rows())
    first = build(job).train.examples
    (file,) = Path(job.data.cache_folder, "examples").glob(f"*{suffix}")
    expected = first.tokens.tolist()
    del first
    for content in (file.read_bytes()[:-5], b"", None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        assert build(job).train.examples.tokens.tolist() == expected


def test_order_is_pinned(make_job):
    """A run resumed with another version must see the same data; these numbers may never change."""
    dataset = build(make_job(make_rows(200), seq_len=48))
    assert (dataset.num_train_sequences, dataset.get_train_indices(42, 0, 6).tolist()) == (
        51,
        [32, 33, 4, 23, 24, 25],
    )


def test_evaluation_prompts(make_job):
    """The prompt of inference and the answer of each held-out row; all rows of another file, of any
    form.
    """
    job = make_job(make_chats(), CHATML, seq_len=256)
    tokenizer, loader = build_data(job, 0, 1)
    prompts = evaluation_prompts(loader.dataset, tokenizer)
    assert len(prompts) == 2
    for prompt_ids, reference, where in prompts:
        messages = make_chats()[int(where.rsplit(" ", 1)[1]) - 1]["messages"]
        expected = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True)[
            "input_ids"
        ]
        assert prompt_ids == expected and reference == messages[3]["content"]
    path = Path(job.data.path).with_name("questions.jsonl")

    def read(rows):
        write_lines(path, rows)
        return read_evaluation_prompts(job.data, str(path), "test", tokenizer)

    prompts = read(make_rows())
    for (prompt_ids, reference, _), row in zip(prompts, make_rows(), strict=True):
        assert (tokenizer.decode(prompt_ids), reference) == (row["prompt"], row["completion"])
    assert prompts[-1].where == f"{path}, row 60"
    for rows, problem in (
        ([{"text": "a"}], r"examples \(text\) have no ans"),
        ([*make_rows(1), {"prompt": "x"}], r"questions\.jsonl, row 2"),
    ):
        with pytest.raises(DataError, match=rf"^evaluation\.path: .*{problem}"):
            read(rows)


def test_other_code_makes_other_tokens(make_job, monkeypatch):
    """No version has to be raised by hand; what a run is told from others by stays."""
    job = make_job([{"prompt": "a", "completion": "b"}] * 4)
    found = []
    for digest in ("1", "1", "2"):
        monkeypatch.setattr(examples_module, "get_code_digest", lambda *_, digest=digest: digest)
        found.append(build_data(job, 0, 1)[1].fingerprint)
    assert len([*Path(job.data.cache_folder).glob("examples/*.tokens")]) == 2
    assert len({*found}) == 1
