"""Mixed sources: shares, orders that depend only on (seed, sample), validation by source, and the
logged values.
"""

from collections import Counter

import numpy as np
import pytest
from files import write_lines

from titanlite.assemble import build_data
from titanlite.base.errors import DataError
from titanlite.config.data import SourceSection
from titanlite.data.dataset import PackedDataset, get_sources
from titanlite.data.loader import TrainLoader
from titanlite.data.tokens import TokenizedCorpus
from titanlite.features.generate.evaluate import evaluation_prompts
from titanlite.features.streams.mixture import PERIOD, MixtureDataset, get_source_seed
from titanlite.features.tools.preview_data import get_shown_documents

SEQ_LEN = 10
PINNED_BY_WEIGHT = [3015, 2119, 2000, 3016, 3018, 1001, 3025, 3001, 3011, 3007, 3003, 2009]
PINNED_BY_SIZE = [1041, 3012, 2028, 1009, 2012, 1047, 1066, 1011, 2043, 2015, 2175, 1049]


def make_part(num_sequences, first_id):
    """Make a dataset whose sequence i has only the token first_id + i; a tenth of the sequences is
    held out.
    """
    tokens = np.repeat(np.arange(first_id, first_id + num_sequences), SEQ_LEN)
    corpus = TokenizedCorpus(np.append(tokens, 1).astype(np.uint16), 0, first_id + num_sequences, 1)
    return PackedDataset(corpus, SEQ_LEN, 0.1)


def make_mixture(weights=None):
    """Make a mixture of 90, 180 and 27 training sequences, with tokens from 1000, 2000 and 3000
    on.
    """
    parts = {"c": make_part(30, 3000), "a": make_part(100, 1000), "b": make_part(200, 2000)}
    return MixtureDataset(parts, weights and dict(zip("abc", weights, strict=True)))


def ids(dataset, start, stop, seed=5):
    """Return the token of each sample."""
    return dataset.batch(dataset.get_train_indices(seed, start, stop)).tokens[:, 0].tolist()


