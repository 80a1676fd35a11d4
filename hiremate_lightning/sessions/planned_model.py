"""What the objects of one session share: the planned model and its options, memory, graphs, history and warnings."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn

from ..housekeeping import log
from ..measuring.resident_memory import ResidentMemory
from ..options import SessionOptions
from ..proofs.proof import Proofs
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..signatures.history import History
from ..signatures.watching import WatchPolicy
from .first_wait import FirstWait
from .graph_runtimes import GraphRuntimes
from .largest import LargestSizes
from .messages import Messages
from .offloading import Offloading


class PlannedModel:
    """The planned model of one session, with what the objects of the session share."""

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root, self.name = root, type(root).__name__
        self.options = options  # replaced if the budget changes
        self.messages = Messages(self.name)
        self.warn = self.messages.warn  # warns, once for each text
        self.reporter = Reporter(options.verbose)  # shows the stages of planning, and counts their time
        self.tracing = ExitStack()  # holds the stage "tracing" open until a capture has ended
        self.kernels = FusedKernels(self.warn) if options.compile else None  # compiled kernels of fused operations
        self.offloading = Offloading(root, options, lambda: self.memory.device, self.warn)
        self.runtimes = GraphRuntimes(options, self.reporter, self.kernels, self.warn, lambda: self.offloading.is_on)
        self.memory = ResidentMemory(root, self.runtimes.waiting, self.runtimes.retained)
        self.history, self.watching, self.proofs = History(), WatchPolicy(), Proofs()
        self.largest = LargestSizes(options.sizes, self.runtimes, self.warn)
        self.first_wait = FirstWait(options.cache_dir, self.memory.model_key)

    def report(self, text: str) -> None:
        """Log and show a line about how steps run from now on."""
        log.info(text)
        self.reporter.report(text)

    @property
    def has_place(self) -> bool:
        """Whether there are fewer plans than `max_plans`."""
        return self.history.plan_count < self.options.max_plans

    def warn_if_full(self) -> bool:
        """Return whether there are `max_plans` plans already, and warn if so."""
        if self.has_place:
            return False
        self.messages.warn(
            f"There are {self.history.plan_count} plans already (max_plans): steps of other input shapes run by one of "
            "these where it fits, or else at the least memory, which is slower. Each new shape may take seconds as it "
            "first appears: pad to a few shapes, or raise max_plans."
        )
        return True
