import pytest

from titanlite.data.loader import TrainLoader
from titanlite.ops import IGNORE_INDEX

# (dp_degree, local_batch_size), G = 12
MESHES = [(1, 12), (2, 1), (4, 3)]


def _make_loader(dataset, dp_degree, local_batch_size, dp_rank=0, **kwargs):
    settings = {"seed": 5, "global_batch_size": 12} | kwargs
    return TrainLoader(
        dataset, local_batch_size=local_batch_size, dp_rank=dp_rank, dp_degree=dp_degree, **settings
    )


def _rows(batches):
    return [tuple(row) for batch in batches for row in batch.tokens.tolist()]


@pytest.mark.parametrize(("dp_degree", "local_batch_size"), MESHES)
def test_any_mesh_sees_the_same_global_batch(make_dataset, dp_degree, local_batch_size):
    for step in [0, 14, 15]:  # 180 training sequences: step 14 ends the first epoch
        dataset = make_dataset()
        indices = dataset.get_train_indices(5, step * 12, step * 12 + 12)
        expected = _rows([dataset.batch(indices)])
        seen = []
        for dp_rank in range(dp_degree):
            batches = _make_loader(dataset, dp_degree, local_batch_size, dp_rank).micro_batches(
                step
            )
            assert len(batches) == 12 // (dp_degree * local_batch_size)
            assert {batch.tokens.shape for batch in batches} == {(local_batch_size, 10)}
            seen += _rows(batches)
        assert sorted(seen) == sorted(expected)


def test_ranks_take_contiguous_slices_of_each_micro_batch(make_dataset):
    dataset = make_dataset()
    rows = _rows([dataset.batch(dataset.get_train_indices(5, 0, 12))])
    first, second = _make_loader(dataset, 2, 3, dp_rank=1).micro_batches(0)
    assert _rows([first]) == rows[3:6]
    assert _rows([second]) == rows[9:12]


@pytest.mark.parametrize(("dp_degree", "local_batch_size"), MESHES)
def test_validation_takes_every_held_out_row_once_on_any_mesh(
    make_dataset, dp_degree, local_batch_size
):
    for num_steps in [0, 1]:
        # 500 sequences, 50 held out: 4 batches of 12, and 2 more
        dataset = make_dataset(num_tokens=5001)
        count = min(num_steps * 12, 50) or 50
        expected = _rows([dataset.batch(range(450, 450 + count))])
        seen, lengths = [], set()
        for dp_rank in range(dp_degree):
            loader = _make_loader(dataset, dp_degree, local_batch_size, dp_rank)
            batches = list(loader.validation_batches(num_steps))
            lengths.add(len(batches))
            assert {batch.tokens.shape for batch in batches} == {(local_batch_size, 10)}
            for batch in batches:
                is_row = batch.document_ids[:, 0] >= 0
                assert (batch.labels[~is_row] == IGNORE_INDEX).all()
                seen += map(tuple, batch.tokens[is_row].tolist())
        assert sorted(seen) == sorted(expected)
        assert lengths == {-(-count // (dp_degree * local_batch_size))}, (
            "or ranks would wait for others in a collective"
        )


def test_samples_are_skipped_once(make_dataset):
    loader = _make_loader(make_dataset(), 1, 4)
    loader.start_from(10, 120, 160)
    assert [loader.samples_before(step) for step in (10, 11)] == [160, 172]
    loader.start_from(11, 172, 160)  # a resume with the same command
    assert loader.samples_before(11) == 172
    smaller = _make_loader(make_dataset(), 1, 4, global_batch_size=4)
    smaller.start_from(11, 132)
    assert [smaller.samples_before(step) for step in (11, 12)] == [132, 136]
