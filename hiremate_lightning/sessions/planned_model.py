"""The model that a session plans, and what all that plans it asks for."""

from __future__ import annotations

from torch import nn

from ..measuring.resident_memory import ResidentMemory
from ..messages import Announcements
from ..options import SessionOptions
from ..reporting.report import Reporter
from ..rewriting.kernels import FusedKernels
from ..signatures.history import History
from .offloading import Offloading
from .parts import Parts


class PlannedModel:
    """What the objects of one session share: options, memory, graphs, history, warnings. It decides nothing.

    Attributes:
        root: The model, whose parameters and buffers are resident.
        name: Its class.
        options: What was asked for; the budget may change.
        announcements: Warns.
        reporter: Shows the stages of planning, and counts their time.
        kernels: Where fused operations are kept, None where nothing is fused.
        offloading: What may be offloaded to the host's memory.
        parts: Its captured graphs.
        memory: What exists before its steps.
        history: The signatures of its steps.
    """

    def __init__(self, root: nn.Module, options: SessionOptions) -> None:
        self.root, self.name, self.options = root, type(root).__name__, options
        self.announcements = Announcements(self.name)
        self.reporter = Reporter(options.verbose)
        self.kernels = FusedKernels(self.announcements.say) if options.compile else None
        self.offloading = Offloading(root, options, lambda: self.memory.device, self.announcements.say)
        say, recomputable = self.announcements.say, options.recomputable_operators
        self.parts = Parts(self.reporter, options.cache_dir, self.kernels, say, recomputable)
        self.parts.measures_link = lambda: self.offloading.is_on
        self.memory = ResidentMemory(root, self.parts.waiting, self.parts.retained)
        self.history = History()

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
