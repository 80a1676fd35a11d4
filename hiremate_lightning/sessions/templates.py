"""Captured code at sizes that were never traced: made from traces of other sizes, and run by decisions for all sizes.

Code gets a template when it is captured with symbols for its sizes. A new size then costs a fraction of a second. Its
graph has a part of its own as any other: what is recorded and proved does not ask where a graph comes from.

A step of such a size gets no plan of its own as long as something fits it: one such plan a size would be one a step,
where nearly every size comes once. What `planning.ladder` keeps for the code serves all of its sizes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .. import thresholds
from ..capturing.template import CodeTemplate
from ..housekeeping import collecting_what_it_leaves
from ..planning.headroom import Room
from ..planning.ladder import Ladder, Loss
from ..planning.solvers import Problem, SolveOptions, smallest_budget
from ..records.costs import step_time_ms
from ..records.expressions import Sizes, WrongTemplateError
from ..records.schedule import keep_all
from ..records.step import Step
from ..running.execution import Part
from ..signatures.recorded_step import RecordedStep
from .current_step import CurrentStep
from .largest import LargestSizes
from .plan_maker import PlanMaker
from .planned_model import PlannedModel

log = logging.getLogger("hiremate_lightning")

REPEATS_OF_SAMPLES = 2  # a line through the times of all samples evens them out
FAILURES = 3  # sizes of one code that no template served, and fewer that one did: then each of its sizes is traced
HEADROOM = 0.8  # of the room of a step that nothing fitted: larger steps may run by the same decisions
LIMIT_S = 5.0  # for solving, while a step waits
BUILT_AND_PROVED = 8.0  # times a step, that programs of other decisions take until they are built and proved


@dataclass
class _Code:
    """What is known of one captured code.

    Attributes:
        number: Its number; None before anything was to be made of it.
        made: For how many sizes it was made.
        failures: For how many it could not be made, or did not run as it was made.
        is_refused: Whether each of its sizes is traced.
    """

    number: int | None = None
    made: int = 0
    failures: int = 0
    is_refused: bool = False


class Templates:
    """The templates of a session, by the first part that each is made from.

    Args:
        model: The planned model.
        largest: Learns of parts.
    """

    def __init__(self, model: PlannedModel, largest: LargestSizes) -> None:
        self._model, self._parts, self._largest = model, model.parts, largest
        self._templates: weakref.WeakKeyDictionary[Part, CodeTemplate] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[object, _Code] = weakref.WeakKeyDictionary()

    def may_serve(self, recorded: RecordedStep | None) -> bool:
        """Whether a step of new sizes that begins may run by templates: else it runs as the user wrote it.

        Where graphs of earlier steps wait, what they hold is planned for each size by itself. Where no step of the same
        code is recorded, no code may be refused.
        """
        refused = {code.number for code in self._codes.values() if code.is_refused}
        of_step = refused if recorded is None else {None, *(call.captured.graph.code for call in recorded.calls)}
        return not (self._cannot_be_made or self._parts.waiting() or refused & of_step)

    def may_make(self, code: object, is_first: bool = False) -> bool:
        """Whether to trace code at a few sizes, so that parts for others can be made; also for the first that come.

        A first plan is made of what was traced at its own sizes. So is one for the largest sizes that users have named.
        """
        has_plan = bool(self._model.history.planned) and not self._largest.becomes
        return (has_plan or not is_first) and not self._cannot_be_made and not self._of(code).is_refused

    @property
    def _cannot_be_made(self) -> bool:
        """Whether no code can be made for new sizes: that is switched off, kernels are fused, or plans may offload."""
        is_off = not thresholds.current.makes_code
        return is_off or self._parts.fuses or self._model.options.offload != "off"

    def part_at(self, code: object, samples: Sequence[tuple[Sizes, Part]], sizes: Sizes) -> Part:
        """Make a part that runs code at some sizes, from parts for others, each with all that varies there.

        Raises:
            NoTemplateError: If there is no template for them.
        """
        first, sizes_before = samples[0][1], tuple(varying for varying, _ in samples)
        self._of(code).number = first.captured.graph.code
        template = self._templates.get(first)
        if template is None or template.sizes != sizes_before:
            profiles = [self._parts.prepare(part, REPEATS_OF_SAMPLES)[1] for _, part in samples]
            costed = [(part.captured, profile) for (_, part), profile in zip(samples, profiles, strict=True)]
            template = self._templates[first] = CodeTemplate(costed, sizes_before)
        captured, profile = template.at(sizes)
        part = self._parts.add(captured, first.conductor, profile)
        part.own = first.own
        self._largest.took(part)
        self._of(code).made += 1
        return part

    def failed(self, code: object, error: Exception) -> None:
        """Learn that there was no part of code for a size, or that it did not run: no memory to prove it, say.

        Code that gave other numbers is refused at once: what is known of it is wrong, also where that does not show.
        """
        record = self._of(code)
        record.failures += 1
        too_often = record.failures >= FAILURES and 2 * record.failures >= record.made
        record.is_refused = record.is_refused or too_often or isinstance(error, WrongTemplateError)

    def _of(self, code: object) -> _Code:
        return self._codes.setdefault(code, _Code())


class Ladders:
    """Solves decisions for all sizes of code that has a template: where none fit, or steps have lost time by them."""

    def __init__(self, model: PlannedModel, maker: PlanMaker) -> None:
        self._model, self._maker = model, maker

    def find(self, ladder: Ladder, step: Step, room: Room) -> None:
        """Solve decisions for a step that nothing fits so far, unless the same was tried in no less room.

        The ladder of its code takes them. They leave some of the room, so that somewhat larger steps may run by them.
        """
        limit_bytes = room.solved_bytes
        share = room.step_bytes / max(1, step.peak_bytes(keep_all(step.graph)))
        fitting = (decisions for decisions in ladder.decisions if step.peak_bytes(decisions) <= limit_bytes)
        if share <= ladder.least_share or next(fitting, None) is not None:
            return  # what fits does so only without what has run
        log.debug("searching for the least memory at all sizes")
        with self._model.reporter.stage("solving"), collecting_what_it_leaves():
            limits = SolveOptions(self._model.options.time_limit_s, progress=self._maker.progress(step))
            least = smallest_budget(Problem(step.graph, step.profile, limit_bytes, limits))
            leaving_some = Room(room.budget, int(HEADROOM * room.step_bytes))
            if step.peak_bytes(least.recompute) < leaving_some.step_bytes and self._model.has_place:
                ladder.rungs.append(self._maker.decide(step, leaving_some, LIMIT_S).recompute)
                return
        ladder.least = least.recompute
        if step.peak_bytes(ladder.least) > limit_bytes:
            ladder.least_share = share

    def step_ended(self, loss: Loss[RecordedStep]) -> bool:
        """Learn of a step that ran by decisions of other sizes; return whether others were solved, which has paid."""
        if (
            not loss.chosen.lost_ms
            or not loss.ladder.note(loss.chosen, self.price_ms(loss))
            or not self._model.has_place
        ):
            return False
        with self._model.reporter.stage("solving"), collecting_what_it_leaves():
            solution = self._maker.decide(loss.step.merge(), loss.room, LIMIT_S)
        if not loss.ladder.solved(loss, solution):
            return False
        text = (
            f"Sizes of {self._model.name} without a plan of their own recompute less from now on: "
            f"{solution.extra_ms:.0f} ms in place of {loss.chosen.again_ms:.0f} ms in a step like the latest one."
        )
        log.info(text)
        self._model.reporter.note(text)
        return True

    def price_ms(self, loss: Loss[RecordedStep]) -> float:
        """Estimate the time that other decisions take until steps run by them, from what plans of the code took."""
        planned = self._model.history.planned
        solve_s = max((signature.own_plan.solution.solve_s for signature in planned), default=0.0)
        calls = [recorded.call for recorded in loss.step.calls]
        step_ms = sum(step_time_ms(call.graph, call.profile) for call in calls)
        return 1000 * solve_s + BUILT_AND_PROVED * step_ms


def predicted_peak_bytes(step: CurrentStep) -> int | None:
    """Return the peak that was predicted for a step of a new size by what it ran; None where nothing was."""
    foreseen, resident = step.comparison.foreseen, step.resident
    if foreseen is None or resident is None or not step.is_from_template:
        return None
    whole, forwards = foreseen[1].merge(), [step.forwards[place] for place in foreseen[1].places]
    decisions = whole.join([forward.program.schedule.decisions(forward.captured.graph) for forward in forwards])
    return resident.size_bytes + whole.peak_bytes(decisions)
