"""Touching memory for the first time is counted, and what it costs is known."""

from __future__ import annotations

import mmap

import pytest

from hiremate_lightning.measuring import profiling

PAGES = 1000


@pytest.fixture
def memory():
    if not profiling.HAS_PAGE_FAULTS:
        pytest.skip("this system does not count page faults")
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        yield memory


def touch(memory: mmap.mmap) -> int:
    """Write to each page; give how many page faults this took."""
    before = profiling.page_faults()
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1
    return profiling.page_faults() - before


def test_a_page_is_counted_when_it_is_touched_first(memory):
    first, again = touch(memory), touch(memory)
    assert first > again
    assert again < PAGES / 10


def test_the_cost_is_what_the_first_touch_takes_longer_than_the_second():
    clocks, faults = iter([0.0, 0.003, 0.004]), iter([100, 104])
    assert profiling._page_fault_ms(clocks.__next__, faults.__next__) == pytest.approx(0.5)


def test_the_cost_is_no_more_than_that_of_clearing_a_huge_page():
    assert 0 <= profiling.page_fault_ms() < 1.0


def test_a_system_that_does_not_count_has_none(monkeypatch):
    profiling.page_fault_ms.cache_clear()
    monkeypatch.setattr(profiling, "HAS_PAGE_FAULTS", False)
    assert profiling.page_faults() == 0
    assert profiling.page_fault_ms() == 0
    profiling.page_fault_ms.cache_clear()
