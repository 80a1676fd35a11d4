"""Numbers are expressions of sizes only where the samples leave no choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiremate_lightning.records.expressions import (
    Expression,
    Line,
    Sizes,
    SizesDifferError,
    find_expression,
    vary_alone,
)

LENGTHS: list[Sizes] = [(40,), (46,), (59,)]
BATCHES: list[Sizes] = [(6, 40), (9, 46), (5, 35), (7, 52)]


@pytest.mark.parametrize(
    ("sizes", "expression"),
    [
        (LENGTHS, Expression(0, (), 64)),
        (LENGTHS, Expression(256, (0,))),
        (LENGTHS, Expression(1, (0,), -1)),
        (LENGTHS, Expression(-3, (0,), 1000)),
        (LENGTHS, Expression(4, (0, 0))),
        (LENGTHS, Expression(1, (0, 0, 0))),
        (BATCHES, Expression(1, (1,))),
        (BATCHES, Expression(64, (0, 1))),
        (BATCHES, Expression(2, (0, 1, 1))),
        (BATCHES, Expression(8, (0, 1), 8, (0,))),
        (BATCHES, Expression(8, (0, 1), -16, (1,))),
    ],
)
def test_the_values_of_an_expression_lead_back_to_it(sizes: list[Sizes], expression: Expression):
    assert find_expression(sizes, [expression.at(sample) for sample in sizes]) == expression


def test_a_square_is_not_taken_for_a_straight_line():
    """At two sizes it would be `86 * length - 1840`."""
    found = find_expression(LENGTHS, [length * length for (length,) in LENGTHS])
    assert found is not None
    assert found.at((101,)) == 101 * 101


def test_numbers_that_are_no_such_expression_have_none():
    assert find_expression(LENGTHS, [length % 7 for (length,) in LENGTHS]) is None
    assert find_expression(LENGTHS, [length // 3 for (length,) in LENGTHS]) is None


def test_sizes_in_proportion_leave_a_choice():
    """A batch and a length that grow together don't tell by which of them a number grows."""
    sizes = [(2, 20), (3, 30), (5, 50)]
    assert find_expression(sizes, [10 * batch for batch, _ in sizes]) is None


def test_quotients_are_sizes_of_their_own():
    """Half of a length, at odd lengths too: lengths that are all even leave a choice."""
    odd, even = ([(length, length // 2) for length in lengths] for lengths in ((40, 47, 59), (40, 46, 58)))
    assert find_expression(odd, [4 * half for _, half in odd]) == Expression(4, (1,))
    assert find_expression(even, [4 * half for _, half in even]) is None


@pytest.mark.parametrize(
    "expression",
    [
        Expression(0, (), -5),
        Expression(3, (0, 1), -7),
        Expression(-2, (1, 1), 9),
        Expression(8, (0, 1), -8, (0,)),
    ],
)
def test_the_source_of_an_expression_is_the_expression(expression: Expression):
    assert eval(expression.source(("a", "b")), {"a": 4, "b": 9}) == expression.at((4, 9))


def test_sizes_that_never_vary_or_are_another_are_left_out():
    samples = [(4, 24, 24, 8), (4, 40, 40, 8), (4, 46, 46, 8)]
    assert vary_alone(samples, (4, 31, 31, 8)) == ([(24,), (40,), (46,)], (31,))


def test_a_size_that_is_made_of_another_is_left_out():
    """Dynamo's `Max(1, s - 1)`, or twice a half; where it is something else, that is refused."""
    samples = [(24, 23, 48), (40, 39, 80), (46, 45, 92)]
    assert vary_alone(samples, (31, 30, 62)) == ([(24,), (40,), (46,)], (31,))
    for sizes in [(1, 1, 2), (31, 30, 63)]:
        with pytest.raises(SizesDifferError, match="not by themselves"):
            vary_alone(samples, sizes)


def test_of_a_size_and_its_quotients_the_least_is_left():
    samples = [(80, 40, 20), (92, 46, 23), (84, 42, 21)]
    assert vary_alone(samples, (96, 48, 24)) == ([(20,), (23,), (21,)], (24,))
    with pytest.raises(SizesDifferError, match="not by themselves"):
        vary_alone(samples, (97, 48, 24))  # it is no multiple any more
    odd = [(81, 40), (92, 46), (84, 42)]
    assert vary_alone(odd, (97, 48)) == (odd, (97, 48))


def test_a_rest_of_two_is_a_size_of_its_own():
    """Its square is the same, unless it is something else at another size."""
    samples = [(40, 0), (47, 1), (59, 1), (64, 0)]
    assert find_expression(samples, [rest for _, rest in samples]) == Expression(1, (1,))
    assert vary_alone(samples, (33, 1)) == (samples, (33, 1))
    with pytest.raises(SizesDifferError, match="not by themselves"):
        vary_alone(samples, (33, 2))


@pytest.mark.parametrize("sizes", [(5, 31, 31), (4, 31, 32)])
def test_sizes_unlike_all_samples_are_refused(sizes: Sizes):
    """One that never varied does; two that were always equal are not."""
    with pytest.raises(SizesDifferError, match="differ"):
        vary_alone([(4, 24, 24), (4, 40, 40), (4, 46, 46)], sizes)


# ---------------------------------------------------------------- lines


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
