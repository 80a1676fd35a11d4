"""Steps that have no plan: they run as was planned for the same code at other sizes, or else at the least memory."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..capturing.absent import without_missing
from ..capturing.capture import Captured
from ..measuring.resident import Resident
from ..memory.allocator import in_blocks
from ..planning.planner import FirstSolution, PlanOptions, fastest_that_fits, first_solution, unplanned
from ..records.costs import Profile, step_time_ms
from ..records.graph import Graph
from ..records.scaling import is_no_larger
from ..records.schedule import keep_all, lower
from ..records.step import Call, Decisions, Step, merge
from ..reporting.report import Stages
from ..running.execution import Part
from ..running.program import Program, build
from ..units import Budget
from .current_step import CurrentStep, Followed, Planned
from .kinds import Kind
from .known import Known

REMEMBERED = 8  # searches, whose result may serve at another size
KEPT = 64  # decisions for a part, by what ran before it in its step
TRACING_BYTES = 2**14  # that tracing takes for itself: states of the random generator, three deep
BudgetOf = Callable[[Step, Resident], int]  # of a step, with what exists before it


@dataclass(frozen=True, slots=True)
class Given:
    """What the programs of first steps are decided by, found out where it is needed.

    Attributes:
        resident: Counts what existed before the step.
        planned: Lists steps, and what was decided for them.
        budget_of: Gives the budget of a step, resident bytes included.
    """

    resident: Callable[[], Resident]
    planned: Callable[[], Iterable[Planned]]
    budget_of: BudgetOf


class FirstSteps:
    """The programs of steps that have no plan.

    Args:
        stages: Shows solving, and adds up its seconds.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._found: deque[FirstSolution] = deque(maxlen=REMEMBERED)
        self._least: weakref.WeakKeyDictionary[Part, Program] = weakref.WeakKeyDictionary()
        self._kept: weakref.WeakKeyDictionary[Part, Program] = weakref.WeakKeyDictionary()
        self._taken_over: weakref.WeakKeyDictionary[Part, dict[Kind, Decisions | None]] = weakref.WeakKeyDictionary()
        self._programs: weakref.WeakKeyDictionary[Part, dict[Decisions, Program]] = weakref.WeakKeyDictionary()
        self._most_bytes = 0  # that were resident

    def forget_plans(self) -> None:
        """Decide anew what to take over: there is another plan, or more is resident."""
        self._taken_over.clear()
        self._programs.clear()

    def count(self, resident: Resident) -> None:
        """Learn of what exists before a step: where that is more than ever, what was taken over may not fit."""
        if resident.size_bytes > self._most_bytes:
            self._most_bytes = resident.size_bytes
            self.forget_plans()

    def forget_least(self, part: Part) -> None:
        """Learn that a part can't run any more as it did."""
        self._least.pop(part, None)
        self._kept.pop(part, None)
        self._taken_over.pop(part, None)
        self._programs.pop(part, None)

    def kept(self, part: Part) -> Program:
        """Return the program of a part that computes nothing again."""
        program = self._kept.get(part)
        if program is None:
            program = self._kept[part] = _build(part.captured, keep_all(part.captured.graph))
        return program

    def take_over(self, step: CurrentStep, part: Part, number: int, profile: Profile, given: Given) -> Program | None:
        """Return the program of a part by a plan for the same step at other sizes; None where none fits.

        Args:
            step: The step under way.
            part: The part, about to run in it.
            number: Its number.
            profile: Costs of its operations.
            given: What there is to decide by.
        """
        found, ran = self._taken_over.setdefault(part, {}), (*step.kind, number)
        if ran not in found:
            with self._stages.stage("solve_s", "solving"):
                if len(found) == KEPT:
                    found.clear()
                found[ran] = decisions = _take_over(step, part.captured, profile, given)
                programs = self._programs.setdefault(part, {})
                if decisions is not None and decisions not in programs:
                    programs[decisions] = _build(part.captured, decisions)
        decisions = found[ran]
        return None if decisions is None else self._programs[part][decisions]

    def least(
        self,
        part: Part,
        profile: Profile,
        resident: Callable[[], Resident],
        budget: Budget,
        budget_of: BudgetOf | None,
        options: PlanOptions,
        name: str,
        free_bytes: Callable[[], int],
    ) -> Program:
        """Return the program of least memory of a part.

        Args:
            part: The part.
            profile: Costs of its operations.
            resident: Counts what existed before the step.
            budget: The budget as asked for.
            budget_of: Gives the budget of a step, resident bytes included; None where it is not to be checked.
            options: How to plan.
            name: What is planned, for reports.
            free_bytes: Returns the bytes that the part may add beyond the budget.

        Raises:
            InfeasibleBudgetError: If the part alone fits neither the budget nor what is free.
        """
        program = self._least.get(part)
        if program is None:
            with self._stages.stage("solve_s", "solving"):
                captured, before = part.captured, resident()
                graph, costs = _without_doubtful(captured, profile)
                step = merge([Call(in_blocks(graph, captured.device), costs)], [0])
                budget_bytes = 0 if budget_of is None else budget_of(step, before)
                progress = self._stages.reporter.solving(step_time_ms(captured.graph, profile))
                resident_bytes = before.size_bytes
                least = first_solution(
                    step, budget, budget_bytes, resident_bytes, options, name, progress, self._found, free_bytes
                )
                self._found.append(FirstSolution(step, least))
                program = self._least[part] = _build(captured, step.split(least.recompute)[0])
        return program


