"""One plan for all processes that train a model: they agree on a problem, and the first process solves it for all.

All messages go through the key-value store of the process group, without collective operations. Ranks plan as a step
begins, never inside of a forward. A rank that gets no answer in time plans alone, so a rank that is late, lost, or at
another step blocks nobody for long. Planning alone is always correct, since ranks with different plans compute the
same gradients; it only takes time.

Ranks measure costs and memory on their own. The agreed problem has the smallest budget above resident bytes of all
ranks, and the most bytes of everything else. So a plan for it fits on each rank. If no plan fits, all ranks know at
the same time: none waits in a collective for a rank that has raised an error. Other ranks don't use the bound of the
solving rank, which was proven for its own costs. Ranks of different models (pipeline stages) plan apart.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any

from ..errors import ScheduleError
from ..housekeeping import log
from ..records.graph import Graph
from ..records.offload import Host, Offload
from .solvers.base import Problem, Solution, Status, Strategy, clock_limit_s, with_decisions

PATIENCE_S = 5.0  # wait for all ranks to plan a step for the first time, which they do at the same moment
PATIENCE_AGAIN_S = 0.5  # wait when planning a step again: a rank that measures more than others may do so alone
POLL_S = 0.02


Group = tuple[Any, int, int]  # the `torch.distributed.Store` of all ranks, the rank of this process, and their number


def shared(strategy: Strategy, group: Group | None, model: str = "") -> Strategy:
    """Wrap a strategy so that it solves once for all ranks that train the same model; no wrapper without a group."""
    return strategy if group is None else SharedSolving(strategy, group, PATIENCE_S, PATIENCE_AGAIN_S, model)


def announce(group: Group | None, model: str) -> None:
    """Announce to the other ranks which model this one trains: ranks that train another one do not wait for it.

    Ranks wait for a rank that has announced nothing yet: all ranks announce their model before the first rank plans.
    """
    if group is not None:
        store, rank, _ = group
        with suppress(RuntimeError):  # the store ended with its process: each rank then plans alone
            store.set(_announced(rank, model), "")
            store.set(_announced(rank), "")


def agreed(problem: Problem, strategy: Strategy) -> Problem:
    """Return the problem that all ranks solve if the strategy is shared; else return the problem unchanged."""
    return strategy.agree(problem) if isinstance(strategy, SharedSolving) else problem


class SharedSolving:
    """A strategy that solves on the first rank of a model; the other ranks take the answer of that rank.

    It waits for some seconds until all ranks plan the same step, and each time they plan it again. It does not wait for
    ranks that train another model, such as pipeline stages.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        patience_s: float,
        patience_again_s: float | None = None,
        model: str = "",
    ) -> None:
        self._strategy = strategy
        self._store, self._rank, self._world = group
        self._patience_s = patience_s
        self._patience_again_s = patience_s if patience_again_s is None else patience_again_s
        self._model = model
        self._agreed: tuple[str, Problem, int] | None = None  # the latest key, problem, and rank that solves

    def _peers(self) -> list[int]:
        """List the ranks that train the same model, or may do so."""
        ranks, check = range(self._world), self._store.check
        if check([_announced(rank, self._model) for rank in ranks]):
            return [*ranks]
        peers = [r for r in ranks if check([_announced(r, self._model)]) or not check([_announced(r)])]
        return sorted({self._rank, *peers})

    def agree(self, problem: Problem) -> Problem:
        """Return the problem that fits all ranks; this rank's own problem if another rank does not come in time."""
        self._agreed, own_needs = None, _needs(problem)
        try:
            key = self._next_key(problem.graph)
            self._store.set(
                f"{key}/needs{self._rank}", base64.b64encode(zlib.compress(json.dumps(own_needs).encode())).decode()
            )
            limit_s, self._patience_s = self._patience_s, self._patience_again_s
            if not self._are_there(lambda: [f"{key}/needs{rank}" for rank in self._peers()], limit_s):
                self._store.set(f"{key}/closed", "")
                return problem
            peers = [rank for rank in self._peers() if self._store.check([f"{key}/needs{rank}"])]
            texts = [self._store.get(f"{key}/needs{rank}") for rank in peers]
            needs_of_peers = [json.loads(zlib.decompress(base64.b64decode(text))) for text in texts]
        except RuntimeError as error:  # from the store: torch has no class of its own for an error that persists
            log.debug("The process group's store does not answer (%s): planning alone", error)
            return problem
        if any(len(needs) != len(own_needs) for needs in needs_of_peers):
            return problem
        problem = _meeting(problem, needs_of_peers)
        self._agreed = key, problem, peers[0]
        return problem

    def __call__(self, problem: Problem) -> Solution:
        """Solve a problem; if it is the agreed one, the first rank sends its solution, and the other ranks take it."""
        if self._agreed is None or self._agreed[1].graph is not problem.graph:
            return self._strategy(problem)
        key, _, leader = self._agreed
        if self._rank != leader:
            return self._adopted(problem, key, leader) or self._strategy(problem)
        answer = ""
        try:
            solution = self._strategy(problem)
            offloads = [astuple(offload) for offload in solution.offloads]
            answer = json.dumps([solution.strategy, solution.status.value, solution.recompute, offloads])
        finally:
            try:
                self._store.set(self._next_answer(key), answer)
            except RuntimeError as error:
                log.debug("The process group's store does not answer (%s): the other ranks solve alone", error)
        return solution

    def _next_key(self, graph: Graph) -> str:
        """Name the solve by the step, and by the number of times that this rank has planned it."""
        name = digest(graph)
        while True:
            key = f"{name}/{self._store.add(f'{name}/rank{self._rank}', 1)}"
            if not self._store.check([f"{key}/closed"]):
                return key

    def _adopted(self, problem: Problem, key: str, leader: int) -> Solution | None:
        """Wait for the solution of the first rank; return None if there is none that this rank can use."""
        start = time.perf_counter()
        try:
            name = self._next_answer(key)
            if not self._are_there(lambda: [name], clock_limit_s(problem.options.time_limit_s) + self._patience_s):
                return None
            answer = self._store.get(name).decode()
        except RuntimeError as error:
            log.debug("The process group's store does not answer (%s): solving alone", error)
            return None
        solution = _checked(problem, answer, leader)
        return solution and replace(solution, solve_s=time.perf_counter() - start)

    def _next_answer(self, key: str) -> str:
        """Name the answer to the next solve of the agreed problem: a solve with another budget may follow."""
        return f"{key}/answer{self._store.add(f'{key}/solves{self._rank}', 1)}"

    def _are_there(self, keys: Callable[[], list[str]], limit_s: float) -> bool:
        """Poll until the store has all keys, whose list may shrink: a wait in the store would block its other users."""
        end = time.perf_counter() + limit_s
        while not self._store.check(keys()):
            if time.perf_counter() > end:
                return False
            time.sleep(POLL_S)
        return True


