"""Read the symbolic sizes that Dynamo put into captured code, and copy the code with numbers in their place.

Numbers in captured code are sums and products of these symbols, which a few samples determine, and quotients,
remainders and extremes (`s // 2`, `Mod(s, 8)`, `Min(70, s)`), which samples can't determine: these count as additional
sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from sympy.core.function import Application  # type: ignore[import-untyped]
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..records.expressions import Sizes
from . import captured_code, tensor_state

SHARES = (0.83, 0.61, 1.27, 0.47, 0.92, 0.71)  # sizes of samples, as shares of a real size
MULTIPLES = (1, 2, 4, 8)  # a sample's size is an odd number times one of these: code may need even sizes
NUMBERS = "hiremate_numbers"  # metadata key of code at fixed sizes: the number of each symbol
GRAIN = 8  # kernels may compute multiples of it differently
LEAST = 3  # smallest size of a sample: code is specialised at 1, and 2 may equal one of its constants
Layout = tuple[Sizes, Sizes]  # shape and strides of a tensor
T = TypeVar("T")


def sizes_among(module: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Return the positions of the inputs of captured code that are numbers on which sizes of its tensors depend."""
    numbers = {i: value.node.expr.free_symbols for i, value in enumerate(inputs) if isinstance(value, torch.SymInt)}
    if not numbers:
        return []
    shown = [value for value in values_in(module) if isinstance(value, torch.Tensor)]
    symbols = set[Any]().union(*(size.free_symbols for size in expressions_in(shown)))
    # Numbers without symbols were specialised, as the sizes of an image that is interpolated.
    return [p for p, its_symbols in numbers.items() if not its_symbols or not symbols.isdisjoint(its_symbols)]


class SizeSymbols:
    """The symbols of captured code's sizes, which are its inputs at `positions`."""

    def __init__(self, module: fx.GraphModule, positions: Sequence[int]) -> None:
        self._module, self._positions = module, tuple(positions)
        self._inputs = module.graph.find_nodes(op="placeholder")
        numbers = [self._inputs[position].meta["example_value"] for position in positions]
        expressions = [number.node.expr if isinstance(number, torch.SymInt) else None for number in numbers]
        self._symbols = [e if e is not None and e.is_symbol else None for e in expressions]
        self._groups = (0,) * len(numbers)  # group of each size: sizes of one group were equal in all calls
        symbols = set(self._symbols)
        self._computed = [number for number in _computed(module) if number.free_symbols <= symbols]

    @property
    def vary(self) -> bool:
        """Whether any size is a symbol; a size that Dynamo specialised to one number is traced as it is."""
        return any(symbol is not None for symbol in self._symbols)

    @property
    def are_one(self) -> bool:
        """Whether all sizes are the same symbol, and code computes only sums and products of it."""
        return len(set(self._symbols)) == 1 and not self._computed

    def with_computed(self, sizes: Sizes) -> Sizes:
        """Return the sizes, followed by the quotients, remainders and extremes that code computes from them."""
        values = self._values(sizes)
        return (*sizes, *(int(number.xreplace(values)) for number in self._computed))

    def learn(self, sizes: Sizes) -> bool:
        """Split the groups by the sizes of a call; return whether sizes differ that were equal in all calls before.

        If made-up sizes differ where real ones are equal, as those of keys and values, kernels may write out of bounds.
        """
        pairs = list(zip(self._groups, sizes, strict=True))
        before, self._groups = self._groups, tuple(map(pairs.index, pairs))
        return self._groups != before

    def smaller(self, sizes: Sizes) -> Sizes:
        """Return about half of each real size, a multiple of 8 if it is large enough: most samples are odd."""
        numbers = dict[int, int]()
        for group, size in zip(self._groups, sizes, strict=True):
            half = max(LEAST, size // 2)
            number = half // GRAIN * GRAIN or half
            while number in numbers.values():
                number += min(GRAIN, number)
            numbers.setdefault(group, min(number, size))
        return self._of_groups(numbers, sizes)

    def samples_near(self, sizes: Sizes, tried: Sequence[Sizes]) -> Iterator[Sizes]:
        """Yield sizes near the real ones to trace the code at, unlike those in `tried` and those of other dimensions.

        Odd sizes come first, then even ones. Sizes of one group are equal.
        """
        used = {number for sample in (*tried, sizes) for number in sample}
        for multiple, round_ in itertools.product(MULTIPLES, range(len(SHARES))):
            numbers = dict[int, int]()
            for symbol, group, size in zip(self._symbols, self._groups, sizes, strict=True):
                if symbol is not None and group not in numbers:
                    share = SHARES[(round_ + 2 * len(numbers)) % len(SHARES)]
                    number = max(LEAST, int(size * share / multiple)) | 1
                    number += bool(self._computed) and (round_ + len(numbers)) % 2  # odd sizes don't show `s // 2`
                    while number * multiple in used:
                        number += 2
                    numbers[group] = number * multiple
                    used.add(number * multiple)
            yield self._of_groups(numbers, sizes)

    def _of_groups(self, numbers: Mapping[int, int], sizes: Sizes) -> Sizes:
        """Return each size as the number of its group; a size without a symbol stays as it is."""
        columns = zip(self._symbols, self._groups, sizes, strict=True)
        return tuple(size if symbol is None else numbers[group] for symbol, group, size in columns)

    def _values(self, sizes: Sizes) -> dict[Any, int]:
        """Return the number of each symbol."""
        return {s: size for s, size in zip(self._symbols, sizes, strict=True) if s is not None}

    def layouts_at(self, sizes: Sizes) -> list[Layout | None] | None:
        """Return the layouts of the code's inputs at other sizes.

        Returns for each input its shape and strides, or None if these are the same at all sizes; None for all if the
        code's guards exclude the sizes.
        """
        inputs, values = [node.meta.get("example_value") for node in self._inputs], self._values(sizes)
        environment: Any = None
        for symbol, position, size in zip(self._symbols, self._positions, sizes, strict=True):
            if symbol is None:
                if int(inputs[position]) != size:
                    return None  # Dynamo specialised it to another number
                continue
            environment = inputs[position].node.shape_env
            bounds = environment.var_to_range[symbol]
            if not bounds.lower <= size <= bounds.upper:
                return None
        if any(guard.expr.xreplace(values) in (False,) for guard in (environment.guards if values else ())):
            return None  # a guard that can't be evaluated is neither
        return [
            (tuple(at_numbers(value.shape, values)), tuple(at_numbers(value.stride(), values)))
            if isinstance(value, torch.Tensor) and any(size.free_symbols for size in expressions_in([value]))
            else None
            for value in inputs
        ]

    def code_at(self, sizes: Sizes) -> fx.GraphModule:
        """Return a copy of the code with numbers in place of the size symbols."""
        module, graph, symbols = self._module, fx.Graph(), self._values(sizes)
        placed = zip(self._positions, sizes, strict=True)
        values: dict[fx.Node, Any] = {self._inputs[position]: size for position, size in placed}
        for node in module.graph.nodes:
            if node not in values:
                number = _numbers_at(node, symbols)
                if number is None and node.op == "call_method" and isinstance(values.get(node.args[0]), int):
                    size, *arguments = fx.node.map_arg(node.args, values.__getitem__)
                    number = getattr(size, str(node.target))(*arguments)  # `__index__` of a size, for example
                values[node] = graph.node_copy(node, values.__getitem__) if number is None else number
                if node.op == "placeholder":
                    values[node]._dynamo_source = node._dynamo_source
        copy = captured_code.module_of(module, graph)
        copy.meta = {**module.meta, NUMBERS: symbols}
        copy._param_name_to_source = module._param_name_to_source
        return copy


def at_numbers(values: Sequence[Any], numbers: Mapping[Any, int]) -> list[int]:
    """Return sizes as numbers, given those of the symbols; raise TypeError if a symbol has none."""
    return [int(v.node.expr.xreplace(numbers)) if isinstance(v, torch.SymInt) else int(v) for v in values]


def _numbers_at(node: fx.Node, numbers: Mapping[Any, int]) -> Any:
    """Return the size or sizes that a node computes, as numbers; None if it computes something else."""
    value = node.meta.get("example_value")
    if node.op in ("placeholder", "output") or not isinstance(value, (torch.SymInt, torch.Size)):
        return None
    sizes = [value] if isinstance(value, torch.SymInt) else list(value)
    if any(not size.free_symbols <= numbers.keys() for size in expressions_in(sizes)):
        return None
    return at_numbers(sizes, numbers)[0] if isinstance(value, torch.SymInt) else torch.Size(at_numbers(sizes, numbers))


def values_in(module: fx.GraphModule) -> list[Any]:
    """Return the example values of captured code's nodes, with containers flattened."""
    return tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])


