"""A schedule: the straight-line program of one training step, and how a solution is lowered to it.

The forward part runs the forward nodes in order. At the turn only `saved` tensors, and tensors that the caller holds,
survive. The backward part runs backward nodes and, before some of them, forward nodes once more. A tensor is freed
after its last use, and again after each recomputation. `lower` inserts these `Free`, so that simulator and executor see
the same ones. A storage may be offloaded to the host's memory between a copy out and a copy in (`offload.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .graph import Direction, Graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a node, which defines all its outputs, again if it ran before."""

    node: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the last reference to a tensor."""

    tensor: int


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Begin to copy a storage to the host while the device computes; it can still be read."""

    storage: int


@dataclass(frozen=True, slots=True)
class WaitOut:
    """Wait until a storage has been copied out, and free its memory on the device."""

    storage: int


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Take memory on the device for a storage that is offloaded, and begin to copy it in."""

    storage: int


@dataclass(frozen=True, slots=True)
class WaitIn:
    """Wait until a storage has been copied in; now it can be read, and the memory of the host is free."""

    storage: int


Copying = CopyOut | WaitOut | CopyIn | WaitIn
Operation = Compute | Free | Copying


@dataclass(frozen=True, slots=True)
class Schedule:
    """Operations of the forward and of the backward, and the tensors handed from one to the other."""

    forward: tuple[Operation, ...]  # operations up to the turn
    saved: tuple[int, ...]  # tensors handed to the backward: the inputs that it reads and the activations that are kept
    backward: tuple[Operation, ...]  # operations after the turn

    def recomputed(self, graph: Graph) -> tuple[int, ...]:
        """List the forward nodes that run in the backward, once for each run."""
        nodes = (op.node for op in self.backward if isinstance(op, Compute))
        return tuple(node for node in nodes if graph.nodes[node].direction is Direction.FORWARD)

    def saved_on_device(self, graph: Graph) -> tuple[int, ...]:
        """List the tensors that are handed to the backward and stay on the device."""
        offloaded = {operation.storage for operation in self.forward if isinstance(operation, CopyOut)}
        return tuple(tensor for tensor in self.saved if graph.tensors[tensor].storage not in offloaded)

    def decisions(self, graph: Graph) -> tuple[tuple[int, ...], ...]:
        """Return the decisions that were lowered to it."""
        rows: list[list[int]] = [[]]
        for operation in self.backward:
            if not isinstance(operation, Compute):
                continue
            if graph.nodes[operation.node].direction is Direction.FORWARD:
                rows[-1].append(operation.node)
            else:
                rows.append([])
        return tuple(tuple(row) for row in rows)


def lower(graph: Graph, recompute: Sequence[Sequence[int]]) -> Schedule:
    """Return the schedule of decisions. It saves the forward tensors that the backward reads before recomputing them.

    Decisions are R: for each position of `graph.backward` the forward nodes that run just before it, in order; one more
    entry may follow, for nodes that only the returned gradients need.
    """
    order: list[int] = []
    for position, before in enumerate(recompute):
        order.extend(before)
        if position < len(graph.backward):
            order.append(graph.backward[position])
    stay = {*graph.inputs, *graph.held}
    backward, read_first = _with_frees(graph, order, set(graph.gradients), stay)
    unread = tuple(Free(t) for t in graph.tangents if t not in read_first)
    saved = tuple(sorted(read_first.difference(graph.tangents)))
    survive = {*saved, *stay}
    leaving = tuple(Free(t) for t in dict.fromkeys(graph.outputs) if t not in survive)
    forward, _ = _with_frees(graph, graph.forward, {*saved, *graph.outputs}, stay)
    return Schedule(forward + leaving, saved, unread + backward)


def _with_frees(
    graph: Graph, order: Sequence[int], returned: set[int], stay: set[int]
) -> tuple[tuple[Operation, ...], set[int]]:
    """Add the frees of a straight-line program by liveness, from its end.

    `returned` tensors are read at the end, `stay` tensors are never freed. Returns the operations, and the tensors that
    must exist at their start.
    """
    reversed_operations: list[Operation] = []
    live, needed = returned | stay, set(returned)
    for index in reversed(order):
        node = graph.nodes[index]
        dead = [t for t in node.outputs if t not in live]
        live.difference_update(node.outputs)
        needed.difference_update(node.outputs)
        dead += [t for t in node.inputs if t not in live]
        live.update(node.inputs)
        needed.update(node.inputs)
        reversed_operations.extend(Free(t) for t in reversed(dead))
        reversed_operations.append(Compute(index))
    return tuple(reversed(reversed_operations)), needed


def keep_all(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the decisions that recompute nothing."""
    return ((),) * (len(graph.backward) + 1)


