"""One step signature: the single record of all that a session keeps of it.

Steps are of one signature where they run the same captured graphs forward in the same order. `History` owns the
signatures, and hands them out by these graphs: nothing else in a session keeps a table of signatures. What a step runs,
and its plan, are frozen records that are replaced as a whole. So what fails halfway is undone by putting the record
before it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from .. import thresholds
from ..calls.given import ModuleCall
from ..capturing.code_at_sizes import SizesOfCalls
from ..measuring.resident import GradientState, Resident
from ..planning.ladder import Ladder
from ..planning.plan import Plan
from ..running.program import Program
from .recorded_step import RecordedStep

TRIES = 4  # eager steps to measure in a row, until one shows its peak

GraphNumbers = tuple[int, ...]  # of the captured graphs that a step runs forward, in order
Start = tuple[int, int]  # of a step: bytes of its arguments, and how many graphs of earlier steps wait then


class Reason(Enum):
    """Why to watch a step."""

    PLAN = "it may be of a signature that has no plan"
    PEAK = "the peak of its plan was not measured"
    TIME = "its plan was not timed"
    GROWN = "code outside of its plan was seen to allocate more"
    AGAIN = "code outside of its plan may have come to take more"
    ITERATION = "what its iteration makes beside graphs that wait was not seen"


@dataclass
class Watched:
    """What was watched of the steps of one signature (`watching`)."""

    looks: Counter[Reason] = field(default_factory=Counter)  # how often they were watched, by reason
    steps: int = 0  # steps so far
    higher: int = 0  # steps for which more was predicted than for measured ones
    has_grown: bool = False  # whether a step was seen to take more outside of its plan than measured ones
    # The most that was seen to be allocated between the forwards and the backward of one of them; None before one was
    # measured.
    allocated_bytes: int | None = None


@dataclass
class Sights:
    """How the steps of one signature have come."""

    count: int = 0  # how often
    is_by_plans: bool = False  # whether every forward of some step ran by a plan, of this or another signature
    # Whether some step was made from traces of other sizes, and not even the least memory fitted.
    fits_nothing: bool = False
    # Whether traces of other sizes do not tell the programs of a plan of it: it gets none.
    has_no_programs: bool = False
    waited: frozenset[int] = frozenset()  # how many graphs of earlier steps waited for their backward as steps began

    def is_worth_a_plan(self, is_made: bool) -> bool:
        """Whether steps have come so that a plan of their own may pay.

        Args:
            is_made: Whether they run code that was made from traces of other sizes: these run by what is decided for
                all sizes, wherever that fits.
        """
        if not is_made:
            return self.count > 1 or not self.is_by_plans
        return not self.has_no_programs and (self.fits_nothing or (self.count > 1 and not self.is_by_plans))


@dataclass(eq=False, slots=True)
class StepSignature:
    """One step signature."""

    graphs: GraphNumbers  # the captured graphs that it runs forward, in order: no other signature has the same
    # What it runs, as it was recorded; None before that, and where it is to be recorded anew.
    step: RecordedStep | None = None
    # What each call of a planned module is given in it; None before it is planned.
    calls: tuple[ModuleCall, ...] | None = None
    # The first signature that runs the same code, at whatever sizes; None before it is planned.
    code: StepSignature | None = None
    # The signature that was foreseen from it at the largest sizes, and what its sizes become there.
    largest: tuple[StepSignature, Mapping[int, int]] | None = None
    # What existed before its steps, by the state of the gradients.
    before: Mapping[GradientState, Resident] = field(default_factory=dict)
    # How often the memory before steps had grown, and what was retained, as its plan was checked last.
    checked_at: tuple[int, int] = (0, 0)
    plan: Plan | None = None  # its plan, None before there is one
    # The program for each place in its sequence of forwards.
    programs: Mapping[int, Program] = field(default_factory=dict)
    is_ahead: bool = False  # whether it is planned ahead of its first step, at the largest sizes
    counts_on_freed_gradients: bool = False  # whether its plan counts gradients as freed that stay allocated
    is_searching: bool = False  # whether its next step is the first in which cuDNN chooses algorithms
    backwards_vary: bool = False  # whether some of its steps have other backwards than others
    sights: Sights = field(default_factory=Sights)  # how its steps have come
    watched: Watched = field(default_factory=Watched)  # what was watched of them
    # Of a plan that saves no memory where nothing fits: whether an eager step took no more, None before one has shown
    # its peak. Of one that recomputes nothing: False once a step without it took more than the budget, else None.
    is_given_back: bool | None = None
    eager_tries: int = 0  # how many eager ones were measured that did not show their peak
    announced: Plan | None = None  # the plan that a user was told of last, as it was then; None for nothing
    shown: Plan | None = None  # the plan whose measurement was shown last, as it was then; None for none
    # Where it is the first signature of its code, decisions for all sizes of that.
    ladder: Ladder = field(default_factory=Ladder)
    # Where it is that signature, the sizes of the calls of its steps.
    sizes_of_calls: SizesOfCalls = field(default_factory=SizesOfCalls)

    @property
    def of_code(self) -> StepSignature:
        """The signature that stands for its code, at whatever sizes."""
        return self.code or self

    @property
    def recorded(self) -> RecordedStep:
        """What it runs, where it was recorded."""
        assert self.step is not None, "only signatures that were recorded are planned"
        return self.step

    @property
    def own_plan(self) -> Plan:
        """Its plan, where it has one."""
        assert self.plan is not None, "asked of signatures that have a plan"
        return self.plan

    def gains_nothing(self, eager_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Whether it needs no plan, once that was measured: it recomputes nothing, and steps fit without it.

        So it is too where nothing fits and the plan saves no memory. `eager_bytes` are what a step adds without the
        plan, `free_bytes` returns what the device could still hand out.
        """
        plan, step = self.own_plan, self.recorded
        if plan.measured.step_ms is None or step.waits:
            return False
        if plan.planned_peak_bytes > plan.budget_bytes:
            return self.saves_nothing(eager_bytes, free_bytes)
        if self.is_given_back is False or not (plan.solution.is_plain and thresholds.current.gives_back):
            return False
        return plan.budget.is_whole or eager_bytes <= replace(plan.room, margin_bytes=step.margin_bytes).step_bytes

    def saves_nothing(self, eager_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Whether nothing fits, its plan saves no memory, and the device has memory to run without it.

        The arguments are those of `gains_nothing`.
        """
        if not self.own_plan.saves_nothing or self.recorded.waits:
            return False
        if self.is_given_back is not None:
            return self.is_given_back
        return eager_bytes - self.own_plan.planned.peak_bytes < free_bytes()

    def ran_without_plan(self, peak_bytes: int | None, plan_bytes: int) -> None:
        """Learn the peak of an eager step whose plan saves no memory, None where the measurement did not see all.

        `plan_bytes` are what a step takes by the plan. If more was taken without it, the plan stays; so it does where
        several steps have not shown their peak.
        """
        self.eager_tries += 1
        if peak_bytes is not None or self.eager_tries == TRIES:
            most_bytes = thresholds.current.released_peak * plan_bytes
            self.is_given_back = peak_bytes is not None and peak_bytes <= most_bytes
