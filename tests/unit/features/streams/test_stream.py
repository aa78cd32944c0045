"""Streams: every example once per pass, the same samples on any world size and after any resume."""

import json
import random
from pathlib import Path

import pytest

from titanlite.assemble import build_data
from titanlite.base.errors import DataError


def make_rows(count):
    rng = random.Random(0)
    return [{"prompt": f"{i}:", "completion": " what is" * rng.randint(1, 6)} for i in range(count)]


def build(job):
    return build_data(job, 0, 1)[1].dataset


def take(dataset, start, stop):
    return [
        dataset.batch([i]).tokens[0].tolist()
        for i in dataset.get_train_indices(42, start, stop).tolist()
    ]


def prompts_in(dataset, start, stop):
    """The numbers that the prompts begin with, in the order of the stream."""
    found = []
    for index in dataset.get_train_indices(42, start, stop).tolist():
        batch = dataset.batch([index])
        for document in range(int(batch.document_ids.max()) + 1):
            tokens = batch.tokens[batch.document_ids == document].tolist()
            found.append(int(str(dataset.tokenizer.decode(tokens)).split(":")[0]))
    return found


def test_every_row_once_per_pass_in_another_order(make_job):
    count = 50  # the last block is short
    dataset = build(make_job(make_rows(count), seq_len=48, streaming=True, streaming_block_rows=16))
    passes = [[], []]
    sample = 0
    for seen in passes:
        while len(seen) < count:
            seen += prompts_in(dataset, sample, sample + 1)
            sample += 1
    first, second = passes
    assert sorted(first) == sorted(second) == list(range(count)) and first != second
    assert all(number < 16 for number in first[:8])  # the first block comes first


def test_any_sample_is_found_again(make_job):
    """After a resume, without the counts of rows, and backwards."""
    job = make_job(make_rows(60), seq_len=48, streaming=True, streaming_block_rows=8)
    whole = take(build(job), 0, 40)
    assert take(build(job), 20, 22) == whole[20:22]
    (file,) = Path(job.data.cache_folder, "streams").glob("*.json")
    file.unlink()
    assert take(build(job), 20, 40) == whole[20:]
    resumed = build(job)
    assert take(resumed, 30, 31) == whole[30:31] and take(resumed, 0, 3) == whole[:3]


def test_what_does_not_fit(make_job):
    rows = [*make_rows(8), {"prompt": 1}, {"prompt": "a", "completion": "b" * 90}, *make_rows(8)]
    job = make_job(rows, seq_len=48, streaming=True, streaming_block_rows=4)
    dataset = build(job)
    with pytest.raises(
        DataError, match=r"rows\.jsonl, row 9: no field 'completion'|row 9: field 'prompt'"
    ):
        take(dataset, 0, 20)
    job.data.bad_rows = "skip"
    with pytest.raises(
        DataError, match=r"rows\.jsonl, row 10: 9\d tokens, but training\.seq_len is 48"
    ):
        take(build(job), 0, 20)
    job.data.too_long = "drop"
    dataset = build(job)
    take(dataset, 0, 7)
    assert dataset.left_out["examples dropped (longer than 48 tokens)"] >= 1
    job = make_job([{"prompt": "a"}] * 6, streaming=True, streaming_block_rows=4, bad_rows="skip")
    with pytest.raises(
        DataError,
        match=r"no row of .*rows\.jsonl can be used; left out: rows skipped \(missing field\): \d",
    ):
        take(build(job), 0, 1)


def test_a_bad_row_that_is_read_ahead_ends_the_run_when_it_is_reached(make_job):
    job = make_job(
        [*make_rows(60), {"prompt": 1}, *make_rows(60)],
        seq_len=48,
        streaming=True,
        streaming_block_rows=8,
    )
    dataset = build(job)
    before = take(dataset, 0, 8)
    taken = len(before)
    with pytest.raises(DataError, match=r"row 61: no field 'completion'"):
        for _ in range(100):
            before += take(dataset, taken, taken + 1)
            taken += 1
    assert taken >= 7 * 3  # all sequences of the 7 blocks before


def test_held_out_rows_come_from_their_own_path(make_job, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"prompt": f"{i}:", "completion": "x"}) + "\n" for i in range(900, 904))
    )
    job = make_job(
        make_rows(20), seq_len=48, streaming=True, validation_path=str(other), packing=False
    )
    dataset = build(job)
    assert dataset.num_validation_sequences == 4
    held_out = dataset.batch(dataset.get_validation_indices(0, 4))
    assert dataset.tokenizer.decode(held_out.tokens[0, :3]).startswith("90")
    assert max(prompts_in(dataset, 0, 20)) < 900
