"""The captured graphs of a session: each is profiled before its first run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..capturing.capture import Captured
from ..measuring.operators import without_unsteady
from ..measuring.profiling import REPEATS, CostCache, measure
from ..memory.metering import undisturbed
from ..records.costs import Profile
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..running.execution import Conductor, Part, Saved


class Parts:
    """Numbers the captured graphs of a session, in the order of their capture.

    Args:
        reporter: Shows profiling, and adds up its seconds.
        cache_dir: Where to keep profiles between runs, None for nowhere.
        kernels: What compiles fused operations before they are profiled, None where nothing is fused.
        announce: Told once of each operator that can't be measured.
        recomputable: Custom operators with Python code that may run twice, by name.

    What belongs to a part goes with it: of sizes that have not come for long, what was traced is dropped.

    Attributes:
        fuses: Whether operations are fused.
        count: How many parts there were so far.
        traced_count: How many captures there were: other parts were made from these, for other sizes.
        measures_link: Returns whether plans need to know how fast the device copies to the host and back.
    """

    def __init__(
        self,
        reporter: Reporter,
        cache_dir: Path | None,
        kernels: FusedKernels | None,
        announce: Callable[[str], None],
        recomputable: Sequence[str] = (),
    ) -> None:
        self._recomputable = recomputable
        self._reporter, self._kernels, self._announce = reporter, kernels, announce
        self._unmeasured: set[str] = set()  # operators
        self._costs = CostCache(cache_dir)
        self.fuses = kernels is not None
        self.measures_link: Callable[[], bool] = lambda: False
        self.count = self.traced_count = 0
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._numbers: weakref.WeakKeyDictionary[Part, int] = weakref.WeakKeyDictionary()
        self._profiles: weakref.WeakKeyDictionary[Part, Profile] = weakref.WeakKeyDictionary()

    def captured_again(self) -> None:
        """Count a capture of code that runs by a part that was made of the same code before."""
        self.traced_count += 1

    @property
    def all(self) -> list[Part]:
        """The parts that still exist, in the order of their capture."""
        return sorted(self._numbers, key=self._numbers.__getitem__)

    @property
    def profiles(self) -> dict[int, Profile]:
        """Costs of the operations of the parts that have run, by number."""
        return {self._numbers[part]: self._profiles[part] for part in self.all if part in self._profiles}

    def find(self, number: int) -> Part | None:
        """Return the part with a number, None where it was dropped."""
        return self._parts.get(number)

    def are_made(self, numbers: Iterable[int]) -> bool:
        """Whether some of these graphs were made from traces of other sizes."""
        parts = [part for number in numbers if (part := self.find(number)) is not None]
        return any(part.captured.template is not None for part in parts)

    def waiting(self) -> list[tuple[Part, Saved]]:
        """List what forwards have saved whose backward has not run yet, with their parts."""
        return [(part, saved) for part in self._existing() for saved in part.waiting()]

    def retained(self) -> list[Saved]:
        """List what forwards have saved that stays for another backward, after one has run."""
        return [saved for part in self._existing() for saved in part.retained()]

    def _existing(self) -> list[Part]:
        """List the parts that still exist, without the guard that a loop over weak keys takes in each step."""
        return [part for reference in self._numbers.keyrefs() if (part := reference()) is not None]

    def add(self, captured: Captured, conductor: Conductor, profile: Profile | None = None) -> Part:
        """Make a part of a captured graph, whose costs are measured as it first runs, unless they are known."""
        part = Part(captured, conductor)
        if profile is not None:
            self._profiles[part] = profile
        self._numbers[part] = self.count
        self._parts[self.count] = part
        self.count += 1
        self.traced_count += profile is None
        return part

    def prepare(self, part: Part, repeats: int = REPEATS) -> tuple[int, Profile]:
        """Return the number of a part that is about to run, and its costs, which are measured the first time."""
        if part not in self._profiles:
            part.captured = without_unsteady(part.captured, self._recomputable)
            self._profiles[part] = self._measure(part.captured, repeats)
        return self._numbers[part], self._profiles[part]

    def _measure(self, captured: Captured, repeats: int) -> Profile:
        """Compile what is fused, then measure each operation."""
        if self._kernels is not None:
            with self._reporter.stage("compiling"), undisturbed(captured.device):
                self._kernels.compile(lambda done, total: self._reporter.progress("kernels", done, total))
        with self._reporter.stage("profiling"):
            profile = measure(
                captured,
                self._costs,
                repeats,
                progress=lambda done, total: self._reporter.progress("operations", done, total),
                announce=self._say_unmeasured,
            )
            return replace(profile, link=self._costs.link_of(captured.device)) if self.measures_link() else profile

    def _say_unmeasured(self, op: str, why: str) -> None:
        """Announce an operator that can't be measured; for other sizes of it only the reason's numbers would differ."""
        if op not in self._unmeasured:
            self._unmeasured.add(op)
            self._announce(why)
