"""The papers' methods: each is what its paper says, on chains and graphs small enough to check it by exhaustion."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import accumulate, combinations, pairwise
from operator import add

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiremate_lightning import hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from hiremate_lightning.options import METHODS, OPTIONS
from hiremate_lightning.planning.solvers.base import Solution, get_strategy, strategy_names
from hiremate_lightning.planning.solvers.chain import ChainBytes, ChainLink, ChainSpan, links, policy_of
from hiremate_lightning.planning.solvers.methods import chen, dtr, min_memory, rockmate, rotor, twremat
from hiremate_lightning.planning.solvers.model import StepModel
from hiremate_lightning.planning.solvers.search import Search, strategy
from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.graph import Graph, StorageKind
from tests.helpers import lazy_frontier, problem_of, random_graph
from tests.tiny import KB, Builder, chain, transformer
from tests.units.planning.test_planner import plan_of, step_of

TOLERANCE_MS = 1e-3  # the model counts what takes no time as a nanosecond


def uneven_chain(seed: int, length: int) -> tuple[Graph, Profile]:
    """A chain of uneven stages; each backward reads the input of its stage, and what the stage saves beside."""
    rng, b = random.Random(seed), Builder()
    value, stages = b.input("x", 0, StorageKind.INPUT), []
    for i in range(length):
        saved = rng.choice((0, 10, 30))
        sizes = rng.choice((10, 20, 40, 80)), *((saved,) if saved else ())
        time_ms, workspace = rng.choice((0.5, 1.0, 2.0, 4.0)), rng.choice((0, 0, 20))
        made = b.op(f"a{i}", (value,), *sizes, time=time_ms, workspace=workspace)
        stages.append((value, (made + 1,) if saved else ()))
        value = made
    gradient = b.tangent("dy", 10)
    for i, (read, saved_too) in reversed(list(enumerate(stages))):
        gradient = b.op(f"g{i}", (gradient, read, *saved_too), rng.choice((10, 20, 40)), backward=True)
    return b.graph(outputs=(value,), gradients=(gradient,))


def skipping(length: int = 6, size: int = KB) -> tuple[Graph, Profile]:
    """A U: the outputs of the first half are read again by the second one, in reverse."""
    b = Builder()
    values = [b.input("x", size, StorageKind.INPUT)]
    reads = []
    for i in range(length):
        reads.append((values[-1],))
        values.append(b.op(f"down{i}", reads[-1], size))
    for i in range(length - 1):
        reads.append((values[-1], values[length - 1 - i]))
        values.append(b.op(f"up{i}", reads[-1], size))
    gradient = b.tangent("dy", size)
    for i, read in reversed(list(enumerate(reads))):
        gradient = b.op(f"g{i}", (gradient, *read), size, backward=True)
    return b.graph(outputs=(values[-1],), gradients=(gradient,))


def search_of(step: tuple[Graph, Profile], budget: int = 0) -> Search:
    problem = problem_of(step, budget)
    return Search(problem)


def test_the_names_are_those_of_the_papers_and_of_what_is_simple():
    assert strategy_names() == tuple(sorted((*METHODS, "none", "portfolio", "segments")))


# ---------------------------------------------------------------- one way for all


def solved(name: str, step: tuple[Graph, Profile], percent: int) -> tuple[Solution, int]:
    """Solve for a share of what keeping everything takes; give the budget too."""
    budget = StepModel(problem_of(step, 0)).keep_all_bytes * percent // 100
    return get_strategy(name)(problem_of(step, budget)), budget


def test_a_methods_proposal_stands_beside_the_plan_made_of_it():
    solution, budget = solved("chen", chain(16, KB), 80)
    assert solution.proposed_bytes < solution.peak_bytes <= budget
    assert solution.proposed_ms > solution.recompute_ms
    assert solution.note == ""


def test_the_repair_is_noted_if_no_schedule_of_a_method_fits():
    solution, budget = solved("min_memory", chain(12, KB), 50)
    assert solution.is_feasible
    assert solution.proposed_bytes > budget
    assert solution.note == ("No schedule of min_memory fits; values were evicted from the one that peaks at 6.84 KiB.")


@pytest.mark.usefixtures("_own_strategies")
def test_a_method_without_a_proposal_names_its_replacement():
    strategy("mute, for a test")(lambda search: iter(()))
    solution, _ = solved("mute, for a test", chain(12, KB), 60)
    assert solution.is_feasible
    assert solution.proposed_bytes == 0
    assert solution.note.endswith("not even after evictions; `segments` found this one.")


@pytest.mark.parametrize("name", ["min_memory", "rockmate", "rotor"])
def test_methods_for_chains_say_where_a_step_is_none(name: str):
    for step, is_chain in ((skipping(), False), (chain(11, KB), True), (transformer(3), True)):
        note = solved(name, step, 80)[0].note
        assert ("is made for chains, and this step is none" in note) is not is_chain
        assert "\n" not in note


def test_checkmate_notes_that_its_program_is_too_large(change_thresholds):
    change_thresholds(program_variables=10)
    solution, _ = solved("checkmate", chain(12, KB), 60)
    assert solution.is_feasible
    assert "variables here: only its relaxation was rounded" in solution.note


def test_hilp_says_where_segments_are_faster():
    solution, _ = solved("hilp", transformer(2), 50)
    assert solution.recompute_ms < solution.proposed_ms
    assert solution.note == "Segments, filled up, are faster here than the choice among the options of clusters."


def test_a_note_is_logged_once_and_is_in_the_summary(caplog):
    step = step_of(*skipping(8, 100 * KB))
    plans = [plan_of(step, step.eager_bytes * 8 // 10, solver="rotor") for _ in range(2)]
    assert [record.message for record in caplog.records] == [plans[0].solution.note]
    assert "and this step is none" in plans[0].summary()
    assert plans[0].to_dict()["note"] == plans[0].solution.note


def test_where_solvers_are_named_all_of_them_are():
    for text in (hiremate.__doc__, HiRemateCallback.__doc__, OPTIONS["solver"].flag["help"]):
        assert text is not None
        assert [name for name in strategy_names() if name not in text] == []


# ---------------------------------------------------------------- the chain


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 14))
def test_links_divide_the_forward_and_the_backward(seed: int, length: int, count: int):
    model = StepModel(problem_of(random_graph(seed, length), 0))
    made = links(model, count)
    assert len(made) <= count
    assert tuple(n for link in made for n in link.nodes) == model.graph.forward
    assert (made[-1].begins, made[0].ends) == (0, len(model.reads))
    assert all(later.ends == max(later.begins, link.begins) for link, later in pairwise(made))
    tapes = [s for link in made for s in link.tape]
    assert sorted(tapes) == sorted(model.producer)


def test_blocks_are_cut_where_modules_end():
    model = StepModel(problem_of(transformer(4), 0))
    assert [len(link.input) for link in links(model, 6)] == [0, 1, 1, 1, 1, 1]


# ---------------------------------------------------------------- rotor


def persistent_schedules(
    chain: list[ChainLink], s: int, t: int, outer: frozenset[int]
) -> Iterator[dict[int, ChainSpan]]:
    """Enumerate the persistent schedules of links s to t: hold what s saves, or run up to q and keep its input."""
    here = outer | chain[s].input
    own = {chain[s].begins: ChainSpan(here | chain[s].own, frozenset(chain[s].tape))}
    if s == t:
        yield own
        return
    for later in persistent_schedules(chain, s + 1, t, here | chain[s].own):
        yield own | later
    for q in range(s + 1, t + 1):
        for later in persistent_schedules(chain, q, t, here):
            for earlier in persistent_schedules(chain, s, q - 1, outer):
                yield earlier | later


@cache
def persistent_frontier(seed: int, length: int) -> list[tuple[int, float]]:
    """Replay all persistent schedules of a chain; give peak and time of each."""
    model = StepModel(problem_of(uneven_chain(seed, length), 0))
    every = persistent_schedules(links(model, 50), 0, length - 1, frozenset())
    found = [model.replay(policy_of(model, spans)) for spans in every]
    return [(replayed.peak_bytes, replayed.recompute_ms) for replayed in found]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_rotor_is_the_best_persistent_schedule_of_a_chain(seed: int, length: int):
    frontier = persistent_frontier(seed, length)
    for budget in sorted({peak for peak, _ in frontier}):
        model = StepModel(problem_of(uneven_chain(seed, length), budget))
        sizes = ChainBytes(model, links(model, 50))
        table = rotor.Table(model, sizes, rotor.whole_tapes(search_of(uneven_chain(seed, length)), sizes), budget)
        replayed = model.replay(policy_of(model, table.spans()))
        best = min(time_ms for peak, time_ms in frontier if peak <= budget)
        assert replayed.peak_bytes <= budget
        assert table.least_ms == pytest.approx(replayed.recompute_ms, abs=TOLERANCE_MS)
        assert table.least_ms == pytest.approx(best, abs=TOLERANCE_MS)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_on_even_chains_rotor_is_the_best_of_all_schedules(length: int):
    frontier = lazy_frontier(problem_of(chain(length), 0))
    assert frontier
    for budget in sorted({peak for peak, _ in frontier}):
        solution = get_strategy("rotor")(problem_of(chain(length), budget))
        best = min(time_ms for peak, time_ms in frontier if peak <= budget)
        assert solution.recompute_ms == pytest.approx(best, abs=TOLERANCE_MS)
        assert solution.note == ""


def test_rockmate_is_at_least_as_fast_as_rotor_on_blocks():
    search = search_of(transformer(4))
    model = search.model
    sizes = ChainBytes(model, links(model, 6))
    for percent in (70, 50, 40):
        budget = model.keep_all_bytes * percent // 100
        tables = [rotor.Table(model, sizes, t(search, sizes), budget) for t in BLOCK_OPTIONS]
        assert tables[1].least_ms <= tables[0].least_ms
        assert tables[1].least_ms < math.inf


BLOCK_OPTIONS = (rotor.whole_tapes, rockmate.options_of_blocks)


# ---------------------------------------------------------------- min_memory


def cubic_checkpoints(inputs: list[int], tapes: list[int], rests: list[int]) -> int:
    """Hong et al.'s O(n^3) programme, on their second objective: every i and j, and U(i, j) by its definition."""
    count = len(inputs)
    least = [0] * (count + 1)
    for i in reversed(range(count)):
        needs = {
            j: max(sum(tapes[i : last + 1]) + rests[last] for last in range(i, j)) for j in range(i + 1, count + 1)
        }
        least[i] = inputs[i] + min(max(need, least[j]) for j, need in needs.items())
    return least[0]


