"""One joint trace for blocks that are alike: what AOTAutograd traces of one of them is written out for each.

Where Dynamo's trace of a module was copied (`module_traces`), the nodes of each copy carry a `TraceMark`. `fold` puts
one node in the place of each such block that has the same operations, on inputs of the same kind, as the first one. The
joint graph of a block is traced once, apart (`block_templates`), and put into the joint graph of everything. Blocks
that nothing shows to be safe are traced as they are.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .. import autocasting, captured_code, tensor_state
from ..same_captures import described_nodes, expect, facts_of
from ..size_symbols import NUMBERS, at_numbers
from .block_templates import BlockCall, BlockTemplate, Stacks, Strides, call_block, hand_over
from .module_traces import MARK, TraceMark

log = logging.getLogger("hiremate_lightning")

FEWEST_BLOCKS = 3  # that are alike: a template takes about as long as a block and a half
FEWEST_NODES = 4  # of a block
_WITHOUT_RESULT = (operator.setitem, torch._C._log_api_usage_once)
_MODES: dict[Any, Callable[..., int]] = {  # what each node adds to the modes that are changed around the next one
    torch.amp.autocast_mode._enter_autocast: lambda *_: 1,
    torch.amp.autocast_mode._exit_autocast: lambda *_: -1,
    torch._C._set_grad_enabled: lambda is_on: -1 if is_on else 1,
}


@dataclass(frozen=True)
class AlikeBlock:
    """Some nodes of captured code that follow each other, and what they read, in order.

    Its outputs, which other nodes read, are positions among the nodes.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> AlikeBlock:
        """Find out what some nodes read and give."""
        inner = set(nodes)
        read = (value for node in nodes for value in _nodes_in(node))
        inputs = tuple(dict.fromkeys(value for value in read if value not in inner))
        outputs = tuple(i for i, node in enumerate(nodes) if not inner.issuperset(node.users))
        return cls(tuple(nodes), inputs, outputs)

    @functools.cached_property
    def description(self) -> Any:
        """What is equal for blocks of the same operations on inputs of the same kind."""
        numbers = {node: number for number, node in enumerate((*self.inputs, *self.nodes))}
        inputs = tuple(facts_of(_shown(value)) for value in self.inputs)
        return described_nodes(self.nodes, numbers), self.outputs, inputs

    def changes_inputs(self) -> bool:
        """Whether it calls a method in place on what it is given, as a batch norm in training does on its counter.

        What changes inputs in other ways is found out once it is traced, for which this saves the time.
        """
        calls = ((str(node.target), node.args[0]) for node in self.nodes if node.op == "call_method")
        return any(name.endswith("_") and not name.endswith("__") and value in self.inputs for name, value in calls)

    def shared(self) -> set[int]:
        """List the positions of the inputs whose gradients get terms from other code too, or may get several here."""
        inner = set(self.nodes)
        reads = Counter(value for node in self.nodes for value in _nodes_in(node))
        return {
            position
            for position, value in enumerate(self.inputs)
            if not inner.issuperset(value.users) or (value.op == "placeholder" and reads[value] > 1)
        }


@dataclass(frozen=True)
class Folded:
    """Captured code with a node for each block that is alike; nodes name blocks by numbers, as long as this lasts."""

    code: fx.GraphModule
    calls: tuple[BlockCall, ...] = ()


def fold(code: fx.GraphModule) -> Folded:
    """Return captured code with one node in the place of each block that is alike, or itself where there are none."""
    calls = dict[AlikeBlock, BlockCall]()
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        for blocks in _blocks_of(code):
            try:
                calls |= _calls_of(blocks, context.fake_mode, code.meta.get(NUMBERS, {}))
            except Exception as error:  # whatever AOTAutograd fails on: then everything is traced
                log.debug("Blocks that are alike are traced one by one: %s", error, exc_info=True)
    return Folded(_with_calls(code, calls), tuple(calls.values())) if calls else Folded(code)


