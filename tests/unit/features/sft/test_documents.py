from collections.abc import Callable

import pytest

from titanlite.data.dataset import IGNORE_INDEX, PackedDataset
from titanlite.data.tokens import TokenizedCorpus
from titanlite.features.sft.dataset import DocumentRows

MakeDataset = Callable[..., PackedDataset]


@pytest.mark.parametrize("seq_len", [1, 3, 10])
@pytest.mark.parametrize("at_end", [True, False])
def test_rows_of_one_document(make_dataset: MakeDataset, seq_len: int, at_end: bool) -> None:
    """Every prediction inside a document is made once, in rows that begin with it or go on with it."""
    packed = make_dataset().tokenized
    stop = int(packed.ends[-1]) + 1 if at_end else len(packed.tokens)
    corpus = TokenizedCorpus(packed.tokens[:stop], packed.eos_token_id, 50, packed.num_documents)
    dataset = DocumentRows(corpus, seq_len)
    expected: list[tuple[list[int], list[int]]] = []
    document: list[int] = []
    for place, token in enumerate(corpus.tokens.tolist()):
        document.append(token)
        if token == corpus.eos_token_id or place == stop - 1:
            for i in range(0, len(document) - 1, seq_len):
                labels = document[i + 1 : i + 1 + seq_len]
                expected.append((document[i : i + len(labels)], labels))
            document = []
    batch = dataset.batch(range(dataset.num_sequences))
    assert len(expected) == dataset.num_sequences == dataset.num_train_sequences + dataset.num_validation_sequences
    for row, (tokens, labels) in enumerate(expected):
        padding = seq_len - len(tokens)
        assert batch.tokens[row, : len(tokens)].tolist() == tokens
        assert batch.labels[row].tolist() == labels + [IGNORE_INDEX] * padding
        assert batch.positions[row].tolist() == [*range(len(tokens))] + [0] * padding
        assert batch.document_ids[row].tolist() == [0] * len(tokens) + [-1] * padding
    assert dataset.fingerprint != PackedDataset(corpus, seq_len).fingerprint
