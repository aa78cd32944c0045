"""Seconds of collectives, computed by hand."""

import pytest
from files import read_table

from titanlite.base.errors import ConfigError
from titanlite.features.choice.hardware import get_hardware

H100 = get_hardware("h100-80gb")


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_gather", range(8), (450e9 * 7 / 8 / 450e9, 0)),
        ("all_reduce", range(8), (2 * 7 / 8, 0)),
        ("reduce_scatter", range(4), (3 / 4, 0)),
        # All 8 adapters of a node carry a ring: 400 GB/s, a little less than NVLink.
        ("all_gather", range(16), (0, 450e9 * 15 / 16 / 400e9)),
        # One rank per node has one adapter.
        ("all_gather", range(0, 64, 8), (0, 450e9 * 7 / 8 / 50e9)),
        # Of 16 parts one stays, 7 go to neighbours and 8 to the other node.
        ("all_to_all", range(16), (7 / 16, 450e9 * 8 / 16 / 50e9)),
        ("all_to_all", range(1), (0, 0)),
    ],
)
def test_seconds_of_collectives(kind, ranks, expected):
    assert H100.collective_s(kind, list(ranks), 450e9) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "expected"), read_table("plans")["short_names"].items())
def test_short_names(name, expected):
    assert get_hardware(name).name == expected


# h20 and l40 are sold, with other figures
@pytest.mark.parametrize("name", ["h1000", "tpu", "", "h20", "l40"])
def test_a_part_of_a_name_is_no_gpu(name):
    with pytest.raises(ConfigError, match=rf"--gpu={name}: not in the table.*Known are h100-80gb"):
        get_hardware(name)
