"""The costs of each node: time and workspace, and an analytic estimate of both.

Solvers and the simulator read a `Profile`. `profiling.py` measures one on the device. `estimate` computes one from
operation counts, the same on every machine, for tests and for planning without the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .graph import OUTSIDE, Graph

HALF_TYPES = ("bfloat16", "float16")
ONE_EXPRESSION = 4  # most operations of a function of autograd that PyTorch computes in one expression


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a device copies to the host and back, both at once, while it computes.

    The bandwidth that copies take from the device's own memory is not counted.
    """

    out_bytes_per_ms: float  # bytes a millisecond to the host
    in_bytes_per_ms: float  # bytes a millisecond from the host
    latency_ms: float = 0.0  # milliseconds that each copy takes in addition

    def out_ms(self, size_bytes: int) -> float:
        """Return the milliseconds of a copy to the host."""
        return self.latency_ms + size_bytes / self.out_bytes_per_ms

    def in_ms(self, size_bytes: int) -> float:
        """Return the milliseconds of a copy from the host."""
        return self.latency_ms + size_bytes / self.in_bytes_per_ms


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by node of a graph."""

    time_ms: tuple[float, ...]  # milliseconds of one run
    # Bytes that a node needs only while it runs, beyond its outputs; below 0 if an output takes a dying value's memory.
    workspace_bytes: tuple[int, ...]
    device: str  # where it was measured, or "estimate"
    link: Link | None = None  # how fast the device copies to the host and back; None where nothing is copied


def profile_from(fields: Mapping[str, Any]) -> Profile:
    """Return the profile whose fields were read from JSON."""
    link = Link(**fields["link"]) if fields.get("link") else None
    return Profile(tuple(fields["time_ms"]), tuple(fields["workspace_bytes"]), fields["device"], link)


def in_eager(graph: Graph, profile: Profile) -> tuple[Graph, Profile]:
    """Return a step as eager PyTorch runs it, with the larger storages, workspaces and reads that are known of it."""
    storages = [replace(s, size_bytes=s.size_bytes * s.eager_times, eager_times=1) for s in graph.storages]
    tensors, nodes = list(graph.tensors), list(graph.nodes)
    latest: dict[int | None, int] = {}  # overwritten storage -> storage of the latest result over it
    functions = defaultdict[int, list[int]](list)  # nodes of each function of autograd
    for index in (*graph.forward, *graph.backward):
        node = graph.nodes[index]
        if node.is_out_of_place_in_eager:
            written = tensors[node.outputs[0]].storage
            assert written is not None, "a result that is written over an input has memory"
            latest[written] = len(storages)
            storages.append(storages[written])
        for tensor in node.outputs:
            storage = tensors[tensor].storage
            tensors[tensor] = replace(tensors[tensor], storage=latest.get(storage, storage))
        if node.function is not None:
            functions[node.function].append(index)
        nodes[index] = replace(
            node,
            inputs=tuple(dict.fromkeys((*node.inputs, *node.eager_inputs))),
            is_mutating=node.is_mutating and not node.is_out_of_place_in_eager,
            # `torch.utils.checkpoint` runs its nodes again.
            is_random=node.is_random and node.checkpoint is None,
            reads_mutated=node.reads_mutated and node.checkpoint is None,
        )
    for members in functions.values():
        last = nodes[members[-1]]
        kept = dict.fromkeys((*last.inputs, *_kept_by_function(graph, members)))
        nodes[members[-1]] = replace(last, inputs=tuple(t for t in kept if t not in last.outputs))
    pairs = zip(graph.nodes, profile.workspace_bytes, strict=True)
    workspaces = tuple(size if node.op == OUTSIDE else max(size, node.eager_bytes) for node, size in pairs)
    eager = replace(graph, nodes=tuple(nodes), tensors=tuple(tensors), storages=tuple(storages))
    return eager, replace(profile, workspace_bytes=workspaces)


def _kept_by_function(graph: Graph, members: Sequence[int]) -> list[int]:
    """List the tensors that eager PyTorch keeps to the end of a function of autograd, whose nodes are `members`.

    It keeps what the function reads. A function of few operations is one expression in C++, whose values are kept too.
    """
    is_one_expression = sum(map(graph.has_work, members)) <= ONE_EXPRESSION
    nodes = [graph.nodes[index] for index in members]
    dropped = set() if is_one_expression else {tensor for node in nodes for tensor in node.outputs}
    return [tensor for node in nodes for tensor in node.inputs if tensor not in dropped]


@dataclass(frozen=True, slots=True)
class Machine:
    """A stand-in device for estimates."""

    # Arithmetic throughput; the default is one core of a present-day server in single precision.
    flops_per_ms: float = 5e7
    bytes_per_ms: float = 1e7  # memory throughput, for operations that only move data
    launch_ms: float = 0.005  # fixed cost of an operation that does any work; views cost nothing
    half_flops_per_ms: float | None = None  # arithmetic throughput in float16 and bfloat16; None for the same


A100 = Machine(flops_per_ms=19.5e9, bytes_per_ms=1.555e9)  # NVIDIA's data sheet, single precision


def estimate(graph: Graph, machine: Machine = Machine()) -> Profile:
    """Estimate each node's time as the sum of its arithmetic and its memory traffic; workspaces are 0."""

    def node_ms(index: int) -> float:
        node = graph.nodes[index]
        if not graph.has_work(index):
            return 0.0
        tensors = dict.fromkeys((*node.inputs, *node.outputs))
        storages = dict.fromkeys(graph.tensors[t].storage for t in tensors)
        traffic = sum(graph.storages[s].size_bytes for s in storages if s is not None)
        is_half = any(graph.tensors[t].dtype in HALF_TYPES for t in node.outputs)
        flops_per_ms = (machine.half_flops_per_ms if is_half else None) or machine.flops_per_ms
        return machine.launch_ms + node.flops / flops_per_ms + traffic / machine.bytes_per_ms

    times = tuple(node_ms(index) for index in range(len(graph.nodes)))
    return Profile(times, (0,) * len(times), "estimate")


def step_time_ms(graph: Graph, profile: Profile) -> float:
    """Return the time of the step without recomputation."""
    return sum(profile.time_ms[n] for n in (*graph.forward, *graph.backward))
