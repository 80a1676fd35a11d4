"""The captured graphs of a session: each is profiled before its first run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..capturing.capture import Captured
from ..measuring.operators import without_unsteady
from ..measuring.profiling import CostCache, measure
from ..memory.metering import undisturbed
from ..options import SessionOptions
from ..records.costs import Profile
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..running.execution import Conductor, GraphRuntime, Saved


class GraphRuntimes:
    """Numbers the captured graphs of a session, in the order of their capture.

    Runtimes are held weakly: traces of sizes that have not come for long are dropped.

    Args:
        options: The options of the session.
        reporter: Shows profiling, and adds up its seconds.
        kernels: Compiles fused operations before they are profiled; None if nothing is fused.
        warn: Warns of each operator that can't be measured.
        measures_link: Returns whether plans need the speed of copies between device and host.

    Attributes:
        fuses: Whether operations are fused.
        count: Number of runtimes so far.
        traced_count: Number of captures so far; other runtimes were made from these, for other sizes.
    """

    def __init__(
        self,
        options: SessionOptions,
        reporter: Reporter,
        kernels: FusedKernels | None,
        warn: Callable[..., None],
        measures_link: Callable[[], bool],
    ) -> None:
        self._recomputable, self._costs = options.recomputable_operators, CostCache(options.cache_dir)
        self._reporter, self._kernels, self._warn, self._measures_link = reporter, kernels, warn, measures_link
        self.fuses = kernels is not None
        self.count = self.traced_count = 0
        self._runtimes: weakref.WeakValueDictionary[int, GraphRuntime] = weakref.WeakValueDictionary()

    def captured_again(self) -> None:
        """Count a capture of code for which there is a runtime already."""
        self.traced_count += 1

    @property
    def all(self) -> list[GraphRuntime]:
        """The runtimes that still exist, in the order of their capture."""
        return [runtime for reference in self._runtimes.valuerefs() if (runtime := reference()) is not None]

    def numbered(self, numbers: Iterable[int]) -> list[GraphRuntime]:
        """List the runtimes with these numbers, without those that were dropped."""
        return [runtime for number in numbers if (runtime := self._runtimes.get(number)) is not None]

    def waiting(self) -> list[tuple[GraphRuntime, Saved]]:
        """List the saved tensors of forwards whose backward has not run yet, with their runtimes."""
        return [(runtime, saved) for runtime in self.all for saved in runtime.saved(has_run=False)]

    def retained(self) -> list[Saved]:
        """List the saved tensors that stay for another backward after one has run (`retain_graph=True`)."""
        return [saved for runtime in self.all for saved in runtime.saved(has_run=True)]

    def add(self, captured: Captured, conductor: Conductor, profile: Profile | None = None) -> GraphRuntime:
        """Make the runtime of a captured graph; without a profile its costs are measured as it first runs."""
        runtime = GraphRuntime(captured, conductor, self.count, profile)
        self._runtimes[self.count] = runtime
        self.count += 1
        self.traced_count += profile is None
        return runtime

    def measure_once(self, runtime: GraphRuntime) -> Profile:
        """Return the costs of a captured graph; the first time, compile its fused operations, and measure all."""
        if runtime.profile is not None:
            return runtime.profile
        captured = runtime.captured = without_unsteady(runtime.captured, self._recomputable)
        if self._kernels is not None:
            with self._reporter.stage("compiling"), undisturbed(captured.device):
                self._kernels.compile(lambda done, total: self._reporter.progress("kernels", done, total))
        with self._reporter.stage("profiling"):
            profile = measure(
                captured,
                self._costs,
                progress=lambda done, total: self._reporter.progress("operations", done, total),
                # One warning for each operator: at other sizes only numbers in the text differ.
                warn=lambda op, why: self._warn(why, topic=f"{op} is not measured"),
            )
            runtime.profile = profile
            if self._measures_link():
                runtime.profile = replace(profile, link=self._costs.link_of(captured.device))
        return runtime.profile
