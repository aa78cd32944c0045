import numpy as np
import pytest
import torch

from titanlite.base.errors import DataError
from titanlite.data import dataset as dataset_module
from titanlite.data.dataset import IGNORE_INDEX, PackedDataset
from titanlite.data.tokens import TokenizedCorpus


def test_batch_against_a_naive_reference(make_dataset):
    dataset = make_dataset()
    all_tokens, eos = dataset.tokenized.tokens.tolist(), dataset.tokenized.eos_token_id
    indices = [3, 0, dataset.num_sequences - 1, *range(20, 60)]
    batch = dataset.batch(indices)
    for row, index in enumerate(indices):
        position = document_id = 0
        for column in range(10):
            token, label = all_tokens[index * 10 + column], all_tokens[index * 10 + column + 1]
            assert batch.tokens[row, column] == token
            assert batch.positions[row, column] == position
            assert batch.document_ids[row, column] == document_id
            assert batch.labels[row, column] == (IGNORE_INDEX if token == eos else label)
            position += 1
            if token == eos:
                position, document_id = 0, document_id + 1
    assert (batch.labels == IGNORE_INDEX).any()
    assert batch.document_ids.max() > 2


def test_on_its_way_to_cuda_a_batch_learns_where_documents_begin(
    monkeypatch,
):
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9, 9, 0, 9, 9, 9], dtype=np.uint32)
    batch = PackedDataset(TokenizedCorpus(tokens, 0, 10, 3), seq_len=6).batch([0, 1])
    assert not batch.to("cpu").inputs
    monkeypatch.setattr(dataset_module, "copy_to", lambda device, tensor: tensor)
    moved = batch.to("cuda")
    assert moved.inputs["starts_N1"].tolist() == [0, 3, 5, 6, 10, 12]
    assert moved.inputs["starts_N1"].dtype == torch.int32 and moved.tokens is batch.tokens
    assert moved.with_rows(2) is moved


def test_each_epoch_is_another_permutation_of_the_training_sequences(
    make_dataset,
):
    dataset = make_dataset()
    num_train = dataset.num_train_sequences
    epochs = [dataset.get_train_indices(7, e * num_train, (e + 1) * num_train) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(num_train))
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[1] != epochs[2]).any()
    assert (epochs[0] != dataset.get_train_indices(8, 0, num_train)).any()
    assert (np.diff(epochs[0]) != 1).any()


def test_order_is_pinned(make_dataset):
    """A run resumed with another version must see the same data; these numbers may never change."""
    assert make_dataset().get_train_indices(42, 0, 8).tolist() == [167, 53, 8, 173, 26, 14, 48, 119]


@pytest.mark.parametrize(
    ("num_sequences", "num_validation"),
    [(2, 1), (200, 20), (6400, 64), (6401, 65)],
)
def test_number_of_held_out_sequences(make_dataset, num_sequences, num_validation):
    dataset = make_dataset(num_sequences + 1, seq_len=1)
    assert (dataset.num_sequences, dataset.num_validation_sequences) == (
        num_sequences,
        num_validation,
    )
    assert dataset.num_train_sequences == num_sequences - num_validation


def test_no_label_is_both_trained_and_validated():
    tokens = np.arange(1, 2002, dtype=np.uint16)  # all different, and no end of text
    dataset = PackedDataset(TokenizedCorpus(tokens, 0, 2002, 1), seq_len=10)
    train = dataset.batch(range(dataset.num_train_sequences)).labels.flatten().tolist()
    validation = dataset.batch(dataset.get_validation_indices(0, 20)).labels.flatten().tolist()
    assert train + validation == list(range(2, 2002))


def test_share_of_the_sequences_that_is_held_out():
    tokens = np.arange(2001, dtype=np.uint16)
    corpus = TokenizedCorpus(tokens, 0, 2002, 1)
    for share, held_out in ((None, 20), (0.0, 0), (0.25, 50)):
        dataset = PackedDataset(corpus, 10, share)
        assert (dataset.num_train_sequences, dataset.num_validation_sequences) == (
            200 - held_out,
            held_out,
        )
        assert set(dataset.get_train_indices(1, 0, 400).tolist()) == set(range(200 - held_out))
        assert dataset.fingerprint.endswith(
            "sequences of 10" if share is None else f"of 10, {held_out} held out"
        )
    assert PackedDataset(TokenizedCorpus(tokens[:11], 0, 2002, 1), 10, 0.0).num_train_sequences == 1
    with pytest.raises(DataError, match=r"give 0 sequence.*, but 1 is needed"):
        PackedDataset(TokenizedCorpus(tokens[:10], 0, 2002, 1), 10, 0.0)
