import pytest

from titanlite.checkpoint import progress
from titanlite.checkpoint.progress import Transfer, format_transfer


@pytest.mark.parametrize(
    ("nbytes", "seconds", "text"),
    [
        (1_000_000_000, 0.8, "1.00 GB in 0.8 s, 1.25 GB/s"),
        (1_500_000, 0.5, "1.50 MB in 0.5 s"),  # 0.00 GB/s says nothing
        (5_000_000, 0.5, "5.00 MB in 0.5 s, 0.01 GB/s"),
        (0, 0.0, "0 B in 0.0 s"),
    ],
)
def test_a_rate_that_would_be_0_is_left_out(nbytes: int, seconds: float, text: str) -> None:
    assert format_transfer(nbytes, seconds) == text


def test_the_line_has_the_size_of_the_folder_not_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress.logger, "info", lambda text, *values: said.append(text % values))
    with Transfer("reading x", 10, 4_000_000) as one:
        one.add(10)
    with Transfer("reading nothing on this rank", 0, 4_000_000):
        pass
    (line,) = said
    assert line.startswith("checkpoint: reading x: 4.00 MB in 0.0 s")