def eager_decisions(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Return the decisions of eager PyTorch: calls of `torch.utils.checkpoint` are recomputed, other values are saved.

    A call is recomputed, up to its last value that the backward needs, before the first backward node that reads such a
    value. Values of the call that other code reads in the forward are saved.
    """
    calls: dict[int, list[int]] = {}
    for index in graph.forward:
        node = graph.nodes[index]
        if node.checkpoint is not None and not node.is_mutating:
            calls.setdefault(node.checkpoint, []).append(index)
    if not calls:
        return keep_all(graph)
    makers = {t: n for members in calls.values() for n in members for t in graph.nodes[n].outputs}
    call_of = {t: call for call, members in calls.items() for n in members for t in graph.nodes[n].outputs}
    missing = {t for t in call_of if graph.tensors[t].storage is not None}.difference(graph.outputs, graph.held)
    missing.difference_update(t for node in graph.nodes if node.is_saved for t in node.outputs)
    for index in graph.forward:
        node = graph.nodes[index]
        missing.difference_update(t for t in node.inputs if call_of.get(t) != node.checkpoint)
    read = [graph.nodes[index].inputs for index in graph.backward] + [graph.gradients]
    wanted, available = {t for inputs in read for t in inputs} & missing, set(range(len(graph.tensors))) - missing
    rows = []
    for inputs in read:
        row: list[int] = []
        for tensor in inputs:
            if tensor not in available:
                call = call_of[tensor]
                needed = (t for t in wanted if call_of[t] == call)
                again = {n for t in needed for n in must_run(t, available, makers, graph.reads, graph.makes)}
                row += (n for n in calls[call] if n in again)
        rows.append(tuple(row))
    return tuple(rows)


def with_checkpoints(graph: Graph, calls: Iterable[Sequence[int]]) -> Graph:
    """Return a copy in which the user's code runs each listed sequence of nodes in `torch.utils.checkpoint`."""
    nodes = list(graph.nodes)
    for members in calls:
        for index in members:
            nodes[index] = replace(nodes[index], checkpoint=members[0])
    return replace(graph, nodes=tuple(nodes))


def ensure(graph: Graph, tensor: int, available: set[int], before: list[int]) -> None:
    """Append to `before` the nodes that must run for a tensor to be available."""

    def name(index: int) -> str:
        return graph.tensors[index].name

    before.extend(must_run(tensor, available, graph.recomputers, graph.reads, graph.makes, name=name))


def must_run(
    wanted: int,
    available: set[int],
    makers: Sequence[int | None] | Mapping[int, int],
    reads: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    makes: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    waiting: list[int] | None = None,
    name: Callable[[int], str] = str,
) -> Iterator[int]:
    """Yield the nodes that must run for a value to be available, each after the nodes that it reads from.

    Values are tensors or storages. A node's outputs are added to `available` when it is yielded. `waiting` receives the
    values that wait for the yielded node: their available inputs must stay. No recursion, because chains have thousands
    of nodes.
    """
    stack = [] if waiting is None else waiting
    stack.append(wanted)
    while stack:
        top = stack[-1]
        if top in available:
            stack.pop()
            continue
        node = makers[top]
        assert node is not None, f"backward tensor {name(top)} is read before it is computed"
        missing = [value for value in reads[node] if value not in available]
        if missing:
            stack.extend(reversed(missing))
            continue
        available.update(makes[node])
        stack.pop()
        yield node
