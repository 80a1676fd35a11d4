"""One plan for all processes of a training: they agree on the problem, rank 0 solves it, the others take its answer.

All travels through the key-value store that every process group has. No collective operation is involved, and nothing
happens inside of a forward: ranks plan as a step begins. A rank that is late, lost, or at another step keeps nobody
waiting for long: whoever gets no answer in time plans alone. That is always right, since ranks with different plans
compute the same gradients; it only takes time.

Ranks measure costs and memory on their own. The problem that they agree on has the smallest budget of all, above what
is resident, and the most bytes of code outside. So what fits it fits on each rank, and where nothing does, all of them
learn it together: none is left waiting in a collective for one that has raised an error. The bound of rank 0 was
proven for the costs there, and is not taken.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..errors import ScheduleError
from ..records.graph import Graph
from .solvers.base import Problem, Solution, Status, Strategy, replay

log = logging.getLogger("hiremate_lightning")
PATIENCE_S = 5.0  # for all ranks to plan a step for the first time: they do so at the same moment
PATIENCE_AGAIN_S = 0.5  # to plan it again: one alone may, where it measures more than the others, which wait meanwhile
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


def shared(strategy: Strategy, group: tuple[Store, int, int] | None) -> Strategy:
    """Let a strategy solve for all ranks.

    Args:
        strategy: What solves.
        group: The store that the ranks share, this process's rank, and their number; None for a process on its own.
    """
    return strategy if group is None else SharedSolving(strategy, *group, PATIENCE_S, PATIENCE_AGAIN_S)


def agreed(problem: Problem, strategy: Strategy) -> Problem:
    """Return the problem that all ranks solve where a strategy is shared; any other problem as it is."""
    return strategy.agree(problem) if isinstance(strategy, SharedSolving) else problem


class SharedSolving:
    """A strategy that solves on rank 0 and is answered by rank 0 elsewhere.

    Args:
        strategy: What solves.
        store: What the ranks share.
        rank: Number of this process.
        world: How many processes there are.
        patience_s: Seconds to wait until all ranks plan the same step.
        patience_again_s: Seconds to wait until they plan it once more.
    """

    def __init__(
        self,
        strategy: Strategy,
        store: Store,
        rank: int,
        world: int,
        patience_s: float,
        patience_again_s: float | None = None,
    ) -> None:
        self._strategy = strategy
        self._store = store
        self._rank = rank
        self._world = world
        self._patience_s = patience_s
        self._patience_again_s = patience_s if patience_again_s is None else patience_again_s
        self._agreed: tuple[str, Problem] | None = None  # the key of the latest agreement, and what was agreed on

    def agree(self, problem: Problem) -> Problem:
        """Return the problem that fits all ranks; this rank's own where another one does not come in time."""
        self._agreed, own = None, _needs(problem)
        try:
            key = self._next_key(problem.graph)
            self._store.set(f"{key}/needs{self._rank}", _written(own))
            keys = [f"{key}/needs{rank}" for rank in range(self._world)]
            limit_s, self._patience_s = self._patience_s, self._patience_again_s
            if not self._are_there(keys, limit_s):
                self._store.set(f"{key}/closed", "")
                return problem
            found = [_read(self._store.get(key)) for key in keys]
        except RuntimeError as error:  # of the store: torch has no class of its own for those that stay
            log.debug("The process group's store does not answer (%s): planning alone", error)
            return problem
        if any(len(needs) != len(own) for needs in found):
            return problem
        problem = _meeting(problem, found)
        self._agreed = key, problem
        return problem

    def __call__(self, problem: Problem) -> Solution:
        """Solve a problem, or take the answer of rank 0 where it is for what was agreed on."""
        if self._agreed is None or self._agreed[1].graph is not problem.graph:
            return self._strategy(problem)
        if self._rank == 0:
            return self._lead(problem, self._agreed[0])
        return self._adopted(problem, self._agreed[0]) or self._strategy(problem)

    def _next_key(self, graph: Graph) -> str:
        """Name the solve: the step, and how often the ranks have solved it together, or one of them alone."""
        name = digest(graph)
        while True:
            key = f"{name}/{self._store.add(f'{name}/rank{self._rank}', 1)}"
            if not self._store.check([f"{key}/closed"]):
                return key

    def _lead(self, problem: Problem, key: str) -> Solution:
        answer = ""
        try:
            solution = self._strategy(problem)
            answer = json.dumps([solution.strategy, solution.status.value, solution.recompute])
        finally:
            self._tell(f"{key}/answer{self._count(key)}", answer)
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
            name = f"{key}/answer{self._count(key)}"
            if not self._are_there([name], problem.options.time_limit_s + self._patience_s):
                return None
            answer = self._store.get(name).decode()
        except RuntimeError as error:
            log.debug("The process group's store does not answer (%s): solving alone", error)
            return None
        solution = _checked(problem, answer)
        return solution and replace(solution, solve_s=time.perf_counter() - start)

    def _count(self, key: str) -> int:
        """Count the solves of what was agreed on: a tighter budget may follow."""
        return self._store.add(f"{key}/solves{self._rank}", 1)

    def _are_there(self, keys: list[str], limit_s: float) -> bool:
        """Wait for values; by asking again and again, for a wait in the store would block who else uses it."""
        end = time.perf_counter() + limit_s
        while not self._store.check(keys):
            if time.perf_counter() > end:
                return False
            time.sleep(POLL_S)
        return True


def _needs(problem: Problem) -> list[int]:
    """List the budget, and all bytes: what ranks measure on their own may differ."""
    sizes = (storage.size_bytes for storage in problem.graph.storages)
    return [problem.budget_bytes, *problem.profile.workspace_bytes, *sizes]


def _meeting(problem: Problem, needs: Sequence[Sequence[int]]) -> Problem:
    """Return the problem with the smallest budget of several, and the most bytes of everything else."""
    budgets, *others = zip(*needs, strict=True)
    most, graph, count = [max(values) for values in others], problem.graph, len(problem.graph.nodes)
    pairs = zip(graph.storages, most[count:], strict=True)
    return replace(
        problem,
        graph=replace(graph, storages=tuple(replace(storage, size_bytes=size) for storage, size in pairs)),
        profile=replace(problem.profile, workspace_bytes=tuple(most[:count])),
        budget_bytes=min(budgets),
    )


def _written(needs: Sequence[int]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(needs).encode())).decode()


def _read(text: bytes) -> list[int]:
    found: list[int] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found


def digest(graph: Graph) -> str:
    """Name a step by its operations and how they are wired; sizes of what was measured outside of them don't count."""
    nodes = [(node.key, node.op, node.inputs, node.outputs) for node in graph.nodes]
    return hashlib.sha256(repr((nodes, graph.forward, graph.backward)).encode()).hexdigest()[:32]


def _checked(problem: Problem, answer: str) -> Solution | None:
    """Replay the decisions of rank 0 with the costs of this rank; None where they are of no use here."""
    if not answer:
        return None
    strategy, status, rows = json.loads(answer)
    recompute = tuple(tuple(row) for row in rows)
    found = Solution(strategy, Status(status), recompute, stopped_by="rank 0 solved")
    if not found.is_feasible:
        return found
    try:
        simulation = replay(problem, recompute)
    except ScheduleError as error:
        log.info("The plan of rank 0 is for another step (%s): solving alone", error)
        return None
    return replace(
        found, status=Status.FEASIBLE, recompute_ms=simulation.recompute_ms, peak_bytes=simulation.peak_bytes
    )
