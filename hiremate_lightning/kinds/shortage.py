"""A budget that nothing fits: the bytes that are enough for all steps seen, found out before training stops.

The first step that does not fit is seldom the one that needs most. Optimizers may not have their state yet, gradients
may not be accumulated yet, the other steps of a GAN may not have run. So steps go on at the least memory until all of
that was seen, at most a few; the error then names what is enough for each of them, with all optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..measuring.resident import Resident
from ..measuring.resident_memory import ResidentMemory
from ..options import SessionOptions
from ..out_of_memory import InfeasibleBudgetError
from ..planning.plan import PlanOptions
from ..planning.planner import AT_LEAST, Need, infeasible, least_need
from ..planning.solvers.base import Problem, SolveOptions
from ..records.away import Host
from ..records.step import Step
from .recorded_step import RecordedStep
from .step_kind import StepKind

HELD_STEPS = 8  # that may run above a budget, to see what others need
SILENT_STEPS = 2  # of them, after which it is said: mostly the error comes before
SO_FAR = "The smallest budget found for the steps seen so far is"
ADVICE = "Raise the budget, make the batch smaller, or pass on_infeasible='warn' to train with the least memory."

BudgetOf = Callable[[Step, Resident, StepKind], int]  # of a step of a kind, and what exists before it
HostOf = Callable[[RecordedStep], Host | None]


class Shortage:
    """Whether some step does not fit the budget, and whether training goes on until more is known.

    Attributes:
        is_held: Whether some step does not fit the budget.
        are_measured: Whether code outside of the graphs was measured in all steps that were described.
        less_bytes: How much less another process of the training has for such a step.
    """

    def __init__(self) -> None:
        self.is_held, self.are_measured = False, True
        self.less_bytes = 0
        self._held_steps = 0
        self._updated = 0, 0  # optimizers' steps so far, and the bytes of their state then
        self._has_settled = False  # whether all optimizers have stepped, and their state grows no more
        self._waits = True  # whether more is to be seen; where no optimizer is known, nobody knows what that is
        self._had_stale = False  # whether there were gradients that the next backward was expected to find freed
        self._batch_bytes = 0  # of the largest batch

    def begin_step(self, resident: Resident, memory: ResidentMemory) -> None:
        """Learn what exists before a step."""
        steps, state_bytes = self._updated
        if memory.optimizer_steps > steps:
            has_appeared = not state_bytes and memory.has_state_of_each
            self._has_settled = memory.all_stepped and (has_appeared or resident.state_bytes <= state_bytes)
            self._updated = memory.optimizer_steps, resident.state_bytes
        is_new = resident.stale_bytes > 0 and not self._had_stale  # nobody has seen yet whether it is freed
        self._had_stale = self._had_stale or is_new
        self._has_settled = self._has_settled and not is_new
        self._batch_bytes = max(self._batch_bytes, resident.batch_bytes)
        self._held_steps += self.is_held
        self._waits = memory.has_optimizers and not self._has_settled

    def hold(self, error: InfeasibleBudgetError) -> None:
        """Let training go on, though a step does not fit."""
        self.is_held = True
        self.less_bytes = max(self.less_bytes, error.less_bytes)

    @property
    def is_to_be_announced(self) -> bool:
        """Whether to say now that steps run above the budget, and that an error is to come."""
        return self.is_held and self._held_steps == SILENT_STEPS

    @property
    def is_to_be_raised(self) -> bool:
        """Whether training stops now: all was seen that may need more, or enough steps have run."""
        return not self._waits or self._held_steps >= HELD_STEPS

    def error(
        self,
        steps: Iterable[tuple[StepKind, RecordedStep]],
        options: SessionOptions,
        budget_of: BudgetOf,
        host_of: HostOf,
        name: str,
    ) -> InfeasibleBudgetError | None:
        """Build the error that names what is enough for the steps seen; None where all fit the budget after all.

        Args:
            steps: The kinds of steps, and what each runs.
            options: What was asked for.
            budget_of: Returns the budget of a step.
            host_of: Returns the memory of the host that values of a step may go away to.
            name: What is planned.
        """
        needs, short = list[Need](), dict[int, int]()
        for kind, step in steps:
            if not kind.before:
                continue
            states = [replace(step, resident=self._with_all(seen)) for seen in kind.before.values()]
            budget_bytes = max(budget_of(state.merge(), state.resident, kind) for state in states)
            of_kind = [_need(state, host_of(state), options.plan, self.less_bytes) for state in states]
            short.update((need.peak_bytes, budget_bytes) for need in of_kind if need.peak_bytes > budget_bytes)
            needs += of_kind
        if not short:
            return None
        is_known = self._has_settled and self.are_measured
        return infeasible(needs, options.budget, short[max(short)], name, SO_FAR if is_known else AT_LEAST, ADVICE)

    def _with_all(self, resident: Resident) -> Resident:
        """Add to what existed what optimizers keep now, and what the largest batch takes more."""
        more_bytes = max(0, self._updated[1] - resident.state_bytes) + max(0, self._batch_bytes - resident.batch_bytes)
        return replace(resident, size_bytes=resident.size_bytes + more_bytes)


def _need(recorded: RecordedStep, host: Host | None, options: PlanOptions, less_bytes: int) -> Need:
    step, resident = recorded.merge(), recorded.resident
    problem = Problem(step.graph, step.profile, 0, SolveOptions(options.time_limit_s), host)
    decided = step.join(recorded.decided) if recorded.decided else None
    need = least_need(problem, resident.size_bytes, decided, options.solutions)
    waiting_bytes = resident.waiting_bytes, resident.plain_waiting_bytes
    return replace(need, waiting_bytes=waiting_bytes, is_guarded=True, less_bytes=less_bytes)
