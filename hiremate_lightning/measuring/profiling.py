"""Measure on the device: time and workspace of each distinct operation, alone and in a step, and copies to the host.

Each distinct operation (operator, shapes, strides, dtypes, device, scalar arguments: `Node.key`) is run alone, on
made-up inputs of its own shapes, so that profiling never needs more memory than the operation itself. Workspace is the
memory that the allocator hands out while the operation runs, beyond its outputs. Random state is restored; no gradient
or buffer of the model is touched.

`TimedRun` also takes times inside a step. On a CPU, the first step of a training touches new pages as its memory grows,
and the system maps and clears each of them; later steps don't. So times taken in a step are reduced by the cost of
these page faults.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import thresholds
from ..capturing.capture import Captured
from ..housekeeping import JsonFile, log
from ..memory.allocator import free_bytes, storage_bytes
from ..memory.metering import MemoryMeter, undisturbed
from ..records.costs import A100, Link, Machine, Profile, estimate
from ..records.graph import Direction, Graph
from ..rewriting.nodes import is_collective, is_part, values_of
from ..running.copies import is_copying
from ..running.program import Program
from ..torch_private import runtime, tensor_state
from .operators import COURSES, META, runner, traced_strides

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # on Windows
    HAS_PAGE_FAULTS = False
else:
    HAS_PAGE_FAULTS = True

CACHE_FORMAT = 2
SIZE_BYTES, FREE_SHARE = 40_000_000, 0.1  # size limits of a measured copy: bytes, and a share of free device memory
COPIES, SMALL_BYTES = 5, 4096  # copies in each direction, and the bytes of a copy whose time is all latency
REPEATS = 8  # most timed runs of an operation; the fastest counts, because other load only adds time
TIME_LIMIT_MS = 10.0  # stop repeating an operation after this total time, but not before two runs
LEAST_MS = 1e-3  # resolution of the clocks
NODES_AHEAD, HOST_MS = 100, 0.06  # nodes that the host launches ahead of a GPU, and the host's time for each
MOST_IN_STEP = 4.0  # a time in the step counts up to this multiple of the time alone: beyond it, other load has run
PROBE_BYTES = 8 * 2**20  # memory that is touched to time page faults
VIEW_MS = 0.002  # time of the interpreter for a view, which runs no kernel


class Cost(NamedTuple):
    """The costs of one operation."""

    time_ms: float
    workspace_bytes: int


@dataclass
class CostCache:
    """Costs of distinct operations, in memory and, if there is a folder, on disk.

    A file that can't be read, or was written by another version or device, is ignored.
    """

    folder: Path | None = None  # folder of the files that keep the costs between runs; None for no files
    _costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    _links: dict[str, Link] = field(default_factory=dict)

    def costs_on(self, device: torch.device) -> dict[str, Cost]:
        """Return the stored costs of a device; costs that the caller adds are stored."""
        name = device_name(device)
        if name not in self._costs:
            self._costs[name] = self._file(name).read(lambda data: self._decode(data, name)) or {}
        return self._costs[name]

    def link_of(self, device: torch.device) -> Link:
        """Return the link between a GPU and the host; measure it the first time."""
        name = device_name(device)
        self.costs_on(device)  # reads the file
        if name not in self._links:
            self._links[name] = measure_link(device)
            self.write(device)
        return self._links[name]

    def write(self, device: torch.device) -> None:
        """Write the costs of a device to disk."""
        name = device_name(device)
        rows, link = dict(sorted(self._costs[name].items())), self._links.get(name)
        data = {"format": CACHE_FORMAT, "device": name, "costs": rows, "link": None if link is None else asdict(link)}
        self._file(name).write(data)

    def _file(self, name: str) -> JsonFile:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return JsonFile(
            None if self.folder is None else self.folder / f"profile-{digest}.json",
            "Ignored the profile in %s: %s",
            "Could not keep the profile in %s (%s); the next run measures again",
        )

    def _decode(self, data: Any, name: str) -> dict[str, Cost]:
        """Return a device's costs by operation from a file's content, and store its link."""
        if data["format"] != CACHE_FORMAT or data["device"] != name:
            raise ValueError("it was written for another version or device")
        if data.get("link"):
            self._links[name] = Link(**data["link"])
        return {key: Cost(float(time_ms), int(size)) for key, (time_ms, size) in data["costs"].items()}


def device_name(device: torch.device) -> str:
    """Name what costs depend on besides the operation: device, threads, torch version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {_cuda_settings()}"
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}"


