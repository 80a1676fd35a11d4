"""The model that a session plans, and what all that plans it asks for."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from torch import nn

from ..measuring.resident_memory import ResidentMemory
from ..messages import Announcements, FirstWait
from ..options import SessionOptions
from ..proofs.proof import Proofs
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..signatures.history import History
from ..signatures.watching import WatchPolicy
from .largest import LargestSizes
from .offloading import Offloading
from .parts import Parts

log = logging.getLogger("hiremate_lightning")


class PlannedModel:
    """What the objects of one session share: options, memory, graphs, history, warnings. It decides nothing."""

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root, self.name = root, type(root).__name__
        self.options = options  # what was asked for; the budget may change
        self.announcements = Announcements(self.name)
        self.say = self.announcements.say  # warns, once for each text
        self.reporter = Reporter(options.verbose)  # shows the stages of planning, and counts their time
        self.tracing = ExitStack()  # measures a capture until it ends
        self.kernels = FusedKernels(self.say) if options.compile else None  # where fused operations are kept
        self.offloading = Offloading(root, options, lambda: self.memory.device, self.say)
        self.parts = Parts(options, self.reporter, self.kernels, self.say, lambda: self.offloading.is_on)
        self.memory = ResidentMemory(root, self.parts.waiting, self.parts.retained)  # what exists before its steps
        self.history, self.watching, self.proofs = History(), WatchPolicy(), Proofs()
        self.largest = LargestSizes(options.sizes, self.parts, self.say)
        self.first_wait = FirstWait(options.cache_dir, self.memory.describe_model)

    def tell(self, text: str) -> None:
        """Log how steps run from now on, and show it."""
        log.info(text)
        self.reporter.note(text)

    @property
    def has_place(self) -> bool:
        """Whether there are fewer plans than allowed."""
        return self.history.plan_count < self.options.max_plans

    def announce_full(self) -> None:
        """Warn that there are as many plans as allowed."""
        self.announcements.say(
            f"There are {self.history.plan_count} plans already (max_plans): steps of other input shapes run by one of "
            "these where it fits, or else at the least memory, which is slower. Each new shape may take seconds as it "
            "first appears: pad to a few shapes, or raise max_plans."
        )
