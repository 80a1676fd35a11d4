"""What a step's record notes: the runs of captured graphs, and marks between which its memory is measured."""

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
from ..running.execution import Part
from ..running.program import Program


@dataclass(eq=False)
class Run:
    """One run of a part."""

    part: Part
    index: int  # position among the forwards of the step
    program: Program
    links: dict[int, Output] = field(default_factory=dict)  # the output of an earlier run that an input is, by input
    passed_on: tuple[int, ...] = ()  # gradients of inputs that other code computed: they don't stay with a parameter
    # Storages of inputs that uncaptured code has computed in the step; no run's output shares them. For each storage: a
    # function that returns whether the storage lives, and its bytes.
    made_outside: dict[int, tuple[Callable[[], bool], int]] = field(default_factory=dict)
    released_bytes: int = 0  # bytes of `made_outside` that the backward has freed: only saved values held them
    # By output, a function that returns whether its storage still lives, and the storage's identity.
    outputs: dict[int, tuple[Callable[[], bool], int]] = field(default_factory=dict)
    alive: tuple[int, ...] | None = None  # outputs that lived when the backward ended, None before it ends
    missing: frozenset[int] = frozenset()  # positions of the gradients of outputs that did not arrive
    # Bytes of each gradient of an output as it arrived. An expanded gradient takes less than its shape says. Storage of
    # several gradients counts for the first one.
    tangent_bytes: tuple[int, ...] = ()
    # Strides of each gradient of an output as it arrived, None for one that did not or is sparse.
    tangent_strides: tuple[tuple[int, ...] | None, ...] = ()
    # Positions of the gradients of outputs that others still held when the backward ended, as along a residual
    # connection.
    outlasting: tuple[int, ...] = ()
    accumulated_bytes: int = 0  # bytes of the gradients that autograd has added to existing ones, and freed
    # Gradients that autograd only adds to those of parameters, with the storages of these parameters.
    added: dict[int, frozenset[int]] = field(default_factory=dict)
    is_retained: bool = False  # whether a backward has left the saved values to another backward
    # Inputs that get gradients and are no parameters: the autograd graph of the outputs holds them.
    trained: tuple[weakref.ref[torch.Tensor], ...] = ()

    def saves(self, output: int) -> bool:
        """Whether it saved an output, or another tensor on the same storage, for its backward."""
        tensors = self.graph.tensors
        return tensors[output].storage in {tensors[t].storage for t in self.program.schedule.saved}

    @property
    def living(self) -> tuple[int, ...]:
        """The outputs that still live."""
        return tuple(t for t, (lives, _) in self.outputs.items() if lives())

    @property
    def is_waiting(self) -> bool:
        """Whether its saved values still exist, and no backward has run yet."""
        return any(saved.run is self for saved in self.part.waiting())

    @property
    def graph(self) -> Graph:
        """The graph that runs, as if all gradients arrived."""
        return self.part.captured.graph

    def as_run(self, profile: Profile) -> tuple[Graph, Profile]:
        """Return the graph and its costs without the operations that only missing gradients need."""
        graph, profile = without_missing(self.part.captured, self.missing, profile)
        storages, roots = list(graph.storages), []
        for tensor, size_bytes in zip(graph.tangents, self.tangent_bytes, strict=False):
            storage = graph.tensors[tensor].storage
            is_expanded = storage is not None and size_bytes < storages[storage].size_bytes
            if storage is not None and is_expanded:
                storages[storage] = replace(storages[storage], size_bytes=size_bytes)
            if is_expanded or not graph.tensors[tensor].shape:
                roots.append(tensor)  # the gradient of the loss, which `backward()` holds to its end
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
    ENDED = "the whole backward has ended, with all that it is part of"
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
    """A mark: it is the label of the interval of memory that begins there."""

    event: Event
    run: int = 0  # the run to which it happens, 0 for none
    tensor: int = 0  # the output that is released
    size_bytes: int = 0  # bytes of a released tensor of the batch, or of one that was counted nowhere


START, CALLED, LEFT, CLOSED = Mark(Event.START), Mark(Event.CALLED), Mark(Event.LEFT), Mark(Event.CLOSED)
OTHER, OTHER_DONE = Mark(Event.OTHER), Mark(Event.OTHER_DONE)
