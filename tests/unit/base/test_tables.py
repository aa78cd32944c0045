"""Names of tensors as tables show them."""

import pytest

from titanlite.base.tables import fold_names


@pytest.mark.parametrize(
    ("layers", "shown"),
    [([3], "3"), ([0, 1, 2], "{0-2}"), ([47, 0, 1, 48, 10], "{0-1,10,47-48}"), ([0, 2], "{0,2}")],
)
def test_folded_names_have_the_numbers_that_are_there_and_no_others(layers, shown):
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up" for layer in layers for expert in (0, 1)]
    assert fold_names(names) == f"model.layers.{shown}.mlp.experts.{{0-1}}.up"


def test_a_name_alone_stays_as_it_is_written():
    assert fold_names(["cpu.00000"]) == "cpu.00000"