def _blocks_of(code: fx.GraphModule) -> Iterator[list[AlikeBlock]]:
    """List the blocks that Dynamo's traces were copied for, those of a trace together.

    There are none in code that may set modes other than those of gradients and autocast, and none where these are set.
    """
    operations = [node for node in code.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    is_cast = any(map(torch.is_autocast_enabled, autocasting.DEVICE_TYPES))
    if is_cast or not torch.is_grad_enabled() or captured_code.takes_gradients(code):
        return
    marked = defaultdict[int, defaultdict[int, list[tuple[int, fx.Node]]]](lambda: defaultdict(list))
    changed = 0  # blocks of `with` around that change a mode
    for index, node in enumerate(operations):
        if node.target in _MODES:
            changed += _MODES[node.target](*node.args)
        elif node.target not in _WITHOUT_RESULT and not _is_plain_operation(node, code.meta.get(NUMBERS, {})):
            log.debug("Blocks that are alike are traced one by one: %s is no plain operation", node)
            return
        elif MARK in node.meta and not changed:
            mark: TraceMark = node.meta[MARK]
            marked[mark.trace][mark.call].append((index, node))
    for by_call in marked.values():
        nodes = [[node for _, node in places] for _, places in sorted(by_call.items()) if _is_whole(places)]
        if nodes and len(nodes[0]) >= FEWEST_NODES:
            yield [AlikeBlock.of(block) for block in nodes]


def _is_whole(places: Sequence[tuple[int, fx.Node]]) -> bool:
    """Whether nodes follow each other, each at its position in the trace."""
    first = places[0][0]
    positions = [node.meta[MARK].position for _, node in places]
    return all(index == first + i for i, (index, _) in enumerate(places)) and positions == sorted(positions)


def _is_plain_operation(node: fx.Node, numbers: Mapping[Any, int]) -> bool:
    """Whether an operation gives tensors of definite sizes or numbers, and is none of torch.func's."""
    values = tensor_state.leaves(node.meta.get("example_value"))
    sizes = [size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    symbols = set[Any]().union(*(s.node.expr.free_symbols for s in sizes if isinstance(s, torch.SymInt)))
    is_of_values = all(isinstance(v, (torch.Tensor, bool, int, float, torch.SymInt)) or v is None for v in values)
    is_static = symbols <= numbers.keys()
    where = f"{getattr(node.target, '__module__', '')}.{node.target}"
    return is_of_values and is_static and "example_value" in node.meta and "_functorch" not in where


def _calls_of(
    blocks: Sequence[AlikeBlock], mode: FakeTensorMode, numbers: Mapping[Any, int]
) -> dict[AlikeBlock, BlockCall]:
    """Trace the first one of some blocks, and list those for which that trace holds."""
    first = blocks[0]
    expect(not first.changes_inputs(), "what a block does to its inputs")
    alike = [block for block in blocks if block.description == first.description]
    if len(alike) < FEWEST_BLOCKS:
        return {}
    with mode:
        inputs = [_leaf_like(_shown(node), numbers) for node in first.inputs]
    shared = {p for p in set[int]().union(*(block.shared() for block in alike)) if inputs[p].requires_grad}

    @functools.cache
    def make(strides: Strides = ()) -> BlockTemplate:
        return BlockTemplate.of(_code_of(first, sorted(shared), strides), inputs, sorted(shared), mode)

    template = make()
    given = {p for p, value in enumerate(first.inputs) if value.op == "placeholder"}
    if sums := template.sums & given - shared:  # one operation here may read an input several times
        shared |= sums
        make.cache_clear()
        template = make()
    return {block: BlockCall(template, _stacks(first, block), make) for block in alike}


def _shown(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("example_value")
    expect(isinstance(value, FakeTensor), "an input of a block that is no tensor")
    assert isinstance(value, torch.Tensor)
    return value


def _leaf_like(shown: torch.Tensor, numbers: Mapping[Any, int]) -> torch.Tensor:
    shape, strides = at_numbers(shown.shape, numbers), at_numbers(shown.stride(), numbers)
    leaf = torch.empty_strided(shape, strides, dtype=shown.dtype, device=shown.device)
    return leaf.requires_grad_(shown.requires_grad)


def _nodes_in(node: fx.Node) -> list[fx.Node]:
    """List the nodes among the arguments of a node, in order; those twice that stand there twice."""
    values: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), values.append)
    return values


def _code_of(block: AlikeBlock, shared: Sequence[int], strides: Strides) -> fx.GraphModule:
    """Make code of a block, which also returns copies of its `shared` inputs.

    Gradients of its results come with these strides, where they are not those of the results themselves.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in block.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["example_value"] = node.meta["example_value"]
    for node in block.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    results = [copies[block.nodes[position]] for position in block.outputs]
    for position, stride in enumerate(strides):
        if stride is not None:
            results[position] = graph.call_function(hand_over, (results[position], stride))
    probes = [graph.call_function(torch.clone, (copies[block.inputs[position]],)) for position in shared]
    graph.output((*results, *probes))
    return fx.GraphModule({}, graph)


def _stacks(first: AlikeBlock, block: AlikeBlock) -> Stacks:
    """List the modules that the nodes of a block are in, by those of the first one's."""
    pairs = zip(first.nodes, block.nodes, strict=True)
    stacks = [(node.meta.get("nn_module_stack"), another.meta.get("nn_module_stack")) for node, another in pairs]
    return {tuple(stack.items()): another for stack, another in stacks if stack and another}


def _with_calls(code: fx.GraphModule, calls: dict[AlikeBlock, BlockCall]) -> fx.GraphModule:
    """Copy captured code, with one node for each block."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    block_at = {block.nodes[0]: block for block in calls}
    inner = {node for block in calls for node in block.nodes}
    for node in code.graph.nodes:
        if node in block_at:
            block = block_at[node]
            results = [block.nodes[position] for position in block.outputs]
            call = calls[block]
            read = (*block.inputs, *(block.inputs[position] for position in call.template.repeated))
            called = graph.call_function(call_block, (call.number, *(copies[value] for value in read)))
            called.meta["example_value"] = tuple(result.meta["example_value"] for result in results)
            for position, result in enumerate(results):
                copies[result] = graph.call_function(_result, (called, position))
                copies[result].meta = dict(result.meta)
        elif node not in inner:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
    folded = fx.GraphModule(code, graph)
    folded.meta = dict(code.meta)
    if hasattr(code, "_param_name_to_source"):
        folded._param_name_to_source = code._param_name_to_source
    return folded


def _result(results: tuple[torch.Tensor, ...], position: int) -> torch.Tensor:
    return results[position]
