"""Meters of the host's memory in several threads."""

from __future__ import annotations

import threading

import torch

from hiremate_lightning.memory.metering import MemoryMeter


def test_a_mark_from_another_thread_stands_in_no_meter():
    """A value that dies in another thread marks its release there, where that thread's own meter may run."""
    outer, labels = MemoryMeter(torch.device("cpu")), []
    outer.start()
    for number in range(4):
        outer.mark(number)

    def work() -> None:
        with MemoryMeter(torch.device("cpu")) as inner:
            outer.mark_release("released")
            outer.mark("marked")
            inner.mark("own")
        labels.extend(interval.label for interval in inner.intervals)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    outer.stop()
    assert labels == ["start", "own"]
    assert [interval.label for interval in outer.intervals] == ["start", 0, 1, 2, 3]
    assert outer.lost_marks
