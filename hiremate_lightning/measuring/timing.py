"""Times of operations inside of a step.

The first step of a training touches new memory wherever its memory grows: the system maps and clears each page then, on
a CPU. Later steps don't. So the cost of these page faults is subtracted from times that were taken in a step.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median, median_low
from typing import Any

import torch
from torch import fx

from ..records.costs import Profile
from ..records.graph import Direction, Graph
from ..running.copies import is_copying
from ..running.program import Program
from ..torch_private import runtime

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # on Windows
    HAS_PAGE_FAULTS = False
else:
    HAS_PAGE_FAULTS = True

NODES_AHEAD, HOST_MS = 100, 0.06  # nodes that the host launches ahead of a GPU, and its time for each
MOST_IN_STEP = 4.0  # times the time alone: a longer sample has met other load
_PROBE_BYTES = 8 * 2**20


class TimedRun:
    """Runs a program node by node and adds up its time, and that of recomputation and waits.

    Attributes:
        total_ms: Time of all nodes.
        recompute_ms: Time of the forward nodes that ran in the backward, and of waits for copies to the host and back.
        samples: By `Node.key`, the times of each run where plain training has it, without those of page faults.
        samples_again: By `Node.key`, the times of each run that recomputed, without those of page faults.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_ms = self.recompute_ms = 0.0
        self.samples: dict[str, list[float]] = {}
        self.samples_again: dict[str, list[float]] = {}

    def wrap(self, program: Program) -> Program:
        """Return a program that does the same, timed."""
        return replace(
            program,
            forward=lambda arguments: self._run(program.forward_module, arguments, is_backward=False),
            backward=lambda arguments: self._run(program.backward_module, arguments, is_backward=True),
            variant=lambda changes, overwrites=True: self.wrap(program.variant(changes, overwrites)),
        )

    def _run(self, module: fx.GraphModule, arguments: list[Any], is_backward: bool) -> Any:
        interpreter = _TimedInterpreter(module, self._device)
        result = interpreter.boxed_run(arguments)
        for node, elapsed_ms, fault_ms in interpreter.times():
            self.total_ms += elapsed_ms
            is_again = is_backward and node.meta.get("direction") is Direction.FORWARD
            if is_again or is_copying(node.target):
                self.recompute_ms += elapsed_ms
            samples = self.samples_again if is_again else self.samples
            if "key" in node.meta:
                samples.setdefault(node.meta["key"], []).append(max(0.0, elapsed_ms - fault_ms))
            elif "finishes" in node.meta:  # right after the operation that it finishes
                samples[node.meta["finishes"]][-1] += max(0.0, elapsed_ms - fault_ms)
        return result

    def refine(self, profile: Profile, graph: Graph) -> Profile:
        """Return the costs with times taken inside the step, where operations find their inputs in no cache.

        An operation that was measured alone, over and over, reads from caches what a step reads from memory. Times of
        recomputation count where there are any. The interpreter's own time for a node, a view's say, is subtracted.
        """
        idle = [t for i, n in enumerate(graph.nodes) if not graph.has_work(i) for t in self.samples.get(n.key, ())]
        idle_ms = median(idle) if idle else 0.0

        def time_ms(index: int, alone_ms: float) -> float:
            key = graph.nodes[index].key
            samples = self.samples_again.get(key) or self.samples.get(key)
            if not samples or not graph.has_work(index):
                return alone_ms
            in_step_ms = max(0.0, min(median_low(samples) - idle_ms, MOST_IN_STEP * alone_ms))
            # An operation that overwrites takes no new memory in the step, as it did alone.
            return in_step_ms if graph.nodes[index].is_mutating else max(alone_ms, in_step_ms)

        return replace(profile, time_ms=tuple(time_ms(i, alone_ms) for i, alone_ms in enumerate(profile.time_ms)))


class _TimedInterpreter(fx.Interpreter):
    """Takes the time of each node; values are freed after their last use, as in generated code."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False  # an error of the user's model is to read as in plain PyTorch
        for node in module.graph.nodes:
            if not node.users and node.op == "call_function":  # generated code frees these too
                self.user_to_last_uses.setdefault(node, []).append(node)
        self._device, self._on_gpu = device, device.type == "cuda"
        self._clocks: list[tuple[fx.Node, Any, Any, int]] = []

    def run_node(self, node: fx.Node) -> Any:
        if self._on_gpu and len(self._clocks) % NODES_AHEAD == 0:
            with torch.cuda.device(self._device):  # else the device would wait for the host, and that would count
                runtime.keep_busy(NODES_AHEAD * HOST_MS)
        faults_before, before = page_faults(), self._read_clock()
        result = super().run_node(node)
        self._clocks.append((node, before, self._read_clock(), page_faults() - faults_before))
        return result

    def _read_clock(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times(self) -> Iterator[tuple[fx.Node, float, float]]:
        """Return each node's milliseconds, and how many of these went into page faults."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        for node, before, after, faults in self._clocks:
            if self._on_gpu:
                yield node, before.elapsed_time(after), 0.0
            else:
                yield node, 1e3 * (after - before), faults * page_fault_ms()


# ---------------------------------------------------------------- page faults


def page_faults() -> int:
    """Return how many pages this process has touched for the first time so far; 0 where the system does not count."""
    return getrusage(RUSAGE_SELF).ru_minflt if HAS_PAGE_FAULTS else 0


@functools.cache
def page_fault_ms() -> float:
    """Measure, once, the milliseconds that a first touch of a page takes."""
    return min(_page_fault_ms() for _ in range(3)) if HAS_PAGE_FAULTS else 0.0


def _page_fault_ms(clock: Callable[[], float] = time.perf_counter, count: Callable[[], int] = page_faults) -> float:
    with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        touched = torch.frombuffer(memory, dtype=torch.uint8)
        clocks, faults = [clock()], count()
        for _ in range(2):
            touched.fill_(1)
            clocks.append(clock())
        faults = count() - faults
        del touched
    first, again = clocks[1] - clocks[0], clocks[2] - clocks[1]
    return max(0.0, 1e3 * (first - again) / max(1, faults))
