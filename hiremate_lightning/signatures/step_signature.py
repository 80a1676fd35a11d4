"""One step signature: the single record of all facts that a session keeps of it.

Steps have the same signature if they run the same captured graphs forward in the same order. `History` makes the
signatures, returns them by these graphs, and sets their steps and plans. The recorded step and the plan are frozen
records that are replaced as a whole. So a change that fails halfway is undone by storing the record before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from .. import thresholds
from ..calls.module_call import ModuleCall
from ..capturing.code_at_sizes import SizesOfCalls
from ..measuring.resident import GradientState, Resident
from ..planning.headroom import guard_bytes
from ..planning.ladder import Ladder
from ..planning.plan import Plan
from ..running.program import Program
from .recorded_step import RecordedStep

EAGER_TRIES = 4  # most eager steps to measure in a row: on a CPU the first one does not show all that is freed

GraphNumbers = tuple[int, ...]  # numbers of the captured graphs that a step runs forward, in order
Start = tuple[int, int]  # how a step starts: bytes of its arguments, and number of graphs of earlier steps that wait


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
    """Which steps of one signature were watched, and what they showed (`watching`)."""

    looks: Counter[Reason] = field(default_factory=Counter)  # number of watched steps by reason
    steps: int = 0  # number of steps so far
    higher: int = 0  # number of steps with a higher predicted peak than that of measured steps
    has_grown: bool = False  # whether a step took more outside of its plan than measured steps
    # Most bytes allocated between the last forward and the backward of a step; None before a step was measured.
    allocated_bytes: int | None = None

    def add_measured(self, allocated_bytes: int) -> None:
        """Store how many bytes a measured step allocated before its backward."""
        self.allocated_bytes = max(self.allocated_bytes or 0, allocated_bytes)

    def add_unmeasured(self, plan: Plan, allocated_bytes: int | None, peak_bytes: int) -> None:
        """Store whether a step by a plan took more than measured steps; None if its allocations were not counted."""
        if self.allocated_bytes is None:
            return
        if allocated_bytes is not None and allocated_bytes > self.allocated_bytes + guard_bytes(plan.budget_bytes):
            self.allocated_bytes, self.has_grown = allocated_bytes, True
        self.has_grown = self.has_grown or peak_bytes > max(plan.budget_bytes, plan.measured.peak_bytes or 0)


@dataclass
class PastSteps:
    """How often and how steps of one signature ran."""

    count: int = 0  # number of captured steps
    is_by_plans: bool = False  # whether every forward of some step ran by a plan, of this or another signature
    # Whether some step ran code made from traces of other sizes, and not even the least memory fitted.
    fits_nothing: bool = False
    # Whether traces of other sizes don't determine the programs of its plan: then it gets no plan.
    has_no_programs: bool = False
    waited: frozenset[int] = frozenset()  # counts of earlier graphs that waited for a backward as its steps began

    def is_worth_a_plan(self, is_made: bool) -> bool:
        """Whether a plan of its own may pay for the signature.

        Args:
            is_made: Whether its steps run code made from traces of other sizes: such steps follow decisions for all
                sizes of the code, as long as some fit.
        """
        if not is_made:
            return self.count > 1 or not self.is_by_plans
        return not self.has_no_programs and (self.fits_nothing or (self.count > 1 and not self.is_by_plans))


@dataclass(eq=False, slots=True)
class StepSignature:
    """One step signature."""

    graphs: GraphNumbers  # the captured graphs that it runs forward, in order: no other signature has the same
    # The step as it was recorded; None before that, and after it was dropped to be recorded again.
    step: RecordedStep | None = None
    # Types and shapes of the tensors that each call of a planned module is given; None before it is planned.
    calls: tuple[ModuleCall, ...] | None = None
    # The first recorded signature that runs the same code, at any sizes; None before it is planned.
    code: StepSignature | None = None
    # The signature foreseen from it at the largest sizes, and each of its sizes with the one that it becomes there.
    largest: tuple[StepSignature, Mapping[int, int]] | None = None
    # The memory before its steps, by the state of the gradients.
    before: Mapping[GradientState, Resident] = field(default_factory=dict)
    # How often the memory before steps had grown, and the retained bytes, when its plan was adapted to them last.
    adapted_at: tuple[int, int] = (0, 0)
    plan: Plan | None = None  # None before there is one
    # The program of each forward with a backward, by its place in the step.
    programs: Mapping[int, Program] = field(default_factory=dict)
    is_ahead: bool = False  # whether it is planned before its first step, at the largest sizes
    is_searching: bool = False  # whether its next step is the first in which cuDNN tries algorithms
    backwards_vary: bool = False  # whether its steps differ in the backwards that they run
    past: PastSteps = field(default_factory=PastSteps)  # how often and how its steps ran
    watched: Watched = field(default_factory=Watched)  # which of its steps were watched
    # For a plan that saves no memory under a budget that nothing fits: whether an eager step took no more, None before
    # one showed its peak. For a plan that recomputes nothing: False once an eager step exceeded the budget, else None.
    eager_is_no_worse: bool | None = None
    eager_tries: int = 0  # number of eager steps that were measured
    # Decisions for all sizes of its code; only the first signature of a code (`of_code`) uses its ladder.
    ladder: Ladder = field(default_factory=Ladder)
    # The sizes of the calls of steps of its code, likewise.
    sizes_of_calls: SizesOfCalls = field(default_factory=SizesOfCalls)

    @property
    def of_code(self) -> StepSignature:
        """The first recorded signature of its code: it has the ladder and the sizes of calls for all sizes."""
        return self.code or self

    @property
    def recorded(self) -> RecordedStep:
        """The recorded step, which must exist."""
        assert self.step is not None, "only signatures that were recorded are planned"
        return self.step

    @property
    def own_plan(self) -> Plan:
        """The plan, which must exist."""
        assert self.plan is not None, "asked of signatures that have a plan"
        return self.plan

    def gains_nothing(self, eager_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Whether its steps may run without the plan, once the plan was timed: it recomputes nothing, and eager fits.

        They may too if nothing fits the budget and the plan saves no memory. `eager_bytes` are the bytes that an eager
        step adds; `free_bytes` returns the bytes that the device could still allocate.
        """
        plan, step = self.own_plan, self.recorded
        if plan.measured.step_ms is None or step.waits:
            return False
        if plan.exceeds_budget:
            return self.saves_nothing(eager_bytes, free_bytes)
        if self.eager_is_no_worse is False or not (plan.solution.keeps_all and thresholds.current.gives_back):
            return False
        return plan.budget.is_whole or eager_bytes <= replace(plan.room, margin_bytes=step.margin_bytes).step_bytes

    def saves_nothing(self, eager_bytes: int, free_bytes: Callable[[], int]) -> bool:
        """Whether its plan saves no memory under a budget that nothing fits, and the device has memory for eager steps.

        The arguments are those of `gains_nothing`.
        """
        if not self.own_plan.saves_nothing or self.recorded.waits:
            return False
        if self.eager_is_no_worse is not None:
            return self.eager_is_no_worse
        return eager_bytes - self.own_plan.planned.peak_bytes < free_bytes()

    def ran_without_plan(self, peak_bytes: int | None, plan_bytes: int) -> None:
        """Set `eager_is_no_worse` by the peak of an eager step whose plan saves no memory.

        The plan stays if the eager step took more than `plan_bytes`, its peak by the plan, or if `EAGER_TRIES` steps
        did not show their peak (None).
        """
        self.eager_tries += 1
        if peak_bytes is not None or self.eager_tries == EAGER_TRIES:
            most_bytes = thresholds.current.given_back_peak * plan_bytes
            self.eager_is_no_worse = peak_bytes is not None and peak_bytes <= most_bytes

    def keep_plan(self) -> None:
        """Run its steps by the plan from now on, since an eager step exceeded the budget."""
        self.eager_is_no_worse = False