def peak_of(chosen: list[int], inputs: list[int], tapes: list[int], rests: list[int]) -> int:
    """Return the peak of some checkpoints, by the objective."""
    kept = list(accumulate(inputs[c] for c in chosen))
    ends = [*chosen[1:], len(inputs)]
    segments = zip(kept, chosen, ends, strict=True)
    return max(k + max(sum(tapes[c : last + 1]) + rests[last] for last in range(c, end)) for k, c, end in segments)


SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(SIZES)
def test_the_linear_and_the_cubic_programme_find_the_same_peak(sizes: list[tuple[int, int, int]]):
    inputs, tapes, rests = (list(column) for column in zip(*sizes, strict=True))
    chosen, least = min_memory.checkpoints(inputs, tapes, rests)
    assert least == cubic_checkpoints(inputs, tapes, rests)
    assert least == peak_of(chosen, inputs, tapes, rests)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_no_other_checkpoints_have_a_smaller_peak(seed: int, length: int):
    rng = random.Random(seed)
    columns = [[rng.randrange(30) for _ in range(length)] for _ in range(3)]
    subsets = (c for count in range(length) for c in combinations(range(1, length), count))
    assert min_memory.checkpoints(*columns)[1] == min(peak_of([0, *c], *columns) for c in subsets)