def _cuda_settings() -> str:
    """Name the settings that decide which kernels CUDA's libraries choose."""
    cudnn = torch.backends.cudnn
    chosen = {
        # `allow_tf32` can't be read once a user has set this newer name for it.
        "TF32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "TF32 convolutions": cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    return ", ".join([f"cuDNN {cudnn.version()}", *(name for name, is_on in chosen.items() if is_on)])


def measure(
    captured: Captured,
    cache: CostCache,
    progress: Callable[[int, int], None] = lambda done, total: None,
    warn: Callable[[str, str], None] = lambda _, why: log.info(why),
) -> Profile:
    """Measure each distinct operation of a captured graph; operations that can't run alone get the analytic estimate.

    `cache` has costs measured before and receives the new ones. `progress` receives the numbers of measured operations
    and of all, `warn` an operator that can't run alone and a message about it.
    """
    graph, measures_times = captured.graph, thresholds.current.measures_times
    costs = cache.costs_on(captured.device)
    missing = {n.key: i for i, n in enumerate(graph.nodes) if n.key not in costs and i < len(captured.fx_nodes)}
    estimates = estimate(graph, A100 if captured.device.type == "cuda" else Machine()).time_ms
    unmeasured: dict[str, Cost] = {}  # estimates, not stored: another run may measure these operations
    can_measure = MemoryMeter.is_available(captured.device)
    with undisturbed(captured.device):
        for done, (key, index) in enumerate(missing.items()):
            progress(done, len(missing))
            cost = _measure_node(captured, index, warn) if can_measure else None
            if cost is None:
                unmeasured[key] = Cost(estimates[index], 0)
            else:
                costs[key] = cost if measures_times else cost._replace(time_ms=estimates[index])
    if missing:
        progress(len(missing), len(missing))
        cache.write(captured.device)
    by_node = [costs.get(n.key) or unmeasured.get(n.key, Cost(0.0, 0)) for n in graph.nodes]
    return Profile(
        tuple(c.time_ms for c in by_node), tuple(c.workspace_bytes for c in by_node), device_name(captured.device)
    )


def _measure_node(captured: Captured, index: int, warn: Callable[[str, str], None]) -> Cost | None:
    record = captured.graph.nodes[index]
    if not captured.graph.has_work(index):
        return Cost(VIEW_MS, 0)
    if is_collective(record.op):
        return None  # other processes would wait for the collective, or take it for one of the step's
    try:
        runs = [runner(captured, index, course) for course in COURSES.get(record.op, (None,))]
        used = () if record.replays is not None else _used_results(captured.fx_nodes[index])
        costs = [_cost(run, captured.device, used) for run in runs]
        return Cost(max(cost.time_ms for cost in costs), max(cost.workspace_bytes for cost in costs))
    except Exception as error:  # any operator may refuse made-up inputs: the estimate takes its place
        reason = (str(error).strip() or "no text").splitlines()[0]
        warn(
            record.op,
            f"{record.op} can't be measured alone ({type(error).__name__}: {reason}). Plans count its results, and no "
            "memory that it takes while it runs. A measured step sees that: plans leave room for it from then on.",
        )
        return None


def _used_results(node: fx.Node) -> Sequence[Any]:
    """List the positions of the results that are read, if an operation has several."""
    return [part.args[1] for part in values_of(node) if is_part(part)]


def _cost(run: Callable[[], Any], device: torch.device, used: Sequence[Any]) -> Cost:
    """Measure the workspace of an operation, then its time; on a CPU the first run measures both."""
    workspace, elapsed_ms = _workspace_bytes(run, device, used)
    times = [elapsed_ms] if device.type == "cpu" else []
    repeats = REPEATS if thresholds.current.measures_times else 1
    while len(times) < repeats and (len(times) < 2 or sum(times) < TIME_LIMIT_MS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            runtime.keep_busy()  # otherwise the device waits for the launch, and the wait counts
        start = _now(device)
        run()
        times.append(_ms_between(start, _now(device)))
    return Cost(min(times), workspace)


def _workspace_bytes(run: Callable[[], Any], device: torch.device, used: Sequence[Any]) -> tuple[int, float]:
    """Return the bytes that an operation takes beyond its used results, and its milliseconds."""
    if device.type != "cpu":  # in its first run, a kernel's library may take memory that it keeps
        run()
    with MemoryMeter(device) as meter:
        start = time.perf_counter()
        result = run()
        elapsed_ms = 1e3 * (time.perf_counter() - start)
    peak_bytes = max((interval.peak_bytes for interval in meter.intervals), default=0)
    results = tensor_state.tensors_among([result[position] for position in used] or result)
    on_device = (t for t in results if t.device == device)
    kept = (
        part for t in on_device for part in tensor_state.dense_parts(t)[-1:]
    )  # of a sparse result the values: it does not allocate the indices
    return max(0, peak_bytes - storage_bytes(kept, device)), elapsed_ms


def as_laid_out(captured: Captured, profile: Profile, strides: Sequence[tuple[int, ...] | None]) -> Profile:
    """Measure workspace again for operations that read tangents with other strides than they were traced with.

    A kernel may copy such a tangent first. Examples are gradients of channels-last pictures, and of probabilities that
    the loss of a speech recognizer reads transposed. `strides` are those of the tangents of a run, by position; None
    for a tangent that did not arrive.
    """
    pairs = zip(captured.tangents, strides, strict=False)
    changed = {t: actual for t, actual in pairs if actual is not None and actual != traced_strides(t.meta["val"])}
    if not changed or not MemoryMeter.is_available(captured.device):
        return profile
    workspace = list(profile.workspace_bytes)
    with undisturbed(captured.device):
        for index in captured.graph.backward:
            node = captured.fx_nodes[index]
            if changed.keys().isdisjoint(node.all_input_nodes):
                continue
            try:
                if captured.graph.has_work(index):
                    run = runner(captured, index, strides=changed)
                    size_bytes, _ = _workspace_bytes(run, captured.device, _used_results(node))
                    workspace[index] = max(workspace[index], size_bytes)
                else:
                    changed[node] = runner(captured, index, strides=changed, device=META)().stride()
            except Exception as error:  # an operation may refuse made-up inputs: its measured workspace stays
                log.debug("Could not measure %s as laid out (%s: %s)", node, type(error).__name__, error)
    return replace(profile, workspace_bytes=tuple(workspace))


# ---------------------------------------------------------------- clocks


def _now(device: torch.device) -> Any:
    """Read the clock; on a GPU return an event that is recorded in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _ms_between(before: Any, after: Any) -> float:
    """Return the milliseconds between two times; on a GPU wait for the second event."""
    if isinstance(before, float):
        return float(1e3 * (after - before))
    after.synchronize()
    return float(before.elapsed_time(after))


# ---------------------------------------------------------------- inside of a step


class TimedRun:
    """Runs a program node by node and adds up its time, and the time of recomputation and of waits for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_ms = 0.0  # time of all nodes
        self.recompute_ms = 0.0  # time of forward nodes that ran in the backward, and of waits for copies
        # Times without page faults by `Node.key`: of first runs, which eager training has too, and of recomputation.
        self.samples: dict[str, list[float]] = {}
        self.samples_again: dict[str, list[float]] = {}

    def wrap(self, program: Program) -> Program:
        """Return the same program, timed."""
        return replace(
            program,
            forward=lambda arguments: self._run(program.forward_module, arguments, is_backward=False),
            backward=lambda arguments: self._run(program.backward_module, arguments, is_backward=True),
            variant=lambda changes: self.wrap(program.variant(changes)),
        )

    def _run(self, module: fx.GraphModule, arguments: list[Any], is_backward: bool) -> Any:
        interpreter = _TimedInterpreter(module, self._device)
        result = interpreter.boxed_run(arguments)
        for node, before, after, faults in interpreter.clocks:
            elapsed_ms = _ms_between(before, after)
            without_faults_ms = max(0.0, elapsed_ms - faults * page_fault_ms()) if faults else elapsed_ms
            self.total_ms += elapsed_ms
            is_again = is_backward and node.meta.get("direction") is Direction.FORWARD
            if is_again or is_copying(node.target):
                self.recompute_ms += elapsed_ms
            samples = self.samples_again if is_again else self.samples
            if "key" in node.meta:
                samples.setdefault(node.meta["key"], []).append(without_faults_ms)
            elif "finishes" in node.meta:  # it runs right after the operation that it finishes
                samples[node.meta["finishes"]][-1] += without_faults_ms
        return result

    def refine(self, profile: Profile, graph: Graph) -> Profile:
        """Return the costs with times taken inside the step, where inputs come from memory.

        An operation that is measured alone, over and over, reads its inputs from caches. Times of recomputation are
        preferred, if there are any. The interpreter's time for a node, known from views, is subtracted.
        """
        idle = [t for i, n in enumerate(graph.nodes) if not graph.has_work(i) for t in self.samples.get(n.key, ())]
        idle_ms = median(idle) if idle else 0.0

        def time_ms(index: int, alone_ms: float) -> float:
            key = graph.nodes[index].key
            samples = self.samples_again.get(key) or self.samples.get(key)
            if not samples or not graph.has_work(index):
                return alone_ms
            in_step_ms = max(0.0, min(median_low(samples) - idle_ms, MOST_IN_STEP * alone_ms))
            # A mutating operation may be faster in the step: there it takes no new memory, unlike alone.
            return in_step_ms if graph.nodes[index].is_mutating else max(alone_ms, in_step_ms)

        return replace(profile, time_ms=tuple(time_ms(i, alone_ms) for i, alone_ms in enumerate(profile.time_ms)))


class _TimedInterpreter(fx.Interpreter):
    """Takes the time of each node; values are freed after their last use, as in generated code."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False  # so that an error of the user's model reads as in eager PyTorch
        for node in module.graph.nodes:
            if not node.users and node.op == "call_function":  # generated code frees these too
                self.user_to_last_uses.setdefault(node, []).append(node)
        self._device, self._on_gpu = device, device.type == "cuda"
        # The nodes that have run, each with the times before and after it, and the page faults between them.
        self.clocks: list[tuple[fx.Node, Any, Any, int]] = []

    def run_node(self, node: fx.Node) -> Any:
        if self._on_gpu and len(self.clocks) % NODES_AHEAD == 0:
            with torch.cuda.device(self._device):  # otherwise the device waits for the host, and the wait counts
                runtime.keep_busy(NODES_AHEAD * HOST_MS)
        faults_before, before = page_faults(), _now(self._device)
        result = super().run_node(node)
        after, faults = _now(self._device), 0 if self._on_gpu else page_faults() - faults_before
        self.clocks.append((node, before, after, faults))
        return result


# ---------------------------------------------------------------- page faults


def page_faults() -> int:
    """Return the number of pages that this process has touched so far; 0 if the system does not count."""
    return getrusage(RUSAGE_SELF).ru_minflt if HAS_PAGE_FAULTS else 0


@functools.cache
def page_fault_ms() -> float:
    """Measure, once, the milliseconds that a first touch of a page takes."""
    return min(_page_fault_ms() for _ in range(3)) if HAS_PAGE_FAULTS else 0.0


def _page_fault_ms(clock: Callable[[], float] = time.perf_counter, count: Callable[[], int] = page_faults) -> float:
    ones = b"\1" * PROBE_BYTES
    with mmap.mmap(-1, PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        clocks, faults = [clock()], count()
        for _ in range(2):
            memory[:] = ones
            clocks.append(clock())
        first_ms, again_ms = (1e3 * (after - before) for before, after in itertools.pairwise(clocks))
        return max(0.0, first_ms - again_ms) / max(1, count() - faults)


# ---------------------------------------------------------------- copies to the host and back


def measure_link(device: torch.device) -> Link:
    """Return the speed of the fastest of a few copies in each direction, while another copy runs in the other one."""
    with undisturbed(device):
        size = max(SMALL_BYTES, min(SIZE_BYTES, int(FREE_SHARE * free_bytes(device))))
        latency_ms = min(min(_both_ways_ms(device, SMALL_BYTES)) for _ in range(COPIES))
        times = [_both_ways_ms(device, size) for _ in range(COPIES)]
    out_ms, in_ms = (max(LEAST_MS, min(of_one) - latency_ms) for of_one in zip(*times, strict=True))
    return Link(size / out_ms, size / in_ms, latency_ms)


def _both_ways_ms(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Copy to the host and from it at the same time; return the milliseconds of each copy."""
    on_device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    clocks = []
    pairs = zip(streams, (on_host[0], on_device[1]), (on_device[0], on_host[1]), strict=True)
    for stream, target, source in pairs:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            before = _now(device)
            target.copy_(source, non_blocking=True)
            clocks.append((before, _now(device)))
    out_ms, in_ms = (_ms_between(*pair) for pair in clocks)
    return out_ms, in_ms
