"""Captured code at sizes that were never traced, made from traces of other sizes.

Its records are those of the sizes; all else is the first sample's: FX nodes, positions of inputs and outputs, terms.
These tell which value is which, and do not depend on sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..housekeeping import Latest
from ..records.costs import Profile
from ..records.expressions import LEAST_SAMPLES, NoTemplateError, Sizes, find_expression
from ..records.graph import Graph
from ..records.graph_template import GraphTemplate
from ..torch_private import tensor_state
from .absent import without_missing
from .capture import Captured

NOTHING: frozenset[int] = frozenset()


class CodeTemplate:
    """The same code at all sizes.

    Args:
        samples: The code as it was captured at a few sizes, each with its costs.
        sizes: The sizes of each, at least `LEAST_SAMPLES`; those that are equal in all samples are one size.

    Attributes:
        samples: The code as it was captured at these sizes.
        sizes: The sizes of each.
        programs: Programs of it, by what they do (`running.template`); they last as long as the code.

    Raises:
        NoTemplateError: If the samples do not tell what the code is at other sizes.
    """

    def __init__(self, samples: Sequence[tuple[Captured, Profile]], sizes: Sequence[Sizes]) -> None:
        if len(set(sizes)) < LEAST_SAMPLES:
            raise NoTemplateError(f"Expected the same code at {LEAST_SAMPLES} sizes or more, not at {sizes}")
        self.samples, self.sizes = tuple(captured for captured, _ in samples), tuple(sizes)
        self.programs: dict[Any, Any] = Latest(32)
        self._profiles = tuple(profile for _, profile in samples)
        self._graphs = dict[frozenset[int], GraphTemplate]()
        # Who foresees a step asks for the code of its calls before they come.
        self._latest = Latest[Sizes, tuple[Captured, Profile]](4)
        self._without(NOTHING)
        # What is taken from the first sample has to be the same in all.
        facts = [
            (c.terms, c.cast_terms, c.finished, c.trained, c.alike, c.mutated, c.overwritten, c.device)
            for c in self.samples
        ]
        if any(of_sample != facts[0] for of_sample in facts):
            raise NoTemplateError("The same code hands on other gradients, or changes other inputs, at other sizes")
        # Each number that any backward may need has an expression: nothing can be traced in a backward.
        layouts = [
            [_layout(value) for node in c.joint.graph.nodes for value in tensor_state.leaves(node.meta.get("val"))]
            for c in self.samples
        ]
        if len({tuple(map(len, of_sample)) for of_sample in layouts}) > 1:
            raise NoTemplateError("The same code has other values at other sizes")
        numbers = {same for values in zip(*layouts, strict=True) for same in zip(*values, strict=True)}
        if any(find_expression(self.sizes, same) is None for same in numbers):
            raise NoTemplateError("How a value lies in memory is no expression of the sizes")

    def at(self, sizes: Sizes) -> tuple[Captured, Profile]:
        """Return the code at some sizes, with its costs."""
        return self._latest.get_or(sizes, lambda: self._at(sizes))

    def _at(self, sizes: Sizes) -> tuple[Captured, Profile]:
        graph, profile = self._without(NOTHING).at(sizes)
        return replace(self.samples[0], graph=graph, template=self, sizes=sizes), profile

    def without(self, missing: frozenset[int], sizes: Sizes) -> tuple[Graph, Profile]:
        """Return its graph and costs at some sizes without what some gradients of outputs would have brought.

        Where the samples differ in what is not brought, it is counted as if it were: this is asked when a step has run.
        """
        try:
            return self._without(missing).at(sizes)
        except NoTemplateError:
            return self._without(NOTHING).at(sizes)

    def _without(self, missing: frozenset[int]) -> GraphTemplate:
        if missing not in self._graphs:
            pairs = zip(self.samples, self._profiles, strict=True)
            present = [without_missing(captured, missing, profile) for captured, profile in pairs]
            self._graphs[missing] = GraphTemplate(present, self.sizes)
        return self._graphs[missing]


def _layout(value: Any) -> tuple[int, ...]:
    if not isinstance(value, torch.Tensor):
        return ()
    strides = value.stride() if value.layout is torch.strided else ()
    return tuple(map(tensor_state.int_hint, (*value.shape, *strides)))
