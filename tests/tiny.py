"""Tiny graphs without torch: a builder, a chain, a transformer with dropout and replay nodes, and plans of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hiremate_lightning.planning.headroom import Room
from hiremate_lightning.planning.plan import Plan, PlanningTime
from hiremate_lightning.planning.solvers.base import Solution, Status
from hiremate_lightning.records.costs import Profile
from hiremate_lightning.records.graph import OUTSIDE, Direction, Graph, Node, Storage, StorageKind, Tensor
from hiremate_lightning.records.schedule import ensure, lower
from hiremate_lightning.records.simulation import simulate
from hiremate_lightning.units import Budget

KB = 1000


@dataclass
class Builder:
    """Appends nodes in order of execution; each method returns the index of the tensor that it made."""

    nodes: list[Node] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    tangents: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)
    module: str = ""

    def storage(self, size: int, kind: StorageKind) -> int:
        self.storages.append(Storage(size, kind))
        return len(self.storages) - 1

    def tensor(self, name: str, storage: int | None, producer: int | None = None) -> int:
        shape = () if storage is None else (self.storages[storage].size_bytes,)
        self.tensors.append(Tensor(name, storage, shape, "uint8", producer))
        return len(self.tensors) - 1

    def input(self, name: str, size: int = 0, kind: StorageKind = StorageKind.PARAMETER) -> int:
        self.inputs.append(self.tensor(name, self.storage(size, kind)))
        return self.inputs[-1]

    def tangent(self, name: str, size: int) -> int:
        self.tangents.append(self.tensor(name, self.storage(size, StorageKind.TANGENT)))
        return self.tangents[-1]

    def op(
        self,
        name: str,
        inputs: tuple[int, ...],
        *sizes: int,
        view_of: int | None = None,
        time: float = 1.0,
        workspace: int = 0,
        backward: bool = False,
        op: str = "",
        random: bool = False,
        mutating: bool = False,
        reads_mutated: bool = False,
        flops: int = 0,
    ) -> int:
        """Append a node with one output for each size, or with one view; return its first output."""
        index, first = len(self.nodes), len(self.tensors)
        kind = StorageKind.GRADIENT if backward else StorageKind.ACTIVATION
        if view_of is not None:
            self.tensor(name, self.tensors[view_of].storage, index)
        for position, size in enumerate(sizes):
            self.tensor(name if not position else f"{name}_{position}", self.storage(size, kind), index)
        direction = Direction.BACKWARD if backward else Direction.FORWARD
        outputs = tuple(range(first, len(self.tensors)))
        self.nodes.append(
            Node(
                name,
                op or f"tiny.{name}",
                direction,
                inputs,
                outputs,
                key=f"{op or name.rstrip('0123456789')} {sizes}",
                is_random=random,
                is_mutating=mutating,
                reads_mutated=reads_mutated,
                flops=flops,
                module=self.module,
            )
        )
        self._cost(time, workspace)
        (self.backward if backward else self.forward).append(index)
        return first

    def replay(self, replayed: int, inputs: tuple[int, ...], output: int, time: float = 1.0) -> int:
        """Append a node that rebuilds a tensor of another one; return its index."""
        node = self.nodes[replayed]
        name = f"{node.name}_replay"
        self.nodes.append(
            Node(name, "tiny.replay", Direction.FORWARD, inputs, (output,), name, module=node.module, replays=replayed)
        )
        self._cost(time, 0)
        return len(self.nodes) - 1

    def outside(self, inputs: tuple[int, ...], held: int, backward: bool = False) -> int:
        """Append outside code that holds bytes; return the tensor that stands for them."""
        self.module = ""
        return self.op(OUTSIDE, inputs, held, time=0.0, op=OUTSIDE, random=True, backward=backward)

    def _cost(self, time: float, workspace: int) -> None:
        self.times.append(time)
        self.workspaces.append(workspace)

    def graph(
        self, outputs: tuple[int, ...] = (), gradients: tuple[int, ...] = (), held: tuple[int, ...] = ()
    ) -> tuple[Graph, Profile]:
        graph = Graph(
            tuple(self.nodes),
            tuple(self.tensors),
            tuple(self.storages),
            tuple(self.forward),
            tuple(self.backward),
            tuple(self.inputs),
            tuple(self.tangents),
            outputs,
            gradients,
            held,
        )
        return graph, Profile(tuple(self.times), tuple(self.workspaces), "tiny")


def chain(length: int = 3, size: int = 100, reads_results: bool = False) -> tuple[Graph, Profile]:
    """x -> a0 -> a1 -> ... -> a(length - 1), each of one size, and a backward that reads them in reverse.

    Nodes 0 to length - 1 are the forward, the others the backward. The gradient g(i) is computed from the one after it
    and from the activation before it, or, where it reads results, from a(i) itself; g0, of the input, is what the step
    returns.
    """
    b = Builder()
    values = [b.input("x", size, StorageKind.INPUT)]
    for i in range(length):
        values.append(b.op(f"a{i}", (values[-1],), size))
    gradient = b.tangent("dy", size)
    for i in reversed(range(length)):
        gradient = b.op(f"g{i}", (gradient, values[i + reads_results]), size, backward=True)
    return b.graph(outputs=(values[-1],), gradients=(gradient,))


def transformer(blocks: int = 4, root: str = "net", size: int = 64 * KB) -> tuple[Graph, Profile]:
    """A small GPT: embedding, blocks of attention and a two-layer MLP with dropout, norm, head, and the loss outside.

    Sizes are multiples of `size`; times are 1 ms for a large operation and 0.1 ms for a small one.
    """
    b = Builder()
    weights = b.input("weights", 10 * size)
    b.module = f"{root}.embed"
    x = b.op("embed", (b.input("tokens", 0, StorageKind.INPUT),), size, time=0.1)
    saved: list[tuple[int, int, int, int, int]] = []
    replays: list[tuple[int, int, int]] = []
    for i in range(blocks):
        b.module = f"{root}.blocks.{i}.attn"
        qkv = b.op(f"qkv{i}", (x, weights), 3 * size, flops=6)
        head = b.op(f"split{i}", (qkv,), view_of=qkv, time=0.0)
        mixed = b.op(f"attend{i}", (head,), size, flops=2, workspace=size // 2)
        b.module = f"{root}.blocks.{i}"
        y = b.op(f"add{i}", (x, mixed), size, time=0.1)
        b.module = f"{root}.blocks.{i}.mlp"
        wide = b.op(f"up{i}", (y, weights), 4 * size, flops=8)
        bent = b.op(f"gelu{i}", (wide,), 4 * size, time=0.1)
        narrow = b.op(f"down{i}", (bent, weights), size, flops=8)
        b.module = f"{root}.blocks.{i}.dropout"
        dropped = b.op(f"dropout{i}", (narrow,), size, size // 4, time=0.1, random=True)
        replays.append((len(b.nodes) - 1, narrow, dropped))
        b.module = f"{root}.blocks.{i}"
        saved.append((x, qkv, y, wide, dropped))
        x = b.op(f"residual{i}", (y, dropped), size, time=0.1)
    b.module = f"{root}.norm"
    normed = b.op("norm", (x,), size, time=0.1)
    b.module = f"{root}.head"
    logits = b.op("logits", (normed, weights), 2 * size, flops=2)
    loss = b.outside((logits,), size // 2)
    return _transformer_backward(b, size, root, (x, normed, logits, loss), saved, replays)


def _transformer_backward(
    b: Builder,
    size: int,
    root: str,
    last: tuple[int, int, int, int],
    saved: list[tuple[int, int, int, int, int]],
    replays: list[tuple[int, int, int]],
) -> tuple[Graph, Profile]:
    final, normed, logits, loss = last
    gradients = []
    b.module = f"{root}.head"
    g = b.op("d_logits", (b.tangent("d_out", 2 * size), normed), size, backward=True)
    b.module = f"{root}.norm"
    g = b.op("d_norm", (g, final), size, backward=True)
    for i, (x, qkv, y, wide, dropped) in reversed(list(enumerate(saved))):
        b.module = f"{root}.blocks.{i}.dropout"
        g = b.op(f"d_dropout{i}", (g, dropped + 1), size, backward=True, time=0.1)
        b.module = f"{root}.blocks.{i}.mlp"
        bent = b.nodes[b.tensors[wide].producer + 1].outputs[0]  # type: ignore[operator]
        g = b.op(f"d_down{i}", (g, bent), 4 * size, backward=True, time=2.0)
        g = b.op(f"d_gelu{i}", (g, wide), 4 * size, backward=True, time=0.1)
        g = b.op(f"d_up{i}", (g, y), size, backward=True, time=2.0)
        b.module = f"{root}.blocks.{i}.attn"
        g = b.op(f"d_attend{i}", (g, qkv), 3 * size, backward=True, time=2.0)
        g = b.op(f"d_qkv{i}", (g, x), size, size, backward=True, time=2.0)
        gradients.append(g + 1)
    for replayed, source, output in replays:
        b.replay(replayed, (source, output + 1), output, time=0.1)
    return b.graph(outputs=(logits,), gradients=tuple(gradients), held=(loss,))


def shaped(graph: Graph, shape: tuple[int, ...], item: str = "float32", rounding: int = 1) -> Graph:
    """Set a shape for each tensor that has bytes, and the size of its storage from it."""
    size = -(-math.prod(shape) * 4 // rounding) * rounding
    tensors = tuple(replace(tensor, shape=shape, dtype=item) for tensor in graph.tensors)
    return replace(graph, tensors=tensors, storages=tuple(Storage(size, s.kind) for s in graph.storages))


def storages_of(graph: Graph, names: Iterable[str]) -> set[int]:
    """Find the storages that the nodes of some names allocate."""
    names = set(names)
    return {s for i, node in enumerate(graph.nodes) if node.name in names for s in graph.allocates[i]}


def recompute_lazily(graph: Graph, kept: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Keep some storages through the turn, and recompute all else just before its first use.

    A recomputed tensor is held to its last use; storages whose tensors can't be recomputed are kept in any case, and so
    are those that the caller holds.

    Args:
        graph: The step.
        kept: Storages to keep.

    Returns:
        For each position of `graph.backward`, and once more for what only the gradients need, the nodes to run before
        it.
    """
    stays: set[int | None] = {*kept, *(graph.tensors[t].storage for t in graph.held)}
    available = set(graph.inputs) | set(graph.tangents)
    for index in graph.forward:
        for tensor in graph.nodes[index].outputs:
            storage = graph.tensors[tensor].storage
            if (
                storage is None
                or storage in stays
                or graph.recomputers[tensor] is None
                or graph.storages[storage].kind.is_resident
            ):
                available.add(tensor)
    decisions = []
    for index in graph.backward:
        before: list[int] = []
        for tensor in graph.nodes[index].inputs:
            ensure(graph, tensor, available, before)
        available.update(graph.nodes[index].outputs)
        decisions.append(tuple(before))
    last: list[int] = []
    for tensor in graph.gradients:
        ensure(graph, tensor, available, last)
    return (*decisions, tuple(last))


