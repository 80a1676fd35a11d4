"""What users are told while a model trains: warnings, why a plan is another one now, and how long the first one takes.

`Announcements` holds the warnings that need counts or plans. Others stand with the one module that gives them, by
`say`; docs/troubleshooting.md explains all of them. `PlanReports` shows which plan came and what was measured of it.
"""

from __future__ import annotations

import timeit
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from . import thresholds
from .errors import HiRemateWarning
from .housekeeping import JsonFile
from .planning.headroom import largest_words
from .planning.plan import Plan, PlanningTime, plan_title
from .records.schedule import keep_all, lower
from .records.simulation import simulate
from .reporting.report import Reporter
from .signatures.step_signature import StepSignature
from .torch_private import dynamo
from .units import format_bytes

CAPTURES = 8  # consecutive steps in which something is captured before that is announced: it goes on like that
RETAINING = 4  # consecutive steps in which more graphs are retained before that is announced: it goes on like that
PLANNING = 64  # steps, the latest ones, of whose time much went to planning before that is announced
PLANNING_SHARE = 0.25  # of the time of a step, in planning alone: what goes with it takes as much again, or more
MOST = 0.75  # of these steps
ALL_PLANNING_SHARE = 0.5  # of the time of all of them, after as many steps that learn
REASONS = 5  # why graphs end that a message lists, the most frequent first
ANEW = "made anew in each step"  # the topic of two warnings, of which the first one is shown
CLEARLY_MORE = 1.1  # than was said of steps in which nothing fits: it is said again
CLEARLY = 0.002  # of a budget: smaller changes are not said
ENDS = " What ends its graphs: "
BATCH = "batch"  # the part of what exists before a step that comes with it
BASE_S = 1.0  # the first capture of a process
MODULE_S = 0.1  # of a module without modules in it: a BERT of 6 layers has 81, and took 9 s of an idle core
OPERATION_S = 0.03  # of an operation as torch.compile reads it
MOST_SLOWER = 4.0


def transforms_in(name: str) -> str:
    """Return the topic of warnings of transforms in a module, or around it."""
    return f"transforms of {name}"


class Warnings:
    """Warns once of each thing."""

    def __init__(self) -> None:
        self._said = dict[str, str]()  # whole texts, by their topics, or by themselves without their causes

    def say(self, text: str, cause: str = "", topic: str = "") -> None:
        """Warn, once for each text, whatever its cause; where a topic is given, once for that."""
        if (topic or text) not in self._said:
            self._said[topic or text] = text + cause
            warnings.warn(text + cause, HiRemateWarning, stacklevel=2)


