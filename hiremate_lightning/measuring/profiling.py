"""Measure on the device: time and workspace of each distinct operation, and the speed of copies to the host and back.

Each distinct operation (operator, shapes, strides, dtypes, device, scalar arguments: `Node.key`) is run alone, on
made-up inputs of its own shapes, so that profiling never needs more memory than the operation itself. Workspace is what
the allocator hands out while the operation runs, beyond its outputs. Random state is restored; no gradient or buffer of
the model is touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..capturing.capture import Captured
from ..memory.allocator import free_bytes, storage_bytes
from ..memory.metering import MemoryMeter, measure_peak, undisturbed
from ..records.costs import A100, Link, Machine, Profile, estimate
from ..rewriting.joint import is_collective, is_part, values_of
from ..torch_private import runtime, tensor_state
from .operators import laid_out, runner, runners, traced_strides

log = logging.getLogger("hiremate_lightning")

CACHE_FORMAT = 2
SIZE_BYTES, FREE_SHARE = 40_000_000, 0.1  # most bytes of a copy, and most of the device's free memory for a copy
REPEATS, SMALL_BYTES = 5, 4096
LEAST_MS = 1e-3  # no clock here resolves less
VIEW_MS = 0.002  # time of the interpreter for a view, which runs no kernel


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How carefully to measure an operation.

    Attributes:
        repeats: Most timed runs; the fastest counts, since other load only ever adds.
        time_limit_ms: Stop repeating an operation once its timed runs took this long together, after two at least. On a
            CPU the run whose memory is measured is one of them.
        agreement: Stop once this share of the fastest time, at most, lies between it and the next two.
    """

    repeats: int = 8
    time_limit_ms: float = 10.0
    agreement: float = 0.05


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one operation."""

    time_ms: float
    workspace_bytes: int


@dataclass
class CostCache:
    """Costs of distinct operations, in memory and, where a folder is given, on disk.

    A file that can't be read, or was written by another version or device, is ignored.

    Attributes:
        folder: Where to keep the costs between runs, None for nowhere.
    """

    folder: Path | None = None
    _costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    _links: dict[str, Link] = field(default_factory=dict)

    def costs_on(self, device: torch.device) -> dict[str, Cost]:
        """Return the known costs of a device; costs that are added to them are kept."""
        name = describe_device(device)
        if name not in self._costs:
            self._costs[name] = self._read(name)
        return self._costs[name]

    def link_of(self, device: torch.device) -> Link:
        """Return the link between a GPU and the host, measured where it is not known."""
        name = describe_device(device)
        self.costs_on(device)  # reads the file
        if name not in self._links:
            self._links[name] = measure_link(device)
            self.write(device)
        return self._links[name]

    def write(self, device: torch.device) -> None:
        """Keep the costs of a device on disk."""
        if self.folder is None:
            return
        name = describe_device(device)
        rows = {key: [c.time_ms, c.workspace_bytes] for key, c in sorted(self._costs[name].items())}
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            link = asdict(self._links[name]) if name in self._links else None
            partial.write_text(json.dumps({"format": CACHE_FORMAT, "device": name, "costs": rows, "link": link}))
            partial.replace(path)
        except OSError as error:
            log.warning("Could not keep the profile in %s (%s); the next run measures again", path, error)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"profile-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"

    def _read(self, name: str) -> dict[str, Cost]:
        if self.folder is None or not self._path(name).is_file():
            return {}
        try:
            data = json.loads(self._path(name).read_text())
            if data["format"] != CACHE_FORMAT or data["device"] != name:
                raise ValueError("it was written for another version or device")
            if data.get("link"):
                self._links[name] = Link(**data["link"])
            return {key: Cost(float(time_ms), int(size)) for key, (time_ms, size) in data["costs"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("Ignored the profile in %s: %s", self._path(name), error)
            return {}


def describe_device(device: torch.device) -> str:
    """Name all that costs depend on besides the operation: device, threads, torch version."""
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
    options: ProfileOptions = ProfileOptions(),
    progress: Callable[[int, int], None] = lambda done, total: None,
    announce: Callable[[str, str], None] = lambda _, why: log.info(why),
) -> Profile:
    """Measure each distinct operation of a captured graph once; what can't be run alone gets its analytic estimate.

    Args:
        captured: The captured graph.
        cache: Costs already known; new ones are added and written.
        options: How carefully to measure.
        progress: Called with the number of operations measured and their total.
        announce: Called with an operator that can't be run alone, and a message about it.
    """
    graph = captured.graph
    costs = cache.costs_on(captured.device)
    missing = {n.key: i for i, n in enumerate(graph.nodes) if n.key not in costs and i < len(captured.fx_nodes)}
    estimates = estimate(graph, A100 if captured.device.type == "cuda" else Machine()).time_ms
    unmeasured: dict[str, Cost] = {}  # not kept: they may be measured another time
    can_measure = MemoryMeter.is_available(captured.device)
    with undisturbed(captured.device):
        for done, (key, index) in enumerate(missing.items()):
            progress(done, len(missing))
            measured = _measure_node(captured, index, options, announce) if can_measure else None
            (unmeasured if measured is None else costs)[key] = measured or Cost(estimates[index], 0)
    if missing:
        progress(len(missing), len(missing))
        cache.write(captured.device)
    known = [costs.get(n.key) or unmeasured.get(n.key, Cost(0.0, 0)) for n in graph.nodes]
    return Profile(
        tuple(c.time_ms for c in known), tuple(c.workspace_bytes for c in known), describe_device(captured.device)
    )


def _measure_node(
    captured: Captured, index: int, options: ProfileOptions, announce: Callable[[str, str], None]
) -> Cost | None:
    record = captured.graph.nodes[index]
    if not captured.graph.has_work(index):
        return Cost(VIEW_MS, 0)
    if is_collective(record.op):
        return None  # other processes would wait for each run of it, or take it for one of the step's own
    try:
        runs = runners(captured, index)
        used = () if record.replays is not None else _used_results(captured.fx_nodes[index])
        costs = [_cost(run, captured.device, used, options) for run in runs]
        return Cost(max(cost.time_ms for cost in costs), max(cost.workspace_bytes for cost in costs))
    except Exception as error:  # any operator may refuse made-up inputs: the estimate takes its place
        reason = (str(error).strip() or "no text").splitlines()[0]
        announce(
            record.op,
            f"{record.op} can't be measured alone ({type(error).__name__}: {reason}). Plans count its results, and no "
            "memory that it takes while it runs. A measured step sees that: plans leave room for it from then on.",
        )
        return None


def _used_results(node: fx.Node) -> Sequence[Any]:
    """List the positions of the results that are read, where an operation has several."""
    return [part.args[1] for part in values_of(node) if is_part(part)]


def _cost(
    run: Callable[[], Any],
    device: torch.device,
    used: Sequence[Any],
    options: ProfileOptions,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Measure the memory of an operation, then its time."""
    workspace, elapsed_ms = _workspace_bytes(run, device, used, clock)
    times = [elapsed_ms] if device.type == "cpu" else []
    return Cost(_time_ms(run, device, options, times, clock), workspace)


