"""The lengths to pad to are those of the least padding."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiremate_lightning import ConfigurationError, bucket_lengths, bucket_of


def padded(lengths, buckets):
    return sum(bucket_of(length, buckets) for length in lengths)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 5))
def test_no_choice_of_as_many_lengths_pads_less(lengths, count):
    found = bucket_lengths(lengths, count)

    distinct = sorted(set(lengths))
    others = combinations(distinct, min(count, len(distinct)))
    assert list(found) == sorted(set(found))
    assert len(found) <= count
    assert padded(lengths, found) == min(padded(lengths, o) for o in others if o[-1] == distinct[-1])


def test_enough_buckets_pad_nothing_and_take_no_time():
    assert bucket_lengths([5, 7, 5, 9], count=8) == (5, 7, 9)
    assert len(bucket_lengths(range(1, 4097), count=8)) == 8


def test_a_length_above_all_buckets_is_refused():
    assert bucket_of(8, (4, 8)) == 8
    with pytest.raises(ConfigurationError, match="The length 9 is above the largest bucket, 8"):
        bucket_of(9, (4, 8))


@pytest.mark.parametrize(("lengths", "count"), [([], 3), ([0, 4], 3), ([4], 0)])
def test_what_cannot_be_chosen_from_is_refused(lengths, count):
    with pytest.raises(ConfigurationError, match="bucket_lengths needs lengths of at least 1"):
        bucket_lengths(lengths, count)
