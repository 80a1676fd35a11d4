"""The data-flow graph of one training step, forward and backward, without torch.

A `Node` is one computation. A `Tensor` is one value. Several tensors may share one `Storage` (views, aliases): bytes
are counted in storages, never in tensors. Records refer to each other by their positions in `Graph.nodes`,
`Graph.tensors` and `Graph.storages`, so that a graph is hashable and comparable.

The backward recomputes a forward tensor by running its recomputer: the *replay* node of its producer if there is one,
else the producer itself if it is deterministic. Without either the tensor can only be saved. A replay node rebuilds the
producer's outputs: a dropout's output from its input and mask, the mask from the generator's state, a batch norm's
output from its statistics.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

OUTSIDE = "outside"  # op of a node that stands for uncaptured code, for example between forward and backward


class Direction(str, Enum):
    """The half of the training step to which a node belongs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StorageKind(str, Enum):
    """The contents of a storage; only `ACTIVATION`, `GRADIENT` and `TANGENT` bytes come and go within a step."""

    PARAMETER = "parameter"
    INPUT = "input"  # buffers, the batch, and other tensors that exist before the step
    ACTIVATION = "activation"  # allocated by a forward node
    GRADIENT = "gradient"  # allocated by a backward node
    TANGENT = "tangent"  # gradient of an output, handed in by the caller's backward

    @property
    def is_resident(self) -> bool:
        """Whether the bytes exist before the step and after it."""
        return self in (StorageKind.PARAMETER, StorageKind.INPUT)


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory."""

    size_bytes: int  # bytes of the block as its allocator hands it out, 0 if it is not on the planned device
    kind: StorageKind  # its contents
    eager_times: int = 1  # size of the block that eager PyTorch holds instead, as a multiple of `size_bytes`


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value."""

    name: str  # name in the captured graph
    storage: int | None  # index of its storage, None for a value that is not a tensor (a symbolic size, say)
    shape: tuple[int, ...]  # sizes
    dtype: str  # element type, such as "float32"; "" for a value that is not a tensor
    producer: int | None  # index of the node that first computes it, None for an input of the graph


@dataclass(frozen=True, slots=True)
class Node:
    """One computation."""

    name: str  # name in the captured graph
    op: str  # qualified name of the operator
    # Forward or backward. A replay node is a forward node that is no part of the forward order.
    direction: Direction
    inputs: tuple[int, ...]  # tensors read, each once, in order of first appearance
    outputs: tuple[int, ...]  # tensors computed
    # Equal for nodes that do the same work: operator, shapes, strides, dtypes, device and scalar arguments.
    key: str = ""
    is_random: bool = False  # draws random numbers; never run twice
    is_mutating: bool = False  # writes to one of its inputs; never run twice
    is_out_of_place_in_eager: bool = False  # writes its result over an input, while eager PyTorch allocates a result
    # Reads a buffer that the step overwrites, or may read a variable of Python, so that a second run may give other
    # numbers; never run twice.
    reads_mutated: bool = False
    flops: int = 0  # floating-point operations, 0 where unknown or none
    module: str = ""  # path of the module that called it, "" for none
    source: str = ""  # "file:line" of the user's code, "" for none
    replays: int | None = None  # for a replay node, the node whose outputs it rebuilds
    # For a backward node, a forward tensor that it reads last: the result is written to that tensor's memory, unless
    # other nodes still read it.
    takes: int | None = None
    eager_bytes: int = 0  # workspace of the same operation in eager PyTorch, 0 if it is not known to be larger
    eager_inputs: tuple[int, ...] = ()  # tensors that only eager PyTorch reads here
    # For a node that the user's code calls in `torch.utils.checkpoint`, the first node of the same call.
    checkpoint: int | None = None
    # For a backward node, the first node of the same autograd function; None if the function has no other node. Eager
    # PyTorch keeps what the function reads and computes to the function's end.
    function: int | None = None
    is_saved: bool = False  # whether the policy of selective checkpointing keeps its outputs nevertheless
    compiled: str = ""  # name of the function that it calls, if its author compiled it; "" for others

    @property
    def is_pure(self) -> bool:
        """Whether each run gives the same values and changes no other value."""
        return not (self.is_random or self.is_mutating or self.reads_mutated)

    @property
    def is_repeatable(self) -> bool:
        """Whether a plan may recompute it."""
        return self.direction is Direction.FORWARD and self.is_pure

    def behind(self, nodes: int, tensors: int) -> Node:
        """Return a copy with its indices shifted by these numbers of nodes and tensors."""
        return replace(
            self,
            inputs=tuple(t + tensors for t in self.inputs),
            outputs=tuple(t + tensors for t in self.outputs),
            replays=None if self.replays is None else self.replays + nodes,
            takes=None if self.takes is None else self.takes + tensors,
            eager_inputs=tuple(t + tensors for t in self.eager_inputs),
            checkpoint=None if self.checkpoint is None else self.checkpoint + nodes,
            function=None if self.function is None else self.function + nodes,
        )