class Announcements(Warnings):
    """The warnings of one session, with what ended captured graphs if that may be why."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._breaks = dynamo.graph_breaks()
        self._captured = 0  # graphs when the latest step ended
        self._capturing_steps = 0  # consecutive steps in each of which something was captured
        self._times = deque[tuple[float, float]](maxlen=PLANNING)  # seconds of the latest steps, and of their planning
        self._steps = 0
        self._planned_s = dynamo.capturing_s()  # in planning, when the latest step ended
        self._failed_guards = Counter[str]()  # before the last of so many steps
        self._retained = 0  # graphs that were retained for another backward when the latest step began
        self._retaining_steps = 0  # consecutive steps before each of which there were more of them

    def say_over(self, text: str) -> None:
        """Warn that a step takes more than its budget, and name what ended captured graphs."""
        self.say(text, self.why_over())

    def why_uncaptured(self) -> str:
        """Return, as a sentence or "", what has ended torch.compile's graphs since this session began."""
        reasons = [reason for reason, _ in (dynamo.graph_breaks() - self._breaks).most_common()]
        others = f"; and {len(reasons) - REASONS} more" if len(reasons) > REASONS else ""
        return f"{ENDS}{'; '.join(reasons[:REASONS])}{others}." if reasons else ""

    def take_split(self) -> str:
        """Return, once and unless a warning has named it, what has ended graphs, as a line for the plan; or ""."""
        why = self.why_uncaptured()
        if not why or any(ENDS in text for text in self._said.values()):
            return ""
        words = "The step is planned in parts; code between them has no plan, and the extra time is of the parts alone."
        self._said["split"] = words + why
        return words + why

    def why_over(self) -> str:
        """Return, as sentences or "", why code that ends graphs may be what a budget is not met for."""
        reasons = self.why_uncaptured()
        if not reasons:
            return ""
        return (
            " Code between captured graphs has no plan, and what one graph hands to the next is kept. Code that "
            f"torch.compile can capture needs less.{reasons}"
        )

    def step_ended(self, captured: int) -> bool:
        """Count the graphs after a step; warn where each step captures some, and return whether this one did not."""
        is_usual = captured == self._captured
        self._captured = captured
        self._capturing_steps = 0 if is_usual else self._capturing_steps + 1
        if self._capturing_steps == CAPTURES - 1:
            self._failed_guards = dynamo.failed_guards()
        if self._capturing_steps == CAPTURES:
            failed = [*(dynamo.failed_guards() - self._failed_guards)]
            cause = f" The latest cause that torch.compile names: {failed[-1]}" if failed else ""
            self.say(
                f"torch.compile captured code again in each of {CAPTURES} consecutive steps, which takes time. Usual "
                "causes: changing input shapes, numbers that code computes with, a list that code appends to. Pad "
                "to a few shapes; hand changing numbers over as tensors; append in a function with "
                "@torch.compiler.disable; or name what keeps its shapes with target=, a detector's backbone say.",
                cause,
                topic=ANEW,
            )
        return is_usual

    def step_took(self, step_s: float, planned_s: float) -> None:
        """Note the time of a step, and of all planning so far; warn, once, where that goes on to take much of it.

        Both times are of the same steps, so that a busy machine does not matter.
        """
        planned_s += dynamo.capturing_s()
        spent_s = planned_s - self._planned_s
        self._planned_s, self._steps = planned_s, self._steps + 1
        self._times.append((max(step_s, 1e-9), spent_s))
        if not spent_s or self._steps < PLANNING:
            return  # as in nearly all steps
        slow = [spent for taken, spent in self._times if spent > PLANNING_SHARE * taken]
        taken_s, all_spent_s = (sum(times) for times in zip(*self._times, strict=True))
        goes_on = self._steps >= 2 * PLANNING and all_spent_s > ALL_PLANNING_SHARE * taken_s
        if goes_on or len(slow) >= MOST * PLANNING:
            self.say(
                f"Planning still takes much of the time of training {self._name}, after {PLANNING} steps or more. The "
                "usual cause: input sizes that hardly ever come again, or layers that are frozen or left out by "
                "chance, whose code is made, proved and planned for a few steps each. Pad to a few sizes; let a data "
                "loader sort batches by size; let a choice of layers come again; or choose a budget in which such "
                "steps fit as they are: these run without a plan.",
                f" Of the time of the latest {PLANNING} steps it took {min(all_spent_s / taken_s, 1.0):.0%}.",
                topic=ANEW,
            )

    def step_begins(self, retained: int) -> None:
        """Note how many graphs are retained for another backward before a step; warn where they become ever more."""
        self._retaining_steps = self._retaining_steps + 1 if retained > self._retained else 0
        self._retained = retained
        if self._retaining_steps == RETAINING:
            self.say(
                f"Before each of {RETAINING} consecutive steps there were more graphs retained for another backward, "
                "and more memory with them. The usual cause: losses, or other results, that are kept after a backward "
                "with retain_graph=True, which plain PyTorch keeps too. Drop them after their last backward."
            )

    # ---------------------------------------------------------------- captured code

    def has_told_of_transforms(self, name: str) -> bool:
        """Whether a warning said that transforms in a module, or around it, run without a plan."""
        return transforms_in(name) in self._said

    def called_inside_backward(self, name: str) -> None:
        """Warn that a planned module was called inside of a backward."""
        self.say(
            f"{name} was called inside of a backward, as torch.utils.checkpoint around it does, or a loss that embeds "
            "a batch in parts (GradCache): such calls get no plan. Call it outside of the backward and without "
            "checkpoint: what is computed again is for the plan to decide."
        )

    # ---------------------------------------------------------------- plans and budgets

    def least(self, peak_bytes: int, budget_bytes: int, largest: str = "") -> None:
        """Warn that nothing fits the budget; name, as a sentence or "", what holds much of the peak."""
        least, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
        more = f", {format_bytes(peak_bytes - budget_bytes)} more" if least == budget else ""
        text = f"Nothing fits the budget of {budget}: the step runs at the least memory found, {least}{more}."
        self.say(text, largest + self.why_over())

    def checkpointing(self, plan: Plan) -> None:
        """Warn, once, that a plan takes the place of what the user's code runs again by itself."""
        if "checkpointing" in self._said or all(node.checkpoint is None for node in plan.graph.nodes):
            return
        kept = simulate(plan.graph, plan.profile, lower(plan.graph, keep_all(plan.graph)))
        own, without = format_bytes(plan.unplanned.peak_bytes), format_bytes(kept.peak_bytes)
        self.say(
            f"{self._name} calls torch.utils.checkpoint, in whose place the plan decides what runs again. A step adds "
            f"{own} with checkpoint, and would add {without} without: shares of a budget are of the former.",
            topic="checkpointing",
        )


# ---------------------------------------------------------------- plans