def room(size_bytes: int, resident_bytes: int = 0, margin_bytes: int = 0) -> Room:
    return Room(Budget(size_bytes=size_bytes), size_bytes, resident_bytes, margin_bytes)


def plan_keeping(graph: Graph, profile: Profile, names: Iterable[str], **changes: Any) -> Plan:
    """Make a plan that keeps what the nodes of some names allocate, in a budget of 0.1 MB more than it takes."""
    recompute = recompute_lazily(graph, storages_of(graph, names))
    found = simulate(graph, profile, lower(graph, recompute))
    solution = Solution(
        "hilp", Status.OPTIMAL, recompute, found.recompute_ms, found.peak_bytes, bound_ms=found.recompute_ms
    )
    budget_bytes = found.peak_bytes + 2_100 * KB
    fields = {
        "target": "GPT",
        "graph": graph,
        "profile": profile,
        "solution": solution,
        "budget": Budget(size_bytes=budget_bytes),
        "budget_bytes": budget_bytes,
        "resident_bytes": 2_000 * KB,
        "planning": PlanningTime(0.5, 0.25, 1.2),
    }
    return Plan(**{**fields, **changes})


def blocks_plan(blocks: int = 4, keep: tuple[str, ...] = ("residual", "up"), **changes: Any) -> Plan:
    """Keep some values of every block of a transformer."""
    graph, profile = transformer(blocks)
    return plan_keeping(graph, profile, [f"{name}{i}" for name in keep for i in range(blocks)], **changes)


def mixed_plan(blocks: int = 4, kept_blocks: int = 2) -> Plan:
    """Keep all of the first blocks, and of the others only what they start from."""
    graph, profile = transformer(blocks)
    kept = [node.name for node in graph.nodes if node.name[-1:].isdigit() and int(node.name[-1]) < kept_blocks]
    return plan_keeping(graph, profile, [*kept, *(f"residual{i}" for i in range(blocks))])


def flat_plan(sizes: tuple[int, ...], name: str = "layer{}.act") -> Plan:
    """A chain in which each module keeps one value of its own size."""
    b = Builder()
    x = b.input("x")
    saved = []
    for i, size in enumerate(sizes):
        b.module = name.format(i)
        x = b.op("a", (x,), size)
        saved.append(x)
    g = b.tangent("dy", 1)
    for tensor in reversed(saved):
        g = b.op("g", (g, tensor), 1, backward=True)
    graph, profile = b.graph(gradients=(g,))
    return plan_keeping(graph, profile, ["a"], resident_bytes=0)