@dataclass(frozen=True)
class Graph:
    """One training step."""

    nodes: tuple[Node, ...]  # all computations, replay nodes included
    tensors: tuple[Tensor, ...]  # all values
    storages: tuple[Storage, ...]  # all blocks of memory
    forward: tuple[int, ...]  # nodes of the forward, in order of execution
    # Nodes of the backward, in order of execution; the order is part of the problem, not of the solution.
    backward: tuple[int, ...]
    inputs: tuple[int, ...]  # tensors that exist before the forward
    tangents: tuple[int, ...]  # tensors handed in at the start of the backward
    outputs: tuple[int, ...]  # tensors that the forward returns
    gradients: tuple[int, ...]  # tensors that the backward returns; they live to its end
    held: tuple[int, ...] = ()  # tensors that live from their computation to the end of the step, whatever the schedule
    # Tensors that live to the end of the step if a schedule saves them, because their backward will run again.
    retained: tuple[int, ...] = ()

    def reading_once(self, storages: Collection[int]) -> Graph:
        """Return a copy in which nodes that read these storages run once, because other code overwrites them."""
        on_them = {t for t, tensor in enumerate(self.tensors) if tensor.storage in storages}
        return self.running_once((), [i for i, node in enumerate(self.nodes) if not on_them.isdisjoint(node.inputs)])

    def running_once(self, random: Collection[int], reading: Collection[int]) -> Graph:
        """Return a copy in which these nodes run once: they draw random numbers, or may read variables that change."""
        once = (replace(n, is_random=True) if i in random else n for i, n in enumerate(self.nodes))
        nodes = tuple(replace(n, reads_mutated=True) if i in reading else n for i, n in enumerate(once))
        return replace(self, nodes=nodes)

    def taking(self, taken: Mapping[int, int | None]) -> Graph:
        """Return a copy with another `Node.takes` for some nodes, by index."""
        nodes = tuple(replace(n, takes=taken[i]) if i in taken else n for i, n in enumerate(self.nodes))
        return replace(self, nodes=nodes)

    def _described(self) -> tuple[list[Any], list[Any], list[Any], tuple[Any, ...]]:
        """Return what makes up the code, without sizes, names and `held`: nodes, tensors, storages, orders and ends."""
        nodes = [
            (n.op, n.direction, n.inputs, n.outputs, n.is_random, n.is_mutating, n.reads_mutated, n.replays)
            for n in self.nodes
        ]
        tensors = [(t.storage, t.dtype, t.producer, len(t.shape)) for t in self.tensors]
        ends = self.forward, self.backward, self.inputs, self.tangents, self.outputs, self.gradients
        return nodes, tensors, [storage.kind for storage in self.storages], ends

    @cached_property
    def code(self) -> int:
        """A number of the graph's code: equal for graphs that differ only in sizes, names, or held tensors."""
        digest = hashlib.blake2b(repr(self._described()).encode(), digest_size=16).digest()
        return int.from_bytes(digest, "big")

    @property
    def at_sizes(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """The number of its code, and the shapes of its tensors."""
        return self.code, tuple(tensor.shape for tensor in self.tensors)

    def like(self, graph: Graph) -> Graph:
        """Store another graph's code as the code of this graph, since it takes long to compute; return this graph."""
        vars(self)["code"] = graph.code
        return self

    def is_no_larger(self, than: Graph) -> bool:
        """Whether each tensor is in each dimension at most as large as in another graph of the same code."""
        pairs = zip(self.tensors, than.tensors, strict=True)
        return all(size <= most for one, other in pairs for size, most in zip(one.shape, other.shape, strict=True))

    def difference(self, other: Graph) -> str | None:
        """Describe the first difference from another graph, sizes and names aside; None if there is none."""
        if self.code == other.code and self.held == other.held:
            return None
        nodes, tensors, *_ = zip(self._described(), other._described(), strict=True)
        for index, (described, other_described) in enumerate(zip(*nodes, strict=False)):
            if described != other_described:
                node, there = self.nodes[index], other.nodes[index]
                where = f" in module {node.module!r}" if node.module else ""
                return f"node {node.name} ({node.op}){where} is {there.name} ({there.op}) there"
        for index, (described, other_described) in enumerate(zip(*tensors, strict=False)):
            if described != other_described:
                return f"tensor {self.tensors[index].name} is another one there, {other.tensors[index].name}"
        counts = f"{len(self.nodes)} and {len(other.nodes)} nodes, {len(self.tensors)} and {len(other.tensors)}"
        return f"they have {counts} tensors, or run them in another order"

    @cached_property
    def recomputers(self) -> tuple[int | None, ...]:
        """For each tensor, the node that can compute it again during the backward, or None."""
        recomputers: list[int | None] = [None] * len(self.tensors)
        replayed = {node.replays for node in self.nodes}
        for index, node in enumerate(self.nodes):
            if node.is_repeatable and node.op != OUTSIDE and index not in replayed:
                for tensor in node.outputs:
                    if recomputers[tensor] is None:
                        recomputers[tensor] = index
        return tuple(recomputers)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the tensors that it reads."""
        return tuple(node.inputs for node in self.nodes)

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the tensors that it computes."""
        return tuple(node.outputs for node in self.nodes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each storage, the bytes that a step allocates for it; 0 for a resident one."""
        return tuple(0 if storage.kind.is_resident else storage.size_bytes for storage in self.storages)

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """Forward tensors and inputs that the backward reads or returns, in order of their index."""
        made_before = set(self.inputs) | {t for node in self.forward for t in self.nodes[node].outputs}
        read = {t for node in self.backward for t in self.nodes[node].inputs} | set(self.gradients)
        return tuple(sorted(read & made_before))

    @cached_property
    def allocates(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the storages that it allocates: those of its outputs on which it has no input."""
        appear = []
        for node in self.nodes:
            read = {self.tensors[t].storage for t in node.inputs}
            made = dict.fromkeys(self.tensors[t].storage for t in node.outputs)
            appear.append(
                tuple(s for s in made if s is not None and s not in read and not self.storages[s].kind.is_resident)
            )
        return tuple(appear)

    def has_work(self, index: int) -> bool:
        """Whether a node computes; otherwise it makes a view, which costs nothing."""
        return bool(self.allocates[index] or self.nodes[index].is_mutating or self.nodes[index].flops)


def bytes_of(graph: Graph, tensors: Iterable[int]) -> int:
    """Return the bytes of tensors, each storage counted once."""
    storages = {graph.tensors[t].storage for t in tensors}
    return sum(graph.sizes[s] for s in storages if s is not None)


def taken_bytes(graph: Graph) -> dict[int, int]:
    """Return, by backward node, the bytes of its result that take the memory of a forward tensor (`Node.takes`).

    Only tensors that die there in any schedule count. The node's workspace is reduced by these bytes, because both the
    tensor and the result are counted while it runs.
    """
    nodes = ((position, index, graph.nodes[index].takes) for position, index in enumerate(graph.backward))
    takers = [(position, index, taken) for position, index, taken in nodes if taken is not None]
    last_reads = _last_reads(graph) if takers else {}
    sizes = {}
    for position, index, taken in takers:
        storage = graph.tensors[taken].storage
        if storage is not None and last_reads.get(storage, -1) <= position:
            sizes[index] = min(graph.sizes[storage], *(graph.sizes[s] for s in graph.allocates[index]))
    return sizes


def _last_reads(graph: Graph) -> dict[int, int]:
    """Return, by storage, the last position in the backward that may read it, or a forward value computed from it.

    Readers of such a value count, because the value may be recomputed. Tensors that stay to the end of the step count
    as read there; the tensors that they were computed from do not.
    """
    end, last = len(graph.backward), dict[int, int]()
    for position, index in enumerate(graph.backward):
        last |= dict.fromkeys(graph.nodes[index].inputs, position)
    last |= dict.fromkeys(graph.gradients, end)
    for index in reversed(graph.forward):
        node = graph.nodes[index]
        latest = max((last[t] for t in node.outputs if t in last), default=-1)
        for tensor in node.inputs:
            last[tensor] = max(latest, last.get(tensor, -1))
    last |= dict.fromkeys((*graph.held, *graph.retained), end)
    by_storage = dict[int, int]()
    for tensor, position in last.items():
        storage = graph.tensors[tensor].storage
        if storage is not None:
            by_storage[storage] = max(position, by_storage.get(storage, -1))
    return by_storage


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element from its type's name, whose first number is the bits."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits.group()) // 8)
