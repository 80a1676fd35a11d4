"""The turn-point model of the whole graph, tightened until the replayed peak meets the budget.

Which values are kept through the turn, and which nodes run once more, is a small mixed-integer program:

    minimise    sum_k c_k y_k                          time recomputed
    (1)         x_d + y_p(d) >= 1      d in U          what the backward reads is kept or recomputed
    (2)         y_k <= x_d + y_p(d)    d in in(k)      a recomputed node has its inputs
    (3)         sum_d m_d x_d <= limit                 bytes kept through the turn
    x_d, y_k in {0, 1}; no y where d can't be recomputed

d are storages of m_d bytes made by node p(d), k nodes of c_k milliseconds, U the storages that the backward reads. Its
relaxation with the bytes of one instant of the backward in (3) is a lower bound on the time of every schedule with
this order of the backward (`lower_bound`). The program ignores when values come and go, so its solutions are replayed,
evicted from where they don't fit, and filled up where they leave room, for several limits. Related: the knapsack of
PyTorch's activation_memory_budget, which stops at (1) to (3); Checkmate (Jain et al., MLSys 2020, arXiv 1910.02653),
which models every instant.
"""

from __future__ import annotations

import time
from dataclasses import replace

from ..graph import Graph
from ..schedule import keep_all
from .base import Problem, Solution, Status, strategy
from .greedy import Found, evict, keep_more
from .mip_backend import Program, Result, solve
from .model import Model, Policy
from .segments import keep_sets

LIMITS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.5, 0.4, 0.3)  # of the bytes that the budget leaves at the turn
BOUND_INSTANTS = 10
FILL = 1.5  # a policy slower than the best by this factor is not pursued: filling up rarely wins back a third


def lower_bound(model: Model, limit_bytes: int, deadline: float) -> float | None:
    """Bound the recompute time of every schedule within a limit from below.

    At each of several backward positions, all that the backward reads from there on is in memory or will be
    recomputed, and what its node reads is in memory. Proof by relaxation; the order of the backward and the times of
    nodes are given.

    Args:
        model: The step.
        limit_bytes: Most bytes at any moment.
        deadline: Stop at this `time.monotonic`; fewer positions give a weaker bound.

    Returns:
        Milliseconds, or None where no schedule fits.
    """
    best = 0.0
    for position in _instants(model):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        program, _ = _program(model, limit_bytes, instant=position)
        result = solve(program, model.problem.options, left, relax=True)
        if result.status is Status.INFEASIBLE:
            return None
        if result.status is Status.OPTIMAL:
            best = max(best, result.objective)
    return best


