"""Text in rows of one document, for models that mix the documents of a row.

Shape suffixes: B sequences in a batch, L tokens per sequence.
"""

from collections.abc import Sequence

import numpy as np
import torch

from titanlite.data.dataset import Batch, PackedDataset
from titanlite.data.tokens import TokenizedCorpus
from titanlite.ops import IGNORE_INDEX


class DocumentRows(PackedDataset):
    """Sequence i is L tokens of one document, or its last ones and padding (document id -1, no label).

    Every prediction inside a document is made once. Raises as `PackedDataset`.
    """

    def count_sequences(self, tokenized: TokenizedCorpus, seq_len: int) -> int:
        ends = np.append(tokenized.ends, len(tokenized.tokens) - 1)  # after the last end-of-text token may be more text
        begins = np.insert(ends[:-1] + 1, 0, 0)
        counts = np.maximum(-(-(ends - begins) // seq_len), 0)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a row in its document
        starts = np.repeat(begins, counts) + number * seq_len
        # (num_sequences, 2) int64: places of the first token, and of the label of the last one.
        self.bounds = np.stack([starts, np.minimum(starts + seq_len, np.repeat(ends, counts))], axis=1)
        return len(self.bounds)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}, a document in each"

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        numbers_B = np.asarray(indices, dtype=np.int64)
        if numbers_B.size == 0 or numbers_B.min() < 0 or numbers_B.max() >= self.num_sequences:
            raise IndexError(f"sequence indices {list(indices)} are not all in [0, {self.num_sequences})")
        bounds = self.bounds[numbers_B]
        rows_BL1 = np.full((len(bounds), self.seq_len + 1), self.tokenized.eos_token_id, dtype=np.int64)
        for row, (start, stop) in zip(rows_BL1, bounds.tolist(), strict=True):
            row[: stop + 1 - start] = self.tokenized.tokens[start : stop + 1]
        arange_L = np.arange(self.seq_len, dtype=np.int64)
        is_text_BL = arange_L < np.diff(bounds, axis=1)
        return Batch(
            tokens=torch.from_numpy(np.ascontiguousarray(rows_BL1[:, :-1])),
            labels=torch.from_numpy(np.where(is_text_BL, rows_BL1[:, 1:], IGNORE_INDEX)),
            positions=torch.from_numpy(arange_L * is_text_BL),
            document_ids=torch.from_numpy(is_text_BL.astype(np.int64) - 1),
        )
