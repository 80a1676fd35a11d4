"""Code that Dynamo captured once for all sizes, traced anew for each.

A plan is of bytes, so the joint graph that it is made of has numbers for sizes. But most seconds of a capture go to
Dynamo, which reads the user's code. Where sizes vary its graph has symbols for them, and is kept: only AOTAutograd's
trace is made for each size that comes. Where that is another one each time, as with what a detector finds, small code
may run as it was captured, without a plan.

What tells symbols apart is private; `tests/test_torch_private.py` says on which versions of torch this was checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..garbage import collecting_what_it_leaves
from . import checkpoints, dynamo, tensor_state

KEPT = 128  # traces of one graph, the latest used ones: each takes megabytes of the host's memory
UNREPEATED = 4  # sizes in a row that have not come before: after more of them, it is asked whether to go on tracing
Runner = Callable[..., Any]
Trace = Callable[[fx.GraphModule, Sequence[Any]], tuple[Runner, int]]
LetRunCaptured = Callable[[object, int], bool]


def sizes_among(module: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """List the positions of the inputs of captured code that are numbers on which sizes of its tensors depend.

    Among them are sizes that turned out to be one number each, as those of a picture that is interpolated: the code is
    that of other captures, whose sizes are no inputs.
    """
    numbers = {i: value.node.expr.free_symbols for i, value in enumerate(inputs) if isinstance(value, torch.SymInt)}
    if not numbers:
        return []
    shown = tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])
    symbols = set[Any]().union(*(_symbols_of(value) for value in shown if isinstance(value, torch.Tensor)))
    return [p for p, its_symbols in numbers.items() if not its_symbols or not symbols.isdisjoint(its_symbols)]


def _symbols_of(tensor: torch.Tensor) -> set[Any]:
    numbers = (*tensor.shape, *(tensor.stride() if tensor.layout is torch.strided else ()))
    return set[Any]().union(*(n.node.expr.free_symbols for n in numbers if isinstance(n, torch.SymInt)))


class EachSize:
    """Captured code that is traced when it is first called with a size.

    Args:
        module: What Dynamo captured.
        sizes: Positions of the inputs that are sizes.
        trace: Gives what runs in the place of code of definite sizes, and the bytes of all its values, from that code
            and inputs without memory.
        let_run_captured: Lets this code run as captured where its sizes don't repeat, given the bytes of all its
            values at the largest size, and returns whether it may; called each time.
    """

    def __init__(
        self, module: fx.GraphModule, sizes: Sequence[int], trace: Trace, let_run_captured: LetRunCaptured
    ) -> None:
        count = len(module.graph.find_nodes(op="placeholder"))
        self._module = module
        self._written = checkpoints.as_written(module)
        self._sizes = tuple(sizes)
        self._others = tuple(position for position in range(count) if position not in self._sizes)
        self._trace = trace
        self._let_run_captured = let_run_captured
        self._unrepeated = 0  # sizes in a row
        self._largest_bytes = (0, 0)  # of the inputs of what was traced, and of all its values
        self._is_particular = False
        self._traced: OrderedDict[tuple[Any, ...], Runner] = OrderedDict()

    def run(self, *arguments: Any) -> Any:
        """Run what was traced for the sizes among the arguments; where that fails, the code as it was captured."""
        sizes = tuple(arguments[position] for position in self._sizes)
        others = [arguments[position] for position in self._others]
        if self._runs_captured(others):
            return self._written(*arguments)
        key = sizes, self._particulars(others)
        run = self._traced.get(key)
        if run is None:
            self._unrepeated += 1
            run = self._trace_for(sizes, others)
        elif self._unrepeated <= UNREPEATED:
            self._unrepeated = 0
        if key in self._traced:
            self._traced.move_to_end(key)
        return run(*others)

    def _runs_captured(self, others: Sequence[Any]) -> bool:
        """Whether to run the code as it was captured: no larger than what was traced, of which the bytes are known."""
        if self._unrepeated <= UNREPEATED:
            return False
        inputs_bytes, all_bytes = self._largest_bytes
        return self._let_run_captured(self, all_bytes) and _bytes_of(others) <= inputs_bytes

    def _trace_for(self, sizes: tuple[int, ...], others: Sequence[Any]) -> Runner:
        module = _with_numbers(self._module, dict(zip(self._sizes, sizes, strict=True)))
        devices = {value.device for value in others if isinstance(value, torch.Tensor)}
        generators = torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"])
        with generators, collecting_what_it_leaves():
            try:
                run, is_general, size_bytes = _trace_apart(module, others, self._trace)
                inputs_bytes, all_bytes = self._largest_bytes
                self._largest_bytes = max(inputs_bytes, _bytes_of(others)), max(all_bytes, size_bytes)
            except Exception as error:  # whatever AOTAutograd fails on
                dynamo.tell_of_failure(error)
                run, is_general = checkpoints.as_written(module), True
        self._is_particular = self._is_particular or not is_general
        self._traced[sizes, self._particulars(others)] = run
        if len(self._traced) > KEPT:
            self._traced.popitem(last=False)
        return run

    def _particulars(self, others: Sequence[Any]) -> tuple[Any, ...]:
        """Tell what a trace may hold for beside sizes: numbers, and how tensors lie in storages that they share."""
        if not self._is_particular:
            return ()
        storages: dict[int, list[tuple[int, int]]] = {}
        for position, value in enumerate(others):
            if tensor_state.is_dense(value):
                place = position, int(value.storage_offset())
                storages.setdefault(value.untyped_storage().data_ptr(), []).append(place)
        shared = [places for places in storages.values() if len(places) > 1]
        offsets = [(position, offset - places[0][1]) for places in shared for position, offset in places]
        return (*(value for value in others if not isinstance(value, torch.Tensor)), *offsets)


def _bytes_of(values: Sequence[Any]) -> int:
    return sum(value.nbytes for value in values if tensor_state.is_dense(value))


def _with_numbers(module: fx.GraphModule, numbers: Mapping[int, int]) -> fx.GraphModule:
    """Copy captured code with numbers in the place of some inputs."""
    graph = fx.Graph()
    inputs = list(module.graph.find_nodes(op="placeholder"))
    values: dict[fx.Node, Any] = {
        node: numbers[position] for position, node in enumerate(inputs) if position in numbers
    }
    for node in module.graph.nodes:
        if node not in values:
            values[node] = graph.node_copy(node, values.__getitem__)
            if node.op == "placeholder":
                values[node]._dynamo_source = node._dynamo_source
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    copy._param_name_to_source = module._param_name_to_source
    return copy


def _trace_apart(module: fx.GraphModule, values: Sequence[Any], trace: Trace) -> tuple[Runner, bool, int]:
    """Trace code after Dynamo has guarded it; say too whether what comes holds for all values of the same sizes.

    It doesn't where AOTAutograd asks for guards: on inputs that overlap, or on numbers that are no sizes.

    Returns:
        What runs, whether it holds for all values of the same sizes, and the bytes of all of its own values.
    """
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)  # other numbers stay symbols, whatever they are
    mode = FakeTensorMode(shape_env=shapes)
    context = TracingContext(mode)
    with tracing(context):
        inputs = [mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in values]
        run, size_bytes = trace(module, inputs)
    return run, not context.guards_context.aotautograd_guards and not shapes.guards, size_bytes