def _instants(model: Model) -> list[int]:
    """Choose the start of the backward, the positions that need most, and the largest of each part of the backward."""
    need = [
        model.gradients[p] + sum(model.sizes[s] for s in reads if s in model.producer or s in model.fixed)
        for p, reads in enumerate(model.reads)
    ]
    count = len(need)
    if not count:
        return []
    parts = [range(count * i // BOUND_INSTANTS, count * (i + 1) // BOUND_INSTANTS) for i in range(BOUND_INSTANTS)]
    chosen = [max(part, key=lambda p: need[p]) for part in parts if part]
    return list(dict.fromkeys([chosen[0], max(range(count), key=lambda p: need[p]), *chosen]))


def _program(model: Model, limit_bytes: int, instant: int | None = None) -> tuple[Program, dict[int, int]]:
    """Build (1) to (3) at the turn, or at an instant of the backward; give also the variable of each choice."""
    first = 0 if instant is None else instant
    used = [s for s in model.choices if s in model.uses and model.uses[s][-1] >= first]
    chosen = _closure(model, used)
    operands = set() if instant is None else set(model.reads[instant])
    program = Program()
    keep = {s: program.variable(0.0, lower=float(s in operands)) for s in chosen}
    nodes = dict.fromkeys(model.producer[s] for s in chosen if s in model.producer)
    run = {node: program.variable(model.cost_ms[node]) for node in nodes}

    def there(storage: int) -> list[tuple[int, float]]:
        terms = [(keep[storage], 1.0)]
        return [*terms, (run[model.producer[storage]], 1.0)] if storage in model.producer else terms

    for storage in used:
        program.row(f"1_{storage}", there(storage), lower=1.0)
    for node in nodes:
        for storage in model.needs[node]:
            program.row(f"2_{node}_{storage}", [*there(storage), (run[node], -1.0)], lower=0.0)
    unit = 2**20  # bytes are scaled to MiB: coefficients near 1 keep the solver exact
    rest = 0 if instant is None else model.gradients[instant]
    bytes_kept = [(keep[s], model.sizes[s] / unit) for s in chosen if model.sizes[s]]
    program.row("3", bytes_kept, upper=(limit_bytes - rest) / unit)
    return program, keep


def _closure(model: Model, used: list[int]) -> list[int]:
    """Give the storages used, and those that recomputing them may read, in order of production."""
    seen, stack = set(used), list(used)
    while stack:
        node = model.producer.get(stack.pop())
        fresh = [s for s in model.needs[node] if s not in seen] if node is not None else []
        seen.update(fresh)
        stack.extend(fresh)
    return [s for s in model.choices if s in seen]


class _Search:
    """Collects the best policy within a budget."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = Model(problem)
        self.limit = problem.budget_bytes
        self.start = time.monotonic()
        self.deadline = self.start + problem.options.time_limit_s
        self.best: Found | None = None

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def by_segments(self) -> None:
        """Fill up the fastest segmentations that fit."""
        found = [Found(p, self.model.replay(p)) for p in segment_policies(self.model)]
        fitting = sorted((f for f in found if f.replay.peak_bytes <= self.limit), key=lambda f: f.rank)
        for start in fitting[:2]:
            self._offer(start)
        if not fitting:
            self._fit(min(found, key=lambda f: f.replay.peak_bytes).policy)
            self._fit(found[-1].policy)

    def by_program(self, share: float, relax: bool) -> Result:
        """Solve the program for a share of the bytes at the turn, and make its solution fit."""
        at_turn = self.model.gradients[0] if self.model.gradients else 0
        program, keep = _program(self.model, int(share * max(0, self.limit - at_turn)))
        gap = self.problem.options.gap * self.problem.step_ms
        result = solve(program, self.problem.options, self.left_s(), relax=relax, absolute_gap=gap)
        if result.values:
            self._fit(Policy(frozenset(s for s, v in keep.items() if result.values[v] >= 0.5)))
        return result

    def by_eviction(self) -> None:
        """Evict from all segmentations; the way to a small peak is not the same for each."""
        for policy in segment_policies(self.model):
            self._fit(policy)

    def _fit(self, policy: Policy) -> None:
        last = None
        for last in evict(self.model, policy, self.limit, self.deadline):
            if self.best is not None and last.replay.recompute_ms > FILL * self.best.replay.recompute_ms:
                return
        if last is not None and last.replay.peak_bytes <= self.limit:
            self._offer(last)

    def _offer(self, found: Found) -> None:
        improved = keep_more(self.model, found, self.limit, self.deadline)
        if self.best is None or improved.rank < self.best.rank:
            self.best = improved

    def is_close_to(self, bound_ms: float) -> bool:
        """Whether the best is proven to be within the gap."""
        gap_ms = self.problem.options.gap * self.problem.step_ms
        return self.best is not None and self.best.replay.recompute_ms <= bound_ms + gap_ms


def segment_policies(model: Model) -> list[Policy]:
    """Give the policies that keep what crosses narrow cuts of the forward, and the one that keeps everything."""
    choices = frozenset(model.choices)
    sets = dict.fromkeys([*(kept & choices for kept in keep_sets(model.graph)), choices])
    return [Policy(kept) for kept in sets]


@strategy("turn_point")
def turn_point(problem: Problem) -> Solution:
    """Solve the turn-point model for several limits; the best replayed policy wins."""
    search = _Search(problem)
    if search.model.keep_all_bytes <= problem.budget_bytes:
        return keep_everything(problem.graph, search.model.keep_all_bytes)
    bound = lower_bound(search.model, problem.budget_bytes, search.start + 0.3 * problem.options.time_limit_s)
    if bound is None:
        return _answer(search, Status.INFEASIBLE, 0.0, "proof")
    search.by_segments()
    for relax in (True, False):
        for share in LIMITS:
            if search.left_s() <= 0 or search.is_close_to(bound):
                break
            search.by_program(share, relax)
    if not search.is_close_to(bound):
        search.by_eviction()
    stopped_by = "proof" if search.is_close_to(bound) else "time limit" if search.left_s() <= 0 else "end of the search"
    status = Status.OPTIMAL if search.is_close_to(bound) else Status.FEASIBLE
    return _answer(search, status if search.best is not None else Status.NOT_FOUND, bound, stopped_by)


def _answer(search: _Search, status: Status, bound_ms: float, stopped_by: str) -> Solution:
    seconds = time.monotonic() - search.start
    found = search.best
    if found is None or status is Status.INFEASIBLE:
        return Solution("turn_point", status, bound_ms=bound_ms, stopped_by=stopped_by, solve_s=seconds)
    return Solution(
        strategy="turn_point",
        status=status,
        recompute=search.model.recompute(found.replay.rows),
        recompute_ms=found.replay.recompute_ms,
        peak_bytes=found.replay.peak_bytes,
        bound_ms=min(bound_ms, found.replay.recompute_ms),
        stopped_by=stopped_by,
        solve_s=seconds,
    )


def keep_everything(graph: Graph, peak_bytes: int) -> Solution:
    """Give the solution that recomputes nothing: nothing is faster."""
    return Solution("none", Status.OPTIMAL, keep_all(graph), 0.0, peak_bytes, stopped_by="proof")


@strategy("none")
def none(problem: Problem) -> Solution:
    """Keep everything, as plain training does; feasible where the budget allows it."""
    peak = Model(problem).keep_all_bytes
    solution = keep_everything(problem.graph, peak)
    if peak <= problem.budget_bytes:
        return solution
    return replace(solution, status=Status.NOT_FOUND, stopped_by="end of the search")
