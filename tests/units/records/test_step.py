"""Several calls and what runs outside of them become one graph, whose peak is that of the whole step."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from hiremate_lightning.housekeeping import Latest
from hiremate_lightning.planning.solvers.base import Problem, replay
from hiremate_lightning.planning.solvers.choices import Policy
from hiremate_lightning.planning.solvers.model import StepModel, decisions
from hiremate_lightning.records.graph import OUTSIDE, Direction, Graph, StorageKind
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.simulation import simulate, simulate_eager
from hiremate_lightning.records.step import HELD_TO_THE_END, Call, Gap, MergedStep, OutsideStage, merge
from tests.helpers import lazy_rows, random_graph
from tests.tiny import KB, Builder, chain, recompute_lazily

NOTHING = Gap()


def linked(output, graph, profile, **gaps):
    """A call that reads an output of the first one, whose bytes belong to that, and gives it its gradient."""
    return Call(graph, profile, links={graph.inputs[0]: (0, output)}, passed_on=(graph.gradients[0],), **gaps)


def two_calls(length=3, size=100, gap_after_first=NOTHING, gap_after_second=NOTHING, gap_between_backwards=NOTHING):
    """Two chains: the second one reads what the first one returns, and gives it its gradient."""
    first = Call(*chain(length, size), after_forward=gap_after_first, before_backward=gap_between_backwards)
    return [first, linked(first.graph.outputs[0], *chain(length, size), after_forward=gap_after_second)]


def simulated(step, recompute=None):
    decisions = keep_all(step.graph) if recompute is None else recompute
    return simulate(step.graph, step.profile, lower(step.graph, decisions))


def peak_of(step, recompute=None):
    return simulated(step, recompute).peak_bytes


def live_at_the_end(step):
    return simulated(step).timeline[-1].live_bytes


def test_keeping_everything_takes_no_extra_time_to_the_last_bit():
    """Nodes stand call by call, and run in another order: sums of times may differ with that."""
    step = merge(two_calls(), (1, 0))
    times = tuple(0.1 * (n + 1) for n in range(len(step.graph.nodes)))
    assert simulated(replace(step, profile=replace(step.profile, time_ms=times))).recompute_ms == 0.0


def everything_recomputed(step):
    return recompute_lazily(step.graph, ())


def test_calls_have_the_peak_of_their_graph_or_of_the_long_chain():
    """They recompute as it does, but for what links them."""
    graph, profile = chain(6)
    linked = merge(two_calls(3), [1, 0])
    alone = simulate(graph, profile, lower(graph, keep_all(graph))).peak_bytes
    assert peak_of(merge([Call(graph, profile)], [0])) == peak_of(linked) == alone
    link, kept = linked.graph.tensors[3].storage, graph.tensors[3].storage
    alone = simulate(graph, profile, lower(graph, recompute_lazily(graph, [kept]))).peak_bytes
    assert peak_of(linked, recompute_lazily(linked.graph, [link])) == alone


@pytest.mark.parametrize("reads_results", [False, True])
def test_strategies_count_links_of_calls_as_the_simulation_does(reads_results):
    """Where the backward reads results, the link is needed only to compute the first one again."""
    first = Call(*chain(3))
    second = linked(first.graph.outputs[0], *chain(3, reads_results=reads_results))
    step = merge([first, second], [1, 0])
    model = StepModel(Problem(step.graph, step.profile, 0))
    for count in range(len(model.choices) + 1):
        for kept in combinations(model.choices, count):
            replayed = model.replay(Policy(frozenset(kept) | model.fixed))
            assert replayed.peak_bytes == peak_of(step, decisions(model, replayed.rows))


def test_links_share_storage_and_weights_gradients_stay():
    calls = two_calls(3)
    step = merge(calls, [1, 0])
    names = [t.name for t in step.graph.tensors]
    second_x = names.index("x", 1)
    assert step.graph.tensors[second_x].storage == step.graph.tensors[names.index("a2")].storage
    assert second_x not in step.graph.inputs
    assert [names[t] for t in step.graph.gradients] == ["g0"]
    assert step.graph.gradients[0] < len(calls[0].graph.tensors)
    again = {n for before in everything_recomputed(step) for n in before}
    assert all(step.owners[n] is not None for n in again), "outside code is never recomputed"
    assert step == merge(two_calls(3), [1, 0]), "merging is deterministic"


@pytest.mark.parametrize("budget_is_tight", [False, True])
def test_each_call_gets_its_own_decisions_back(budget_is_tight):
    calls = two_calls(4)
    step = merge(calls, [1, 0])
    decisions = everything_recomputed(step) if budget_is_tight else keep_all(step.graph)

    parts = step.split(decisions)

    assert len(parts) == 2
    for call, part in zip(calls, parts, strict=True):
        assert len(part) == len(call.graph.backward) + 1
        simulate(call.graph, call.profile, lower(call.graph, part))  # valid on its own
    recomputed = sum(len(before) for part in parts for before in part)
    assert recomputed == sum(len(before) for before in decisions)


def test_split_finds_the_calls_of_any_order_of_backwards():
    graph, profile = chain(3)
    step = merge([Call(graph, profile), Call(graph, profile)], [0, 1])
    parts = step.split(everything_recomputed(step))
    assert parts[0] == parts[1] == recompute_lazily(graph, ())


def test_what_is_held_or_needed_outside_is_part_of_the_peak():
    plain = merge(two_calls(3), [1, 0])
    held = merge(two_calls(3, gap_after_second=Gap(held_bytes=1000, peak_bytes=1000)), [1, 0])
    assert peak_of(held) == peak_of(plain) + 1000
    alone = chain(3, 100)
    before, after = Call(*alone, before_forward=Gap(held_bytes=7 * KB)), Call(*alone, after_backward=Gap(0, 10**9))
    assert peak_of(merge([before], [0])) == peak_of(merge([Call(*alone)], [0])) + 7 * KB
    assert peak_of(merge([after], [0])) >= 10**9


def test_a_high_peak_outside_is_the_peak_of_the_step():
    """What is needed between backwards belongs to the backward."""
    step = merge(two_calls(3, gap_after_first=Gap(held_bytes=0, peak_bytes=5000)), [1, 0])
    simulation = simulated(step)
    assert step.graph.nodes[simulation.peak_moment.node].op == OUTSIDE
    assert 5000 < simulation.peak_bytes < 6000
    step = merge(two_calls(3, gap_between_backwards=Gap(held_bytes=10, peak_bytes=5000)), [1, 0])
    assert step.graph.nodes[simulated(step).peak_moment.node].direction is Direction.BACKWARD


def three_calls(*between_backwards, after_last=NOTHING, before_first=NOTHING):
    """Three chains side by side, the gradients of each of which code outside takes, as FSDP2 does."""
    calls = [Call(*chain(3)) for _ in range(3)]
    calls = [replace(call, passed_on=call.graph.gradients) for call in calls]
    calls[0] = replace(calls[0], before_forward=before_first, before_backward=between_backwards[1])
    calls[1] = replace(calls[1], before_backward=between_backwards[0])
    calls[2] = replace(calls[2], after_forward=after_last)
    return merge(calls, [2, 1, 0])


# Where outside code holds bytes, and where it frees some of them. FSDP2 gathers the parameters of a unit before its
# backward, frees them before the next unit's, and frees the last buffer of its gathers as the root's forward ends.
FREED = {
    "after a forward, before its backward": lambda held, given: merge(
        two_calls(gap_after_first=held, gap_between_backwards=given), [1, 0]
    ),
    "after a forward, after a later one": lambda held, given: merge(
        two_calls(gap_after_first=held, gap_after_second=given), [1, 0]
    ),
    "at the beginning, between backwards": lambda held, given: three_calls(NOTHING, given, before_first=held),
    "at the beginning, at the turn": lambda held, given: three_calls(
        NOTHING, NOTHING, before_first=held, after_last=given
    ),
    "at the turn, between backwards": lambda held, given: three_calls(NOTHING, given, after_last=held),
    "between backwards, between later ones": three_calls,
}


@pytest.mark.parametrize(("given_bytes", "live_bytes"), [(0, 1000), (300, 700), (1000, 0), (2000, 0)])
@pytest.mark.parametrize("step_of", FREED.values(), ids=FREED)
def test_bytes_that_outside_code_frees_later_live_until_then(step_of, given_bytes, live_bytes):
    held = live_at_the_end(step_of(Gap(1000, 1000), Gap(-given_bytes, 0)))
    assert held - live_at_the_end(step_of(NOTHING, NOTHING)) == live_bytes


@pytest.mark.parametrize(("sees_call", "live_bytes"), [(False, 900), (True, 700)])
def test_stale_bytes_are_freed_first_if_their_end_is_unknown(sees_call, live_bytes):
    def live(held_bytes, given_bytes):
        first, last = two_calls(3, gap_after_first=Gap(held_bytes, held_bytes), gap_after_second=Gap(-given_bytes, 0))
        if sees_call:
            last = replace(last, stages=(OutsideStage(),), called_at=1)
        return live_at_the_end(merge([first, last], [1, 0], stale_bytes=200))

    assert live(1000, 300) - live(0, 0) == live_bytes


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("released_bytes", "live_bytes"), [(0, 1500), (300, 1200), (1000, 500), (2000, 0)])
def test_inputs_made_by_code_are_freed_with_their_backward(index, released_bytes, live_bytes):
    """The nearest before the call are given back first; those that were made after it stay."""

    def live(held_bytes, released_bytes):
        calls = two_calls(3, gap_after_first=Gap(held_bytes if index else 0, 0))
        calls[0] = replace(calls[0], before_forward=Gap(held_bytes // 2 if index else 3 * held_bytes // 2, 0))
        calls[index] = replace(calls[index], released_bytes=released_bytes)
        return live_at_the_end(merge(calls, [1, 0]))

    assert live(1000, released_bytes) - live(0, 0) == live_bytes


def test_lingering_memory_stays_when_the_last_forward_frees():
    """In both cases the second of two calls side by side returns a value that lives until its backward has run."""

    def live_at_the_turn(held_bytes):
        first, second = Call(*chain(3)), Call(*chain(3))
        held, given = Gap(held_bytes, held_bytes), Gap(-held_bytes, 0)
        held_until = {second.graph.outputs[0]: 4}
        second = replace(second, after_forward=held, before_backward=given, held_until=held_until)
        step = merge([first, second], [0, 1])
        simulation = simulated(step)
        return simulation.timeline[simulation.turn].live_bytes

    assert live_at_the_turn(1000) - live_at_the_turn(0) == 1000


@pytest.mark.parametrize(("peak_bytes", "more_bytes"), [(0, 0), (100, 0), (1000, 900)])
def test_code_between_backwards_counts_the_gradient_it_returns(peak_bytes, more_bytes):
    def peak_between(peak_bytes):
        step = merge(two_calls(3, gap_between_backwards=Gap(0, peak_bytes)), [1, 0])
        simulation = simulated(step)
        backward = simulation.timeline[simulation.turn :]
        return next(moment.peak_bytes for moment in backward if step.owners[moment.node] is None)

    assert peak_between(peak_bytes) - peak_between(0) == more_bytes


@pytest.mark.parametrize(("peak_bytes", "more_bytes"), [(0, 1000), (1000, 1000), (1050, 1050), (2000, 2000)])
def test_code_outside_reuses_gradients_that_die_in_it(peak_bytes, more_bytes):
    """It hands on 100 bytes, and holds 1000 once a gradient of 100 bytes is gone: not all of that lives at once."""

    def peak_between(gap):
        step = three_calls(gap, NOTHING)
        simulation = simulated(step)
        outside = (m for m in simulation.timeline if step.owners[m.node] is None)
        return next(m.peak_bytes for m in outside if step.graph.nodes[m.node].direction is Direction.BACKWARD)

    before_bytes = peak_between(NOTHING) - 100
    assert peak_between(Gap(1000, peak_bytes)) - before_bytes == more_bytes


def test_stale_gradients_count_in_the_forward_only():
    graph, profile = chain(3)
    without, stale = (merge([Call(graph, profile)], [0], stale_bytes=size) for size in (0, 10_000))

    def peaks(step):
        found = simulated(step)
        halves = found.timeline[: found.turn], found.timeline[found.turn :]
        return [max(moment.peak_bytes for moment in half) for half in halves]

    assert peaks(stale)[0] == peaks(without)[0] + 10_000
    assert peaks(stale)[1] == peaks(without)[1]


def test_stale_gradients_are_gone_when_the_backward_is_called():
    graph, profile = chain(3)
    call = Call(graph, profile, stages=(OutsideStage(peak_bytes=500),), after_forward=Gap(0, 2000))

    def peaks(called_at):
        step = merge([replace(call, called_at=called_at)], [0], stale_bytes=10_000)
        found = simulated(step)
        return [moment.peak_bytes for moment in found.timeline[found.turn - 2 : found.turn]]

    (before, after), (unknown_before, unknown_after) = peaks(1), peaks(None)
    assert before == unknown_before
    assert after == unknown_after - 10_000


@pytest.mark.parametrize("calls", [1, 2])
def test_outputs_of_the_step_before_go_with_the_last_forward(calls):
    graph, profile = chain(3)
    stages = (OutsideStage(peak_bytes=500),)
    made = [replace(c, stages=stages) for c in ([Call(graph, profile)] if calls == 1 else two_calls(3))]

    def peaks(left_bytes):
        step = merge(made, list(reversed(range(calls))), left_bytes=left_bytes)
        found = simulated(step)
        outside = [m.peak_bytes for m in found.timeline[: found.turn] if step.owners[m.node] is None]
        own = [m.peak_bytes for m in found.timeline if step.owners[m.node] is not None]
        return own, outside

    (own, outside), (own_left, outside_left) = peaks(0), peaks(10_000)
    forwards = 3 * calls
    assert own_left[:forwards] == [size + 10_000 for size in own[:forwards]]
    assert own_left[forwards:] == own[forwards:]
    assert outside_left[-2:] == outside[-2:]


def test_outputs_that_someone_holds_are_never_given_back():
    graph, profile = chain(3)
    output = graph.outputs[0]
    free, held = (merge([Call(graph, profile, held_until=held)], [0]) for held in ({}, {output: HELD_TO_THE_END}))
    assert peak_of(held, everything_recomputed(held)) == peak_of(free, everything_recomputed(free)) + 100


# ---------------------------------------------------------------- memory that a gradient takes from a value


def loss_at_the_end(read_later: bool = False, branches: bool = False, size: int = 100):
    """Logits of a layer, their loss, and a gradient of it that takes their memory.

    Another branch may be computed from the logits, which its backward, after that of the loss, reads; or that backward
    reads the logits themselves.
    """
    b = Builder()
    weight, x = b.input("w", 10), b.input("x", size, StorageKind.INPUT)
    logits = b.op("logits", (x, weight), size)
    aside = b.op("aside", (logits,), size) if branches else logits
    loss = b.op("loss", (logits,), 1, workspace=10)
    one = b.tangent("one", 1)
    of_logits = b.op("of_logits", (one, logits), size, workspace=20, backward=True)
    reads = (of_logits, weight, *((aside,) if branches or read_later else ()))
    gradient = b.op("of_x", reads, size, backward=True)
    graph, profile = b.graph(outputs=(loss, logits), gradients=(gradient,))
    return graph.taking({graph.backward[0]: logits}), profile, logits


def workspace_of_the_gradient(step) -> int:
    (taking,) = (i for i, node in enumerate(step.graph.nodes) if node.takes is not None)
    return step.profile.workspace_bytes[taking]


def test_a_gradient_takes_the_memory_of_a_value_that_dies():
    graph, profile, _ = loss_at_the_end()
    assert workspace_of_the_gradient(merge([Call(graph, profile)], [0])) == 20 - 100
    assert peak_of(merge([Call(graph, profile)], [0])) == 100 + 100  # the gradients of logits and input
    beside = graph.taking({graph.backward[0]: None})
    assert peak_of(merge([Call(beside, profile)], [0])) == 100 + 100 + 1 + 20  # logits, gradient, its own, workspace


@pytest.mark.parametrize(
    ("others", "is_held"),
    [({"read_later": True}, False), ({"branches": True}, False), ({}, True)],
    ids=["read", "computed from again", "held"],
)
def test_a_value_that_is_needed_later_keeps_its_memory(others, is_held):
    graph, profile, logits = loss_at_the_end(**others)
    call = Call(graph, profile, held_until={logits: HELD_TO_THE_END} if is_held else {})
    assert workspace_of_the_gradient(merge([call], [0])) == 20


def test_the_backward_of_another_call_keeps_a_value_in_memory():
    graph, profile, logits = loss_at_the_end()
    calls = [Call(graph, profile), linked(logits, *chain(2))]
    for order, kept in (([1, 0], 20 - 100), ([0, 1], 20)):
        assert workspace_of_the_gradient(merge(calls, order)) == kept, order


# ---------------------------------------------------------------- peaks at other sizes


def at_other_size(call: Call, times: int) -> Call:
    """Return a call with other bytes, each storage with a growth of its own."""
    graph = call.graph
    storages = tuple(replace(s, size_bytes=s.size_bytes * (times + i % 3)) for i, s in enumerate(graph.storages))
    workspaces = tuple(size * times for size in call.profile.workspace_bytes)
    costs = replace(call.profile, workspace_bytes=workspaces, time_ms=tuple(t * times for t in call.profile.time_ms))
    return replace(
        call, graph=replace(graph, storages=storages), profile=costs, after_forward=Gap(7 * times, 9 * times)
    )


def check_peaks(replays: Latest, step: MergedStep, candidates: list, code: str) -> None:
    problem = Problem(step.graph, step.profile, 0)
    sized = step.sharing([code], replays)
    for candidate in candidates:
        simulation = replay(problem, candidate)
        assert sized.peak_bytes(candidate) == simulation.peak_bytes
        assert sized.again_ms(candidate) == pytest.approx(simulation.recompute_ms)
    assert sized.eager_bytes == simulate_eager(step.graph, step.profile).peak_bytes


def some_decisions(graph: Graph, step: MergedStep) -> list:
    """Return what keeps everything, and a few lazy recomputations."""
    model = StepModel(Problem(graph, step.profile, 0))
    rows = [row for row, _ in zip(lazy_rows(model), range(5), strict=False)]
    return [keep_all(graph), *(decisions(model, row) for row in rows)]


@pytest.mark.parametrize("seed", range(8))
def test_peaks_at_other_sizes_are_those_of_the_simulator(seed):
    call, replays = Call(*random_graph(seed)), Latest(16)
    steps = [merge([at_other_size(call, times)], [0]) for times in (1, 3, 2)]
    candidates = some_decisions(steps[0].graph, steps[0])
    for step in steps:
        check_peaks(replays, step, candidates, "code")


def test_calls_that_hand_on_gradients_have_exact_peaks_too():
    replays = Latest(16)
    for size in (100, 300):
        step = merge(two_calls(size=size, gap_between_backwards=Gap(size, 2 * size)), [1, 0])
        check_peaks(replays, step, [keep_all(step.graph)], "code")


def test_other_code_of_the_same_orders_has_replays_of_its_own():
    first, second, other = (merge([Call(*random_graph(0))], [0]) for _ in range(3))
    known = Latest(16)
    assert first.sharing(["one"], known).replays is second.sharing(["one"], known).replays
    assert first.sharing(["one"], known).replays is not other.sharing(["other"], known).replays
    assert first.sharing([None], known) is first


def test_what_is_held_outside_means_other_replays():
    """Gradients that exist before a step die in it at once: the same calls take other memory then."""
    graph, profile = random_graph(1)
    known = Latest(16)
    steps = [merge([Call(replace(graph, gradients=gradients), profile)], [0]) for gradients in (graph.gradients, ())]
    one, other = (step.sharing(["code"], known) for step in steps)
    assert one.replays is not other.replays
