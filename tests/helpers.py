"""Random tiny graphs of every shape that a captured step has, and an exhaustive search over their lazy policies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from hiremate_lightning.errors import ScheduleError
from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, replay
from hiremate_lightning.planning.solvers.choices import Policy, Rows
from hiremate_lightning.planning.solvers.model import StepModel, decisions
from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.graph import Graph, StorageKind
from hiremate_lightning.records.schedule import Schedule
from hiremate_lightning.records.simulation import Simulation, simulate
from tests.tiny import Builder

KINDS = ("op", "op", "op", "skip", "view", "dropout", "pair", "norm", "buffer", "outside")


def random_graph(seed: int, length: int = 6) -> tuple[Graph, Profile]:
    """A step with chains, skips, views, replayed dropouts and norms, two outputs, buffers, and code outside."""
    rng = random.Random(seed)
    b = Builder()
    weight, buffer = b.input("w", 64), b.input("buffer", 8)
    values = [b.input("x", 32, StorageKind.INPUT)]
    steps: list[tuple[int, tuple[int, ...]]] = []  # what each forward node makes, and what its backward may read
    replays: list[tuple[int, int, int]] = []
    held: list[int] = []
    for i in range(length):
        kind, last, size = rng.choice(KINDS), values[-1], rng.choice((10, 20, 40, 80))
        cost, work = rng.choice((0.5, 1.0, 2.0)), rng.choice((0, 0, 5, 30))
        if kind == "view":
            made = b.op(f"view{i}", (last,), view_of=last, time=0.0)
            extra = (made,)
        elif kind == "dropout":
            made = b.op(f"drop{i}", (last,), size, size // 4, time=cost, random=True)
            replays.append((len(b.nodes) - 1, last, made))
            extra = (made, made + 1)
        elif kind == "pair":
            made = b.op(f"pair{i}", (last, weight), size, size // 2, time=cost, workspace=work)
            extra = (last, made, made + 1)
        elif kind == "norm":
            made = b.op(f"norm{i}", (last, weight), size, 4, time=3 * cost, workspace=work)
            replays.append((len(b.nodes) - 1, last, made))
            extra = (last, made, made + 1)
        elif kind == "buffer":
            made = b.op(f"read{i}", (last, buffer), size, time=cost, reads_mutated=True)
            b.op(f"update{i}", (last, buffer), view_of=buffer, time=0.1, mutating=True)
            extra = (last, made)
        elif kind == "outside" and len(held) < 1:
            held.append(b.outside((last,), size))
            continue
        else:
            sources = (last, rng.choice(values)) if kind == "skip" else (last,)
            made = b.op(f"op{i}", tuple(dict.fromkeys(sources)), size, time=cost, workspace=work)
            extra = (*sources, made)
        steps.append((made, extra))
        values.append(made)
    return _backward(b, rng, values[-1], steps, replays, tuple(held))


def _backward(
    b: Builder,
    rng: random.Random,
    output: int,
    steps: list[tuple[int, tuple[int, ...]]],
    replays: list[tuple[int, int, int]],
    held: tuple[int, ...],
) -> tuple[Graph, Profile]:
    gradient, returned = b.tangent("dy", 16), []
    for i, (_, extra) in reversed(list(enumerate(steps))):
        reads = tuple(t for t in dict.fromkeys(extra) if rng.random() < 0.7)
        if reads and rng.random() < 0.25:  # a view of a forward value, made by the backward
            seen = b.op(f"t{i}", (reads[0],), view_of=reads[0], time=0.0, backward=True)
            reads = (seen, *reads[1:])
        sizes = (rng.choice((10, 20, 40)), *((8,) if rng.random() < 0.4 else ()))
        gradient = b.op(f"g{i}", (gradient, *reads), *sizes, backward=True, workspace=rng.choice((0, 0, 20)))
        if len(sizes) > 1:
            returned.append(gradient + 1)
    for replayed, source, made in replays:
        b.replay(replayed, (source, made + 1), made, time=0.2)
    if rng.random() < 0.1:
        returned.append(steps[-1][0])  # a forward value handed out as a gradient
    return b.graph(outputs=(output,), gradients=(*returned, gradient), held=held)


def retaining(step: tuple[Graph, Profile]) -> tuple[Graph, Profile]:
    """A step whose backward will run again."""
    graph, profile = step
    return replace(graph, retained=tuple(range(len(graph.tensors)))), profile


def problem_of(step: tuple[Graph, Profile], budget_bytes: int, **options: float | str) -> Problem:
    return Problem(*step, budget_bytes, SolveOptions(**options))  # type: ignore[arg-type]


def random_policy(model: StepModel, rng: random.Random) -> Policy:
    kept = frozenset(s for s in model.choices if rng.random() < 0.5)
    positions = range(len(model.reads))
    drops = frozenset((s, p) for s in model.choices for p in positions if rng.random() < 0.2)
    return Policy(kept, drops)


def lazy_rows(model: StepModel) -> Iterator[Rows]:
    """Enumerate what policies can do: all sets kept, and after each position all sets dropped."""
    free = [s for s in model.choices if s in model.producer]
    for count in range(len(free) + 1):
        for kept in combinations(free, count):
            yield from _continue(model, [], {*kept, *model.fixed})


def _continue(model: StepModel, rows: Rows, live: set[int]) -> Iterator[Rows]:
    position, later = len(rows), set(model.choices)
    row: list[int] = []
    now = set(live)
    for storage in model.all_reads[position]:
        if storage not in now:
            row.extend(model.recompute(storage, now))
    if position == len(model.reads):
        yield [*rows, row]
        return
    droppable = [s for s in model.choices if s in now & later and s in model.producer]
    droppable = [s for s in droppable if model.uses.get(s, [-1])[-1] > position or _feeds(model, s)]
    droppable = [s for s in droppable if not model.is_pinned(s, position)]
    for count in range(len(droppable) + 1):
        for dropped in combinations(droppable, count):
            yield from _continue(model, [*rows, row], now.difference(dropped))


def _feeds(model: StepModel, storage: int) -> bool:
    return any(storage in needs for needs in model.needs.values())


def all_lazy(model: StepModel, limit: int = 4000) -> list[Rows] | None:
    """List what lazy policies can do, fastest first; None for more than a limit."""
    found: dict[tuple[tuple[int, ...], ...], Rows] = {}
    for tried, rows in enumerate(lazy_rows(model)):
        if tried >= 20 * limit or len(found) >= limit:
            return None
        found[tuple(map(tuple, rows))] = rows
    return sorted(found.values(), key=lambda rows: sum(model.cost_ms[n] for row in rows for n in row))


def lazy_frontier(problem: Problem, limit: int = 4000) -> list[tuple[int, float]] | None:
    """Simulate all lazy schedules; give peak and time of those that none beats in both, None for too many to try."""
    model = StepModel(problem)
    everything = all_lazy(model, limit)
    if everything is None:
        return None
    frontier: list[tuple[int, float]] = []
    for rows in everything:
        found = replay(problem, decisions(model, rows))
        if not frontier or found.peak_bytes < frontier[-1][0]:
            frontier.append((found.peak_bytes, found.recompute_ms))
    return frontier


def moments(simulation: Simulation) -> list[tuple[int, int]]:
    return [(moment.peak_bytes, moment.live_bytes) for moment in simulation.timeline]


def refused(graph: Graph, profile: Profile, schedule: Schedule) -> str:
    """Simulate what can't run; return the error."""
    with pytest.raises(ScheduleError) as error:
        simulate(graph, profile, schedule)
    return str(error.value)
