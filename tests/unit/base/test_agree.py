"""Errors that one rank finds are raised on all."""

import pytest

from titanlite.base.agree import together
from titanlite.base.errors import CheckpointError, DataError, TitanliteError

CASES = {
    "none": ([None, None, None], None),
    "all alike": ([DataError("no rows")] * 3, DataError("no rows")),
    "one": ([None, None, CheckpointError("full")], CheckpointError("full (rank 2)")),
    "two kinds": (
        [None, DataError("no rows"), CheckpointError("full")],
        DataError("no rows (rank 1)\nfull (rank 2)"),
    ),
    "two of three": ([DataError("x"), None, DataError("x")], DataError("x (ranks 0, 2)")),
}


@pytest.mark.parametrize(("raised", "expected"), CASES.values(), ids=CASES)
def test_what_any_rank_raises_is_raised_on_all(run_ranks, raised, expected):
    def rank_main():
        import torch.distributed as dist

        own = raised[dist.get_rank()]
        try:
            with together():
                if own is not None:
                    raise own
        except TitanliteError as error:
            return error
        return None

    for found in run_ranks(3, rank_main):
        assert type(found) is type(expected) and str(found) == str(expected)


def test_one_process_raises_its_own_error():
    with pytest.raises(DataError, match=r"^no rows$"), together():
        raise DataError("no rows")