def _needs(problem: Problem) -> list[int]:
    """List the numbers in which ranks may differ: budget, host, link to the host, workspaces, storages."""
    host, link = problem.host, problem.profile.link
    of_host = [0, 0, 0]  # without a link nothing is offloaded
    if link is not None:
        of_host = [host.size_bytes, int(link.out_bytes_per_ms), int(link.in_bytes_per_ms)]
    sizes = (storage.size_bytes for storage in problem.graph.storages)
    return [problem.budget_bytes, *of_host, *problem.profile.workspace_bytes, *sizes]


def _meeting(problem: Problem, needs: Sequence[Sequence[int]]) -> Problem:
    """Return the problem with the smallest budget, host and link of all ranks, and the largest of all other bytes."""
    budget_bytes, host_bytes, *speeds = (min(values) for values in zip(*(row[:4] for row in needs), strict=True))
    most = [max(values) for values in zip(*(row[4:] for row in needs), strict=True)]
    count = len(problem.graph.nodes)
    pairs = zip(problem.graph.storages, most[count:], strict=True)
    graph = replace(problem.graph, storages=tuple(replace(storage, size_bytes=size) for storage, size in pairs))
    profile, host = replace(problem.profile, workspace_bytes=tuple(most[:count])), problem.host
    if profile.link is None or not host_bytes:
        host = Host(0)
    else:
        out_bytes_per_ms, in_bytes_per_ms = map(float, speeds)
        link = replace(profile.link, out_bytes_per_ms=out_bytes_per_ms, in_bytes_per_ms=in_bytes_per_ms)
        profile, host = replace(profile, link=link), replace(host, size_bytes=host_bytes)
    return replace(problem, graph=graph, profile=profile, budget_bytes=budget_bytes, host=host)


def digest(graph: Graph) -> str:
    """Hash a step's operations and their wiring, without the measured sizes of outside code."""
    nodes = [(node.key, node.op, node.inputs, node.outputs) for node in graph.nodes]
    return hashlib.sha256(repr((nodes, graph.forward, graph.backward)).encode()).hexdigest()[:32]


def _announced(rank: int, model: str | None = None) -> str:
    """Name the key by which a rank announces its model; without a model, the key by which it announces any."""
    return f"hiremate/rank{rank}" if model is None else f"hiremate/rank{rank}/{model}"


def _checked(problem: Problem, answer: str, leader: int) -> Solution | None:
    """Replay the decisions of the first rank with the costs of this rank; return None if they don't fit its step."""
    if not answer:
        return None
    strategy, status, rows, places = json.loads(answer)
    recompute, offloads = tuple(tuple(row) for row in rows), tuple(Offload(*place) for place in places)
    solution = Solution(strategy, Status(status), stopped_by=f"rank {leader} solved")
    if not solution.is_feasible:
        return solution
    try:
        return with_decisions(problem, replace(solution, status=Status.FEASIBLE), recompute, offloads)
    except ScheduleError as error:
        log.info("The plan of rank %d is for another step (%s): solving alone", leader, error)
        return None
