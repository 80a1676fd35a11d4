"""The joint graph of a block of captured code, traced once and written into larger joint graphs for each block like it.

AOTAutograd traces what stands in for a block, one operator forward and one backward; `write_out` then puts the nodes of
the block's own joint graph in the place of both. So the joint graph is that of a trace of everything, node by node:

* Autograd runs the nodes of a block one after the other, since what is computed later comes back first.
* An operator forward gives new memory, as the block does: it changes nothing, and returns no view.
* A gradient is added up in the order in which its terms come. Of an input that code outside of the block reads too, the
  block gives each term by itself, and each is added where the trace of everything adds it. Probes show where: copies
  of such inputs that the traced block returns, whose gradients come before all others.
* Gradients that come to a block, one for each of its outputs, have the layout for which it was traced. For others, as
  those of a part of a larger result, it is traced once more: `hand_over` gives that trace gradients of that layout.

Where one of these does not hold, `NotShownError` ends the trace, and everything is traced.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd import graph_capture
from torch._functorch._aot_autograd.schemas import MutationType, OutputType, ViewAndMutationMeta
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import aot
from ..hacks import replaced
from ..same_captures import NotShownError, expect
from ..tensor_state import fake_mode_of, laid_out_like, layout_of, leaves, real_mode, storages_among
from .memoryless import Memory

Stacks = dict[tuple[Any, ...], dict[str, Any]]  # the modules that a node is in, by those of the same node of a template
Strides = tuple[tuple[int, ...] | None, ...]  # of the gradients of a block's results; None for one without
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_numbers = itertools.count(1)
_calls: weakref.WeakValueDictionary[int, BlockCall] = weakref.WeakValueDictionary()


class LayoutsError(NotShownError):
    """Blocks give gradients of other layouts than was traced with; they have the templates for these now."""


class _TracedError(Exception):
    """A joint graph is there: nothing is compiled."""


class BlockTemplate:
    """The joint graph of a block, whose last outputs are copies of its `shared` inputs: its nodes by what they are for.

    Attributes:
        repeated: Positions of the inputs that it gets once more: for each term of a gradient but the first.
        gradients: For each input, and each that it gets once more, the node of a term; None where there is none.
        sums: Positions of the inputs whose gradients are sums of several terms, of those that the block adds up itself.
        added_after: For some terms the node after which they are added to others, None for before the backward.
    """

    def __init__(
        self, joint: fx.GraphModule, forward_count: int, metadata: ViewAndMutationMeta, shared: Sequence[int]
    ) -> None:
        changes = any(info.mutation_type is not MutationType.NOT_MUTATED for info in metadata.input_info)
        gives_new = all(info.output_type is OutputType.non_alias for info in metadata.output_info)
        expect(not changes and gives_new and not metadata.tokens, "what a block does to its inputs")
        operations = [node for node in joint.graph.nodes if node.op not in ("placeholder", "output")]
        expect(all(node.op == "call_function" for node in operations), "a constant in a block")
        placeholders = joint.graph.find_nodes(op="placeholder")
        self.inputs = [node for node in placeholders if not aot.is_tangent(node)]
        tangents = [node for node in placeholders if aot.is_tangent(node)]
        turn = next((i for i, node in enumerate(operations) if aot.is_of_backward(node)), len(operations))
        self.forward, self.backward = operations[:turn], operations[turn:]
        expect(all(map(aot.is_of_backward, self.backward)), "forward and backward of a block in turns")
        outputs, gradients, *_ = aot.joint_outputs(joint, forward_count)
        count = len(outputs) - len(shared)
        self.outputs: list[Any] = outputs[:count]
        self.has_gradient = [info.requires_grad for info in metadata.output_info[:count]]
        self.tangents, probes = tangents[: len(tangents) - len(shared)], tangents[len(tangents) - len(shared) :]
        self._put_in_place_of_handed()
        expect(sum(self.has_gradient) == len(self.tangents), "the gradients of a block")
        self.forward = [node for node in self.forward if node not in outputs[count:]]
        self._check_outputs()
        self._list_terms(gradients, dict(zip(shared, probes, strict=True)))

    def _put_in_place_of_handed(self) -> None:
        """Put the results and the gradients of the block in the place of those that were handed over."""
        ops = torch.ops.hiremate_lightning
        handed = {node: node.args[0] for node in self.forward if node.target is ops.handed.default}
        laid_out = {node.args[0]: node for node in self.backward if node.target is ops.laid_out.default}
        expect(all(set(node.users) <= {laid_out[node]} for node in self.tangents if node in laid_out), "a gradient")
        self.outputs = [handed.get(node, node) for node in self.outputs]
        self.tangents = [laid_out.get(node, node) for node in self.tangents]
        self.forward = [node for node in self.forward if node not in handed]
        self.backward = [node for node in self.backward if node not in self.tangents]

    @property
    def terms(self) -> Any:
        """What code around the block has to know to call it."""
        return [gradient is None for gradient in self.gradients], self.has_gradient, self.repeated, self.sums

    @property
    def layouts(self) -> Any:
        """How its results lie, and the gradients that it gives."""
        return [node and layout_of(node.meta["val"]) for node in (*self.outputs, *self.gradients)]

    def _check_outputs(self) -> None:
        makers = dict[int, fx.Node]()  # by storage: what had it first
        for node in (*self.inputs, *self.forward):
            for storage in storages_among(leaves(node.meta["val"])):
                makers.setdefault(storage, node)
        for node in self.outputs:
            (storage,) = storages_among([node.meta["val"]])
            is_item = node.target is operator.getitem and makers[storage] is node.args[0]
            expect(makers[storage] is node or is_item, "a block that returns a view")
        expect(set(self.outputs) <= set(self.forward), "a block that returns what it was given")
        expect(len(set(self.outputs)) == len(self.outputs), "a block that returns a value twice")

    def _list_terms(self, gradients: Sequence[Any], probes: dict[int, fx.Node]) -> None:
        """Find the terms of the gradients, and where those of inputs with probes are added."""
        self.sums, self.repeated = set[int](), list[int]()
        self.gradients: list[fx.Node | None] = []
        self.added_after = dict[fx.Node, fx.Node | None]()
        more, sums = list[fx.Node](), dict[fx.Node, fx.Node]()
        for position, gradient in enumerate(gradients):
            terms = [] if gradient is None else [gradient]
            if terms and position not in probes and gradient.meta.get("is_gradient_acc"):
                self.sums.add(position)
            if position in probes:
                added = _terms_since(probes[position], gradient)
                terms = [term for term, _ in added]
                sums |= {node: term for term, node in added}
            self.gradients.append(terms[0] if terms else None)
            self.repeated += [position] * len(terms[1:])
            more += terms[1:]
        self.gradients += more
        expect(len(set(sums.values())) == len(sums), "a term of two gradients")
        before: fx.Node | None = None
        for node in self.backward:
            if node in sums:
                self.added_after[sums[node]] = before
            else:
                before = node
        self.backward = [node for node in self.backward if node not in sums]

    @classmethod
    def of(
        cls, code: fx.GraphModule, inputs: Sequence[torch.Tensor], shared: Sequence[int], mode: FakeTensorMode
    ) -> BlockTemplate:
        """Trace a block, whose last outputs are copies of its `shared` inputs."""
        made: list[BlockTemplate] = []
        metadata: list[ViewAndMutationMeta] = []
        trace = graph_capture.create_functionalized_fn

        def note_and_trace(*given: Any, meta: ViewAndMutationMeta, **options: Any) -> Any:
            metadata.append(meta)
            return trace(*given, meta=meta, **options)

        def partition(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
            made.append(cls(joint, num_fwd_outputs, metadata[-1], shared))
            raise _TracedError

        def refuse(*_: Any) -> Any:
            raise NotShownError("a block without gradients")

        backend = aot.make_backend(partition, refuse, refuse, refuse)
        noting = replaced((graph_capture, "create_functionalized_fn", note_and_trace))
        with suppress(_TracedError), tracing(TracingContext(mode)), noting, torch.enable_grad(), real_mode():
            backend(code, inputs)
        return made[0] if made else refuse()


def _terms_since(first: fx.Node, total: Any) -> list[tuple[fx.Node, fx.Node]]:
    """List the terms that were added to a first one, each with the node that adds it."""
    terms: list[tuple[Any, fx.Node]] = []
    while total is not first:
        is_sum = isinstance(total, fx.Node) and total.target is torch.ops.aten.add.Tensor
        expect(is_sum and bool(total.meta.get("is_gradient_acc")) and len(total.users) == 1, "the terms of a gradient")
        terms.append((total.args[1], total))
        total = total.args[0]
    return terms[::-1]


class BlockCall:
    """A block that is alike, and the template that stands for it.

    Attributes:
        stacks: The modules that its nodes are in.
        number: By which nodes of graphs name it.
        strides: Of the gradients as they came; None before that.
    """

    def __init__(self, template: BlockTemplate, stacks: Stacks, make: Callable[[Strides], BlockTemplate]) -> None:
        self.template, self.stacks, self.number = template, stacks, next(_numbers)
        self.strides: list[tuple[int, ...]] | None = None
        self._make = make
        _calls[self.number] = self

    def meet_gradients(self) -> bool:
        """Take the template for the gradients that came; return whether what was traced with the last one holds."""
        template = self.template
        if self.strides in (None, [node.meta["val"].stride() for node in template.tangents]):
            return True
        assert self.strides is not None
        strides = iter(self.strides)
        self.template = self._make(tuple(next(strides) if has_one else None for has_one in template.has_gradient))
        expect(self.template.terms == template.terms, "what a block gives for gradients of other strides")
        return bool(self.template.layouts == template.layouts)

    def metadata(self, node: fx.Node) -> dict[str, Any]:
        """Return what is known of the copy of a node of the template."""
        renamed = {
            key: self.stacks.get(tuple(node.meta[key].items()), node.meta[key]) for key in _STACKS if key in node.meta
        }
        return {**node.meta, **renamed}


def call_block(number: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run what stands in for a block while it is traced."""
    results: tuple[torch.Tensor, ...] = _TracedBlock.apply(number, *inputs)  # type: ignore[no-untyped-call]
    return results


