"""Storages that are offloaded: what a schedule does with them, counted by hand, and by two slower ways."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiremate_lightning.errors import ScheduleError
from hiremate_lightning.records.costs import Link, Profile
from hiremate_lightning.records.graph import Graph, StorageKind
from hiremate_lightning.records.offload import Idle, Offload, can_be_offloaded, idle_storages, with_offloads
from hiremate_lightning.records.schedule import (
    Compute,
    CopyIn,
    CopyOut,
    Free,
    Operation,
    Schedule,
    WaitIn,
    WaitOut,
    keep_all,
    lower,
)
from hiremate_lightning.records.simulation import allocations, blocks, simulate
from hiremate_lightning.reporting.timeline import Band, lifetimes
from tests.helpers import moments, random_graph, refused
from tests.tiny import Builder, chain, recompute_lazily

FAST, SLOW = Link(100.0, 100.0), Link(50.0, 25.0)  # a block of 100 bytes takes 1 ms, or 2 ms out and 4 ms in


def kept(length: int, link: Link | None = FAST) -> tuple[Graph, Profile, Schedule]:
    graph, profile = chain(length, size=100)
    return graph, replace(profile, link=link), lower(graph, keep_all(graph))


def storage_of(graph: Graph, name: str) -> int:
    (storage,) = {tensor.storage for tensor in graph.tensors if tensor.name == name}
    assert storage is not None
    return storage


def offloaded(step: tuple[Graph, Profile, Schedule], **places: tuple[int, int, int]) -> tuple[Graph, Profile, Schedule]:
    """Offload values of a step, by their names; each has the places where it goes out, is gone and comes back."""
    graph, profile, schedule = step
    offloads = [Offload(storage_of(graph, name), *own) for name, own in places.items()]
    return graph, profile, with_offloads(graph, schedule, offloads)


def test_a_value_is_offloaded_between_its_uses():
    graph, _, schedule = kept(3)
    a0, a1 = storage_of(graph, "a0"), storage_of(graph, "a1")
    # a0 is made by the first operation and read by the second; of the backward it is g1 that reads it, the second.
    half = {"end": 3, "start": 0}
    assert idle_storages(graph, schedule) == (
        Idle(a0, made=1, last=2, first=1, **half),
        Idle(a1, made=2, last=3, first=0, **half),
    )


def test_a_value_that_is_offloaded_is_counted_as_by_hand():
    found = simulate(*offloaded(kept(3), a0=(1, 2, 1)))
    # a0; a0 and a1, then a0 is gone; a1 and a2; a1, dy and g2; a0, which is back, g2 and g1; g1 and g0.
    assert moments(found) == [(100, 100), (200, 100), (200, 100), (300, 100), (300, 100), (200, 100)]
    assert (found.peak_bytes, found.saved_bytes, found.host_bytes) == (300, 100, 100)
    # It goes out while a1 is computed. It comes in when g2 is there, and g1 waits for it.
    assert (found.time_ms, found.wait_ms, found.recompute_ms) == (7.0, 1.0, 0.0)
    assert found.overhead == pytest.approx(1 / 6)


def test_a_copy_that_begins_earlier_takes_memory_and_no_time():
    """Each copy takes the latency of the link."""
    found = simulate(*offloaded(kept(3), a0=(1, 2, 0)))
    # a0 is back before g2 runs: a0, a1, dy and g2.
    assert moments(found)[3:] == [(400, 200), (300, 100), (200, 100)]
    assert (found.time_ms, found.wait_ms) == (6.0, 0.0)
    late = kept(3, Link(100.0, 100.0, latency_ms=0.5))
    assert simulate(*offloaded(late, a0=(1, 2, 1))).wait_ms == 0.5 + 1.5


def test_copies_of_one_direction_wait_for_each_other():
    found = simulate(*offloaded(kept(4, SLOW), a1=(2, 4, 0), a0=(1, 4, 0)))
    # Out: a0 from 1 to 3, a1 from 3 to 5, and computing, done at 4, waits for it. In: a1 from 5 to 9, a0 from 9 to 13.
    # g3 runs from 5 to 6; g2 waits for a1 until 9, g1 from 10 until 13 for a0, g0 ends at 15.
    assert (found.time_ms, found.wait_ms, found.host_bytes) == (15.0, 7.0, 200)


def test_views_are_offloaded_and_prefetched_with_their_storage():
    b = Builder()
    a = b.op("a", (b.input("x", 1, StorageKind.INPUT),), 100)
    view = b.op("view", (a,), view_of=a, time=0.0)
    out = b.op("b", (view,), 10)
    b.op("g", (a, view, b.tangent("dy", 1)), 10, backward=True)
    graph, profile = b.graph(outputs=(out,))
    schedule = lower(graph, keep_all(graph))
    assert [(idle.last, idle.first) for idle in idle_storages(graph, schedule)] == [(3, 0)]
    found = simulate(*offloaded((graph, replace(profile, link=FAST), schedule), a=(1, 3, 0)))
    assert (found.saved_bytes, [m.live_bytes for m in found.timeline]) == (0, [100, 100, 0, 0])


def test_what_a_mutation_changes_is_copied_after_it():
    b = Builder()
    a = b.op("a", (b.input("x", 1, StorageKind.INPUT),), 100)
    b.op("fill", (a,), view_of=a, mutating=True)
    out = b.op("b", (a,), 10)
    b.op("g", (a, b.tangent("dy", 1)), 10, backward=True)
    graph, profile = b.graph(outputs=(out,))
    schedule, storage = lower(graph, keep_all(graph)), storage_of(graph, "a")
    assert [(idle.made, idle.last) for idle in idle_storages(graph, schedule)] == [(2, 3)]
    early = (schedule.forward[0], CopyOut(storage), *schedule.forward[1:], WaitOut(storage))
    words = refused(graph, replace(profile, link=FAST), replace(schedule, forward=early))
    assert words == "'fill' changes 'a', which is being copied out"


@pytest.mark.parametrize("seen", ["outputs", "held", "gradients"])
def test_what_others_see_does_not_get_offloaded(seen: str):
    graph, _, schedule = kept(3)
    a0 = graph.nodes[0].outputs[0]
    others = replace(graph, **{seen: (*getattr(graph, seen), a0)})
    assert [idle.storage for idle in idle_storages(others, schedule)] == [storage_of(graph, "a1")]


def test_what_outside_code_uses_and_what_is_pinned_stays():
    b = Builder()
    a = b.op("a", (), 100)
    read = b.op("read", (a,), 100)
    held = b.outside((read,), 50)
    other = b.op("b", (held,), 100)
    b.op("g", (a, read, held, other, b.tangent("dy", 1)), 1, backward=True)
    graph, _ = b.graph()
    schedule = lower(graph, keep_all(graph))
    found = [idle.storage for idle in idle_storages(graph, schedule)]
    assert found == [storage_of(graph, "a"), storage_of(graph, "b")]
    pinned = idle_storages(graph, schedule, pinned=[storage_of(graph, "a")])
    assert [idle.storage for idle in pinned] == [storage_of(graph, "b")]


def test_what_is_retained_for_another_backward_stays_on_the_host():
    graph, profile, schedule = kept(3)
    retaining = replace(graph, retained=tuple(range(len(graph.tensors))))
    found = simulate(*offloaded((retaining, profile, schedule), a0=(1, 2, 1)))
    # a1 and g2; a1 and g1, as a0 has come back and died with it; a1 and g0.
    assert [moment.live_bytes for moment in found.timeline[3:]] == [200, 200, 200]


def test_a_value_that_comes_back_may_be_computed_again_later():
    graph, profile, _ = kept(4)
    a0 = storage_of(graph, "a0")
    schedule = lower(graph, ((0, 1), (1,), (0,), (), ()))  # a0 is saved by none: make it so
    assert a0 not in {graph.tensors[t].storage for t in schedule.saved}
    schedule = lower(graph, ((1,), (), (0,), (), ()))  # a1 from a0, which is dropped and computed again for g1
    offloading = offloaded((graph, profile, schedule), a0=(1, 2, 0))
    assert simulate(*offloading).recompute_ms == 2.0
    bands = [life.band for life in lifetimes(graph, offloading[2]) if life.storage == a0]
    assert bands == [Band.OFFLOADED, Band.OFFLOADED, Band.RECOMPUTED]


def test_nothing_offloaded_is_the_schedule_as_it_was():
    graph, _, schedule = kept(3, SLOW)
    assert with_offloads(graph, schedule, []) == schedule


# ---------------------------------------------------------------- what is refused


def without(operations: tuple[Operation, ...], kind: type) -> tuple[Operation, ...]:
    return tuple(operation for operation in operations if not isinstance(operation, kind))


@pytest.fixture
def offload() -> tuple[Graph, Profile, Schedule]:
    return offloaded(kept(3), a0=(1, 2, 1))


def test_a_read_of_a_value_that_is_not_back_yet_is_refused(offload):
    graph, profile, schedule = offload
    a0 = storage_of(graph, "a0")
    early = replace(schedule, backward=(*without(schedule.backward, WaitIn), WaitIn(a0)))
    assert refused(graph, profile, early) == "'g1' reads 'a0', which is offloaded"
    forward = (Compute(0), CopyOut(a0), WaitOut(a0), Compute(1), *without(schedule.forward, Compute))
    assert refused(graph, profile, replace(schedule, forward=forward)) == "'a1' reads 'a0', which is offloaded"


@pytest.mark.parametrize(
    ("half", "left_out", "words"),
    [
        ("forward", CopyOut, "WaitOut of 'a0' is out of turn"),
        ("forward", WaitOut, "The forward ends before it has copied out 'a0': its last operation is CopyOut"),
        ("backward", CopyIn, "WaitIn of 'a0' is out of turn"),
        ("backward", WaitIn, "'g1' reads 'a0', which is offloaded"),
    ],
)
def test_no_part_of_the_way_can_be_left_out(offload, half, left_out, words):
    graph, profile, schedule = offload
    broken = replace(schedule, **{half: without(getattr(schedule, half), left_out)})
    assert refused(graph, profile, broken) == words


def test_a_copy_that_never_ends_or_is_freed_meanwhile_is_refused():
    graph, profile, schedule = kept(3)
    last, (a2,) = storage_of(graph, "a2"), graph.nodes[2].outputs
    forward = without(schedule.forward, Free)
    freeing = replace(schedule, forward=(*forward, CopyOut(last), Free(a2), WaitOut(last)))
    assert refused(graph, profile, freeing) == "The schedule frees 'a2', which is being copied out"
    keeping = replace(schedule, saved=(*schedule.saved, a2), forward=(*forward, CopyOut(last), WaitOut(last)))
    words = "The step ends without 'a2': its last operation is WaitOut"
    assert refused(replace(graph, outputs=()), profile, keeping) == words


def test_copies_need_a_link_and_values_that_nobody_holds(offload):
    graph, profile, schedule = offload
    holding = replace(graph, held=graph.nodes[0].outputs)
    assert refused(holding, profile, schedule) == "'a0' can't be offloaded: it is held to the end of the step"
    words = refused(graph, replace(profile, link=None), schedule)
    assert words == "The schedule copies to the host, but its costs do not say how fast (Profile.link)"


def test_values_come_back_in_the_backward_only(offload):
    graph, profile, schedule = offload
    copy_in = CopyIn(storage_of(graph, "a0"))
    words = "The forward has a CopyIn: values are offloaded in the forward, and come back after it"
    assert refused(graph, profile, replace(schedule, forward=(*schedule.forward, copy_in))) == words
    first = next(position for position, o in enumerate(schedule.backward) if isinstance(o, Free))
    backward = list(without(schedule.backward, CopyIn))
    backward.insert(first, copy_in)
    words = "The schedule frees after a copy in that no node has followed yet: free before it"
    assert refused(graph, profile, replace(schedule, backward=tuple(backward))) == words


@pytest.mark.parametrize(
    "places",
    [{"out": 0}, {"gone": 1}, {"out": 3}, {"gone": 4}, {"back": 2}, {"back": -1}],
    ids=["before it is made", "while it is read", "after it is gone", "after the forward", "too late", "before all"],
)
def test_places_that_do_not_fit_are_refused(places: dict[str, int]):
    graph, _, schedule = kept(3)
    offload = replace(Offload(storage_of(graph, "a0"), out=1, gone=2, back=1), **places)
    with pytest.raises(ScheduleError, match=r"does not fit Idle\(storage=1, made=1, last=2, first=1, "):
        with_offloads(graph, schedule, [offload])


def test_an_offload_that_is_forbidden_or_repeated_is_refused():
    graph, _, schedule = kept(3)
    offload = Offload(storage_of(graph, "a0"), out=1, gone=2, back=1)
    with pytest.raises(ScheduleError, match="may not be offloaded"):
        with_offloads(graph, schedule, [replace(offload, storage=storage_of(graph, "a2"))])
    with pytest.raises(ScheduleError, match="is offloaded twice"):
        with_offloads(graph, schedule, [offload, offload])


# ---------------------------------------------------------------- two slower ways to count the same


def slowly_counted_bytes(graph: Graph, profile: Profile, schedule: Schedule, offloads: list[Offload]) -> list[int]:
    """Count the bytes while each node runs: all blocks that live then, but for those that are offloaded."""
    nodes = [o.node for o in (*schedule.forward, *schedule.backward) if isinstance(o, Compute)]
    turn = sum(isinstance(operation, Compute) for operation in schedule.forward)
    windows = {offload.storage: range(offload.gone, turn + offload.back) for offload in offloads}
    counted = [profile.workspace_bytes[node] for node in nodes]
    for storage, first, last in blocks(graph, schedule):
        is_offloaded = windows.get(storage, range(0)) if first < turn <= last else range(0)
        for moment in range(first, last + 1):
            counted[moment] += 0 if moment in is_offloaded else graph.sizes[storage]
    return counted


def tick_by_tick(graph: Graph, profile: Profile, schedule: Schedule) -> int:
    """Let three workers go through their lists, a millisecond at a time; return when the last is done."""
    link, now, left, place = profile.link, 0, 0, 0
    queues: dict[str, list[list[int]]] = {"out": [], "in": []}  # storage and milliseconds of each copy to be done
    operations = (*schedule.forward, *schedule.backward)
    assert link is not None
    while True:
        while left == 0 and place < len(operations):
            operation = operations[place]
            if isinstance(operation, Compute):
                left = int(profile.time_ms[operation.node])
            elif isinstance(operation, CopyOut):
                queues["out"].append([operation.storage, int(link.out_ms(graph.sizes[operation.storage]))])
            elif isinstance(operation, CopyIn):
                queues["in"].append([operation.storage, int(link.in_ms(graph.sizes[operation.storage]))])
            elif isinstance(operation, (WaitOut, WaitIn)):
                queue = queues["out" if isinstance(operation, WaitOut) else "in"]
                if any(storage == operation.storage for storage, _ in queue):
                    break
            place += 1
        if left == 0 and place == len(operations):
            return now
        now, left = now + 1, max(0, left - 1)
        for queue in queues.values():
            if queue:
                queue[0][1] -= 1
                if queue[0][1] == 0:
                    queue.pop(0)


def random_offloads(graph: Graph, schedule: Schedule, rng: random.Random) -> list[Offload]:
    found = []
    for idle in idle_storages(graph, schedule):
        if rng.random() < 0.6:
            out = rng.randint(idle.made, idle.end)
            gone = rng.randint(max(out, idle.last), idle.end)
            found.append(Offload(idle.storage, out, gone, rng.randint(idle.start, idle.first)))
    rng.shuffle(found)
    return found


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_the_simulator_agrees_with_both_slow_ways(seed: int, length: int):
    rng = random.Random(seed)
    graph, costs = random_graph(seed, length)
    times = tuple(float(rng.randint(0, 40)) for _ in graph.nodes)
    profile = replace(costs, time_ms=times, link=Link(*rng.choice(((1.0, 0.5), (2.0, 4.0), (0.25, 1.0))), latency_ms=3))
    sizes = tuple(replace(s, size_bytes=-(-s.size_bytes // 4) * 4) for s in graph.storages)  # whole milliseconds
    graph = replace(graph, storages=sizes)
    keep = [s for s in range(len(sizes)) if rng.random() < 0.7]
    schedule = lower(graph, recompute_lazily(graph, keep))
    offloads = random_offloads(graph, schedule, rng)
    offload = with_offloads(graph, schedule, offloads)
    found = simulate(graph, profile, offload)
    assert [moment.peak_bytes for moment in found.timeline] == slowly_counted_bytes(graph, profile, schedule, offloads)
    assert found.time_ms == tick_by_tick(graph, profile, offload)
    assert found.recompute_ms == simulate(graph, profile, schedule).recompute_ms
    assert found.host_bytes == sum(graph.sizes[offload.storage] for offload in offloads)
    listed = allocations(graph, offload).peak_bytes(np.array(graph.sizes), np.array(profile.workspace_bytes))
    assert listed == found.peak_bytes


def test_many_random_steps_have_something_to_offload():
    rng = random.Random(0)
    counts = []
    for seed in range(60):
        graph, _ = random_graph(seed, 8)
        counts.append(len(random_offloads(graph, lower(graph, keep_all(graph)), rng)))
    assert sum(count > 1 for count in counts) > 30


def test_nothing_is_offloaded_that_others_hold():
    b = Builder()
    weight, x = b.input("w", 8), b.input("x", 100)
    saved = []
    for block in range(3):
        given, hidden = x, b.op(f"linear{block}", (x, weight), 100)
        x = b.op(f"sum{block}", (hidden, given), 100)
        saved.append((given, hidden))
    gradient = b.tangent("t", 100)
    for block in reversed(range(3)):
        gradient = b.op(f"grad{block}", (gradient, *saved[block]), 100, backward=True)
    graph, _ = b.graph(outputs=(x,), gradients=(gradient,))

    names = {tensor.name for tensor in graph.tensors if tensor.storage in can_be_offloaded(graph, len(graph.storages))}
    assert names == {"linear0", "sum0", "linear1", "sum1", "linear2"}, "the input was there, the last sum is returned"
    assert max(can_be_offloaded(graph, 4)) < 4, "the later storages stand for code outside"
