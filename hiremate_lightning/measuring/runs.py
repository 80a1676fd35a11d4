"""The entries of a step's record: runs of captured graphs, and the marks between which memory is measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from ..capturing.absent import without_missing
from ..records.costs import Profile
from ..records.graph import Graph
from ..records.step import Output
from ..running.execution import GraphRuntime
from ..running.program import Program


@dataclass(eq=False)
class Run:
    """One run of a captured graph, forward and backward."""

    runtime: GraphRuntime
    index: int  # position among the forwards of the step
    program: Program
    links: dict[int, Output] = field(default_factory=dict)  # by input: the earlier run's output on the same storage
    # Gradients that don't stay in a leaf's `.grad`: other code computed the input, or FSDP2 lent it.
    passed_on: tuple[int, ...] = ()
    # Inputs that uncaptured code has computed in the step and that are no run's outputs. By storage: a function that
    # returns whether the storage lives, and its bytes.
    made_outside: dict[int, tuple[Callable[[], bool], int]] = field(default_factory=dict)
    released_bytes: int = 0  # bytes of `made_outside` that the backward has freed: only saved values held them
    # By output: a function that returns whether the output's storage lives, and the storage's identity.
    outputs: dict[int, tuple[Callable[[], bool], int]] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()  # positions of outputs whose gradients did not arrive
    # Bytes of each tangent (gradient of an output). An expanded tangent takes less than its shape says. A storage that
    # several tangents share counts for the first one.
    tangent_bytes: tuple[int, ...] = ()
    tangent_strides: tuple[tuple[int, ...] | None, ...] = ()  # strides of each tangent; None if missing or sparse
    # Positions of tangents that uncaptured code still holds when the backward ends, for example along a residual
    # connection.
    outlasting: tuple[int, ...] = ()
    accumulated_bytes: int = 0  # bytes of gradients that autograd adds to existing ones and then frees
    # Gradients that autograd would only add to `.grad` of leaves, with the storages of these leaves.
    added: dict[int, frozenset[int]] = field(default_factory=dict)
    is_retained: bool = False  # whether a backward has kept the saved values for another backward
    # Leaves among the inputs that are no parameters: the autograd graph of the outputs holds them.
    trained: tuple[weakref.ref[torch.Tensor], ...] = ()

    def saves(self, output: int) -> bool:
        """Whether the run saved an output, or another tensor on the output's storage, for its backward."""
        tensors = self.graph.tensors
        return tensors[output].storage in {tensors[t].storage for t in self.program.schedule.saved}

    @property
    def living(self) -> tuple[int, ...]:
        """The outputs that still live."""
        return tuple(t for t, (lives, _) in self.outputs.items() if lives())

    @property
    def is_waiting(self) -> bool:
        """Whether its saved values exist and no backward has run yet."""
        return any(saved.run is self for saved in self.runtime.saved(has_run=False))

    @property
    def graph(self) -> Graph:
        """The captured graph, which assumes that all gradients of outputs arrive."""
        return self.runtime.captured.graph

    def as_run(self, profile: Profile) -> tuple[Graph, Profile]:
        """Return the graph and its costs as the run had them.

        Operations that need a missing gradient are left out; expanded tangents have the bytes that they take.
        """
        graph, profile = without_missing(self.runtime.captured, self.missing, profile)
        storages, roots = list(graph.storages), []
        for tensor, size_bytes in zip(graph.tangents, self.tangent_bytes, strict=False):
            storage = graph.tensors[tensor].storage
            is_expanded = storage is not None and size_bytes < storages[storage].size_bytes
            if storage is not None and is_expanded:
                storages[storage] = replace(storages[storage], size_bytes=size_bytes)
            if is_expanded or not graph.tensors[tensor].shape:
                roots.append(tensor)  # a gradient of the loss: `backward()` holds it to its end
        return replace(graph, storages=tuple(storages), held=(*graph.held, *roots)), profile


# ---------------------------------------------------------------- marks


class Event(Enum):
    """The event at a mark."""

    START = "the step begins"
    FORWARD = "a forward starts"
    FORWARD_DONE = "a forward has ended"
    CALLED = "someone calls the backward"
    BACKWARD = "a backward starts"
    BACKWARD_DONE = "a backward has ended"
    ENDED = "the whole backward of autograd has ended, of which a captured backward was part"
    OTHER = "the backward of a forward of an earlier step starts"
    OTHER_DONE = "the backward of a forward of an earlier step has ended"
    RELEASED = "an output is released"
    LEFT = "the last output of the step before is released"
    UNCOUNTED = "another tensor is released that was there before the step"
    GIVEN = "a tensor of the batch is released"
    CLOSED = "the measurement ends"

    def of(self, run: int) -> Mark:
        """Return the mark of a run."""
        return Mark(self, run)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the step; it labels the interval of memory that begins there."""

    event: Event
    run: int = 0  # index of the run, 0 for none
    tensor: int = 0  # the output that is released
    size_bytes: int = 0  # for `GIVEN` and `UNCOUNTED`, the bytes of the released tensor


START, CALLED, LEFT, CLOSED = Mark(Event.START), Mark(Event.CALLED), Mark(Event.LEFT), Mark(Event.CLOSED)
OTHER, OTHER_DONE = Mark(Event.OTHER), Mark(Event.OTHER_DONE)