def _workspace_bytes(
    run: Callable[[], Any], device: torch.device, used: Sequence[Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """Measure the bytes that an operation takes beside those of its results that are used, and its milliseconds."""
    results: list[Any] = []
    elapsed_ms = 0.0

    def run_once() -> None:
        nonlocal elapsed_ms
        start = clock()
        results.append(run())
        elapsed_ms = 1e3 * (clock() - start)

    if device.type != "cpu":  # the first run of a kernel may take memory that its library keeps
        run()
    peak_bytes = measure_peak(run_once, device)
    (result,) = results
    kept = tensor_state.tensors_among([result[position] for position in used] or result)
    return max(0, peak_bytes - storage_bytes((t for t in kept if t.device == device), device)), elapsed_ms


def as_laid_out(captured: Captured, profile: Profile, strides: Sequence[tuple[int, ...] | None]) -> Profile:
    """Measure the workspace of operations again that read gradients of outputs with other strides than were traced.

    A kernel may copy such a gradient first. Gradients of pictures whose channels are last come so, and those of
    probabilities that the loss of a speech recognizer reads transposed. Strides are those of the gradients as they
    came, by position; None for one that did not.
    """
    pairs = zip(captured.tangents, strides, strict=False)
    others = {node: own for node, own in pairs if own is not None and own != traced_strides(node)}
    layouts: dict[fx.Node, Any] = {node: laid_out(node, own) for node, own in others.items()}
    if not layouts or not MemoryMeter.is_available(captured.device):
        return profile
    workspace = list(profile.workspace_bytes)
    with undisturbed(captured.device):
        for index in captured.graph.backward:
            node = captured.fx_nodes[index]
            if layouts.keys().isdisjoint(node.all_input_nodes):
                continue
            try:
                if captured.graph.has_work(index):
                    run = runner(captured, index, layouts=layouts)
                    size_bytes, _ = _workspace_bytes(run, captured.device, _used_results(node))
                    workspace[index] = max(workspace[index], size_bytes)
                else:
                    layouts[node] = runner(captured, index, layouts=layouts, device=torch.device("meta"))()
            except Exception as error:  # as in `_measure_node`: the workspace with the traced strides stays
                log.debug("Could not measure %s as laid out (%s: %s)", node, type(error).__name__, error)
    return replace(profile, workspace_bytes=tuple(workspace))


def _time_ms(
    run: Callable[[], Any],
    device: torch.device,
    options: ProfileOptions,
    before: Sequence[float] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the fastest time of an operation that has run before, beside the times that it took then."""
    times = [*before]
    while len(times) < 2 or (len(times) < options.repeats and sum(times) < options.time_limit_ms):
        times.append(_time_once_ms(run, device, clock))
        fastest = sorted(times)[:3]
        if len(fastest) == 3 and fastest[2] <= (1 + options.agreement) * fastest[0]:
            break
    return min(times)


def _time_once_ms(run: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type != "cuda":
        start = clock()
        run()
        return 1e3 * (clock() - start)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    runtime.keep_busy()  # the device would wait for each launch, and that would count
    before.record()
    run()
    after.record()
    torch.cuda.synchronize(device)
    return float(before.elapsed_time(after))


# ---------------------------------------------------------------- copies to the host and back


def measure_link(device: torch.device) -> Link:
    """Return the speed of the fastest of a few copies in each direction, while as much goes in the other one."""
    with undisturbed(device):
        size = max(SMALL_BYTES, min(SIZE_BYTES, int(FREE_SHARE * free_bytes(device))))
        latency_ms = min(min(_both_ways_ms(device, SMALL_BYTES)) for _ in range(REPEATS))
        times = [_both_ways_ms(device, size) for _ in range(REPEATS)]
    out_ms, in_ms = (max(LEAST_MS, min(of_one) - latency_ms) for of_one in zip(*times, strict=True))
    return Link(size / out_ms, size / in_ms, latency_ms)


def _both_ways_ms(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Copy to the host and back at once; return the milliseconds of each."""
    on_device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    events = []
    pairs = zip(streams, (on_host[0], on_device[1]), (on_device[0], on_host[1]), strict=True)
    for stream, target, source in pairs:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            before.record(stream)
            target.copy_(source, non_blocking=True)
            after.record(stream)
        events.append((before, after))
    torch.cuda.synchronize(device)
    out_ms, in_ms = (before.elapsed_time(after) for before, after in events)
    return out_ms, in_ms
