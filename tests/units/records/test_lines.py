"""Numbers at other sizes: whole ones are exact on a line, measured ones stay beside their neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiremate_lightning.records.expressions import Line

whole = st.integers(0, 10**9)


@given(a=whole, b=st.integers(0, 10**6), first=st.integers(1, 99), more=st.integers(1, 99), size=st.integers(1, 10**5))
def test_a_line_through_whole_numbers_is_exact(a, b, first, more, size):
    sizes = (first, first + more)

    assert Line(sizes, [a + b * n for n in sizes]).whole(size) == a + b * size


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=4), size=st.integers(1, 500))
def test_a_measured_value_lies_between_its_neighbours(values, size):
    sizes = [3**i for i in range(len(values))]

    found = Line(sizes, values).measured(size)

    beside = sum(s <= size for s in sizes)
    if size > sizes[-1]:
        assert found >= values[-1]
    else:
        low, high = sorted((values[beside - 1], values[min(beside, len(values) - 1)]))
        assert low * (1 - 1e-9) - 1e-9 <= found <= high * (1 + 1e-9) + 1e-9


def test_what_grew_faster_than_the_size_goes_on_to_do_so():
    line = Line((2, 4), (4.0, 16.0))

    assert line.measured(8) == pytest.approx(64.0)
    assert Line((2, 4), (1.0, 100.0)).measured(8) == pytest.approx(400.0)  # no faster than the square
