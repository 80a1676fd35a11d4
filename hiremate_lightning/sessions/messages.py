"""Messages to users while a model trains: warnings, and why a plan or a budget changed.

`Messages` has the warnings that need counts or plans. Other warnings stand in the one module that gives them, by
`warn`; docs/troubleshooting.md explains all of them. `PlanReports` reports new plans and their measurements.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping

from ..errors import HiRemateWarning
from ..housekeeping import Once
from ..planning.headroom import largest_words
from ..planning.plan import Plan, plan_title
from ..records.schedule import keep_all, lower
from ..records.simulation import simulate
from ..reporting.report import Reporter
from ..signatures.step_signature import StepSignature
from ..torch_private import dynamo
from ..units import format_bytes

CAPTURES = 8  # warn after so many consecutive steps that each captured something
RETAINING = 4  # warn after so many consecutive steps before which the number of retained graphs had grown
PLANNING = 64  # number of latest steps whose time of planning is compared with their whole time
PLANNING_SHARE = 0.25  # a step counts as slow if planning takes more than this share of its time
MOST = 0.75  # warn if at least this share of the latest steps is slow,
ALL_PLANNING_SHARE = 0.5  # or if planning takes this share of the time of all of them, after twice as many steps
REASONS = 5  # most reasons of graph breaks that a message lists, the most frequent first
ANEW = "made anew in each step"  # the topic of two warnings, of which only the first one is shown
CLEARLY_MORE = 1.1  # warn again if nothing fits and a peak is so many times as high as the one in the last warning
CLEARLY = 0.002  # report a change of the budget by more than this share
ENDS = " What ends its graphs: "
BATCH = "batch"  # the kind of resident bytes that changes from step to step

Listener = Callable[[Plan], None]  # called with each plan when it is made, and again when it has been measured


def transforms_in(name: str) -> str:
    """Return the topic of warnings of transforms of torch.func in or around a module."""
    return f"transforms of {name}"


def warn(text: str, cause: str = "") -> None:
    """Warn; the warning is from where a `Once` is called that shows it by this function."""
    warnings.warn(text + cause, HiRemateWarning, stacklevel=3)


class Messages:
    """The warnings of one session, with the reasons of graph breaks if these may be the cause."""

    def __init__(self, name: str) -> None:
        self._warn_once = Once(warn)
        self._name = name
        self._breaks = dynamo.graph_breaks()
        self._has_named_breaks = False  # whether a text has named the reasons of graph breaks
        self._captured = 0  # number of captured graphs when the latest step ended
        self._capturing_steps = 0  # number of consecutive steps that each captured something
        self._times = deque[tuple[float, float]](maxlen=PLANNING)  # seconds of the latest steps, and of their planning
        self._steps = 0
        self._planned_s = dynamo.capturing_s()  # seconds of planning and capturing when the latest step ended
        self._failed_guards = Counter[str]()  # failed guards before the last of `CAPTURES` steps
        self._retained = 0  # number of graphs retained for another backward when the latest step began
        self._retaining_steps = 0  # number of consecutive steps before which this number had grown

    def warn(self, text: str, cause: str = "", topic: str = "") -> None:
        """Warn once for each topic, or without a topic for each text; remember if it names reasons of graph breaks."""
        if self._warn_once(text, cause, topic=topic) and ENDS in text + cause:
            self._has_named_breaks = True

    def warn_over(self, text: str) -> None:
        """Warn that a step takes more than its budget, with the reasons of graph breaks."""
        self.warn(text, self.why_over())

    def why_uncaptured(self) -> str:
        """Return the reasons of graph breaks since this session began, as a sentence; "" for none."""
        reasons = [reason for reason, _ in (dynamo.graph_breaks() - self._breaks).most_common()]
        others = f"; and {len(reasons) - REASONS} more" if len(reasons) > REASONS else ""
        return f"{ENDS}{'; '.join(reasons[:REASONS])}{others}." if reasons else ""

    def take_split(self) -> str:
        """Return, once, the reasons of graph breaks as a line for the plan; "" for none, or if a warning has them."""
        why = self.why_uncaptured()
        if not why or self._has_named_breaks:
            return ""
        self._has_named_breaks = True
        words = "The step is planned in parts; code between them has no plan, and the extra time is of the parts alone."
        return words + why

    def why_over(self) -> str:
        """Return sentences that say how graph breaks may be the cause of too high a peak; "" without graph breaks."""
        reasons = self.why_uncaptured()
        if not reasons:
            return ""
        return (
            " Code between captured graphs has no plan, and what one graph hands to the next is kept. Code that "
            f"torch.compile can capture needs less.{reasons}"
        )

    def count_captured(self, captured: int) -> bool:
        """Return whether a step has captured a graph, by the count after it; warn if many consecutive steps have."""
        has_captured = captured != self._captured
        self._captured = captured
        self._capturing_steps = self._capturing_steps + 1 if has_captured else 0
        if self._capturing_steps == CAPTURES - 1:
            self._failed_guards = dynamo.failed_guards()
        if self._capturing_steps == CAPTURES:
            failed = [*(dynamo.failed_guards() - self._failed_guards)]
            cause = f" The latest cause that torch.compile names: {failed[-1]}" if failed else ""
            self.warn(
                f"torch.compile captured code again in each of {CAPTURES} consecutive steps, which takes time. Usual "
                "causes: changing input shapes, numbers that code computes with, a list that code appends to. Pad "
                "to a few shapes; hand changing numbers over as tensors; append in a function with "
                "@torch.compiler.disable; or name what keeps its shapes with target=, a detector's backbone say.",
                cause,
                topic=ANEW,
            )
        return has_captured

    def step_took(self, step_s: float, planned_s: float) -> None:
        """Store the time of a step, and of all planning so far; warn, once, if planning goes on to take much time.

        Both times are of the same steps, so that a busy machine does not matter.
        """
        planned_s += dynamo.capturing_s()
        spent_s = planned_s - self._planned_s
        self._planned_s, self._steps = planned_s, self._steps + 1
        self._times.append((max(step_s, 1e-9), spent_s))
        if not spent_s or self._steps < PLANNING:
            return  # nearly all steps end here
        slow = [spent for taken, spent in self._times if spent > PLANNING_SHARE * taken]
        taken_s, all_spent_s = (sum(times) for times in zip(*self._times, strict=True))
        goes_on = self._steps >= 2 * PLANNING and all_spent_s > ALL_PLANNING_SHARE * taken_s
        if goes_on or len(slow) >= MOST * PLANNING:
            self.warn(
                f"Planning still takes much of the time of training {self._name}, after {PLANNING} steps or more. The "
                "usual cause: input sizes that hardly ever come again, or layers that are frozen or left out by "
                "chance, whose code is made, proved and planned for a few steps each. Pad to a few sizes; let a data "
                "loader sort batches by size; let a choice of layers come again; or choose a budget in which such "
                "steps fit as they are: these run without a plan.",
                f" Of the time of the latest {PLANNING} steps it took {min(all_spent_s / taken_s, 1.0):.0%}.",
                topic=ANEW,
            )

    def count_retained(self, retained: int) -> None:
        """Store how many graphs are retained for another backward before a step; warn if the number keeps growing."""
        self._retaining_steps = self._retaining_steps + 1 if retained > self._retained else 0
        self._retained = retained
        if self._retaining_steps == RETAINING:
            self.warn(
                f"Before each of {RETAINING} consecutive steps there were more graphs retained for another backward, "
                "and more memory with them. The usual cause: losses, or other results, that are kept after a backward "
                "with retain_graph=True, which plain PyTorch keeps too. Drop them after their last backward."
            )

    # ---------------------------------------------------------------- captured code

    def has_warned_of_transforms(self, name: str) -> bool:
        """Whether a warning said that transforms in or around a module run without a plan."""
        return transforms_in(name) in self._warn_once

    def called_inside_backward(self, name: str) -> None:
        """Warn that a planned module was called inside of a backward."""
        self.warn(
            f"{name} was called inside of a backward, as torch.utils.checkpoint around it does, or a loss that embeds "
            "a batch in parts (GradCache): such calls get no plan. Call it outside of the backward and without "
            "checkpoint: what is computed again is for the plan to decide."
        )

    # ---------------------------------------------------------------- plans and budgets

    def least(self, peak_bytes: int, budget_bytes: int, largest: str = "") -> None:
        """Warn that nothing fits the budget; `largest` names the largest tensors at the peak, as a sentence or ""."""
        least, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
        more = f", {format_bytes(peak_bytes - budget_bytes)} more" if least == budget else ""
        text = f"Nothing fits the budget of {budget}: the step runs at the least memory found, {least}{more}."
        self.warn(text, largest + self.why_over())

    def checkpointing(self, plan: Plan) -> None:
        """Warn, once, that a plan replaces the calls of torch.utils.checkpoint in the user's code."""
        if "checkpointing" in self._warn_once or all(node.checkpoint is None for node in plan.graph.nodes):
            return
        kept = simulate(plan.graph, plan.profile, lower(plan.graph, keep_all(plan.graph)))
        own, without = format_bytes(plan.unplanned.peak_bytes), format_bytes(kept.peak_bytes)
        self.warn(
            f"{self._name} calls torch.utils.checkpoint, in whose place the plan decides what runs again. A step adds "
            f"{own} with checkpoint, and would add {without} without: shares of a budget are of the former.",
            topic="checkpointing",
        )


