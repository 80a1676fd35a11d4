"""The captured graphs of a session: each is profiled before its first run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..capturing.capture import Captured
from ..measuring.operators import without_unsteady
from ..measuring.profiling import REPEATS, CostCache, measure
from ..memory.metering import undisturbed
from ..options import SessionOptions
from ..records.costs import Profile
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..running.execution import Conductor, Part, Saved


class Parts:
    """Numbers the captured graphs of a session, in the order of their capture.

    Of sizes that have not come for long, what was traced is dropped: parts are held weakly.

    Args:
        options: What was asked for.
        reporter: Shows profiling, and adds up its seconds.
        kernels: What compiles fused operations before they are profiled, None where nothing is fused.
        say: Warns of each operator that can't be measured.
        measures_link: Returns whether plans need to know how fast the device copies to the host and back.

    Attributes:
        fuses: Whether operations are fused.
        count: How many parts there were so far.
        traced_count: How many captures there were: other parts were made from these, for other sizes.
    """

    def __init__(
        self,
        options: SessionOptions,
        reporter: Reporter,
        kernels: FusedKernels | None,
        say: Callable[..., None],
        measures_link: Callable[[], bool],
    ) -> None:
        self._recomputable, self._costs = options.recomputable_operators, CostCache(options.cache_dir)
        self._reporter, self._kernels, self._say, self._measures_link = reporter, kernels, say, measures_link
        self.fuses = kernels is not None
        self.count = self.traced_count = 0
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()

    def captured_again(self) -> None:
        """Count a capture of code that runs by a part that was made of the same code before."""
        self.traced_count += 1

    @property
    def all(self) -> list[Part]:
        """The parts that still exist, in the order of their capture."""
        return [part for reference in self._parts.valuerefs() if (part := reference()) is not None]

    def numbered(self, numbers: Iterable[int]) -> list[Part]:
        """List the parts with these numbers, without those that were dropped."""
        return [part for number in numbers if (part := self._parts.get(number)) is not None]

    def waiting(self) -> list[tuple[Part, Saved]]:
        """List what forwards have saved whose backward has not run yet, with their parts."""
        return [(part, saved) for part in self.all for saved in part.waiting()]

    def retained(self) -> list[Saved]:
        """List what forwards have saved that stays for another backward, after one has run."""
        return [saved for part in self.all for saved in part.retained()]

    def add(self, captured: Captured, conductor: Conductor, profile: Profile | None = None) -> Part:
        """Make a part of a captured graph, whose costs are measured as it first runs, unless they are known."""
        part = Part(captured, conductor)
        part.number, part.profile = self.count, profile
        self._parts[self.count] = part
        self.count += 1
        self.traced_count += profile is None
        return part

    def costs_of(self, part: Part, repeats: int = REPEATS) -> Profile:
        """Return the costs of a part that is about to run; the first time each operation is measured.

        What is fused is compiled before that.
        """
        if part.profile is not None:
            return part.profile
        captured = part.captured = without_unsteady(part.captured, self._recomputable)
        if self._kernels is not None:
            with self._reporter.stage("compiling"), undisturbed(captured.device):
                self._kernels.compile(lambda done, total: self._reporter.progress("kernels", done, total))
        with self._reporter.stage("profiling"):
            profile = measure(
                captured,
                self._costs,
                repeats,
                progress=lambda done, total: self._reporter.progress("operations", done, total),
                # For other sizes of an operator only the numbers in the text would differ.
                announce=lambda op, why: self._say(why, topic=f"{op} is not measured"),
            )
            part.profile = profile
            if self._measures_link():
                part.profile = replace(profile, link=self._costs.link_of(captured.device))
        return part.profile
