"""Memory is measured to the byte, and one measurement never stands in the way of another."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.torch_private import runtime
from tests.processes import run_python

CPU = torch.device("cpu")
KB = 1024


def floats(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes // 4)


def test_results_and_gradients_count_and_what_existed_does_not():
    before, a, weight = floats(64 * KB), torch.ones(KB), torch.ones(KB, requires_grad=True)
    assert measure_peak(lambda: None) == 0
    assert measure_peak(before.neg_) == 0
    assert measure_peak(lambda: a + a) == 4 * KB
    assert measure_peak((weight * 2).sum().backward) >= weight.nbytes


def test_each_interval_has_its_own_peak_and_first_bytes():
    with MemoryMeter(CPU) as meter:
        kept = floats(8 * KB)
        meter.mark("second")
        floats(32 * KB)
        meter.mark("third")
        del kept
    found = [(i.label, i.start_bytes, i.peak_bytes) for i in meter.intervals]
    assert found == [("start", 0, 8 * KB), ("second", 8 * KB, 40 * KB), ("third", 8 * KB, 8 * KB)]


def test_an_interval_may_begin_as_soon_as_something_is_released():
    with MemoryMeter(CPU) as meter:
        dropped = floats(8 * KB)
        meter.mark_release("dropped")
        del dropped
        floats(4 * KB)
    found = [(i.label, i.start_bytes, i.peak_bytes) for i in meter.intervals]
    assert found == [("start", 0, 8 * KB), ("dropped", 0, 4 * KB)]


def test_a_meter_within_another_pauses_the_outer_one():
    """A mark on a paused one is known to be lost."""
    with MemoryMeter(CPU) as outer:
        assert MemoryMeter.is_available(CPU)
        first = floats(8 * KB)
        peak = measure_peak(lambda: floats(32 * KB))
        second = floats(4 * KB)
        del first, second
    assert peak == 32 * KB
    assert [i.peak_bytes for i in outer.intervals] == [12 * KB]
    assert not outer.lost_marks
    with MemoryMeter(CPU) as outer:
        measure_peak(lambda: outer.mark("inside"))
    assert outer.lost_marks
    assert [i.label for i in outer.intervals] == ["start"]


def test_a_mark_in_code_that_is_traced_is_no_part_of_it():
    """A tensor that dies while code is traced sets one."""

    def code(x: torch.Tensor) -> torch.Tensor:
        meter.mark("inside")
        return x.sin()

    with MemoryMeter(CPU) as meter:
        traced = make_fx(code)(torch.ones(3))
    assert [str(node.target) for node in traced.graph.nodes] == ["x_1", "aten.sin.default", "output"]
    assert [i.label for i in meter.intervals] == ["start", "inside"]


def test_an_outer_meter_may_end_before_the_inner_one():
    outer, inner = MemoryMeter(CPU), MemoryMeter(CPU)
    outer.start()
    inner.start()
    outer.stop()
    kept = floats(16 * KB)
    inner.stop()
    del kept
    assert max(i.peak_bytes for i in inner.intervals) == 16 * KB
    assert not runtime.profiler_is_running()


def test_a_meter_that_ends_in_any_way_does_not_block_the_next():
    def fail():
        raise KeyError("the user's own")

    meter = MemoryMeter(CPU)
    meter.start()
    meter.stop()
    intervals = meter.intervals
    meter.stop()
    assert meter.intervals == intervals
    meter = MemoryMeter(CPU)
    meter.start()
    del meter
    gc.collect()
    assert not runtime.profiler_is_running()
    with pytest.raises(KeyError):
        measure_peak(fail)
    assert not runtime.profiler_is_running()
    assert measure_peak(lambda: floats(16 * KB)) == 16 * KB


def test_no_meter_is_available_while_another_profiler_records():
    assert MemoryMeter.is_available(CPU)
    with MemoryMeter(CPU) as meter:
        meter.mark("inside")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        assert not MemoryMeter.is_available(CPU)
        torch.ones(4).add(1)
    assert MemoryMeter.is_available(CPU)
    assert "aten::add" in {event.name for event in profiler.events()}


def test_meters_give_way_where_another_profiler_begins():
    outer, inner = MemoryMeter(CPU), MemoryMeter(CPU)
    outer.start()
    inner.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(4).add(1)
        for meter in (inner, outer):
            meter.mark("too late")
            meter.stop()
            assert meter.lost_marks
            assert [interval.label for interval in meter.intervals] == ["start"]
    assert "aten::add" in {event.name for event in profiler.events()}
    assert measure_peak(lambda: floats(16 * KB)) == 16 * KB


def test_blocks_allocated_before_are_not_logged():
    code = (
        "import torch\n"
        "from hiremate_lightning.memory.metering import measure_peak\n"
        "kept = [torch.ones(10) for _ in range(2000)]\n"
        "print(measure_peak(kept.clear))\n"
    )
    found = run_python("-c", code)
    assert found.stdout == "0\n", found.stderr
    assert "Memory block" not in found.stderr


def test_what_torch_logs_otherwise_is_left_as_it_was():
    """And a meter knows that another one ran meanwhile."""
    level = runtime._log_level()
    assert level is not None
    before = level.value
    with MemoryMeter(CPU) as outer, MemoryMeter(CPU) as inner:
        assert level.value > before
    assert level.value == before
    assert (outer.was_interrupted, inner.was_interrupted) == (True, False)


class Device:
    """Stands for CUDA's statistics: live bytes and their peak since the last reset."""

    def __init__(self) -> None:
        self.live = self.peak = 7 * KB  # of others

    def add(self, size_bytes: int, resets: bool = False) -> None:
        """Allocate, or free."""
        self.live += size_bytes
        self.peak = self.live if resets else max(self.peak, self.live)


