"""The symbols that Dynamo has for the sizes of captured code, and what it computes from them.

Numbers in captured code are sums and products of these symbols, which a few samples tell, and quotients, rests and
extremes (`s // 2`, `Mod(s, 8)`, `Min(70, s)`), which no samples could. Those count as sizes of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from sympy.core.function import Application  # type: ignore[import-untyped]
from torch import fx

from ..records.expressions import Sizes
from . import tensor_state

SHARES = (0.83, 0.61, 1.27, 0.47, 0.92, 0.71)  # of a real size, that sizes of samples are near
MULTIPLES = (1, 2, 4, 8)  # of odd numbers, that sizes of samples are: code may ask for even ones
NUMBERS = "hiremate_numbers"  # in the metadata of code at definite sizes: the numbers of its symbols
GRAIN = 8  # kernels may compute multiples of it in another way
LEAST = 3  # size of a sample: at 1, and where 2 is the number of something, code is other code


class SizeSymbols:
    """The symbols for the sizes of captured code.

    Args:
        module: The code.
        positions: Those of its inputs that are sizes.
    """

    def __init__(self, module: fx.GraphModule, positions: Sequence[int]) -> None:
        inputs = module.graph.find_nodes(op="placeholder")
        numbers = [inputs[position].meta["example_value"] for position in positions]
        expressions = [number.node.expr if isinstance(number, torch.SymInt) else None for number in numbers]
        self._symbols = [e if e is not None and e.is_symbol else None for e in expressions]
        self._groups = (0,) * len(numbers)  # by position: sizes of a group were equal in all calls
        known = set(self._symbols)
        self._computed = [number for number in _computed(module) if number.free_symbols <= known]

    @property
    def vary(self) -> bool:
        """Whether any size is a symbol; sizes that turned out to be one number each are traced as they come."""
        return any(symbol is not None for symbol in self._symbols)

    @property
    def are_one(self) -> bool:
        """Whether all sizes are one symbol, of which nothing but sums and products is computed."""
        return len(set(self._symbols)) == 1 and not self._computed

    def with_computed(self, sizes: Sizes) -> Sizes:
        """Return sizes with the quotients, rests and extremes of them."""
        values = {s: size for s, size in zip(self._symbols, sizes, strict=True) if s is not None}
        return (*sizes, *(int(number.xreplace(values)) for number in self._computed))

    def learn(self, sizes: Sizes) -> bool:
        """Learn the sizes of a call; return whether some differ that were equal in all calls before.

        What was always equal stays equal in all that is made up: keys and values, a text and its mask. Kernels of
        PyTorch may read and write beyond their memory where it is not.
        """
        pairs = list(zip(self._groups, sizes, strict=True))
        before, self._groups = self._groups, tuple(map(pairs.index, pairs))
        return self._groups != before

    def smaller(self, sizes: Sizes) -> Sizes:
        """Return about half of real sizes, multiples of 8 where they are large enough: most samples are odd."""
        numbers = dict[int, int]()
        for group, size in zip(self._groups, sizes, strict=True):
            half = max(LEAST, size // 2)
            number = half // GRAIN * GRAIN or half
            while number in numbers.values():
                number += min(GRAIN, number)
            numbers.setdefault(group, min(number, size))
        return self._of_groups(numbers, sizes)

    def samples_near(self, sizes: Sizes, taken: Sequence[Sizes]) -> Iterator[Sizes]:
        """Yield sizes to trace the code at, each unlike all others of its dimension and of other dimensions.

        Odd ones come first, then even ones. Sizes that were equal in all calls are equal.

        Args:
            sizes: Real ones, learned before.
            taken: Sizes that were traced.
        """
        used = {number for sample in (*taken, sizes) for number in sample}
        for multiple, round_ in itertools.product(MULTIPLES, range(len(SHARES))):
            numbers = dict[int, int]()
            for symbol, group, size in zip(self._symbols, self._groups, sizes, strict=True):
                if symbol is not None and group not in numbers:
                    share = SHARES[(round_ + 2 * len(numbers)) % len(SHARES)]
                    number = max(LEAST, int(size * share / multiple)) | 1
                    number += bool(self._computed) and (round_ + len(numbers)) % 2  # odd ones tell no halves
                    while number * multiple in used:
                        number += 2
                    numbers[group] = number * multiple
                    used.add(number * multiple)
            yield self._of_groups(numbers, sizes)

    def _of_groups(self, numbers: Mapping[int, int], sizes: Sizes) -> Sizes:
        """Return the numbers of groups as sizes; where code has no symbol, a size is what it is."""
        columns = zip(self._symbols, self._groups, sizes, strict=True)
        return tuple(size if symbol is None else numbers[group] for symbol, group, size in columns)


def numbers_of(inputs: Sequence[fx.Node], sizes: Mapping[int, int]) -> dict[Any, int]:
    """Return the numbers of symbols, from the sizes among the inputs of captured code, by position."""
    shown = [(inputs[position].meta["example_value"], size) for position, size in sizes.items()]
    return {v.node.expr: size for v, size in shown if isinstance(v, torch.SymInt) and v.node.expr.is_symbol}


def at_numbers(values: Sequence[Any], numbers: Mapping[Any, int]) -> list[int]:
    """Return sizes as numbers, by those of symbols; a TypeError tells that a symbol has none."""
    return [int(v.node.expr.xreplace(numbers)) if isinstance(v, torch.SymInt) else int(v) for v in values]


def _computed(module: fx.GraphModule) -> list[Any]:
    shown = tensor_state.leaves([node.meta.get("example_value") for node in module.graph.nodes])
    tensors = [value for value in shown if isinstance(value, torch.Tensor) and value.layout is torch.strided]
    numbers = [n for value in tensors for n in (*value.shape, *value.stride())] + shown
    expressions = {number.node.expr for number in numbers if isinstance(number, torch.SymInt)}
    sums = {expression for expression in expressions if expression.is_Add and expression.has(Application)}
    computed = set[Any]().union(*(expression.atoms(Application) for expression in expressions))
    return [*sorted(sums, key=str), *sorted(computed, key=str)]  # rows of strided convolutions are `(s - 1) // 2 + 1`
