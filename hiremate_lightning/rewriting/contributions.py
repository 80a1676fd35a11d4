"""Accumulation of gradients across captured graphs: those of values from other code, handed over term by term.

Autograd adds up what the readers of a value contribute to its gradient one after the other, the last reader's first. A
captured graph hands over one sum for all readers in it. Where code outside of the graph reads the value too, that is
another order of additions, and gives other last bits. So where such a sum has several terms, the captured graph takes
the value once more for each of them: autograd adds them up as it does without capture.

Of a parameter it is only known in the backward whether others read it, another run of the same graph for example. So it
is noted of how many terms each sum is, see `running.accumulation`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from ..torch_private import aot, backward_pass
from ..torch_private.hacks import replaced
from ..torch_private.tensor_state import is_dense, storage_id, takes_other_gradients, versions_of
from .nodes import written_values

aten = torch.ops.aten

TermCounts = Mapping[int, int]  # by position of an input: of how many terms its gradient is the sum


class OtherTermsError(Exception):
    """A captured graph was traced with other inputs than those to which the terms of its gradients belong."""

    def __init__(self, terms: TermCounts) -> None:
        super().__init__(f"gradients of several terms, by input: {terms}")
        self.terms = terms


def likely_terms(module: fx.GraphModule) -> TermCounts:
    """Expect, before code is traced, of how many terms the gradients of its inputs are.

    Dynamo ran the code on tensors without memory, and autograd has noted there what reads each. A trace shows whether
    that is right, and where it isn't the code is traced once more. Only inputs whose memory is not written to count.
    """
    inputs = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    results = [node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes]
    dense = [value for value in inputs if is_dense(value)]
    written = {storage_id(value) for value, version in zip(dense, versions_of(dense), strict=True) if version}
    kept = [p for p, value in enumerate(inputs) if _has_gradient(value) and storage_id(value) not in written]
    readers = _count_readers([v for v in results if _has_gradient(v)], [inputs[position] for position in kept])
    return {position: count for position, count in zip(kept, readers, strict=True) if count > 1}


def _has_gradient(value: Any) -> TypeGuard[torch.Tensor]:
    return is_dense(value) and value.requires_grad


class Contributions:
    """The gradients of one captured graph's inputs that are handed over term by term.

    Inputs are without memory. The terms are those at another size, or the likely ones; or settled, as another trace has
    found them: then this trace is the last.
    """

    def __init__(self, inputs: Sequence[Any], terms: TermCounts, is_settled: bool = False) -> None:
        self._is_settled, self._count = is_settled, len(inputs)
        self._with_gradient = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad]
        self.of_other_types = [i for i in self._with_gradient if takes_other_gradients(inputs[i])]  # than their own
        strided = [i for i in self._with_gradient if inputs[i].layout is torch.strided]
        # The same graph runs for a batch that is a leaf and for what code has computed; Dynamo tells parameters apart.
        self._leaves = [i for i in strided if isinstance(inputs[i], torch.nn.Parameter)]
        self._computed = [i for i in strided if i not in self._leaves]
        self.readers: list[int] = []  # from how many places a gradient comes to each input, as the trace has shown
        self.of_leaves: TermCounts = {}  # the same of parameters, where there are several terms
        self.of_casts: TermCounts = {}  # see `casts.share`
        self.terms: TermCounts = {position: count for position, count in terms.items() if position in self._computed}
        self._added = [(position, term) for position, count in self.terms.items() for term in range(1, count)]

    def expand(self, values: Sequence[Any]) -> list[Any]:
        """Add an input for each term of a gradient but the first.

        Autograd runs what is made last first, so they are made in the opposite order of the terms.
        """
        added = {place: values[place[0]].view_as(values[place[0]]) for place in reversed(self._added)}
        return [*values, *(added[place] for place in self._added)]

    def expand_traced(self, values: Sequence[Any]) -> list[Any]:
        """Add the same to the inputs of a trace."""
        expanded = self.expand(values)
        for added, (position, _) in zip(expanded[len(values) :], self._added, strict=True):
            aot.trace_with_sizes_of(added, values[position])
        return expanded

    @contextmanager
    def traced(self, module: fx.GraphModule) -> Iterator[None]:
        """Surround a trace: readers are counted, and inputs that nothing reads are there, as many as `expand` adds."""
        last = next((node for node in reversed(module.graph.nodes) if node.op == "placeholder"), None)
        added: list[fx.Node] = []
        for number in range(len(self._added)):
            last = aot.add_input(module.graph, last, f"term_{number}")
            added.append(last)
        grad, tracing = torch.autograd.grad, threading.get_ident()

        def counting(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                self.readers = _count_readers(outputs, inputs)
            return grad(outputs, inputs, *args, **kwargs)

        try:
            with replaced((torch.autograd, "grad", counting)):
                yield
        finally:
            for node in added:
                module.graph.erase_node(node)
            module.recompile()

    def hand_over(self, joint: fx.GraphModule, forward_outputs: int) -> None:
        """Rewrite a joint graph, with so many outputs of the forward, to hand gradients over term by term.

        Raises:
            OtherTermsError: There are other terms than inputs for them.
        """
        output = joint.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        added = len(self._added)
        if len(self.readers) != len(self._with_gradient) + added:
            return  # AOTAutograd has arranged the inputs otherwise
        readers = dict(zip(self._with_gradient, self.readers, strict=False))
        changed = set(written_values(joint))
        inputs = enumerate(aot.inputs_with_gradients(joint, forward_outputs))
        written = {position for position, (node, _) in inputs if node in changed}

        def terms_of(positions: Iterable[int]) -> dict[int, list[fx.Node]]:
            kept = [position for position in positions if position not in written]
            terms = {p: [t for t, _ in additions(results[forward_outputs + p], readers[p])] for p in kept}
            return {position: own for position, own in terms.items() if len(own) > 1}

        computed = terms_of(self._computed)
        if len(results) - forward_outputs == self._count + added:  # else inputs that overlap are one to AOTAutograd
            self.of_leaves = {position: len(terms) for position, terms in terms_of(self._leaves).items()}
        counts = {position: len(terms) for position, terms in computed.items()}
        if counts != self.terms:
            if self._is_settled:
                return  # another trace gave other terms: the sums stay
            raise OtherTermsError(counts)
        others: list[fx.Node] = []
        for position, (first, *rest) in computed.items():
            results[forward_outputs + position] = first
            others.extend(rest)
        output.args = ((*results[: len(results) - added], *others),)


def _count_readers(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Count the places from which a gradient comes to each input, on the way back from outputs."""
    edges = backward_pass.edges_from(outputs)
    return [edges[edge.node, edge.output_nr] for edge in map(get_gradient_edge, inputs)]


