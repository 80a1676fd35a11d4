"""Touching memory for the first time is counted, and what it costs is known."""

from __future__ import annotations

import mmap

import pytest

from hiremate_lightning.measuring import timing

PAGES = 1000


@pytest.fixture
def memory():
    if not timing.HAS_PAGE_FAULTS:
        pytest.skip("this system does not count page faults")
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        yield memory


def touch(memory: mmap.mmap) -> int:
    """Write to each page; give how many page faults this took."""
    before = timing.page_faults()
    for start in range(0, len(memory), mmap.PAGESIZE):
        memory[start] = 1
    return timing.page_faults() - before


def test_a_page_is_counted_when_it_is_touched_first(memory):
    first, again = touch(memory), touch(memory)
    assert first > again
    assert again < PAGES / 10


def test_the_cost_is_what_the_first_touch_takes_longer_than_the_second():
    clocks, faults = iter([0.0, 0.003, 0.004]), iter([100, 104])
    assert timing._page_fault_ms(clocks.__next__, faults.__next__) == pytest.approx(0.5)


def test_the_cost_is_no_more_than_that_of_clearing_a_huge_page():
    assert 0 <= timing.page_fault_ms() < 1.0


def test_a_system_that_does_not_count_has_none(monkeypatch):
    timing.page_fault_ms.cache_clear()
    monkeypatch.setattr(timing, "HAS_PAGE_FAULTS", False)
    assert timing.page_faults() == 0
    assert timing.page_fault_ms() == 0
    timing.page_fault_ms.cache_clear()