def expressions_in(values: Sequence[Any]) -> set[Any]:
    """Return the symbolic expressions of numbers, and of the sizes and strides of tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = [n for t in tensors for n in (*t.shape, *(t.stride() if t.layout is torch.strided else ()))]
    return {number.node.expr for number in (*numbers, *values) if isinstance(number, torch.SymInt)}


def _computed(module: fx.GraphModule) -> list[Any]:
    expressions = expressions_in(values_in(module))
    sums = {expression for expression in expressions if expression.is_Add and expression.has(Application)}
    computed = set[Any]().union(*(expression.atoms(Application) for expression in expressions))
    return [*sorted(sums, key=str), *sorted(computed, key=str)]  # rows of strided convolutions are `(s - 1) // 2 + 1`


def _without_memory(mode: FakeTensorMode, value: Any, layout: Layout | None) -> Any:
    """Return a fake tensor for a tensor, in its own layout or another one; return other inputs as they are."""
    if layout is None or not isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value
    with mode:
        other = torch.empty_strided(*layout, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)
        return other if value.is_leaf else other.clone()


def trace_apart(
    module: fx.GraphModule,
    values: Sequence[Any],
    trace: Callable[[fx.GraphModule, Sequence[Any]], T],
    layouts: Sequence[Layout | None],
) -> tuple[T, bool]:
    """Trace code after Dynamo has guarded it, with each input in another layout or its own.

    Returns also whether the trace holds for all inputs of the same sizes. It does not if AOTAutograd asks for guards:
    on inputs that overlap, or on numbers that are no sizes.
    """
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)  # other numbers stay symbols, 0 and 1 too
    mode = FakeTensorMode(shape_env=shapes)
    context = TracingContext(mode)
    with tracing(context):
        inputs = [_without_memory(mode, value, layout) for value, layout in zip(values, layouts, strict=True)]
        run = trace(module, inputs)
    return run, not context.guards_context.aotautograd_guards and not shapes.guards