# ---------------------------------------------------------------- plans


class PlanReports:
    """Reports plans by step signature, and why a budget or a plan has changed, each once."""

    def __init__(self, reporter: Reporter, messages: Messages, listeners: list[Listener]) -> None:
        self._reporter, self._messages, self._listeners = reporter, messages, listeners
        self._said_bytes = 0  # the largest peak in a warning that nothing fits
        # By signature, the plan whose budget was reported last, and the plan whose measurement was, as they were then.
        self._planned, self._measured = dict[StepSignature, Plan](), dict[StepSignature, Plan]()

    def notify(self, plan: Plan) -> None:
        """Call the listeners with a plan."""
        for listener in self._listeners:
            listener(plan)

    def planned(self, signature: StepSignature, plan: Plan, remark: str = "") -> None:
        """Show a new plan, with the reason for it, and give the warnings that go with it."""
        self._report_why(signature, plan, is_new=True)
        self._reporter.planned(plan, remark)
        if split := self._messages.take_split():
            self._reporter.report(f"  {split}")
        if signature.is_searching:
            self._messages.warn(
                "torch.backends.cudnn.benchmark is on: convolutions that are computed again may take another algorithm "
                "than before, and differ in the last bits. Turn it off for the same numbers bit for bit."
            )
        self.warn_least(signature, plan.planned_peak_bytes)
        self._messages.checkpointing(plan)

    def kept(self, signature: StepSignature, plan: Plan) -> None:
        """Report a plan that stays to the listeners, and show why its budget has changed."""
        self._report_why(signature, plan, is_new=False)
        self.notify(plan)
        self.warn_least(signature, plan.planned_peak_bytes)

    def warn_least(self, signature: StepSignature, peak_bytes: int) -> None:
        """Warn if nothing fits, with the planned or measured peak, if it is clearly above the last one warned of."""
        plan, is_higher = signature.own_plan, peak_bytes > CLEARLY_MORE * self._said_bytes
        if plan.exceeds_budget and is_higher and not signature.recorded.is_provisional:
            self._said_bytes = peak_bytes
            largest = largest_words(plan.graph, plan.profile, plan.schedule, plan.planned)
            self._messages.least(peak_bytes, plan.budget_bytes, largest)

    def budget_changed(self) -> None:
        """Allow the warning that nothing fits again, for the new budget."""
        self._said_bytes = 0

    def measured(self, signature: StepSignature, plan: Plan) -> None:
        """Show the measurement of a plan, once, and again if its peak has come to exceed the budget."""
        shown, self._measured[signature] = self._measured.get(signature), plan
        if shown is None or shown.solution is not plan.solution or (_is_over(plan) and not _is_over(shown)):
            self._reporter.measured(plan)

    def _report_why(self, signature: StepSignature, plan: Plan, is_new: bool) -> None:
        before = self._planned.get(signature)
        if before is None or str(before.budget) != str(plan.budget):
            self._planned[signature] = plan
            return
        why, came = _why(before, plan), _more("came", dict(before.resident_parts), dict(plan.resident_parts))
        if why:
            budgets = f"{format_bytes(before.budget_bytes)} -> {format_bytes(plan.budget_bytes)}"
            self._reporter.report(f"{plan_title(plan)}: budget {budgets}, since {why}")
        elif is_new and came:
            self._reporter.report(f"{plan_title(plan)} is made again, since {came}")
        if why or is_new:
            self._planned[signature] = plan


