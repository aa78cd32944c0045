"""Documents that are shown are those of the batch: the same tokens, the same labels, with the
places they are from.
"""

import re

import numpy as np
import pytest
import torch

from titanlite.assemble import build_data
from titanlite.config.schema import JobConfig
from titanlite.data.dataset import IGNORE_INDEX
from titanlite.features.tools.preview_data import get_shown_documents


def build(job):
    return build_data(job, 0, 1)[1].dataset


def check_against_batch(dataset, index):
    """The shown documents, one after the other, are row `index`; what is trained are its labels, in
    order.
    """
    documents, batch = get_shown_documents(dataset, index), dataset.batch([index])
    read = [token for document in documents for token in document.ids[: document.num_tokens]]
    num_used = int((batch.document_ids >= 0).sum())
    assert read == batch.tokens[0, :num_used].tolist()
    starts = np.cumsum([0, *(document.num_tokens for document in documents)])
    labels = torch.full_like(batch.labels[0], IGNORE_INDEX)
    for start, document in zip(starts.tolist(), documents, strict=False):
        for place, (token, trained) in enumerate(zip(document.ids, document.trained, strict=True)):
            if trained:
                labels[start + place - 1] = token
    assert labels.tolist() == batch.labels[0].tolist()
    ids = batch.document_ids[0, starts[:-1]].tolist()
    assert ids == list(range(len(documents)))
    return documents


def test_sequences_of_a_corpus(data, text_folder):
    job = JobConfig(data=data)
    job.training.seq_len = 48
    tokenizer, loader = build_data(job, 0, 1)
    dataset = loader.dataset
    texts = [path.read_text(encoding="utf-8") for path in sorted(text_folder.rglob("*.txt"))]
    seen = set()
    for index in range(dataset.num_sequences):
        (shown,) = check_against_batch(dataset, index)
        place, _, name = shown.place.partition(", beginning in document ")
        assert (
            place == f"tokens {48 * index} to {48 * index + 48} of {len(dataset.tokenized.tokens)}"
        )
        number, _, count = name.partition(" of ")
        first = tokenizer.decode(shown.ids).split(tokenizer.eos_token)[0]
        assert count == "40" and first in texts[int(number) - 1]
        seen.add(number)
    assert len(seen) > 10


@pytest.mark.parametrize(("packing", "streaming"), [(True, False), (False, True)])
def test_rows(make_job, packing, streaming):
    rows = [{"prompt": f"{i}:", "completion": " what is" * (i % 5 + 1)} for i in range(40)]
    settings = {"packing": packing, "streaming": streaming, "streaming_block_rows": 16}
    dataset = build(make_job(rows, seq_len=48, **settings))
    found = [
        check_against_batch(dataset, index)
        for index in dataset.get_train_indices(42, 0, 9).tolist()
    ]
    assert any(len(documents) > 1 for documents in found) == packing
    tokenizer = build_data(make_job(rows), 0, 1)[0]
    for document in (document for documents in found for document in documents):
        path, _, line = document.place.partition(", row ")
        text = tokenizer.decode(document.ids)
        assert path.endswith("rows.jsonl") and text.startswith(f"{int(line) - 1}:")
        assert document.num_trained > 1


@pytest.mark.parametrize("streaming", [True, False])
def test_pairs_and_pieces(make_job, streaming):
    pairs = [{"prompt": f"{i}:", "chosen": " good", "rejected": " bad"} for i in range(9)]
    dataset = build(make_job(pairs, seq_len=64, streaming=streaming, format="preference"))
    documents = check_against_batch(dataset, 0)
    assert [document.side for document in documents] == ["chosen", "rejected"] * (
        len(documents) // 2
    )
    texts = [{"text": f"{i} what is the answer " * 9} for i in range(9)]
    dataset = build(
        make_job(texts, seq_len=16, streaming=streaming, too_long="split", format="text")
    )
    places = [d.place for i in range(6) for d in check_against_batch(dataset, i)]
    assert any(place.endswith(", from token 15 on") for place in places)
    assert any(re.search(r", row \d$", place) for place in places) or streaming
