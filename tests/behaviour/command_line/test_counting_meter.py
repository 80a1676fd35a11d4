"""The meter of tensors without memory: it counts what the host's allocator would hand out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hiremate_lightning.command_line.without_device import CountingMeter
from hiremate_lightning.memory.metering import MemoryMeter
from hiremate_lightning.torch_private import tensor_state

CPU = torch.device("cpu")


def measured(meter):
    """Run a loss and its backward, and release what it was computed from on the way."""
    rows = torch.zeros(32, 128, requires_grad=True) + 0
    labels = torch.zeros(32, dtype=torch.long)
    meter.start()
    loss = F.cross_entropy(rows, labels)
    tensor_state.at_release(rows, lambda: meter.mark_release("released"))
    meter.mark("called")
    del rows
    loss.backward()
    meter.mark("end")
    meter.stop()
    return meter.intervals


def test_it_counts_what_the_allocator_hands_out():
    with tensor_state.fake_mode():
        counted = measured(CountingMeter(CPU))
    found = {i.label: (i.start_bytes, i.peak_bytes) for i in counted}

    allocated = measured(MemoryMeter(CPU))
    # Only the allocator knows what was there before: its release takes the live bytes below those of the start.
    held = {i.label: (i.start_bytes, i.peak_bytes) for i in allocated}
    assert found["start"] == held["start"]
    assert found["called"][0] == held["called"][0]
    assert max(peak for _, peak in found.values()) == 3 * 4 * 32 * 128 + 8


def test_a_release_begins_an_interval():
    meter = CountingMeter(CPU)
    with tensor_state.fake_mode():
        meter.start()
        values = torch.ones(100)
        tensor_state.at_release(values, lambda: meter.mark_release("released"))
        del values
        meter.stop()
    start, released = meter.intervals

    assert (start.peak_bytes, released.label) == (400, "released")
    assert (released.start_bytes, released.released_bytes) == (0, 400)


@pytest.mark.parametrize(("device", "size_bytes"), [("cpu", 4), ("cuda", 512)])
def test_blocks_are_those_of_the_device(device, size_bytes):
    meter = CountingMeter(torch.device(device))
    with tensor_state.fake_mode():
        meter.start()
        value = torch.ones(1)
        view = value.view(1, 1)
        meter.stop()

    assert view._base is value
    assert meter.intervals[-1].peak_bytes == size_bytes


def test_what_others_resize_is_counted():
    """FSDP2 makes whole parameters so, and frees them again."""
    with tensor_state.fake_mode():
        whole = torch.ones(100)
        whole.untyped_storage().resize_(0)
        meter = CountingMeter(CPU, [whole])
        meter.start()
        whole.untyped_storage().resize_(400)
        whole.fill_(1)
        meter.mark("whole")
        whole.untyped_storage().resize_(0)
        meter.stop()

    assert [(i.start_bytes, i.peak_bytes) for i in meter.intervals] == [(0, 400), (400, 400)]
