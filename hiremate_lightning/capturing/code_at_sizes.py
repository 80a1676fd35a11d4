"""Captured code at sizes that were never traced, made from traces of other sizes (samples).

Its records are computed for the new sizes. Everything else is the first sample's and does not depend on sizes: FX
nodes, positions of inputs and outputs, terms of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..housekeeping import Latest, log
from ..records.costs import Profile
from ..records.expressions import LEAST_SAMPLES, Sizes, SizesDifferError, expression_of, vary_alone
from ..records.graph import Graph
from ..records.graph_at_sizes import GraphAtSizes
from ..torch_private import tensor_state
from .absent import without_missing
from .capture import Captured

NONE_MISSING: frozenset[int] = frozenset()


class CodeAtSizes:
    """Captured code that can be made at any sizes.

    Args:
        samples: The code as captured at a few sizes, each with its costs.
        sizes: The sizes of each sample, at least `LEAST_SAMPLES` different ones.

    Attributes:
        samples: The code as captured at each of the sizes.
        sizes: The sizes of each sample.
        programs: Cache of the programs of this code at all sizes, see `running.program_at_sizes`.

    Raises:
        SizesDifferError: If the samples do not determine the code at other sizes.
    """

    def __init__(self, samples: Sequence[tuple[Captured, Profile]], sizes: Sequence[Sizes]) -> None:
        if len(set(sizes)) < LEAST_SAMPLES:
            raise SizesDifferError(f"Expected the same code at {LEAST_SAMPLES} sizes or more, not at {sizes}")
        self.samples, self.sizes = tuple(captured for captured, _ in samples), tuple(sizes)
        self.programs: dict[Any, Any] = Latest(32)
        self._profiles = tuple(profile for _, profile in samples)
        self._graphs = dict[frozenset[int], GraphAtSizes]()
        # A forecast of a step makes the code of its later calls, and the calls themselves need the same code again.
        self._latest = Latest[Sizes, tuple[Captured, Profile]](4)
        self._without(NONE_MISSING)
        # The first sample is used for all sizes, so these facts must be equal in all samples.
        facts = [
            (c.terms, c.cast_terms, c.finished, c.trained, c.gradient_dtypes, c.mutated, c.overwritten, c.device)
            for c in self.samples
        ]
        if any(of_sample != facts[0] for of_sample in facts):
            raise SizesDifferError("The same code hands on other gradients, or changes other inputs, at other sizes")
        # Every size and stride needs an expression now, since a backward cannot be traced later.
        layouts = [
            [_layout(value) for node in c.joint.graph.nodes for value in tensor_state.leaves(node.meta.get("val"))]
            for c in self.samples
        ]
        if len({tuple(map(len, of_sample)) for of_sample in layouts}) > 1:
            raise SizesDifferError("The same code has other values at other sizes")
        for numbers in {same for values in zip(*layouts, strict=True) for same in zip(*values, strict=True)}:
            expression_of(self.sizes, numbers, "how a value lies in memory")

    def at(self, sizes: Sizes) -> tuple[Captured, Profile]:
        """Return the code and its costs at the given sizes."""

        def make() -> tuple[Captured, Profile]:
            graph, profile = self._without(NONE_MISSING).at(sizes)
            return replace(self.samples[0], graph=graph, made_from=self, sizes=sizes), profile

        return self._latest.get_or(sizes, make)

    def without(self, missing: frozenset[int], sizes: Sizes) -> tuple[Graph, Profile]:
        """Return the graph and costs at the given sizes without nodes that only missing gradients need.

        If the samples differ in these nodes, the full graph is returned, since this is called after a step has run.
        """
        try:
            return self._without(missing).at(sizes)
        except SizesDifferError:
            return self._without(NONE_MISSING).at(sizes)

    def _without(self, missing: frozenset[int]) -> GraphAtSizes:
        if missing not in self._graphs:
            pairs = zip(self.samples, self._profiles, strict=True)
            present = [without_missing(captured, missing, profile) for captured, profile in pairs]
            self._graphs[missing] = GraphAtSizes(present, self.sizes)
        return self._graphs[missing]


class SizesOfCalls:
    """Predicts the sizes of the later calls of a step from those of its first call, as in earlier steps."""

    def __init__(self) -> None:
        self._calls: tuple[Captured, ...] = ()  # the calls of the latest step
        self._sizes = Latest[Sizes, tuple[Sizes, ...]](8)  # sizes of the first call -> sizes of all calls of that step

    def note(self, calls: Sequence[Captured]) -> None:
        """Store the calls of a finished step and their sizes."""
        if not calls or any(call.made_from is None for call in calls):
            return
        if [call.made_from for call in calls] != [call.made_from for call in self._calls]:
            self._sizes.clear()  # the stored sizes belong to other traces
        self._calls = tuple(calls)
        self._sizes[calls[0].sizes] = tuple(call.sizes for call in calls)

    def foresee(self, begun: Sequence[Captured]) -> list[tuple[Captured, Profile]]:
        """Return the calls that follow those already begun, with their costs; [] if their sizes are uncertain."""
        count = len(begun)
        if len(self._sizes) < LEAST_SAMPLES or any(
            call.made_from is not before.made_from for call, before in zip(begun, self._calls, strict=False)
        ):
            return []
        try:
            samples, first = vary_alone(list(self._sizes), begun[0].sizes)
            columns = list(zip(*self._sizes.values(), strict=True))[count:]
            expressions = [
                [expression_of(samples, values, "the size of another call") for values in zip(*sizes, strict=True)]
                for sizes in columns
            ]
        except SizesDifferError as error:
            log.debug("The sizes of a step to come are not known: %s", error)
            return []
        to_come = zip(self._calls[count:], expressions, strict=True)
        return [
            call.made_from.at(tuple(expression.at(first) for expression in its_sizes))
            for call, its_sizes in to_come
            if call.made_from is not None  # for mypy: `note` stores no other calls
        ]


def _layout(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    strides = value.stride() if value.layout is torch.strided else ()
    return tuple(map(tensor_state.int_hint, (*value.shape, *strides)))
