"""The captured graphs of a session: each is profiled before its first run, and planned alone for the least memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import nn

from . import torch_private
from .capture import Captured
from .costs import Profile
from .custom_operators import without_unsteady
from .execution import Conductor, Part, Program
from .fused_kernel import Kernels
from .graph import StorageKind
from .profiling import CostCache, measure, undisturbed
from .report import Stages


class Parts:
    """Numbers the captured graphs of a session, in the order of their capture.

    Args:
        stages: Shows profiling and solving, and adds up their seconds.
        cache_dir: Where to keep profiles between runs, None for nowhere.
        kernels: What compiles fused operations before they are profiled, None where nothing is fused.

    Attributes:
        all: The parts so far.
        profiles: Costs of the operations of those that have run.
    """

    def __init__(self, stages: Stages, cache_dir: Path | None, kernels: Kernels | None) -> None:
        self._stages = stages
        self._costs = CostCache(cache_dir)
        self._kernels = kernels
        self.all: list[Part] = []
        self.profiles: list[Profile] = []
        self._least: list[Program] = []
        self._changed: set[Part] = set()  # whose program of least memory is of an earlier captured graph

    def add(self, captured: Captured, conductor: Conductor) -> Part:
        """Make a part of a captured graph."""
        part = Part(captured, conductor)
        self.all.append(part)
        return part

    def prepare(self, part: Part, build_least: Callable[[Captured, Profile], Program]) -> int:
        """Give a part's number; at its first run measure its operations and build its program of least memory.

        Args:
            part: What is about to run.
            build_least: Builds that program for a captured graph with these costs.
        """
        number = next(i for i, known in enumerate(self.all) if known is part)
        while len(self.profiles) <= number:
            next_one = self.all[len(self.profiles)]
            captured = next_one.captured = without_unsteady(next_one.captured)
            profile = self._measure(captured)
            with self._stages.stage("solve_s", "solving"):
                least = build_least(captured, profile)
            self.profiles.append(profile)
            self._least.append(least)
        if part in self._changed:
            self._changed.remove(part)
            self._least[number] = build_least(part.captured, self.profiles[number])
        return number

    def least(self, number: int) -> Program:
        """Give the program of least memory of a part that is prepared."""
        return self._least[number]

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Learn of values that other code overwrites before the backward: nothing can be computed from them then."""
        part.captured = part.captured.reading_once(storages)
        self._changed.add(part)

    def _measure(self, captured: Captured) -> Profile:
        """Compile what is fused, then measure each operation."""
        if self._kernels is not None:
            with self._stages.stage("compile_s", "compiling"), undisturbed(captured.device):
                self._kernels.compile(lambda done, total: self._stages.reporter.progress("kernels", done, total))
        with self._stages.stage("profile_s", "profiling"):
            return measure(
                captured,
                self._costs,
                progress=lambda done, total: self._stages.reporter.progress("operations", done, total),
            )


def uses_all_parameters(captured: Captured, root: nn.Module) -> bool:
    """Whether a captured graph reads all parameters of a module."""
    used = sum(storage.kind is StorageKind.PARAMETER for storage in captured.graph.storages)
    return used >= len({torch_private.storage_id(p) for p in root.parameters()})
