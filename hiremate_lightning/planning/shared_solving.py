"""One solve for all processes of a training: rank 0 solves, the others take what it found.

Decisions travel through the key-value store that every process group has. No collective operation is involved, so a
rank that is late, lost, or at another step keeps nobody waiting for long: whoever gets no answer in time solves alone.
That is always right, since ranks with different plans compute the same gradients; it only takes time.

Ranks measure costs and memory on their own. What rank 0 found is adopted where the graph is the same and the budget
here is no smaller, or the schedule fits it all the same. Its bound was proven for the costs on rank 0 and is not taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import replace
from typing import Protocol

from ..errors import ScheduleError
from ..records.graph import Graph
from .solvers.base import Problem, Solution, Status, Strategy, replay

log = logging.getLogger("hiremate_lightning")
PATIENCE_S = 5.0  # for rank 0 to begin with the same step: ranks of one training plan at the same moment
POLL_S = 0.02


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of the values are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; give the sum."""


def shared(strategy: Strategy, group: tuple[Store, int] | None) -> Strategy:
    """Let a strategy solve for all ranks.

    Args:
        strategy: What solves.
        group: The store that the ranks share and the rank of this process; None for a process on its own.
    """
    return strategy if group is None else SharedSolving(strategy, *group, PATIENCE_S)


class SharedSolving:
    """A strategy that solves on rank 0 and is answered by rank 0 elsewhere.

    Args:
        strategy: What solves.
        store: What the ranks share.
        rank: Number of this process.
        patience_s: Seconds to wait until rank 0 begins with the same step.
    """

    def __init__(self, strategy: Strategy, store: Store, rank: int, patience_s: float) -> None:
        self._strategy = strategy
        self._store = store
        self._rank = rank
        self._patience_s = patience_s

    def __call__(self, problem: Problem) -> Solution:
        """Solve a problem, or take the answer of rank 0."""
        try:
            key = self._next_key(problem.graph)
        except RuntimeError as error:  # of the store: torch has no class of its own for those that stay
            log.debug("The process group's store does not answer (%s): solving alone", error)
            return self._strategy(problem)
        if self._rank == 0:
            return self._lead(problem, key)
        return self._adopted(problem, key) or self._strategy(problem)

    def _next_key(self, graph: Graph) -> str:
        """Name the solve: the step, and how often this rank has solved it."""
        name = digest(graph)
        return f"{name}/{self._store.add(f'{name}/rank{self._rank}', 1)}"

    def _lead(self, problem: Problem, key: str) -> Solution:
        self._tell(f"{key}/begun", "")
        answer = ""
        try:
            solution = self._strategy(problem)
            if solution.is_feasible:
                answer = json.dumps([problem.budget_bytes, solution.strategy, solution.recompute])
        finally:
            self._tell(f"{key}/answer", answer)
        return solution

    def _tell(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            log.debug("The process group's store does not answer (%s): the other ranks solve alone", error)

    def _adopted(self, problem: Problem, key: str) -> Solution | None:
        """Wait for the answer of rank 0; None where there is none that can be used here."""
        start = time.perf_counter()
        try:
            if not self._is_there(f"{key}/begun", self._patience_s):
                return None
            if not self._is_there(f"{key}/answer", problem.options.time_limit_s + self._patience_s):
                return None
            answer = self._store.get(f"{key}/answer").decode()
        except RuntimeError as error:
            log.debug("The process group's store does not answer (%s): solving alone", error)
            return None
        solution = _checked(problem, answer)
        return solution and replace(solution, solve_s=time.perf_counter() - start)

    def _is_there(self, key: str, limit_s: float) -> bool:
        """Wait for a value; by asking again and again, for a wait in the store would block who else uses it."""
        end = time.perf_counter() + limit_s
        while not self._store.check([key]):
            if time.perf_counter() > end:
                return False
            time.sleep(POLL_S)
        return True


def digest(graph: Graph) -> str:
    """Name a step by its operations and how they are wired; sizes of what was measured outside of them don't count."""
    nodes = [(node.key, node.op, node.inputs, node.outputs) for node in graph.nodes]
    return hashlib.sha256(repr((nodes, graph.forward, graph.backward)).encode()).hexdigest()[:32]


def _checked(problem: Problem, answer: str) -> Solution | None:
    """Replay the decisions of rank 0 with the costs of this rank; None where they are of no use here."""
    if not answer:
        return None
    budget_bytes, strategy, rows = json.loads(answer)
    recompute = tuple(tuple(row) for row in rows)
    try:
        simulation = replay(problem, recompute)
    except ScheduleError as error:
        log.info("The plan of rank 0 is for another step (%s): solving alone", error)
        return None
    if simulation.peak_bytes > problem.budget_bytes < budget_bytes:
        return None
    return Solution(
        strategy=strategy,
        status=Status.FEASIBLE,
        recompute=recompute,
        recompute_ms=simulation.recompute_ms,
        peak_bytes=simulation.peak_bytes,
        stopped_by="rank 0 solved",
    )