class _TracedBlock(torch.autograd.Function):
    """Stands in for a block: one operator forward, and one backward."""

    @staticmethod
    def forward(ctx: Any, number: int, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.number = number
        template = _calls[number].template
        results = torch.ops.hiremate_lightning.block(number, inputs[: len(template.inputs)])
        pairs = zip(results, template.has_gradient, strict=True)
        ctx.mark_non_differentiable(*(result for result, has_gradient in pairs if not has_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        template = _calls[ctx.number].template
        tangents = [g for g, has_gradient in zip(gradients, template.has_gradient, strict=True) if has_gradient]
        for tangent, node in zip(tangents, template.tangents, strict=True):
            expect(tangent is not None, "a gradient of a block that is absent")
            (shape, _, *kind), (expected, _, *expected_kind) = map(layout_of, (tangent, node.meta["val"]))
            expect((shape, kind) == (expected, expected_kind), "a gradient of a block")
        _calls[ctx.number].strides = [tangent.stride() for tangent in tangents]
        needed = zip(template.gradients, ctx.needs_input_grad[1:], strict=True)
        expect(all(is_needed for gradient, is_needed in needed if gradient is not None), "what needs a gradient")
        results = iter(torch.ops.hiremate_lightning.block_backward(ctx.number, tangents))
        return None, *(None if gradient is None else next(results) for gradient in template.gradients)


def hand_over(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a result of a block, whose gradient then has such strides; for traces of templates."""
    handed: torch.Tensor = _Handing.apply(result, strides)  # type: ignore[no-untyped-call]
    return handed


class _Handing(torch.autograd.Function):
    """Stands between a block and what reads its result: a node of the forward, and one of the backward."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, strides: tuple[int, ...]) -> Any:
        ctx.strides = strides
        return torch.ops.hiremate_lightning.handed(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.ops.hiremate_lightning.laid_out(gradients[0], ctx.strides), None


def _results_like(nodes: Iterable[fx.Node | None]) -> list[torch.Tensor]:
    return [laid_out_like(node.meta["val"]) for node in nodes if node is not None]


_library = torch.library.Library("hiremate_lightning", "FRAGMENT")
_library.define("block(int number, Tensor[] inputs) -> Tensor[]")
_library.define("block_backward(int number, Tensor[] tangents) -> Tensor[]")
_library.define("handed(Tensor result) -> Tensor")
_library.define("laid_out(Tensor gradient, int[] strides) -> Tensor")
torch.library.register_fake("hiremate_lightning::handed", torch.empty_like, lib=_library)
torch.library.register_fake("hiremate_lightning::laid_out", laid_out_like, lib=_library)
torch.library.register_fake(
    "hiremate_lightning::block", lambda number, inputs: _results_like(_calls[number].template.outputs), lib=_library
)
torch.library.register_fake(
    "hiremate_lightning::block_backward",
    lambda number, tangents: _results_like(_calls[number].template.gradients),
    lib=_library,
)


def write_out(joint: fx.GraphModule) -> None:
    """Put the nodes of blocks in the place of what stands in for them; `LayoutsError` asks to trace once more."""
    ops = torch.ops.hiremate_lightning
    if joint.graph.find_nodes(op="call_function", target=ops.block.default):
        backward = joint.graph.find_nodes(op="call_function", target=ops.block_backward.default)
        numbers: list[Any] = [node.args[0] for node in backward]
        holds = [_calls[number].meet_gradients() for number in numbers]  # each of them takes its template
        if not all(holds):
            raise LayoutsError("a trace with other templates")
        shown = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
        mode = fake_mode_of(shown)
        with torch.no_grad(), enable_python_dispatcher():
            _Writing(joint.graph, mode).run()


class _Writing:
    """Writes blocks into a joint graph, whose values have no memory.

    Copies of the nodes of templates, and what they lie on, are known by the numbers of calls.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self._memory: dict[int, Memory] = {}
        self._written: dict[int, dict[fx.Node, Any]] = {}
        self._stale = set[int]()  # storages of what stood in for results of blocks
        self._values: list[Any] = []  # that lie on these: a number must not come again
        self._erased = set[fx.Node]()

    def run(self) -> None:
        """Go through the graph once."""
        ops = torch.ops.hiremate_lightning
        for node in list(self._graph.nodes):
            if node.target is ops.block.default:
                call, inputs = _calls[node.args[0]], node.args[1]
                self._written[call.number], self._memory[call.number] = {}, Memory(self._mode)
                self._give(call, call.template.inputs, inputs)
                self._write(node, call, call.template.forward, call.template.outputs)
            elif node.target is ops.block_backward.default:
                call, tangents = _calls[node.args[0]], node.args[1]
                self._give(call, call.template.tangents, tangents)
                gradients = [gradient for gradient in call.template.gradients if gradient is not None]
                self._write(node, call, call.template.backward, gradients)
            elif node not in self._erased:
                storages = storages_among(leaves(node.meta.get("val")))
                if not self._stale.isdisjoint(storages):  # a view of what is on other memory now
                    assert callable(node.target), "nodes of joint graphs call functions"
                    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda value: value.meta["val"])
                    with self._mode:
                        node.meta["val"] = node.target(*arguments, **named)

    def _give(self, call: BlockCall, inputs: Sequence[fx.Node], given: Sequence[fx.Node]) -> None:
        """Hand over what a block gets, before its forward or its backward."""
        self._written[call.number].update(zip(inputs, given, strict=True))
        self._memory[call.number].give([node.meta["val"] for node in inputs], [node.meta["val"] for node in given])

    def _write(self, place: fx.Node, call: BlockCall, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> None:
        copies, memory = self._written[call.number], self._memory[call.number]
        with self._graph.inserting_before(place), real_mode():
            for node in nodes:
                copy = copies[node] = self._graph.node_copy(node, copies.__getitem__)
                copy.meta = call.metadata(node)
                copy.meta["val"] = memory.like(node.meta["val"])
        sums = dict[fx.Node, fx.Node]()  # by the term that is added
        for user in list(place.users):
            expect(user.target is operator.getitem, "the results of a block")
            position: Any = user.args[1]
            for reader in user.users:
                if reader.meta.get("is_gradient_acc") and len(reader.args) > 1 and reader.args[1] is user:
                    sums[results[position]] = reader
            self._values.append(user.meta["val"])
            self._stale |= storages_among([user.meta["val"]])
            user.replace_all_uses_with(copies[results[position]])
            self._graph.erase_node(user)
            self._erased.add(user)
        self._move(sums, call.template, copies)
        self._graph.erase_node(place)

    def _move(self, sums: dict[fx.Node, fx.Node], template: BlockTemplate, copies: dict[fx.Node, Any]) -> None:
        """Add terms of gradients where the trace of everything adds them: as soon as they are there."""
        last = dict[fx.Node | None, fx.Node]()
        for term, before in template.added_after.items():  # in the order in which they are added
            if term not in sums:
                continue
            place = last.get(before) if before is None or before in last else copies[before]
            if place is not None:
                place.append(sums[term])
            else:  # before all of the block's backward
                copies[template.backward[0]].prepend(sums[term])
            last[before] = sums[term]