class PlanReports:
    """Reports plans by step signature, and why a budget or a plan is another one now: each once."""

    def __init__(self, reporter: Reporter, announcements: Announcements) -> None:
        self._reporter, self._announcements = reporter, announcements
        self.listeners: list[Callable[[Plan], None]] = []  # called with each plan when it is made, and when measured
        self._said_bytes = 0  # the largest peak that was announced, where nothing fits

    def notify(self, plan: Plan) -> None:
        """Call the listeners with a plan."""
        for listener in self.listeners:
            listener(plan)

    def planned(self, signature: StepSignature, plan: Plan, remark: str = "") -> None:
        """Show a new plan, after what came since the one before, and warn of what it brings."""
        self._say_why(signature, plan, is_new=True)
        self._reporter.planned(plan, remark)
        if split := self._announcements.take_split():
            self._reporter.note(f"  {split}")
        if signature.is_searching:
            self._announcements.say(
                "torch.backends.cudnn.benchmark is on: convolutions that are computed again may take another algorithm "
                "than before, and differ in the last bits. Turn it off for the same numbers bit for bit."
            )
        if plan.planned_peak_bytes > plan.budget_bytes:
            self.say_least(signature, plan.planned_peak_bytes)
        self._announcements.checkpointing(plan)

    def kept(self, signature: StepSignature, plan: Plan) -> None:
        """Report a plan that stays to the listeners, and print why its budget changed."""
        self._say_why(signature, plan, is_new=False)
        self.notify(plan)
        if plan.planned_peak_bytes > plan.budget_bytes:
            self.say_least(signature, plan.planned_peak_bytes)

    def say_least(self, signature: StepSignature, peak_bytes: int) -> None:
        """Warn of what a step takes in which nothing fits, planned or measured, clearly more than was said of any."""
        if not signature.recorded.is_provisional and peak_bytes > CLEARLY_MORE * self._said_bytes:
            self._said_bytes = peak_bytes
            plan = signature.own_plan
            largest = largest_words(plan.graph, plan.profile, plan.schedule, plan.planned)
            self._announcements.least(peak_bytes, plan.budget_bytes, largest)

    def budget_changed(self) -> None:
        """Forget what was said of a budget that nothing fits."""
        self._said_bytes = 0

    def measured(self, signature: StepSignature, plan: Plan) -> None:
        """Show what was measured of a plan, once; again where it takes more than the budget, and did not before."""
        shown, signature.shown = signature.shown, plan
        if shown is None or shown.solution is not plan.solution or (_is_over(plan) and not _is_over(shown)):
            self._reporter.measured(plan)

    def _say_why(self, signature: StepSignature, plan: Plan, is_new: bool) -> None:
        before = signature.announced
        if before is None or str(before.budget) != str(plan.budget):
            signature.announced = plan
            return
        why, came = _why(before, plan), _more("came", dict(before.resident_parts), dict(plan.resident_parts))
        if why:
            budgets = f"{format_bytes(before.budget_bytes)} -> {format_bytes(plan.budget_bytes)}"
            self._reporter.note(f"{plan_title(plan)}: budget {budgets}, since {why}")
        elif is_new and came:
            self._reporter.note(f"{plan_title(plan)} is made again, since {came}")
        if why or is_new:
            signature.announced = plan


def _is_over(plan: Plan) -> bool:
    """Whether a plan was measured above its budget."""
    return (plan.measured.peak_bytes or 0) > plan.budget_bytes


def _why(before: Plan, now: Plan) -> str:
    """Return, in words or "", why the budget is clearly another one than was told last, if that stays.

    Batches come and go. So does what a step adds, where something frees gradients before some steps, a validation say.
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
    """Return, in words or "", of which part most more exists before a step now."""
    size, name = max(((size - before.get(name, 0), name) for name, size in now.items()), default=(0, ""))
    return f"{format_bytes(size)} of {name} {verb}" if size > 0 else ""


# ---------------------------------------------------------------- the first plan


class FirstWait:
    """Foresees the seconds until the first plan of a model, and remembers them for the next run.

    What takes the time is mostly Python: torch.compile's capture, and the proof that what it captured is right. That
    grows with the modules that are called, and with how slow this machine's Python is now. In a folder for plans, the
    seconds of the run before are known instead; there the model has a name that is the same in each run.
    """

    def __init__(self, folder: Path | None, describe: Callable[[], str]) -> None:
        self._folder, self._describe = folder, describe
        self._is_noted = False

    def expected_s(self, modules: int, operations: int = 0) -> float:
        """Return about how many seconds it will take, by modules without modules in them and captured operations."""
        known_s = self._file().read(lambda data: float(data["seconds"]))
        if known_s is not None:
            return known_s
        # A short loop of Python, the fastest of some: another process may take the core for a moment.
        loops_s = timeit.repeat("for number in range(50_000): number * number % 7", number=1, repeat=5)
        slower = min(max(0.5, 1000 * min(loops_s) / thresholds.current.usual_loop_ms), MOST_SLOWER)
        return slower * (BASE_S + MODULE_S * modules + OPERATION_S * operations)

    def took(self, planning: PlanningTime) -> None:
        """Keep, when the first plan was made, the seconds of what the next run does again: costs and plans are kept."""
        if not self._is_noted:
            self._is_noted = True
            self._file().write({"seconds": planning.capture_s + planning.prove_s})

    def _file(self) -> JsonFile:
        path = None if self._folder is None else self._folder / f"wait-{self._describe()}.json"
        return JsonFile(
            path,
            "Ignored the seconds of planning in %s: %s",
            "Could not keep the seconds of planning in %s (%s); the next run guesses them",
        )


def modules_without_parts(root: nn.Module) -> int:
    """Count the modules that have no modules in them."""
    return sum(next(module.children(), None) is None for module in root.modules())
