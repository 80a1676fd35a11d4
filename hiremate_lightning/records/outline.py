"""Merged steps of the same code at many sizes: decisions are replayed once, and then only added up.

Such steps run the same operations on the same storages. Only bytes and times differ. The simulator finds the
allocations, frees and recomputations of decisions once, at the first size. At every other size the peak is a sum of
bytes in the same order: exact, in well under a millisecond.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .costs import as_plain
from .schedule import as_written, lower
from .simulation import Allocations, allocations
from .step import Decisions, Step

KEPT = 64  # decisions of an outline, the latest used ones
OUTLINES = 16  # of all code, the latest used ones


class Outline:
    """A merged step, given at some size, without its sizes."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._replayed: OrderedDict[Decisions, tuple[Allocations, np.ndarray]] = OrderedDict()

    def replayed(self, decisions: Decisions) -> tuple[Allocations, np.ndarray]:
        """Return the allocations and frees of decisions, and the nodes that they compute again."""
        if decisions not in self._replayed:
            if len(self._replayed) == KEPT:
                self._replayed.popitem(last=False)
            graph = self._step.graph
            again = np.array([node for before in decisions for node in before], dtype=np.int64)
            self._replayed[decisions] = allocations(graph, lower(graph, decisions)), again
        self._replayed.move_to_end(decisions)
        return self._replayed[decisions]

    @cached_property
    def plain(self) -> Allocations:
        """The allocations and frees of plain PyTorch."""
        graph, _ = as_plain(self._step.graph, self._step.profile)
        return allocations(graph, lower(graph, as_written(graph)))


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
        self._outlines: OrderedDict[Hashable, Outline] = OrderedDict()

    def at_size(self, step: Step, codes: Iterable[Hashable]) -> SizedStep:
        """Return a merged step with its outline.

        Each call has a key of its code, equal at all sizes of that code; None where that is not known.
        """
        codes = tuple(codes)
        if None in codes:
            return SizedStep(step, Outline(step))
        key = (codes, *_ends(step))
        if key not in self._outlines:
            if len(self._outlines) == OUTLINES:
                self._outlines.popitem(last=False)
            self._outlines[key] = Outline(step)
        self._outlines.move_to_end(key)
        return SizedStep(step, self._outlines[key])


def _ends(step: Step) -> tuple[Hashable, ...]:
    """Return the parts of a merged step that depend neither on sizes nor on its calls alone: orders, outside code."""
    graph = step.graph
    outside = [node for node, owner in zip(graph.nodes, step.owners, strict=True) if owner is None]
    made = (tuple(graph.tensors[t].storage for t in node.outputs) for node in outside)
    handed = tuple((node.inputs, node.outputs, storages) for node, storages in zip(outside, made, strict=True))
    stay = graph.inputs, graph.tangents, graph.outputs, graph.gradients, graph.held, graph.retained
    return (len(graph.storages), graph.forward, graph.backward, *stay, handed)