@pytest.mark.parametrize("seed", range(8))
def test_on_a_chain_the_peak_is_what_the_programme_says(seed: int):
    model = StepModel(problem_of(uneven_chain(seed, 20), 0))
    made = links(model, 50)
    sizes = ChainBytes(model, made)
    chosen, least = min_memory.checkpoints([sizes.of(link.input) for link in made], sizes.tape, sizes.rest)
    replayed = model.replay(policy_of(model, min_memory.spans_between(made, chosen)))
    assert max(map(add, replayed.timeline.node_bytes.tolist(), model.gradients)) <= least
    assert replayed.peak_bytes < model.keep_all_bytes


# ---------------------------------------------------------------- chen


def test_chen_keeps_the_inputs_of_sqrt_n_segments():
    model = StepModel(problem_of(chain(36, KB), 0))
    first = next(chen.propose(search_of(chain(36, KB))))
    positions = sorted(model.made_at[s] for s in first.kept)
    assert positions == [5, 11, 17, 23, 29]
    assert model.replay(first).recompute_ms == 35 - len(positions)


# ---------------------------------------------------------------- dtr


def test_dtr_gives_up_what_is_large_old_and_cheap_first():
    run = dtr.DtrRun(StepModel(problem_of(uneven_chain(3, 8), 0)), limit_bytes=10**9, deadline=math.inf)
    assert run.policy() is not None
    run.live = set(run._model.producer)
    run._read_ms = dict.fromkeys(run.live, 0.0)
    scores = {s: run._score(s) for s in run.live}
    model = run._model
    by_hand = {s: model.cost_ms[model.producer[s]] / (model.sizes[s] * run._clock_ms) for s in run.live}
    assert scores == pytest.approx(by_hand)
    oldest = min(run.live)
    run._read_ms = {s: 0.0 if s == oldest else run._clock_ms for s in run.live}
    assert min(run.live, key=run._score) == oldest


