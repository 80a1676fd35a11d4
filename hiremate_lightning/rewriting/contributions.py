"""Return the gradients of a captured graph's inputs term by term, so that autograd adds them up as in eager PyTorch.

Autograd adds the contributions of a value's readers to its gradient one by one, the last reader's first. A captured
graph returns one sum for all its readers. If uncaptured code reads the value too, this changes the order of additions
and the last bits. So if the sum has several terms, the captured graph gets one extra input with the same value for each
further term, and autograd adds up the terms in eager's order.

Whether other code reads a parameter, for example another run of the same graph, is known only in the backward. So the
number of terms of each parameter's gradient is stored, see `running.accumulation`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from ..torch_private import aot, backward_pass
from ..torch_private.hacks import replaced
from ..torch_private.tensor_state import takes_other_gradients
from .nodes import written_values

aten = torch.ops.aten

TermCounts = Mapping[int, int]  # position of an input -> number of terms of its gradient


class OtherTermsError(Exception):
    """A captured graph was traced with extra inputs for other numbers of terms than its gradients have: trace again."""

    def __init__(self, terms: TermCounts) -> None:
        super().__init__(f"gradients of several terms, by input: {terms}")
        self.terms = terms


class Contributions:
    """The gradients that one captured graph returns term by term.

    `inputs` are fake tensors. `terms` come from a trace at another size, if there is one. With `is_settled` they come
    from a failed trace at this size, and `hand_over` raises no error again.
    """

    def __init__(self, inputs: Sequence[Any], terms: TermCounts, is_settled: bool = False) -> None:
        self._is_settled, self._count = is_settled, len(inputs)
        self._with_gradient = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad]
        self.of_any_type = [i for i in self._with_gradient if takes_other_gradients(inputs[i])]
        strided = [i for i in self._with_gradient if inputs[i].layout is torch.strided]
        # Dynamo guards on which inputs are parameters; any other input may be a leaf or computed, from call to call.
        self._leaves = [i for i in strided if isinstance(inputs[i], torch.nn.Parameter)]
        self._computed = [i for i in strided if i not in self._leaves]
        self.readers: list[int] = []  # number of autograd edges into each input with gradient, counted by the trace
        self.of_leaves: TermCounts = {}  # for parameters whose gradients have several terms
        self.terms: TermCounts = {position: count for position, count in terms.items() if position in self._computed}
        self._added = [(position, term) for position, count in self.terms.items() for term in range(1, count)]

    def expand(self, values: Sequence[Any]) -> list[Any]:
        """Return the inputs followed by one view of an input for each further term of its gradient.

        Autograd runs the node created last first, so the views are created in the reverse order of the terms.
        """
        added = {place: values[place[0]].view_as(values[place[0]]) for place in reversed(self._added)}
        return [*values, *(added[place] for place in self._added)]

    def expand_traced(self, values: Sequence[Any]) -> list[Any]:
        """Do the same as `expand` with the fake inputs of a trace."""
        expanded = self.expand(values)
        for added, (position, _) in zip(expanded[len(values) :], self._added, strict=True):
            aot.trace_with_sizes_of(added, values[position])
        return expanded

    @contextmanager
    def traced(self, module: fx.GraphModule) -> Iterator[None]:
        """During a trace, count the readers of inputs, and add unread inputs to the graph for those of `expand`."""
        last = next((node for node in reversed(module.graph.nodes) if node.op == "placeholder"), None)
        added: list[fx.Node] = []
        for number in range(len(self._added)):
            last = aot.add_input(module.graph, last, f"term_{number}")
            added.append(last)
        grad, tracing = torch.autograd.grad, threading.get_ident()

        def counting(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == tracing:
                edges = backward_pass.edges_from(outputs)
                self.readers = [edges[edge.node, edge.output_nr] for edge in map(get_gradient_edge, inputs)]
            return grad(outputs, inputs, *args, **kwargs)

        try:
            with replaced((torch.autograd, "grad", counting)):
                yield
        finally:
            for node in added:
                module.graph.erase_node(node)
            module.recompile()

    def hand_over(self, joint: fx.GraphModule, forward_outputs: int) -> None:
        """Rewrite a joint graph, whose forward has this many outputs, to return gradients term by term.

        Raises:
            OtherTermsError: If the gradients have other numbers of terms than `expand` has added inputs for.
        """
        output = joint.graph.output_node()
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        added = len(self._added)
        if len(self.readers) != len(self._with_gradient) + added:
            return  # AOTAutograd has changed the inputs, so the counts can't be assigned to them
        readers = dict(zip(self._with_gradient, self.readers, strict=False))
        changed = set(written_values(joint))
        inputs = enumerate(aot.inputs_with_gradients(joint, forward_outputs))
        written = {position for position, (node, _) in inputs if node in changed}

        def terms_of(positions: Iterable[int]) -> dict[int, list[fx.Node]]:
            kept = [position for position in positions if position not in written]
            terms = {p: [t for t, _ in additions(results[forward_outputs + p], readers[p])] for p in kept}
            return {position: parts for position, parts in terms.items() if len(parts) > 1}

        computed = terms_of(self._computed)
        if len(results) - forward_outputs == self._count + added:  # not if AOTAutograd merged overlapping inputs
            self.of_leaves = {position: len(terms) for position, terms in terms_of(self._leaves).items()}
        counts = {position: len(terms) for position, terms in computed.items()}
        if counts != self.terms:
            if self._is_settled:
                return  # two traces gave different terms: return the sums
            raise OtherTermsError(counts)
        further: list[fx.Node] = []
        for position, (first, *rest) in computed.items():
            results[forward_outputs + position] = first
            further.extend(rest)
        output.args = ((*results[: len(results) - added], *further),)


def additions(total: Any, count: int) -> list[tuple[fx.Node, fx.Node]]:
    """List at most `count` terms of a sum in order, each with the node that adds it; the first two have the same node.

    If the sum has more additions, the first ones belong to the first reader's term, which is their sum.
    """
    arrived = arrivals(total)
    inner = len(arrived) - count  # additions before the first reader's term was complete
    if inner <= 0:
        return arrived
    rest = arrived[inner + 1 :]
    return [(arrived[inner][1], rest[0][1]), *rest] if rest else []


def sums_alone(gradients: Sequence[Any], terms: TermCounts) -> TermCounts:
    """Return the counts of the gradients whose sums are read by nothing but the output of the graph."""
    alone = _only_returned(gradients)
    return {p: count for p, count in terms.items() if gradients[p] in alone and additions(gradients[p], count)}


def casts_alone(gradients: Sequence[Any], terms: TermCounts) -> TermCounts:
    """Return the counts of the gradients of casts that are read by nothing but the cast to a leaf's gradient."""
    alone = _only_returned(gradients)

    def is_alone(whole: Any, count: int) -> bool:
        if whole not in alone or whole.target is not aten._to_copy.default:
            return False
        half = whole.args[0]
        return len(half.users) == 1 and (count == 1 or bool(additions(half, count)))

    return {position: count for position, count in terms.items() if is_alone(gradients[position], count)}


def _only_returned(gradients: Sequence[Any]) -> set[fx.Node]:
    """List the gradients that the graph returns once and that no other node reads."""
    uses = Counter(value for value in gradients if isinstance(value, fx.Node))
    return {value for value, count in uses.items() if count == len(value.users) == 1}


def arrivals(total: Any) -> list[tuple[fx.Node, fx.Node]]:
    """List all terms of a sum in order, each with the node that adds it; the first two have the same node."""
    arrived: list[tuple[Any, fx.Node]] = []
    node: Any = total
    while isinstance(node, fx.Node) and node.target is aten.add.Tensor and node.meta.get("is_gradient_acc"):
        if node is not total and len(node.users) != 1:
            break
        arrived.append((node.args[1], node))
        node = node.args[0]
    return [(node, arrived[-1][1]), *reversed(arrived)] if arrived else []