def _is_over(plan: Plan) -> bool:
    """Whether a plan was measured above its budget."""
    return (plan.measured.peak_bytes or 0) > plan.budget_bytes


def _why(before: Plan, now: Plan) -> str:
    """Return in words why the budget differs clearly from the one reported last, or "" if it does not.

    Changes of batches don't count, nor a lower budget without less memory before the step: a step may add less at
    times, for example if validation frees gradients before it.
    """
    old, new = dict(before.resident_parts), dict(now.resident_parts)
    moved_bytes = (now.budget_bytes - new.pop(BATCH, 0)) - (before.budget_bytes - old.pop(BATCH, 0))
    if abs(moved_bytes) <= CLEARLY * before.budget_bytes:
        return ""
    if format_bytes(before.budget_bytes) == format_bytes(now.budget_bytes):
        return ""
    if moved_bytes < 0:
        gone = _more("is gone", new, old)
        return f"{gone}, and a share is of what a step adds to the rest" if gone else ""
    came = _more("came", old, new)
    return f"{came}, and a share is of what a step adds to that" if came else "a share is of the largest step"


def _more(verb: str, before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Return in words which kind of resident bytes has grown most before a step; "" if none has."""
    size, name = max(((size - before.get(name, 0), name) for name, size in now.items()), default=(0, ""))
    return f"{format_bytes(size)} of {name} {verb}" if size > 0 else ""