def _take_over(step: CurrentStep, captured: Captured, profile: Profile, given: Given) -> Decisions | None:
    """Decide for the next forward of the step under way."""
    place, seen = len(step.forwards), step.comparison
    _compare(step, given)
    seen.alike = [(known, decided) for known, decided in seen.alike if known.runs_at(place, captured)]
    seen.compared = place + 1
    if not seen.alike:
        return None
    first = seen.alike[0][0]
    if place not in first.places or not all(known.goes_on_as(first, place) for known, _ in seen.alike):
        return None  # nobody knows how the step goes on
    call = first.places.index(place)
    followed, is_last = seen.followed, call + 1 == len(first.calls)  # all sizes are known then
    if followed is None or is_last or not is_no_larger(captured.graph, followed.known.captured[call].graph):
        followed = seen.followed = _follow(step, captured, profile, call, given)
    return None if followed is None else followed.decisions[call]


def _compare(step: CurrentStep, given: Given) -> None:
    """Find the planned steps that are the same code so far."""
    seen = step.comparison
    if not seen.compared:
        seen.alike = list(given.planned())
    for place in range(seen.compared, len(step.forwards)):
        captured = step.forwards[place].captured
        seen.alike = [(known, decided) for known, decided in seen.alike if known.runs_at(place, captured)]


def _follow(step: CurrentStep, captured: Captured, profile: Profile, call: int, given: Given) -> Followed | None:
    """Choose, of what was decided for steps of the same code, the fastest that fits; None where none does."""
    alike = step.comparison.alike
    begun = [step.forwards[place] for place in alike[0][0].places[:call]]
    resident = given.resident()
    known = _foresee(alike, [*((f.captured, f.profile) for f in begun), (captured, profile)], resident)
    if known is None:
        return None
    whole = known.merge()
    margin_bytes = max(known.margin_bytes for known, _ in alike)
    traced_bytes = TRACING_BYTES if len(known.calls) > 1 else 0  # graphs are traced while values of others live
    budget_bytes = given.budget_of(whole, resident) - resident.size_bytes - margin_bytes - traced_bytes
    before = [forward.program.schedule.decisions(forward.captured.graph) for forward in begun]
    decided = dict.fromkeys([keep_all(whole.graph), *(decisions for _, decisions in alike)])
    candidates = [whole.join([*before, *whole.split(decisions)[call:]]) for decisions in decided]
    decisions = fastest_that_fits(whole, budget_bytes, candidates)
    if call + 1 == len(known.calls):
        step.comparison.foreseen = alike[0][0], unplanned(whole).peak_bytes + margin_bytes
    return None if decisions is None else Followed(known, whole.split(decisions))


def _foresee(alike: Sequence[Planned], calls: Sequence[tuple[Captured, Profile]], resident: Resident) -> Known | None:
    """Foresee the step under way: what is still to come as in the smallest known step that is not smaller so far.

    Args:
        alike: The planned steps that run the same code so far.
        calls: What has run of it, and is about to run, with the costs.
        resident: What exists before it.

    Returns:
        The step; None where it is larger than all that is known: what is still to come may be larger too.
    """
    codes = [own for own, _ in calls]

    @functools.cache
    def as_run(index: int, missing: frozenset[int]) -> tuple[Graph, Profile]:
        own, costs = calls[index]
        return without_missing(own, missing, costs)

    steps, count = [known for known, _ in alike], len(calls)
    if count < len(steps[0].calls):
        steps = [known for known in steps if known.is_no_smaller(codes)]
        least_bytes = min((known.bytes_from(count) for known in steps), default=0)
        steps = [known for known in steps if known.bytes_from(count) == least_bytes]
    foreseen = [step for known in steps if (step := known.at_sizes(codes, as_run, resident)) is not None]
    return max(foreseen, key=lambda step: step.outside_bytes, default=None)


def _without_doubtful(captured: Captured, profile: Profile) -> tuple[Graph, Profile]:
    """Count no gradients that may never come: where a loss is returned, those of other outputs, logits for example.

    Nor is it known who holds these outputs; their memory is taken for free where a gradient may have it.
    """
    graph = captured.graph
    doubtful = frozenset(i for i, t in enumerate(graph.tangents) if graph.tensors[t].shape)
    return without_missing(captured, doubtful if len(doubtful) < len(graph.tangents) else frozenset(), profile)


def _build(captured: Captured, decisions: Decisions) -> Program:
    program = build(captured, lower(captured.graph, decisions))
    return replace(program, protects=True)  # what becomes of the values outside was not seen yet