def additions(total: Any, count: int) -> list[tuple[fx.Node, fx.Node]]:
    """List the terms of a sum as they arrive, each with the node that adds it; the first two have the same.

    Where more than `count` arrive, the first one is the sum of those before.
    """
    arrived = arrivals(total)
    inner = len(arrived) - count  # additions before the first reader's term was complete
    if inner <= 0:
        return arrived
    rest = arrived[inner + 1 :]
    return [(arrived[inner][1], rest[0][1]), *rest] if rest else []


def sums_alone(gradients: Sequence[Any], terms: TermCounts) -> TermCounts:
    """Return those of the gradients of leaves, of some terms, that are added up for this gradient alone."""
    alone = _only_returned(gradients)
    return {p: count for p, count in terms.items() if gradients[p] in alone and additions(gradients[p], count)}


def casts_alone(gradients: Sequence[Any], terms: TermCounts) -> TermCounts:
    """Return those of the gradients of casts that are cast to be a gradient of a leaf, and are read by nothing else."""
    alone = _only_returned(gradients)

    def is_alone(whole: Any, count: int) -> bool:
        if whole not in alone or whole.target is not aten._to_copy.default:
            return False
        half = whole.args[0]
        return len(half.users) == 1 and (count == 1 or bool(additions(half, count)))

    return {position: count for position, count in terms.items() if is_alone(gradients[position], count)}


def _only_returned(gradients: Sequence[Any]) -> set[fx.Node]:
    """List the gradients that are returned once and read by nothing."""
    uses = Counter(value for value in gradients if isinstance(value, fx.Node))
    return {value for value, count in uses.items() if count == len(value.users) == 1}


def arrivals(total: Any) -> list[tuple[fx.Node, fx.Node]]:
    """List the terms of a sum as they arrive, each with the node that adds it; the first two have the same."""
    arrived: list[tuple[Any, fx.Node]] = []
    node: Any = total
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor and node.meta.get("is_gradient_acc"):
        if node is not total and len(node.users) != 1:
            break
        arrived.append((node.args[1], node))
        node = node.args[0]
    return [(node, arrived[-1][1]), *reversed(arrived)] if arrived else []
