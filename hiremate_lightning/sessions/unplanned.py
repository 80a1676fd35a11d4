"""Steps that run as the user wrote them, though their model is planned: where that fits, and is as fast.

There are four kinds. Steps of sizes that were never seen, which to capture would take seconds (`plain_steps`); those
of them that fit only where modules of the model are called twice, as in `torch.utils.checkpoint` (`second_calls`);
those that fit only where what autograd saves is put aside (`aside`); and steps whose plan gains nothing and is slower
than eager PyTorch (`releasing`).
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import cache
from typing import Any

from ..measuring.aside import HAS_FILES, SavedAside
from ..memory.free_memory import free_host_bytes
from ..records.ways import Way
from ..torch_private import saved_hooks, sharding, tensor_state
from ..units import format_bytes
from .captured_steps import CapturedSteps
from .current_step import CurrentStep, PlainRun
from .given import ModuleCall, tensors_inside
from .new_sizes import NewSizes, TimedStep
from .plain_steps import PlainSteps, Prediction
from .planned import PlannedKinds, saves_nothing
from .planned_model import PlannedModel
from .releasing import Releases, Timing
from .second_calls import SecondCalls
from .step_kind import StepKind

log = logging.getLogger("hiremate_lightning")
WORTH_A_PLAN = 1.0  # of the time that a plan takes to make, spent on saving memory at one size without a plan
SHARE_ASIDE = 0.5  # of what the host could still hand out, and the disk of the temporary files, at most


class UnplannedSteps:
    """Decides which steps run as the user wrote them, and learns from those that do.

    Args:
        model: The planned model.
        planned: The plans.

    Attributes:
        releases: Times kinds of steps with and without their plans.
    """

    def __init__(self, model: PlannedModel, planned: PlannedKinds) -> None:
        self.releases = Releases()
        self._model, self._root, self._name, self._planned = model, model.root, model.name, planned
        self._history, self._reporter, self._say = model.history, model.stages.reporter, model.announcements.say
        self._is_allowed = not model.parts.fuses  # fused kernels give other bits than PyTorch's own
        self._note = cache(self._reporter.note)  # each text once
        self._second_calls = SecondCalls(model.root)
        self._captured, self._plain = CapturedSteps(self._second_calls), PlainSteps()
        self._new_sizes = NewSizes(self._name)
        self._may_put_aside = HAS_FILES and not sharding.has_units(model.root)
        self._sizes_vary = False  # whether any step ran plain since its sizes were not known
        self._extra_ms = defaultdict[tuple[ModuleCall, ...], float](float)  # spent on saving memory so far, by calls

    def step_begins(self, step: CurrentStep) -> StepKind | None:
        """Decide whether a step that begins with some calls runs as the user wrote it.

        Returns:
            The kind of the step, where its plan gains nothing; else None.
        """
        self._second_calls.step_begins()
        self._describe_planned()
        settled = self._settled_kind(step)
        if settled is not None and self.releases.runs_plain(settled):
            step.plain = self._released(step, settled)
            return settled
        step.plain = self._plainly(step)
        if step.plain is not None:
            way, self._sizes_vary = step.plain.prediction.way, True
            self._extra_ms[tuple(step.calls)] += way.extra_ms
            self._note(self._describe(way))
        return settled

    def _describe(self, way: Way) -> str:
        if not way.saves_memory:
            return "Steps of other input sizes that fit the budget as they are run without a plan."
        if way.paths:
            how = f"call as many modules of {self._name} twice as they need to"
        else:
            how = "put what the backward reads aside, in temporary files or, from a GPU, in the host's memory"
        return (
            f"Steps of other input sizes that fit the budget only with less memory run without a plan, and {how}, "
            "until their sizes have come often."
        )

    def called(self, step: CurrentStep, call: ModuleCall) -> None:
        """Learn of a further call of the step under way: if it does not fit as it is, it is captured."""
        step.calls.append(call)
        if step.plain is not None and step.plain.released is not None:
            step.plain = self._released(step, step.plain.released)
        elif step.plain is not None:
            step.plain = self._plainly(step, step.plain.prediction)

    @contextmanager
    def calling(self, plain: PlainRun | None, arguments: Any) -> Iterator[None]:
        """Surround a call of a step that runs plain, with some arguments."""
        way = Way() if plain is None else plain.prediction.way
        with ExitStack() as stack:
            stack.enter_context(self._second_calls.twice(way.paths) if way.paths else self._second_calls.observed())
            if way.puts_aside:
                stack.enter_context(saved_hooks.giving_way_to_transforms())
                given = (*tensors_inside(arguments), *self._root.parameters(), *self._root.buffers())
                stack.enter_context(SavedAside(tensor_state.storages_among(given), self._files_are_full))
            yield

    def _files_are_full(self, error: OSError) -> None:
        """Warn that what was to be put aside stays in memory."""
        self._may_put_aside = False
        self._say(
            "There was no room for temporary files in which a step of a new input size was to put what its backward "
            "reads, so that it took more memory; no further step does that.",
            f" ({error})",
        )

    def backward_starts(self) -> None:
        """Learn that the backward of a step that runs plain starts."""
        self._second_calls.backward_starts()

    def is_to_be_measured(self, plain: PlainRun) -> bool:
        """Whether to measure a step that runs plain."""
        released = plain.released
        if released is not None and saves_nothing(released.own_plan):
            return self.releases.is_to_be_measured(released)
        return self._plain.is_to_be_measured(plain.prediction, self._room_bytes())

    def ended(self, step: CurrentStep, plain: PlainRun) -> None:
        """Learn from a step that ran plain."""
        before = self._second_calls.fit
        self._second_calls.step_ended()
        if self._second_calls.fit is not before:
            self._plain.read_again()
        if step.record is None:
            return
        peak_bytes, plan = step.record.peak_bytes, self._planned.latest
        added_bytes = None if peak_bytes is None else peak_bytes - step.record.resident_bytes
        self._plain.measured(step.calls, plain.likely, plain.prediction, added_bytes)
        if plain.released is not None and self._model.options.budget.share == 1:
            return  # the budget is what plain training takes
        if plain.released is not None and saves_nothing(released := plain.released.own_plan):
            plan_bytes = released.measured.peak_bytes or released.planned_peak_bytes
            self.releases.measured(plain.released, peak_bytes, plan_bytes)
            return
        if peak_bytes is not None and plan is not None and peak_bytes > plan.budget_bytes:
            self._is_over(plain, peak_bytes, plan.budget_bytes)

    def _is_over(self, plain: PlainRun, peak_bytes: int, budget_bytes: int) -> None:
        """Learn that a step that ran plain took more than the budget, and warn, once for each reason."""
        found = f" It took {format_bytes(peak_bytes)}; the budget is {format_bytes(budget_bytes)}."
        if plain.released is not None:
            self.releases.keep(plain.released)
            self._say("A step without its plan took more than the budget: such steps run by their plan again.", found)
            return
        way = "a plan" if plain.prediction.way.saves_memory else "recomputation"
        self._say(
            f"A step of a new input size ran without {way}, since it was predicted to fit, and took more than the "
            "budget. From now on such predictions have a margin.",
            found,
        )

    def graph_stays(self) -> None:
        """Learn that a backward retained the graph of code that ran as the user wrote it: later steps are captured.

        What such a graph holds in the steps that follow, nobody sees.
        """
        self._is_allowed = False
        self._note("Steps that retain a graph run by plans from now on, which count what it holds.")

    def was_foreseen(self, step: CurrentStep, kind: StepKind) -> None:
        """Learn of the step that ends, where it ran by the plan of another size and has none of its own."""
        foreseen = step.comparison.foreseen
        if foreseen is not None and kind.plan is None and self._is_allowed:
            planned, at_sizes = foreseen
            self._plain.learn_foreseen(self._captured.describe(at_sizes, step.calls, self._history.same_code(planned)))

    def _describe_planned(self) -> None:
        """Let predictions know what was captured."""
        for kind in self._history.planned if self._is_allowed else ():
            if kind.given is not None:
                self._plain.learn(kind, self._captured.described(kind))

    def note_release(self, timing: Timing) -> None:
        """Learn that the step after one that was timed begins; announce where its kind runs without its plan now."""
        ratio = self.releases.next_begins(timing)
        if ratio is not None:
            gains = "saves no memory" if saves_nothing(timing.kind.own_plan) else "recomputes nothing"
            text = (
                f"A plan of {self._name} {gains} and takes {ratio:.2f} times as long as the code without it: such "
                "steps run without it from now on."
            )
            log.info(text)
            self._reporter.note(text)

    def next_begins(self, before: CurrentStep, seconds: float) -> None:
        """Learn what a step took that nothing was watched or captured in, and say what steps of new sizes cost.

        Args:
            before: The step.
            seconds: From its beginning to that of the next one.
        """
        likely = before.plain.likely if before.plain is not None else self._history[before.graphs]
        if not before.calls or likely.plan is None or not self._is_allowed:
            return
        prediction = self._plain.predict(before.calls, likely, sys.maxsize, (Way(),))
        if prediction is None or not prediction.captured_bytes:
            return
        step = TimedStep(prediction.captured_bytes, seconds)
        if before.plain is not None and before.plain.prediction.way.saves_memory:
            most_bytes = max(kind.own_plan.resident_bytes for kind in self._history.planned)
            text = self._new_sizes.saved_memory(step, most_bytes + prediction.added_bytes)
            if text is not None:
                log.info(text)
                self._reporter.note(text)
        elif before.plain is not None:
            self._new_sizes.ran_plain(step)
        else:
            recompute_ms = likely.plan.measured.recompute_ms
            self._new_sizes.ran_planned(step, (recompute_ms or likely.plan.solution.recompute_ms) / 1000)

    def _released(self, step: CurrentStep, kind: StepKind) -> PlainRun | None:
        """Return how a step of a kind runs whose plan gains nothing; None where its calls are another kind's."""
        if kind not in self._plain.called_like(step.calls):
            return None
        prediction = self._plain.predict(step.calls, kind, sys.maxsize, (Way(),))
        return None if prediction is None else PlainRun(prediction, kind, kind)

    def _plainly(self, step: CurrentStep, begun: Prediction | None = None) -> PlainRun | None:
        """Return how the step under way runs plain, of sizes that have no plan; None where it is to be captured.

        Args:
            step: The step.
            begun: How it began, for a further call.
        """
        likely = self._history.likely(step.foreseen)
        if likely is None or not self._is_allowed or not step.calls:
            return None
        like = self._plain.called_like(step.calls)
        ways: tuple[Way, ...] | None = None if begun is None else (begun.way,)
        if like:  # its plan recomputes something, or it runs as other sizes do
            gains_nothing = all(kind.own_plan.solution.recompute_ms == 0 for kind in like)
            ways = (Way(),) if self._sizes_vary and gains_nothing else ()
        prediction = self._plain.predict(step.calls, likely, self._room_bytes(), ways)
        if prediction is None:
            return None
        if begun is None and (self._is_to_be_planned(step, prediction) or not self._has_room(prediction)):
            return None
        return PlainRun(prediction, likely)

    def _has_room(self, prediction: Prediction) -> bool:
        """Whether there is room for what a step puts aside."""
        aside_bytes = prediction.aside_bytes
        if not aside_bytes:
            return True
        free_bytes = min(free_host_bytes(), shutil.disk_usage(tempfile.gettempdir()).free)
        return self._may_put_aside and aside_bytes <= SHARE_ASIDE * free_bytes

    def _room_bytes(self) -> int:
        """Return what a step may add to the resident bytes."""
        plans = [kind.own_plan for kind in self._history.planned]
        is_share = self._model.options.budget.share is not None
        most_resident_bytes = max(plan.resident_bytes for plan in plans)
        return max(plan.budget_bytes - (plan.resident_bytes if is_share else most_resident_bytes) for plan in plans)

    def _is_to_be_planned(self, step: CurrentStep, prediction: Prediction) -> bool:
        """Whether saving memory in steps called like this one has taken more time than a plan would have."""
        plan, extra_ms = self._planned.latest, self._extra_ms.get(tuple(step.calls), 0.0)
        planning_ms = 0.0 if plan is None else 1000 * float(sum(astuple(plan.planning)))
        return prediction.way.saves_memory and extra_ms > WORTH_A_PLAN * planning_ms

    def _settled_kind(self, step: CurrentStep) -> StepKind | None:
        """Return the kind of the step that begins, where nothing else is called like it and its plan gains nothing."""
        likely = self._history.likely(step.foreseen)
        if likely is None or not self._is_allowed or self._plain.called_like(step.calls) != [likely]:
            return None
        plain_bytes = self._plain.with_margin(likely.own_plan.unplanned.peak_bytes)
        return likely if self._planned.gains_nothing(likely, plain_bytes) else None
