"""Chooses few lengths to pad to, for batches whose lengths vary, since each new length has to be captured.

A dynamic program over the distinct lengths finds the lengths of least total padding exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from .errors import ConfigurationError


def bucket_lengths(lengths: Iterable[int], count: int = 8) -> tuple[int, ...]:
    """Choose the lengths to pad to.

    Args:
        lengths: Length of each sample, or of each batch.
        count: Most lengths to choose.

    Returns:
        At most `count` of the lengths, ascending, the longest included. Padding each length to the next of these takes
        the least padding in total.

    Raises:
        ConfigurationError: If there are no lengths, or one of them or the count is below 1.

    Example:
        >>> bucket_lengths([3, 4, 4, 9, 10, 30], count=3)
        (4, 10, 30)
    """
    values, occurrences = np.unique(np.fromiter(lengths, dtype=np.int64), return_counts=True)
    if not len(values) or values[0] < 1 or count < 1:
        raise ConfigurationError("bucket_lengths needs lengths of at least 1, and a count of at least 1.")
    before = np.concatenate([[0], np.cumsum(occurrences)])  # number of samples shorter than each length
    ends = len(values)
    # least[i]: least padded elements of the samples of the i shortest lengths, with the number of buckets so far
    least = np.where(np.arange(ends + 1) == 0, 0.0, np.inf)
    chosen: list[tuple[int, ...]] = [()] * (ends + 1)  # the buckets of this padding
    for _ in range(min(count, ends)):
        following, buckets = least.copy(), list(chosen)
        for end in range(1, ends + 1):
            padded = least[:end] + (before[end] - before[:end]) * values[end - 1]
            start = int(np.argmin(padded))
            if padded[start] < following[end]:
                following[end], buckets[end] = padded[start], (*chosen[start], int(values[end - 1]))
        least, chosen = following, buckets
    return chosen[ends]


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """Return the length to pad to: the smallest bucket that holds a length.

    Args:
        length: Length of a batch.
        buckets: The result of `bucket_lengths`.

    Raises:
        ConfigurationError: If the length is above the largest bucket.
    """
    position = bisect_left(buckets, length)
    if position == len(buckets):
        raise ConfigurationError(
            f"The length {length} is above the largest bucket, {buckets[-1] if buckets else 'there is none'}. "
            "Choose the buckets from all lengths that occur, or cut longer samples."
        )
    return buckets[position]