def kinds(samples):
    return [token // 1000 for token in samples]


def test_shares_hold_in_every_period():
    dataset = make_mixture([1, 2, 5])
    assert [source.share for source in dataset.sources] == [1 / 8, 2 / 8, 5 / 8]
    counts = Counter(kinds(ids(dataset, 3 * PERIOD, 4 * PERIOD)))
    assert counts == {1: PERIOD // 8, 2: PERIOD // 4, 3: PERIOD * 5 // 8}
    # If weights do not divide a period, the quotas are as near as possible.
    assert make_mixture([4, 2, 1]).order.quotas.tolist() == [9362, 4681, 2341]


def test_each_source_goes_through_its_own_epochs():
    """The samples of a source, and their order, do not depend on the other sources."""
    dataset = make_mixture([1, 2, 5])
    found = ids(dataset, 0, PERIOD + 50)
    for kind, (name, _, part) in enumerate(dataset.sources, start=1):
        own = [token for token in found if token // 1000 == kind]
        assert own == ids(part, 0, len(own), get_source_seed(5, name))
        size = part.num_train_sequences
        assert len(own) > 3 * size
        for epoch in range(3):
            assert len(set(own[epoch * size : (epoch + 1) * size])) == size


@pytest.mark.parametrize("weights", [None, [3.0, 2.0, 1.0]])
def test_a_sample_does_not_depend_on_what_was_asked_before(weights):
    first = PERIOD - 1000
    whole = ids(make_mixture(weights), first, PERIOD + 1000)
    dataset = make_mixture(weights)
    for start, stop in (
        (PERIOD + 990, PERIOD + 1000),
        (PERIOD - 3, PERIOD + 3),
        (first, first + 7),
    ):
        assert ids(dataset, start, stop) == whole[start - first : stop - first]
    assert ids(dataset, first, first + 100, seed=6) != whole[:100]


def test_the_order_is_pinned():
    """A run must find the same samples with later versions."""
    assert ids(make_mixture([1, 2, 5]), 100, 112) == PINNED_BY_WEIGHT
    assert ids(make_mixture(), 100, 112) == PINNED_BY_SIZE


@pytest.mark.parametrize("period", [PERIOD, 16])
def test_without_weights_an_epoch_has_every_sequence_once(monkeypatch, period):
    """An epoch that is longer than a period is shuffled in pieces."""
    monkeypatch.setattr("titanlite.features.streams.mixture.PERIOD", period)
    dataset = make_mixture()
    total = 90 + 180 + 27
    assert dataset.num_train_sequences == total
    whole = ids(dataset, 0, 3 * total)
    epochs = [whole[i * total : (i + 1) * total] for i in range(3)]
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) and len(set(epochs[0])) == total
    assert len({tuple(kinds(epoch)) for epoch in epochs}) == 3
    assert len(set(kinds(whole[:40]))) == 3
    for start, stop in ((15, 17), (100, 250), (290, 300)):
        assert ids(dataset, start, stop) == whole[start:stop]
        own = Counter(kinds(whole[:stop]))
        assert dataset.get_taken(5, stop) == {"a": own[1], "b": own[2], "c": own[3]}


# --- through the loader


def make_loader(dataset):
    sizes = {"global_batch_size": 4, "local_batch_size": 4}
    return TrainLoader(dataset, seed=5, dp_rank=0, dp_degree=1, **sizes)


@pytest.mark.parametrize("weights", [None, [1, 2, 5]])
def test_a_run_that_goes_on_with_another_mixture_goes_on_in_every_source(
    weights,
):
    """Each sequence of a source comes again only after all its other sequences, and none is left
    out.
    """
    before = make_loader(make_mixture([3, 2, 1]))
    seen = [ids(before.dataset, 4 * step, 4 * step + 4) for step in range(25)]
    taken = before.get_taken(25)
    assert sum(taken.values()) == 100
    after = make_loader(make_mixture(weights))
    after.start_from(25, 100, taken=taken)
    seen += [ids(after.dataset, 4 * step, 4 * step + 4) for step in range(25, 60)]
    tokens = [token for step in seen for token in step]
    for kind, (name, _, part) in enumerate(get_sources(after.dataset), start=1):
        own = [token for token in tokens if token // 1000 == kind]
        assert own == ids(part, 0, len(own), get_source_seed(5, name)) and len(own) > 15
    # A second resume with the same mixture has the same order and the same offsets.
    again = make_loader(make_mixture(weights))
    again.start_from(40, 160, taken=after.get_taken(40))
    assert again.dataset.offsets == after.dataset.offsets
    assert ids(again.dataset, 160, 240) == tokens[160:240]


def test_a_source_that_is_new_begins_with_its_first_sequence():
    dataset = make_mixture([1, 1, 1])
    dataset.resume_at(5, 600, {"a": 123, "gone": 45})
    assert dataset.get_taken(5, 600) == {"a": 123, "b": 0, "c": 0}
    first = next(token for token in ids(dataset, 600, 700) if token // 1000 == 2)
    assert [first] == ids(dataset.parts[1], 0, 1, get_source_seed(5, "b"))


# --- from a configuration


@pytest.fixture
def make_sources(make_job, tmp_path):
    """`make_sources(sources, **settings)`: 40 rows "a N" and 80 rows "b N" in separate files."""

    def make(weights=(3, 1), **settings):
        job = make_job([], **{"seq_len": 64, "packing": False, **settings})
        job.data.path = ""
        for number, (name, count) in enumerate((("a", 40), ("b", 80))):
            file = tmp_path / f"{name}.jsonl"
            rows = [{"prompt": f"{name} {i}:", "completion": " yes"} for i in range(count)]
            write_lines(file, rows)
            weight = None if weights is None else float(weights[number])
            job.data.sources[name] = SourceSection(path=str(file), weight=weight)
        return job

    return make


def get_rows(loader, count):
    """Return source and row of the first samples."""
    indices = loader.dataset.get_train_indices(loader.seed, 0, count).tolist()
    return [get_shown_documents(loader.dataset, index)[0].place for index in indices]


def test_examples(make_sources, tmp_path):
    tokenizer, loader = build_data(make_sources(), 0, 1)
    places = get_rows(loader, 400)
    assert all(
        place.startswith((f"a: {tmp_path}/a.jsonl, row ", f"b: {tmp_path}/b.jsonl, row "))
        for place in places
    )
    assert sum(place.startswith("a") for place in places) == pytest.approx(300, abs=30)
    assert loader.dataset.fingerprint.startswith("a 12288/16384: 36 examples of ")
    assert "; b 4096/16384: 72 examples of " in loader.dataset.fingerprint
    prompts = evaluation_prompts(loader.dataset, tokenizer)
    assert Counter(prompt.where.rpartition("/")[2].partition(".")[0] for prompt in prompts) == {
        "a": 4,
        "b": 8,
    }


def test_a_mistake_names_the_source(make_sources, tmp_path):
    job = make_sources()
    (tmp_path / "b.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(DataError, match=r"^data\.sources\.b: .*b\.jsonl"):
        build_data(job, 0, 1)
    (tmp_path / "b.jsonl").write_text('{"prompt": "b", "completion": "%s"}\n' % (" long" * 99))
    with pytest.raises(
        DataError, match=r'Raise training\.seq_len, or set data\.sources\.b\.too_long to "cut"'
    ):
        build_data(job, 0, 1)
    job.data.sources["b"].streaming, job.data.sources["b"].bad_rows = True, "error"
    loader = build_data(job, 0, 1)[1]
    for read in (lambda: get_rows(loader, 40), lambda: loader.micro_batches(0)):
        with pytest.raises(DataError, match=r"^data\.sources\.b: .*set data\.sources\.b\.too_long"):
            read()


def test_the_folder_is_no_part_of_the_order(make_sources, tmp_path):
    """Machines may have the data in different places."""
    job = make_sources()
    job.data.sources["b"].streaming = True
    here = build_data(job, 0, 1)[1].fingerprint
    (tmp_path / "moved").mkdir()
    for name in ("a", "b"):
        job.data.sources[name].path = str(
            (tmp_path / f"{name}.jsonl").rename(tmp_path / f"moved/{name}.jsonl")
        )
    assert build_data(job, 0, 1)[1].fingerprint == here
    with (tmp_path / "moved/b.jsonl").open("a") as file:
        file.write('{"prompt": "one", "completion": "more"}\n')
    assert build_data(job, 0, 1)[1].fingerprint != here
    orders = [build_data(make_sources(w), 0, 1)[1].fingerprint for w in ((3, 1), (6, 2), (3, 2))]
    assert orders[0] == orders[1] != orders[2]
