"""Which samples each step takes."""

from titanlite.data.order import Stretch, add_stretch, find_stretch

FIRST, SECOND = Stretch(0, 0, 8, "data"), Stretch(5, 40, 4, "data")


def test_a_stretch_that_goes_on_as_before_is_no_new_one():
    assert add_stretch([], FIRST) == [FIRST]
    assert add_stretch([FIRST], Stretch(5, 40, 8, "data")) == [FIRST]
    for new in (SECOND, Stretch(5, 48, 8, "data"), Stretch(5, 40, 8, "other data")):
        assert add_stretch([FIRST], new) == [FIRST, new]


def test_a_new_stretch_takes_the_place_of_later_ones():
    assert add_stretch([FIRST, SECOND, Stretch(9, 99, 4, "data")], Stretch(5, 44, 4, "data")) == [
        *(FIRST, Stretch(5, 44, 4, "data"))
    ]
    assert add_stretch([FIRST, SECOND], FIRST) == [FIRST]


def test_steps_are_found_in_the_stretch_that_they_belong_to():
    found = [find_stretch([FIRST, SECOND], step) for step in (0, 4, 5, 100)]
    assert found == [FIRST, FIRST, SECOND, SECOND]
    assert find_stretch([SECOND], 4) is None
    assert [stretch.samples_before(step) for stretch, step in zip(found, (0, 4, 5, 100), strict=True) if stretch] == [
        *(0, 32, 40, 40 + 95 * 4)
    ]