# ---------------------------------------------------------------- twremat


def is_decomposition(near: Mapping[int, set[int]], bags: list[frozenset[int]], above: list[int]) -> bool:
    """Whether each edge is in a bag, and the bags with a value are connected."""
    edges = all(any({a, b} <= bag for bag in bags) for a in near for b in near[a])
    tops = [sum(v in bag and (above[i] < 0 or v not in bags[above[i]]) for i, bag in enumerate(bags)) for v in near]
    return edges and all(count == 1 for count in tops)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_the_separators_are_those_of_a_tree_decomposition(seed: int, length: int):
    model = StepModel(problem_of(random_graph(seed, length), 0))
    near = twremat.neighbours_of(model)
    bags, above = twremat.tree_decomposition(near)
    assert is_decomposition(near, bags, above)
    separators = twremat.balanced(bags, above)
    owned = [s for separator in separators for s in separator.values]
    assert sorted(owned) == sorted(near)
    for separator in separators:
        outside = {s for value in separator.below for s in near[value]} - separator.below
        on_the_way = set[int]()
        number = separator.above
        while number >= 0:
            on_the_way |= separators[number].values
            number = separators[number].above
        assert outside <= on_the_way


def test_twremat_adds_constant_memory_as_a_chain_doubles():
    peaks = []
    for length in (16, 32, 64, 128):
        model = StepModel(problem_of(chain(length), 0))
        separators = twremat.balanced(*twremat.tree_decomposition(twremat.neighbours_of(model)))
        policy = policy_of(model, twremat.spans(model, separators, leaf_bytes=0))
        peaks.append(model.replay(policy).peak_bytes)
    assert all(after - before <= 200 for before, after in pairwise(peaks))
