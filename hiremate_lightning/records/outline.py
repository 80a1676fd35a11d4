"""Merged steps of the same code at many sizes: decisions are replayed once, and then only added up.

Such steps run the same operations on the same storages. Only bytes and times differ. The simulator finds the
allocations, frees and recomputations of decisions once, at the first size. At every other size the peak is a sum of
bytes in the same order: exact, in well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..housekeeping import Latest
from .costs import as_plain
from .schedule import eager_decisions, lower
from .simulation import Allocations, allocations
from .step import Decisions, Step


class Outline:
    """A merged step, given at some size, without its sizes."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._replayed = Latest[Decisions, tuple[Allocations, np.ndarray]](64)

    def replayed(self, decisions: Decisions) -> tuple[Allocations, np.ndarray]:
        """Return the allocations and frees of decisions, and the nodes that they compute again."""
        return self._replayed.get_or(decisions, lambda: self._replay(decisions))

    def _replay(self, decisions: Decisions) -> tuple[Allocations, np.ndarray]:
        graph = self._step.graph
        again = np.array([node for before in decisions for node in before], dtype=np.int64)
        return allocations(graph, lower(graph, decisions)), again

    @cached_property
    def plain(self) -> Allocations:
        """The allocations and frees of plain PyTorch."""
        graph, _ = as_plain(self._step.graph, self._step.profile)
        return allocations(graph, lower(graph, eager_decisions(graph)))


@dataclass(frozen=True)
class SizedStep:
    """A merged step at one size, and its outline: the parts that do not depend on its size."""

    step: Step
    outline: Outline

    @cached_property
    def _bytes(self) -> tuple[np.ndarray, np.ndarray]:
        sizes, workspaces = self.step.graph.sizes, self.step.profile.workspace_bytes
        return np.array(sizes, dtype=np.int64), np.array(workspaces, dtype=np.int64)

    @cached_property
    def _times_ms(self) -> np.ndarray:
        return np.array(self.step.profile.time_ms)

    def peak_bytes(self, decisions: Decisions) -> int:
        """Return the bytes that decisions add at their peak, as the simulator counts them."""
        return self.outline.replayed(decisions)[0].peak_bytes(*self._bytes)

    def again_ms(self, decisions: Decisions) -> float:
        """Return the milliseconds of the nodes that decisions compute again."""
        return float(self._times_ms[self.outline.replayed(decisions)[1]].sum())

    @cached_property
    def plain_bytes(self) -> int:
        """The bytes that plain PyTorch adds at its peak."""
        graph, profile = as_plain(self.step.graph, self.step.profile)
        sizes, workspaces = graph.sizes, profile.workspace_bytes
        return self.outline.plain.peak_bytes(np.array(sizes, dtype=np.int64), np.array(workspaces, dtype=np.int64))


class Outlines:
    """The outlines of steps."""

    def __init__(self) -> None:
        self._outlines = Latest[Hashable, Outline](16)

    def at_size(self, step: Step, codes: Iterable[Hashable]) -> SizedStep:
        """Return a merged step with its outline.

        Each call has a key of its code, equal at all sizes of that code; None where that is not known.
        """
        codes = tuple(codes)
        if None in codes:
            return SizedStep(step, Outline(step))
        return SizedStep(step, self._outlines.get_or((codes, *_ends(step)), lambda: Outline(step)))


def _ends(step: Step) -> tuple[Hashable, ...]:
    """Return the parts of a merged step that depend neither on sizes nor on its calls alone: orders, outside code."""
    graph = step.graph
    outside = [node for node, owner in zip(graph.nodes, step.owners, strict=True) if owner is None]
    made = (tuple(graph.tensors[t].storage for t in node.outputs) for node in outside)
    handed = tuple((node.inputs, node.outputs, storages) for node, storages in zip(outside, made, strict=True))
    stay = graph.inputs, graph.tangents, graph.outputs, graph.gradients, graph.held, graph.retained
    return (len(graph.storages), graph.forward, graph.backward, *stay, handed)
