"""How a captured part runs in its first step, before that is known as a whole and planned."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from .absent import without_missing
from .allocator import in_blocks
from .capture import Captured
from .costs import Profile
from .execution import Program, build
from .kinds import Known
from .planner import FirstSolution, PlanOptions, fastest_that_fits, first_solution, unplanned
from .resident import Resident
from .schedule import keep_all, lower
from .step import Call, Decisions, Step, merge
from .units import Budget

REMEMBERED = 8  # searches, whose result may serve at another size
BudgetOf = Callable[[Step, int], int]  # of a step, with so many resident bytes


class FirstSteps:
    """The programs of first steps: what was planned for another size, or that of least memory."""

    def __init__(self) -> None:
        self._found: deque[FirstSolution] = deque(maxlen=REMEMBERED)
        self._taken_over: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()  # by identity

    def was_taken_over(self, program: Program) -> bool:
        """Whether a program is by a plan for another size."""
        return self._taken_over.get(id(program)) is program

    def take_over(
        self,
        captured: Captured,
        profile: Profile,
        resident: Resident,
        planned: Collection[tuple[Known, Decisions]],
        budget_of: BudgetOf,
    ) -> Program | None:
        """Build the fastest program that fits, of those planned for the same step at other sizes; None where none does.

        Args:
            captured: The part.
            profile: Costs of its operations.
            resident: What exists before the step.
            planned: Steps, and what was decided for them.
            budget_of: Gives the budget of a step, resident bytes included.
        """
        alike = [(known, decisions) for known, decisions in planned if known.is_one_call_of(captured)]
        costs = {m: without_missing(captured, m, profile) for m in {known.missing[0] for known, _ in alike}}
        sized = [(known.at_size(captured, *costs[known.missing[0]], resident), d) for known, d in alike]
        foreseen = [(known, known.merge(), decisions) for known, decisions in sized if known is not None]
        if not foreseen:
            return None
        step = max((step for _, step, _ in foreseen), key=lambda step: unplanned(step).peak_bytes)
        margin_bytes = max(known.margin_bytes for known, _, _ in foreseen)
        budget_bytes = budget_of(step, resident.size_bytes) - resident.size_bytes - margin_bytes
        candidates = [keep_all(step.graph), *(decisions for _, _, decisions in foreseen)]
        decisions = fastest_that_fits(step, budget_bytes, candidates)
        if decisions is None:
            return None
        program = _build(captured, step, decisions)
        self._taken_over[id(program)] = program
        return program

    def search(
        self,
        captured: Captured,
        profile: Profile,
        resident_bytes: int,
        budget: Budget,
        budget_of: BudgetOf | None,
        options: PlanOptions,
        name: str,
        progress: Callable[[float, float], None],
    ) -> Program:
        """Build the program of least memory.

        Args:
            captured: The part.
            profile: Costs of its operations.
            resident_bytes: Bytes that exist before the step.
            budget: The budget as asked for.
            budget_of: Gives the budget of a step, resident bytes included; None where it is not to be checked.
            options: How to plan.
            name: What is planned, for reports.
            progress: Told of what is found while solving.

        Raises:
            InfeasibleBudgetError: If not even the part alone fits.
        """
        step = merge([Call(in_blocks(captured.graph, captured.device), profile)], [0])
        budget_bytes = 0 if budget_of is None else budget_of(step, resident_bytes)
        least = first_solution(step, budget, budget_bytes, resident_bytes, options, name, progress, self._found)
        self._found.append(FirstSolution(step, least))
        return _build(captured, step, least.recompute)


def _build(captured: Captured, step: Step, decisions: Decisions) -> Program:
    program = build(captured, lower(captured.graph, step.split(decisions)[0]))
    return replace(program, protects=True)  # what becomes of the values outside was not seen yet
