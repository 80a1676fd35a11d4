"""Steps that run as the user wrote them, though their model is planned: where that fits, and is as fast.

There are three kinds. Steps of sizes that were never seen, which to capture would take seconds (`plain_steps`); those
of them that fit only where blocks of the model are called twice, as in `torch.utils.checkpoint` (`repeated_blocks`);
and steps whose plan recomputes nothing and is slower than eager PyTorch (`releasing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from torch import nn

from ..measuring.recording import StepRecord
from ..records.costs import step_time_ms
from ..reporting.report import Reporter
from ..units import format_bytes
from .current_step import CurrentStep, PlainRun
from .kinds import Kind
from .plain_peaks import PlainPeaks
from .plain_steps import ModuleCall, PlainSteps
from .planned import PlannedKinds
from .releasing import Releases, Timing
from .repeated_blocks import RepeatedBlocks

log = logging.getLogger("hiremate_lightning")
TWICE_SHARE = 0.25  # of a step's time that blocks which are called twice cost more than a plan


class UnplannedSteps:
    """Decides which steps run as the user wrote them, and learns from those that do.

    Args:
        root: The model.
        planned: The plans.
        reporter: Shows what is decided.
        say: Warns.
        is_allowed: Whether any step may: not where fused kernels give other bits than PyTorch's own.

    Attributes:
        releases: Times kinds of steps with and without their plans.
    """

    def __init__(
        self, root: nn.Module, planned: PlannedKinds, reporter: Reporter, say: Callable[[str], None], is_allowed: bool
    ) -> None:
        self.releases = Releases()
        self._name, self._planned, self._reporter, self._say = type(root).__name__, planned, reporter, say
        self._is_allowed = is_allowed
        self._said = set[str]()
        self._peaks, self._blocks = PlainPeaks(planned), RepeatedBlocks(root)
        self._sizes_vary = False  # whether any step ran plain since its sizes were not known
        self._plain, self._twice = PlainSteps(), PlainSteps()
        self._ran_twice = Counter[tuple[ModuleCall, ...]]()  # steps by what they were called with

    def step_begins(self, step: CurrentStep) -> Kind | None:
        """Decide whether a step that begins with some calls runs as the user wrote it.

        Returns:
            The kind of the step, where its plan gains nothing; else None.
        """
        settled = self._settled_kind(step)
        if settled is not None and self.releases.runs_plain(settled):
            step.plain = self._released(step, settled)
            return settled
        step.plain = self._as_written(step) or self._with_blocks_twice(step)
        if step.plain is not None:
            self._ran_twice[tuple(step.calls)] += step.plain.is_twice
            self._sizes_vary = True
            self._note(
                "Steps of other input sizes that fit the budget only with recomputation run without a plan, and "
                f"compute {self._blocks.count} blocks of {self._name} twice, until their sizes have come often."
                if step.plain.is_twice
                else "Steps of other input sizes that fit the budget as they are run without a plan."
            )
        return settled

    def called(self, step: CurrentStep, call: ModuleCall) -> None:
        """Learn of a further call of the step under way: if it does not fit as it is, it is captured."""
        step.calls.append(call)
        if step.plain is None:
            return
        if step.plain.is_twice:
            step.plain = self._with_blocks_twice(step)
        elif step.plain.released is not None:
            step.plain = self._released(step, step.plain.released)
        else:
            step.plain = self._as_written(step)

    @contextmanager
    def calling(self, plain: PlainRun | None) -> Iterator[None]:
        """Surround a call of a step that runs plain."""
        with self._blocks.twice() if plain is not None and plain.is_twice else self._blocks.observed():
            yield

    def is_to_be_measured(self, plain: PlainRun) -> bool:
        """Whether to measure a step that runs plain."""
        return self._sizes(plain).is_to_be_measured(plain.bound_bytes)

    def _sizes(self, plain: PlainRun) -> PlainSteps:
        return self._twice if plain.is_twice else self._plain

    def measured(self, plain: PlainRun, record: StepRecord) -> None:
        """Learn from a step that ran plain, and was measured."""
        peak_bytes, plan = record.peak_bytes, self._planned.latest
        added_bytes = None if peak_bytes is None else peak_bytes - record.resident_bytes
        self._sizes(plain).measured(plain.bound_bytes, added_bytes)
        if plain.released is not None and self._planned.options.budget.share == 1:
            return  # the budget is what plain training takes
        if peak_bytes is not None and plan is not None and peak_bytes > plan.budget_bytes:
            if plain.released is not None:
                self.releases.keep(plain.released)
            self._say(
                f"A step of a new input size ran without {'a plan' if plain.is_twice else 'recomputation'}, since it "
                "was predicted to fit, and took "
                f"{format_bytes(peak_bytes)}, above the budget of {format_bytes(plan.budget_bytes)}. "
                "From now on such predictions have a margin."
            )

    def was_planned(self, kind: Kind, calls: Sequence[ModuleCall]) -> None:
        """Learn that a kind of step has a plan now, and what its calls are given."""
        code, shapes = self._planned.kinds.same_code(kind), [t.shape for t in self._planned.plans[kind].graph.tensors]
        for sizes in (self._plain, self._twice):
            sizes.learn(kind, calls, code, shapes=shapes)

    def was_foreseen(self, step: CurrentStep) -> None:
        """Learn what the step that ends would have taken plain, where it ran by the plan of another size."""
        if step.comparison.foreseen is not None:
            known, added_bytes = step.comparison.foreseen
            self._plain.learn(step.kind, step.calls, self._planned.kinds.same_code(known), added_bytes)

    def note_release(self, timing: Timing) -> None:
        """Learn that the step after one that was timed begins; announce where its kind runs without its plan now."""
        ratio = self.releases.next_begins(timing)
        if ratio is not None:
            text = (
                f"A plan of {self._name} recomputes nothing and takes {ratio:.2f} times as long as the code "
                "without it: such steps run without it from now on."
            )
            log.info(text)
            self._reporter.note(text)

    def _released(self, step: CurrentStep, kind: Kind) -> PlainRun | None:
        """Return how a step of a kind runs whose plan gains nothing; None where its calls are another kind's."""
        plans = self._planned.plans
        is_same = kind in self._plain.called_like(step.calls, plans)
        return PlainRun(plans[kind].unplanned.peak_bytes, kind) if is_same else None

    def _as_written(self, step: CurrentStep) -> PlainRun | None:
        """Return how the step under way runs plain, of sizes that have no plan; None where it is to be captured."""
        bound_bytes = self._bound(step)
        return None if bound_bytes is None else PlainRun(bound_bytes)

    def _bound(self, step: CurrentStep) -> float | None:
        likely, plans = self._planned.kinds.likely(step.foreseen), self._planned.plans
        if likely is None or not self._is_allowed or not step.calls:
            return None
        like = self._plain.called_like(step.calls, plans)
        if like and self._sizes_vary and all(plans[kind].solution.recompute_ms == 0 for kind in like):
            peaks = self._peaks.as_written()  # as other sizes run; what was captured for this one may be gone
            bound_bytes = max(peaks[kind].added_bytes for kind in like)
            return bound_bytes if self._plain.fits(bound_bytes, peaks) else None
        return self._plain.bound_bytes(step.calls, self._peaks.as_written(), likely)

    def _with_blocks_twice(self, step: CurrentStep) -> PlainRun | None:
        """Return how the step under way runs if it calls the blocks twice; None where it is to be captured."""
        likely, blocks = self._planned.kinds.likely(step.foreseen), self._blocks.fit
        if likely is None or blocks is None or not self._is_allowed or not step.calls or self._has_come_often(step):
            return None
        bound_bytes = self._twice.bound_bytes(step.calls, self._peaks.called_twice(blocks), likely)
        return None if bound_bytes is None else PlainRun(bound_bytes, is_twice=True)

    def _has_come_often(self, step: CurrentStep) -> bool:
        """Whether the step under way has cost more time so far, each time it came, than a plan for it would take."""
        plan, count = self._planned.latest, self._ran_twice[tuple(step.calls)]
        if plan is None or not count:
            return False
        step_ms = plan.measured.step_ms or step_time_ms(plan.graph, plan.profile)
        planning_ms = 1000 * float(sum(astuple(plan.planning)))
        return count * TWICE_SHARE * step_ms > planning_ms

    def _settled_kind(self, step: CurrentStep) -> Kind | None:
        """Return the kind of the step that begins, where nothing else is called like it and its plan gains nothing."""
        likely, plans = self._planned.kinds.likely(step.foreseen), self._planned.plans
        if likely is None or not self._is_allowed or self._plain.called_like(step.calls, plans) != [likely]:
            return None
        plain_bytes = self._plain.with_margin(plans[likely].unplanned.peak_bytes)
        return likely if self._planned.gains_nothing(likely, plain_bytes) else None

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._reporter.note(text)
