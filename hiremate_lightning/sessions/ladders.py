"""Decisions for all sizes of code that has a template, solved where none fit, or where steps have lost time by them.

A step of a size that was never traced gets no plan of its own as long as something fits it: one such plan a size would
be one a step, where nearly every size comes once. What `planning.ladder` keeps for the code serves all of its sizes.
"""

from __future__ import annotations

import logging

from ..housekeeping import collecting_what_it_leaves
from ..planning.headroom import Room
from ..planning.ladder import Ladder, Loss
from ..planning.solvers import Problem, SolveOptions, smallest_budget
from ..records.costs import step_time_ms
from ..records.schedule import keep_all
from ..records.step import Step
from ..signatures.recorded_step import RecordedStep
from .plan_maker import PlanMaker
from .planned_model import PlannedModel

log = logging.getLogger("hiremate_lightning")

HEADROOM = 0.8  # of the room of a step that nothing fitted: larger steps may run by the same decisions
LIMIT_S = 5.0  # for solving, while a step waits
BUILT_AND_PROVED = 8.0  # times a step, that programs of other decisions take until they are built and proved

StepLadder = Ladder[RecordedStep]
StepLoss = Loss[RecordedStep]


class Ladders:
    """Solves decisions for all sizes of code.

    Args:
        model: The planned model.
        maker: Solves.
    """

    def __init__(self, model: PlannedModel, maker: PlanMaker) -> None:
        self._model, self._maker = model, maker

    def find(self, ladder: StepLadder, step: Step, room: Room) -> None:
        """Solve decisions for a step that nothing fits so far, unless the same was tried in no less room.

        They leave some of the room, so that somewhat larger steps may run by them too.

        Args:
            ladder: The decisions for its code, which take them.
            step: The step.
            room: How many bytes it has.
        """
        limit_bytes = room.solved_bytes
        share = room.step_bytes / max(1, step.peak_bytes(keep_all(step.graph)))
        fitting = (decisions for decisions in ladder.decisions if step.peak_bytes(decisions) <= limit_bytes)
        if share <= ladder.least_share or next(fitting, None) is not None:
            return  # what fits does so only without what has run
        log.debug("searching for the least memory at all sizes")
        with self._model.stages.stage("solve_s", "solving"), collecting_what_it_leaves():
            limits = SolveOptions(self._model.options.plan.time_limit_s, progress=self._maker.progress(step))
            least = smallest_budget(Problem(step.graph, step.profile, limit_bytes, limits))
            leaving_some = Room(room.budget, int(HEADROOM * room.step_bytes))
            if step.peak_bytes(least.recompute) < leaving_some.step_bytes and self._model.has_place:
                ladder.rungs.append(self._maker.decide(step, leaving_some, LIMIT_S).recompute)
                return
        ladder.least = least.recompute
        if step.peak_bytes(ladder.least) > limit_bytes:
            ladder.least_share = share

    def step_ended(self, loss: StepLoss) -> bool:
        """Learn of a step that ran by decisions of other sizes; solve some for all sizes where that has paid by now.

        Returns:
            Whether there are other decisions now.
        """
        if not loss.lost_ms:
            return False
        ladder, price_ms = loss.ladder, self.price_ms(loss)
        target = ladder.note(loss, price_ms)
        if target is None or not self._model.has_place:
            return False
        with self._model.stages.stage("solve_s", "solving"), collecting_what_it_leaves():
            solution = self._maker.decide(target.step.merge(), target.room, LIMIT_S)
        if not ladder.solved(target, solution):
            return False
        text = (
            f"Sizes of {self._model.name} without a plan of their own recompute less from now on: "
            f"{solution.extra_ms:.0f} ms in place of {target.again_ms:.0f} ms in a step like the slowest one lately."
        )
        log.info(text)
        self._model.stages.reporter.note(text)
        return True

    def price_ms(self, loss: StepLoss) -> float:
        """Estimate the time that other decisions take until steps run by them, from what plans of the code took."""
        planned = self._model.history.planned
        solve_s = max((signature.own_plan.solution.solve_s for signature in planned), default=0.0)
        calls = [recorded.call for recorded in loss.step.calls]
        step_ms = sum(step_time_ms(call.graph, call.profile) for call in calls)
        return 1000 * solve_s + BUILT_AND_PROVED * step_ms
