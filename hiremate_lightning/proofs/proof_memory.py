"""The memory that the proof of a captured graph needs, and the memory that is free for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..capturing.capture import Captured
from ..measuring.saved_offload import HAS_FILES
from ..memory.allocator import alone, in_blocks
from ..records.costs import Profile
from ..records.graph import StorageKind, bytes_of
from ..records.simulation import forward_peak_bytes, simulate, simulate_plain
from ..records.step import Step
from ..running.program import Program


@dataclass(frozen=True, slots=True)
class ProofMemory:
    """Bytes that the runs of a proof take beside the memory that exists before the step.

    Attributes:
        plain_bytes: Of a plain forward and backward.
        beside_bytes: Of gradients on their way, and of operators while they run, in a plain backward.
        forward_bytes: Of a plain forward without gradients.
        own_bytes: Of the captured forward and backward.
        own_forward_bytes: Of the captured forward.
        changed_bytes: Of copies of what the code changes in place.
        kept_bytes: Of one run's results, which wait for those of another run; 0 where they are not in device memory.
        free_bytes: Free for all of this.
        can_offload: Whether values can be offloaded.
    """

    plain_bytes: int
    beside_bytes: int
    forward_bytes: int
    own_bytes: int
    own_forward_bytes: int
    changed_bytes: int
    kept_bytes: int
    free_bytes: int
    can_offload: bool = True

    @property
    def needs_files(self) -> bool:
        """Whether a run's results are kept in files, since a plain backward does not fit beside them."""
        needed_bytes = max(self.plain_bytes, self.own_bytes + self.changed_bytes + self.kept_bytes)
        return self.kept_bytes > 0 and needed_bytes > self.free_bytes

    @property
    def has_plain(self) -> bool:
        """Whether a plain backward fits."""
        return max(self.plain_bytes, self.own_bytes + self.changed_bytes) <= self.free_bytes

    @property
    def has_forward(self) -> bool:
        """Whether a forward fits, without gradients."""
        return max(self.forward_bytes, self.own_forward_bytes + self.changed_bytes) <= self.free_bytes

    @property
    def values_bytes(self) -> int:
        """Bytes that values of the forward may take in a backward that runs segment by segment; 0 where it can't."""
        if self.own_bytes + self.changed_bytes > self.free_bytes:
            return 0
        return max(0, self.free_bytes - self.beside_bytes - self.changed_bytes)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that saved values may take, in the forward too, where others are offloaded; 0 where they can't be."""
        return max(0, min(self.values_bytes, self.free_bytes - self.forward_bytes)) if self.can_offload else 0


def proof_memory(
    captured: Captured, profile: Profile, program: Program, free_bytes: Callable[[Step, torch.device], int]
) -> ProofMemory:
    """Predict the bytes that the runs of a proof take, as allocated.

    Args:
        captured: The captured graph.
        profile: Costs of its operations.
        program: The program that is about to run.
        free_bytes: Returns the bytes that are free on a device beside what exists before a step.
    """
    graph, step = in_blocks(captured.graph, captured.device), alone(captured.graph, profile, captured.device)
    own = simulate(graph, profile, program.schedule)
    # Activations that take nothing, and gradients that are dropped as they come.
    storages = (replace(s, size_bytes=0) if s.kind is StorageKind.ACTIVATION else s for s in graph.storages)
    without_activations = replace(graph, storages=tuple(storages), gradients=())
    return ProofMemory(
        plain_bytes=step.plain_bytes,
        beside_bytes=simulate_plain(without_activations, profile).peak_bytes,
        forward_bytes=forward_peak_bytes(graph, profile),
        own_bytes=own.peak_bytes,
        own_forward_bytes=max((moment.peak_bytes for moment in own.timeline[: own.turn]), default=0),
        changed_bytes=2 * bytes_of(graph, captured.mutated),
        kept_bytes=bytes_of(graph, (*graph.outputs, *graph.gradients)) if captured.device.type == "cpu" else 0,
        free_bytes=max(free_bytes(step, captured.device), own.peak_bytes),  # the step takes them in any case
        can_offload=HAS_FILES or captured.device.type != "cpu",
    )