@pytest.fixture
def device(answer_for_gpu) -> Device:
    device = Device()
    answer_for_gpu(
        synchronize=lambda _: None,
        memory_allocated=lambda _: device.live,
        max_memory_allocated=lambda _: device.peak,
        reset_peak_memory_stats=lambda _: device.add(0, resets=True),
    )
    return device


def test_each_interval_of_a_device_has_its_own_peak(device):
    with MemoryMeter(torch.device("cuda")) as meter:
        device.add(8 * KB)
        meter.mark("second")
        device.add(32 * KB)
        device.add(-32 * KB)
        meter.mark("third")
        device.add(-8 * KB)
    found = [(i.label, i.start_bytes, i.peak_bytes) for i in meter.intervals]
    assert found == [("start", 0, 8 * KB), ("second", 8 * KB, 40 * KB), ("third", 8 * KB, 8 * KB)]


def test_what_another_meter_saw_stay_on_a_device_does_not_count(device):
    with MemoryMeter(torch.device("cuda")) as outer:
        device.add(2 * KB)
        with MemoryMeter(torch.device("cuda")):
            device.add(64 * KB)
            device.add(-32 * KB)  # the rest is a library's workspace, say
        device.add(1 * KB)
        outer.mark("second")
        device.add(1 * KB)
    found = [(i.start_bytes, i.peak_bytes) for i in outer.intervals]
    assert found == [(0, 3 * KB), (3 * KB, 4 * KB)]


def test_a_mark_from_another_thread_stands_in_no_meter():
    """A value that dies in another thread marks its release there, where that thread's own meter may run."""
    outer, labels = MemoryMeter(CPU), []
    outer.start()
    for number in range(4):
        outer.mark(number)

    def work() -> None:
        with MemoryMeter(CPU) as inner:
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


def test_a_meter_outlives_one_that_was_dropped_inside_of_it():
    outer, inner = MemoryMeter(CPU), MemoryMeter(CPU)
    outer.start()
    inner.start()
    del inner
    assert measure_peak(lambda: floats(16 * KB)) == 16 * KB
    outer.mark("too late")
    outer.stop()
    assert outer.lost_marks
    assert not runtime.profiler_is_running()


def test_a_meter_that_is_dropped_in_a_backward_blocks_nothing():
    meters = [MemoryMeter(CPU)]
    meters[0].start()
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda gradient: meters.clear())
    weight.sum().backward()
    assert MemoryMeter.is_available(CPU)
    assert measure_peak(lambda: floats(16 * KB)) == 16 * KB
    assert not runtime.profiler_is_running()


def test_a_meter_whose_thread_has_ended_is_known_to_be_lost():
    """The next thread may get the number of the one that has ended."""
    meters = []

    def measure():
        for meter in meters:
            meter.stop()
            assert meter.lost_marks
        meters[:] = [MemoryMeter(CPU)]
        meters[0].start()

    for _ in range(4):
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    meters[0].stop()
    assert meters[0].lost_marks
    assert measure_peak(lambda: floats(16 * KB)) == 16 * KB
