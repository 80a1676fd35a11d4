"""Steps that run as the user wrote them, though their model is planned: where that fits, and is as fast.

There are three kinds. Steps of sizes that were never seen, which to capture would take seconds (`plain_steps`); those
of them that fit only where blocks of the model are called twice, as in `torch.utils.checkpoint` (`repeated_blocks`);
and steps whose plan recomputes nothing and is slower than eager PyTorch (`releasing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple

from torch import nn

from ..measuring.recording import StepRecord
from ..records.costs import step_time_ms
from ..reporting.report import Reporter
from ..units import format_bytes
from .first_steps import FirstSteps
from .kinds import Kind
from .plain_peaks import PlainPeaks
from .plain_steps import Call, PlainSteps
from .planned import PlannedKinds
from .releasing import Releases
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
        calls: What the calls of the step under way were given.
        finished_calls: The same of the step that waits to be planned.
        released: The kind of the step under way, which runs plain though it has a plan; None for no such step.
        bound_bytes: What the step under way adds at most, as it runs plain; None for a step that does not.
    """

    def __init__(
        self, root: nn.Module, planned: PlannedKinds, reporter: Reporter, say: Callable[[str], None], is_allowed: bool
    ) -> None:
        self.releases = Releases()
        self.calls: list[Call] = []
        self.finished_calls: tuple[Call, ...] = ()
        self.released: Kind | None = None
        self.bound_bytes: float | None = None
        self._name, self._planned, self._reporter, self._say = type(root).__name__, planned, reporter, say
        self._is_allowed = is_allowed
        self._said = set[str]()
        self._peaks, self._blocks = PlainPeaks(planned), RepeatedBlocks(root)
        self._is_twice = False  # whether the step under way calls the blocks twice
        self._sizes_vary = False  # whether any step ran plain since its sizes were not known
        self._plain, self._twice = PlainSteps(), PlainSteps()
        self._ran_twice = Counter[tuple[Call, ...]]()  # steps by what they were called with

    def step_begins(self, *calls: Call) -> Kind | None:
        """Decide about the step that begins with some calls.

        Returns:
            The kind of the step, where its plan gains nothing; else None.
        """
        self._note_release()
        self.calls = list(calls)
        settled = self._settled_kind()
        self.released = settled if settled is not None and self.releases.runs_plain(settled) else None
        self._is_twice, self.bound_bytes = False, self._bound()
        if self.bound_bytes is None and self.released is None:
            self.bound_bytes = self._bound_twice()
            self._is_twice = self.bound_bytes is not None
            self._ran_twice[tuple(self.calls)] += self._is_twice
        if self.bound_bytes is not None and self.released is None:
            self._sizes_vary = True
            self._note(
                "Steps of other input sizes that fit the budget only with recomputation run without a plan, and "
                f"compute {self._blocks.count} blocks of {self._name} twice, until their sizes have come often."
                if self._is_twice
                else "Steps of other input sizes that fit the budget as they are run without a plan."
            )
        return settled

    def called(self, call: Call) -> None:
        """Learn of a further call of the step under way: if it does not fit as it is, it is captured."""
        self.calls.append(call)
        if self.bound_bytes is not None:
            self.bound_bytes = self._bound_twice() if self._is_twice else self._bound()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Surround a call of a step that runs plain."""
        with self._blocks.twice() if self._is_twice else self._blocks.observed():
            yield

    @property
    def is_to_be_measured(self) -> bool:
        """Whether to measure the step that begins, which runs plain."""
        return self.bound_bytes is not None and self._sizes.is_to_be_measured(self.bound_bytes)

    @property
    def _sizes(self) -> PlainSteps:
        return self._twice if self._is_twice else self._plain

    def step_ended(self, record: StepRecord | None) -> None:
        """Learn from a step that ran plain, and was measured; None where it was not."""
        released, bound_bytes = self.released, self.bound_bytes
        self.released = self.bound_bytes = None
        if record is None or bound_bytes is None:
            return
        peak_bytes, plan = record.peak_bytes, self._planned.latest
        self._sizes.measured(bound_bytes, None if peak_bytes is None else peak_bytes - record.resident_bytes)
        if released is not None and self._planned.options.budget.share == 1:
            return  # the budget is what plain training takes
        if peak_bytes is not None and plan is not None and peak_bytes > plan.budget_bytes:
            self.releases.keep(released)
            self._say(
                f"A step of a new input size ran without {'a plan' if self._is_twice else 'recomputation'}, since it "
                "was predicted to fit, and took "
                f"{format_bytes(peak_bytes)}, above the budget of {format_bytes(plan.budget_bytes)}. "
                "From now on such predictions have a margin."
            )

    def finished(self) -> None:
        """Keep what the step that ends was called with, until it is planned."""
        self.finished_calls = tuple(self.calls)

    def was_planned(self, kind: Kind) -> None:
        """Learn that the step that had finished has a plan now."""
        code, shapes = self._planned.same_code(kind), [t.shape for t in self._planned.plans[kind].graph.tensors]
        for sizes in (self._plain, self._twice):
            sizes.learn(kind, self.finished_calls, code, shapes=shapes)

    def was_foreseen(self, kind: Kind, first_steps: FirstSteps) -> None:
        """Learn what the step that ends would have taken plain, where it ran by the plan of another size."""
        if first_steps.foreseen is not None:
            known, added_bytes = first_steps.foreseen
            self._plain.learn(kind, self.calls, self._planned.same_code(known), added_bytes)

    def forget_step(self) -> None:
        """Forget the step under way, which has failed."""
        self.released = self.bound_bytes = None
        self.calls.clear()
        self.releases.forget_step()

    def _bound(self) -> float | None:
        """Bound what the step under way adds if it runs plain; None where it is to be captured."""
        likely, plans = self._planned.kinds.likely(), self._planned.plans
        if self.released is not None:
            is_same = self.released in self._plain.called_like(self.calls, plans)
            return plans[self.released].unplanned.peak_bytes if is_same else None
        if likely is None or not self._is_allowed or not self.calls:
            return None
        like = self._plain.called_like(self.calls, plans)
        if like and self._sizes_vary and all(plans[kind].solution.recompute_ms == 0 for kind in like):
            peaks = self._peaks.as_written()  # as other sizes run; what was captured for this one may be gone
            bound_bytes = max(peaks[kind].added_bytes for kind in like)
            return bound_bytes if self._plain.fits(bound_bytes, peaks) else None
        return self._plain.bound_bytes(self.calls, self._peaks.as_written(), likely)

    def _bound_twice(self) -> float | None:
        """Bound what the step under way adds if it calls the blocks twice; None where it is to be captured."""
        likely, blocks = self._planned.kinds.likely(), self._blocks.fit
        if likely is None or blocks is None or not self._is_allowed or not self.calls or self._has_come_often():
            return None
        return self._twice.bound_bytes(self.calls, self._peaks.called_twice(blocks), likely)

    def _has_come_often(self) -> bool:
        """Whether the step under way has cost more time so far, each time it came, than a plan for it would take."""
        plan, count = self._planned.latest, self._ran_twice[tuple(self.calls)]
        if plan is None or not count:
            return False
        step_ms = plan.measured.step_ms or step_time_ms(plan.graph, plan.profile)
        planning_ms = 1000 * float(sum(astuple(plan.planning)))
        return count * TWICE_SHARE * step_ms > planning_ms

    def _settled_kind(self) -> Kind | None:
        """Return the kind of the step that begins, where nothing else is called like it and its plan gains nothing."""
        likely, plans = self._planned.kinds.likely(), self._planned.plans
        if likely is None or not self._is_allowed or self._plain.called_like(self.calls, plans) != [likely]:
            return None
        plain_bytes = self._plain.with_margin(plans[likely].unplanned.peak_bytes)
        return likely if self._planned.gains_nothing(likely, plain_bytes) else None

    def _note_release(self) -> None:
        """Announce a kind of step that runs without its plan from now on."""
        released = self.releases.next_begins()
        if released is not None:
            text = (
                f"A plan of {self._name} recomputes nothing and takes {released[1]:.2f} times as long as the code "
                "without it: such steps run without it from now on."
            )
            log.info(text)
            self._reporter.note(text)

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._reporter.note(text)
