"""Code cut into segments that are computed twice, so that its gradients take little memory and keep their bits.

A plain backward keeps all that a forward saves. Where that does not fit, the code runs segment by segment, each in
`torch.utils.checkpoint`: only what passes from one segment to the next is kept, or not even that is, but offloaded.
Autograd's graph is that of the code itself, so gradients are added in the same order.

`Observed` runs the code once without gradients, and sees what each node saves, makes and writes to. `cut` chooses the
segments by that. Where none fit, `keeping_little` offloads all that autograd saves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from ..measuring.saved_offload import LEAST_OFFLOAD, offloading_saved
from ..torch_private import captured_code, tensor_state

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of segments that are tried
_NUMBERS = (bool, int, float, torch.SymInt)


@dataclass
class Seen:
    """The effects of a node."""

    # Numbers of the blocks that autograd would keep for its backward, beside those that the code is given.
    saved: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)  # numbers of the blocks that it has written to
    sets_state: bool = False  # whether it returns neither tensors nor numbers, as autocast does when it is entered
    is_inside: bool = False  # whether a transform of torch.func is under way after it


class Observed(fx.Interpreter):
    """Runs code once, and records the effects of its nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[fx.Node, Seen] = {}  # effects of each called node
        self.blocks_of: dict[fx.Node, frozenset[int]] = {}  # numbers of the blocks of memory that its result lies on
        self.sizes: list[int] = []  # bytes of each block
        self.given = set[int]()  # numbers of the blocks that were there before
        self._blocks: dict[int, tuple[int, Callable[[], bool]]] = {}  # by storage: number, and whether it lives
        self._now = Seen()

    def __call__(self, *arguments: Any) -> Any:
        """Run the code."""
        self.given.update(map(self._block_of, _tensors(arguments)))
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda nothing: nothing):
            try:
                return self.run(*arguments)
            finally:  # hooks may outlive the run, and so may this interpreter: its values must not
                self.args_iter = iter(())
                self.env.clear()

    def wrote(self, tensor: torch.Tensor) -> None:
        """Note that the node under way may write to a tensor: whoever runs the code tells."""
        self._now.written.add(self._block_of(tensor))

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self._now = seen = Seen()
        result = super().run_node(n)
        if n.op == "output":
            return result
        self.blocks_of[n] = blocks = frozenset(map(self._block_of, _tensors(result)))
        if n.op == "get_attr":
            self.given |= blocks
        elif n.op != "placeholder":
            seen.sets_state = not all(isinstance(v, (torch.Tensor, *_NUMBERS)) for v in tensor_state.leaves(result))
            seen.is_inside = tensor_state.is_transforming()
            self.seen[n] = seen
        return result

    def _save(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            block = self._block_of(tensor)
            if block not in self.given:
                self._now.saved.add(block)

    def _block_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the block that a tensor lies on; another one where the last one there has died."""
        tensor = tensor_state.untransformed(tensor)
        storage = tensor_state.storage_id(tensor)
        known = self._blocks.get(storage)
        if known is not None and known[1]():
            return known[0]
        self._blocks[storage] = len(self.sizes), tensor_state.watch_storage(tensor)
        self.sizes.append(tensor.untyped_storage().nbytes())
        return len(self.sizes) - 1


@dataclass(frozen=True)
class Segment:
    """Some nodes that follow each other."""

    module: fx.GraphModule  # their code: inputs as arguments, outputs as a tuple
    inputs: tuple[fx.Node, ...]  # values that pass in
    outputs: tuple[fx.Node, ...]  # values that pass out
    # Positions of the inputs that the code changes in place. A second run gets copies that were made before the first
    # one.
    changing: tuple[int, ...]
    once: bool  # whether it runs once, and keeps its saved tensors


def _run(graph: fx.Graph, segments: Sequence[Segment], *arguments: Any) -> Any:
    """Run code segment by segment; each value is dropped after the last segment that reads it."""
    values = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    results, last = graph.output_node(), {node: segment for segment in segments for node in segment.inputs}
    returned = set(results.all_input_nodes)
    for segment in segments:
        inputs = [values[node] for node in segment.inputs]
        values.update(zip(segment.outputs, _call(segment, inputs), strict=True))
        for node in segment.inputs:
            if last[node] is segment and node not in returned:
                del values[node]
    return fx.map_arg(results.args[0], values.__getitem__)


def _call(segment: Segment, inputs: Sequence[Any]) -> tuple[Any, ...]:
    if segment.once:
        return segment.module(*inputs)  # type: ignore[no-any-return]
    changing, count = {i: inputs[i] for i in segment.changing}, len(inputs)
    with torch.no_grad():
        next_time = {i: value.clone() for i, value in changing.items()}

    def run(*others: Any) -> Any:
        nonlocal changing
        rest, now, changing = iter(others), changing, next_time
        return segment.module(*(now[i] if i in now else next(rest) for i in range(count)))

    others = (value for i, value in enumerate(inputs) if i not in changing)
    return checkpoint(run, *others, use_reentrant=False)  # type: ignore[no-any-return]


def cut(
    module: fx.GraphModule, observed: Observed, free_bytes: int, can_offload: bool = True
) -> Callable[..., Any] | None:
    """Cut observed code into as few segments as fit; None where no cut that was tried fits.

    The free bytes are the most that values of the forward may take at any moment of a backward. Values that pass
    between segments are offloaded where they don't fit so, and can be.
    """
    shape = _Shape(observed)
    cuts = [bounds for count in COUNTS if (bounds := shape.bounds(count)) is not None]
    for is_offloaded, bounds in product((False, True) if can_offload else (False,), cuts):
        if shape.peak_bytes(bounds, is_offloaded) <= free_bytes:
            run = partial(_run, module.graph, [shape.segment(module, first, end) for first, end in bounds])
            return offloading_saved(run, _constants(module)) if is_offloaded else run
    return None


def keeping_little(module: fx.GraphModule, observed: Observed, free_bytes: int) -> Callable[..., Any] | None:
    """Offload all that autograd saves, except small values; None where those and the values of one node don't fit."""
    of_nodes = [[observed.sizes[block] for block in seen.saved] for seen in observed.seen.values()]
    small_bytes = sum(size for sizes in of_nodes for size in sizes if size < LEAST_OFFLOAD)
    needed_bytes = small_bytes + max(map(sum, of_nodes), default=0)
    return offloading_saved(module, _constants(module)) if needed_bytes <= free_bytes else None


class _Shape:
    """Nodes in their order, and the values that pass between them."""

    def __init__(self, observed: Observed) -> None:
        self._nodes, self._seen = list(observed.seen), list(observed.seen.values())
        self._blocks_of, self._sizes, given = observed.blocks_of, observed.sizes, observed.given
        made, read, written = dict[int, int](), dict[int, int](), dict[int, int]()
        for index, (node, seen) in enumerate(observed.seen.items()):
            for block in self._blocks_of[node] - given:
                made.setdefault(block, index)
            for source in node.all_input_nodes:
                read |= dict.fromkeys(self._blocks_of[source] & made.keys(), index)
            written |= dict.fromkeys(seen.written & made.keys(), index)
        self._made, self._read = made, read
        steps = [0] * (len(self._nodes) + 1)
        for block, last in read.items():
            if last > made[block]:
                steps[made[block] + 1] += self._sizes[block]
                steps[last + 1] -= self._sizes[block]
        self._passing_bytes = list(accumulate(steps))  # by place, of values that are made before and read after it
        self._changed = {block for seen in self._seen for block in seen.written} & given
        self._may_cut = [True, *(not seen.is_inside for seen in self._seen)]
        for block, index in written.items():  # a value that is changed in place must be made in the same segment
            self._may_cut[made[block] + 1 : index + 1] = [False] * (index - made[block])

    def bounds(self, count: int) -> list[tuple[int, int]] | None:
        """Cut into about `count` segments, at places where few bytes pass.

        A node that sets state is a segment of its own. One inside of a transformation makes the whole transformation
        a segment. Returns None where there is no place to cut around such a node.
        """
        forced = self._around_state()
        if forced is None:
            return None
        cuts, start, limit_bytes = [0], 0, self._saved_bytes(0, len(self._nodes)) // count
        saved, saved_bytes = set[int](), 0
        for index, seen in enumerate(self._seen):
            if index in forced and index > start:
                cuts.append(index)
                start, saved, saved_bytes = index, set(), 0
            saved_bytes += sum(self._sizes[block] for block in seen.saved - saved)
            saved |= seen.saved
            if saved_bytes <= limit_bytes:
                continue
            allowed = [i for i in range((start + index) // 2 + 1, index + 1) if self._may_cut[i]]
            if allowed:
                start = min(allowed, key=lambda place: (self._passing_bytes[place], -place))
                cuts.append(start)
                saved = set[int]().union(*(seen.saved for seen in self._seen[start : index + 1]))
                saved_bytes = sum(self._sizes[block] for block in saved)
        return list(zip(cuts, [*cuts[1:], len(self._nodes)], strict=True))

    def _around_state(self) -> set[int] | None:
        """Return the places to cut before and after each node that sets state; None where one has no such place."""
        allowed = [place for place, may_cut in enumerate(self._may_cut) if may_cut]
        forced = set[int]()
        for index, seen in enumerate(self._seen):
            if seen.sets_state:
                after = bisect_right(allowed, index)
                if after == len(allowed):
                    return None
                forced |= {allowed[after - 1], allowed[after]}
        return forced

    def peak_bytes(self, bounds: Sequence[tuple[int, int]], is_offloaded: bool) -> int:
        """Return the most bytes of the forward that live in a backward: of passed values, and of a segment's own.

        Where values that pass are offloaded, only those that pass at the segment live with it.
        """
        passed, kept_bytes, peak_bytes = set[int](), 0, 0
        for start, end in bounds:
            passed = set() if is_offloaded else passed
            passed.update(block for block, last in self._read.items() if self._made[block] < start <= last)
            passed_bytes = sum(self._sizes[block] for block in passed)
            peak_bytes = max(peak_bytes, passed_bytes + kept_bytes + self._own_bytes(start, end, passed))
            is_kept = not is_offloaded and self._runs_once(start, end)
            kept_bytes += self._saved_bytes(start, end, passed) if is_kept else 0
        return peak_bytes

    def _own_bytes(self, start: int, end: int, beside: Collection[int]) -> int:
        """Return the most bytes that live while a segment runs again and saves, beside some blocks."""
        saved, live, peak_bytes = set[int](), set[int](), 0
        for index in range(start, end):
            saved |= self._seen[index].saved
            live |= saved | self._blocks_of[self._nodes[index]] & self._made.keys()
            peak_bytes = max(peak_bytes, sum(self._sizes[block] for block in live if block not in beside))
            live = {block for block in live if block in saved or self._read.get(block, 0) > index}
        return peak_bytes

    def _saved_bytes(self, start: int, end: int, beside: Collection[int] = ()) -> int:
        """Return the bytes that nodes between two places save, beside some blocks."""
        saved = set[int]().union(*(seen.saved for seen in self._seen[start:end]))
        return sum(self._sizes[block] for block in saved if block not in beside)

    def _runs_once(self, start: int, end: int) -> bool:
        """Whether a second run would go wrong: nodes set state, or get the same memory twice and change it."""
        if any(seen.sets_state for seen in self._seen[start:end]):
            return True
        own = set(self._nodes[start:end])
        inputs = dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in own)
        changed = [block for node in inputs for block in self._blocks_of[node] & self._changed]
        return len(set(changed)) < len(changed)

    def segment(self, module: fx.GraphModule, start: int, end: int) -> Segment:
        """Make a segment of the nodes between two places."""
        nodes, graph, copies = self._nodes[start:end], fx.Graph(), dict[fx.Node, fx.Node]()
        own = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        inputs = tuple(node for node in read if node not in own and node.op != "get_attr")
        copies |= {node: graph.placeholder(node.name) for node in inputs}
        copies |= {node: graph.node_copy(node) for node in read if node.op == "get_attr"}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        outputs = tuple(node for node in nodes if not own.issuperset(node.users))
        graph.output(tuple(copies[node] for node in outputs))
        changing = tuple(i for i, node in enumerate(inputs) if self._blocks_of[node] & self._changed)
        return Segment(captured_code.module_of(module, graph), inputs, outputs, changing, self._runs_once(start, end))


def _constants(module: fx.GraphModule) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tensor_state.leaves(values) if tensor_state.is_dense(value)]
