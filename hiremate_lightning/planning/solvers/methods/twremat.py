"""TW-Remat: recomputation along a balanced tree of separators, made from a tree decomposition of the graph.

Source: Kumar, Purohit, Svitkina, Vee, Wang, "Efficient Rematerialization for Deep Networks", NeurIPS 2019, whose
procedure REMAT is in `docs/formulation.md`.

Changed: REMAT computes the inputs of one backward node after the other, and holds the separators on the path to them.
A separator whose values, with those below it, take few bytes is a leaf, computed as a whole. The paper has no budget;
here, leaf sizes from nothing to everything are tried to meet one. The inputs of a node form a clique, so that one bag
has them all. The method ignores times: it recomputes values of another subtree, however long that takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from ..chain import ChainSpan, policy_of
from ..choices import Policy
from ..model import StepModel
from ..search import Search, strategy

LEAF_STEPS = 16  # leaf sizes to try, besides 0
LEAF_FACTOR = 0.7  # from one leaf size to the next
GAPS = (0.1, 0.0)  # free a separator after this share of the backward without a read below it


@dataclass(frozen=True, slots=True)
class Separator:
    """A node of a balanced tree: the values that no separator above has, and all values at or below it.

    `above` is the number of the separator above, -1 at the top.
    """

    above: int
    values: frozenset[int]
    below: frozenset[int]


@strategy("twremat")
def propose(search: Search) -> Iterator[Policy]:
    """Propose schedules of several leaf sizes, by bisection between sizes that fit and sizes that don't."""
    model = search.model
    separators = balanced(*tree_decomposition(neighbours_of(model)))
    total = sum(model.sizes[s] for s in model.choices)
    sizes = [total * LEAF_FACTOR**step for step in range(LEAF_STEPS)] + [0.0]
    for part in GAPS:
        first, last = 0, len(sizes) - 1
        while first <= last:
            middle = (first + last) // 2
            policy = policy_of(model, spans(model, separators, sizes[middle], int(part * len(model.reads))))
            yield policy
            if model.replay(policy).peak_bytes <= search.limit:
                last = middle - 1
            else:
                first = middle + 1


# ---------------------------------------------------------------- the tree


def neighbours_of(model: StepModel) -> dict[int, set[int]]:
    """Return the undirected graph of values: edges join a value and its sources, and values that are read together."""
    near: dict[int, set[int]] = {s: set() for s in model.choices if s in model.producer}
    groups = [(s, source) for s in near for source in model.needs[model.producer[s]]]
    for pair in (*groups, *(p for reads in model.reads for p in combinations(reads, 2))):
        a, b = pair
        if a in near and b in near and a != b:
            near[a].add(b)
            near[b].add(a)
    return near


def tree_decomposition(near: Mapping[int, set[int]]) -> tuple[list[frozenset[int]], list[int]]:
    """Eliminate values of least degree one by one; return the bags, and for each the later bag above it, or -1."""
    left = {value: set(others) for value, others in near.items()}
    heap = [(len(others), value) for value, others in left.items()]
    heapq.heapify(heap)
    bags, number_of = list[frozenset[int]](), dict[int, int]()
    while heap:
        degree, value = heapq.heappop(heap)
        if value not in left or degree != len(left[value]):
            continue
        others = left.pop(value)
        number_of[value] = len(bags)
        bags.append(frozenset({value, *others}))
        for other in sorted(others):
            left[other] |= others
            left[other] -= {other, value}
            heapq.heappush(heap, (len(left[other]), other))
    above = [min((number_of[v] for v in bag if number_of[v] > i), default=-1) for i, bag in enumerate(bags)]
    return bags, above


def balanced(bags: list[frozenset[int]], above: list[int]) -> list[Separator]:
    """Balance a tree of bags: a subtree below a separator has at most half of its bags; return the top first."""
    near: list[list[int]] = [[] for _ in bags]
    for bag, other in enumerate(above):
        if other >= 0:
            near[bag].append(other)
            near[other].append(bag)
    parts, taken = list[tuple[int, frozenset[int]]](), set[int]()
    stack = [(root, -1, frozenset[int]()) for root, other in enumerate(above) if other < 0]
    while stack:
        first, parent, owned = stack.pop()
        middle = _middle(near, taken, first)
        taken.add(middle)
        values = bags[middle] - owned
        parts.append((parent, values))
        number, owned = len(parts) - 1, owned | values
        stack.extend((other, number, owned) for other in near[middle] if other not in taken)
    below = [set(values) for _, values in parts]
    for number in reversed(range(len(parts))):
        if parts[number][0] >= 0:
            below[parts[number][0]] |= below[number]
    return [Separator(parent, values, frozenset(under)) for (parent, values), under in zip(parts, below, strict=True)]


def _middle(near: list[list[int]], taken: set[int], first: int) -> int:
    """Return the bag of a tree whose removal leaves trees of at most half of the bags."""
    order, parent = [first], {first: -1}
    for bag in order:
        fresh = [other for other in near[bag] if other not in taken and other not in parent]
        parent.update((other, bag) for other in fresh)
        order.extend(fresh)
    size = dict.fromkeys(order, 1)
    for bag in reversed(order[1:]):
        size[parent[bag]] += size[bag]
    middle = first
    while heavy := [o for o in near[middle] if parent.get(o) == middle and 2 * size[o] > len(order)]:
        middle = heavy[0]
    return middle


# ---------------------------------------------------------------- the schedule


def spans(model: StepModel, separators: list[Separator], leaf_bytes: float, gap: int = 0) -> dict[int, ChainSpan]:
    """Return the values held in each part of the backward: the separators on the path to its reads, and its leaf.

    A leaf is a separator with all values below it, of at most `leaf_bytes`. A separator is freed if nothing below it is
    read for more than `gap` positions of the backward.
    """
    values, is_in_leaf = list[frozenset[int]](), list[bool]()  # values held for each separator; a leaf holds all below
    for separator in separators:
        is_below = separator.above >= 0 and is_in_leaf[separator.above]
        is_leaf = not is_below and sum(model.sizes[s] for s in separator.below) <= leaf_bytes
        is_in_leaf.append(is_below or is_leaf)
        values.append(frozenset() if is_below else separator.below if is_leaf else separator.values)
    owner = {s: number for number, separator in enumerate(separators) for s in separator.values}
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    last = dict[int, int]()
    for position, reads in enumerate(model.all_reads):
        for number in _on_the_way(separators, {owner[s] for s in reads if s in owner}):
            if position - last.get(number, -gap - 2) > gap + 1:
                if number in last:
                    ends.setdefault(last[number] + 1, []).append(number)
                begins.setdefault(position, []).append(number)
            last[number] = position
    for number, position in last.items():
        ends.setdefault(position + 1, []).append(number)
    held, now = {0: ChainSpan(frozenset(), frozenset())}, set[int]()
    for position in sorted({*begins, *ends}):
        now = now.difference(ends.get(position, ())).union(begins.get(position, ()))
        if now:
            held[position] = ChainSpan(frozenset().union(*(values[number] for number in now)), frozenset())
    return held


def _on_the_way(separators: list[Separator], numbers: set[int]) -> set[int]:
    """Return the separators of these numbers and all separators above them."""
    reached = set[int]()
    for number in numbers:
        while number >= 0 and number not in reached:
            reached.add(number)
            number = separators[number].above
    return reached
