"""Capture a training step without the memory that it takes, and cost it without the device.

The module is built, called and differentiated on *fake* tensors, which have shape, type and device but no memory, and
goes through the same front end and records as in training. So bytes are those of training, but for what only a device
can tell: workspaces, which are taken as 0, and code outside of the captured parts. Times are estimates from operation
counts and stated rates, unless they are measured operation by operation.

Where torch was built without CUDA it can't differentiate fake CUDA tensors. A step for a GPU is then captured on CPU
tensors and accounted as on a GPU: blocks rounded as CUDA's allocator rounds them, attention by the kernels that a GPU
runs.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..capturing.capture import Captured
from ..errors import CaptureError, ConfigurationError, did_you_mean
from ..measuring.describing import describe
from ..measuring.profiling import CostCache, measure
from ..measuring.recording import Run, StepRecord
from ..memory.allocator import allocated_bytes
from ..records.costs import A100, Machine, Profile, estimate
from ..records.graph import Graph
from ..records.schedule import keep_all, lower
from ..records.step import Step, merge
from ..rewriting.joint import is_order_dependent_on_gpu
from ..running.accumulation import Leaves
from ..running.execution import Part
from ..running.program import Program, build
from ..sessions.backend import planning_backend
from ..sessions.eager_paths import eager_paths
from ..sessions.refusals import refuse
from ..torch_private import dynamo, tensor_state
from .factory import ModelCall, Workload

aten = torch.ops.aten
log = logging.getLogger("hiremate_lightning")
HALF_TYPES = ("float16", "bfloat16")
_CPU = torch.device("cpu")
LOSSES = ("auto", "model", "sum")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a millisecond, for estimates.

    Attributes:
        full: In float32 and whatever is not half precision.
        half: In float16 and bfloat16.
        source: Where the numbers come from.
    """

    full: Machine
    half: Machine
    source: str

    def __str__(self) -> str:
        """Write the rates for people."""
        full, half = (machine.flops_per_ms / 1e9 for machine in (self.full, self.half))
        flops = f"{full:g} TFLOP/s" if full == half else f"{full:g} TFLOP/s ({half:g} in half precision)"
        return f"{flops}, {self.full.bytes_per_ms / 1e6:g} GB/s: {self.source}"


DEFAULT_RATES = {
    "cpu": Rates(Machine(), Machine(), "about one core of a server"),
    "cuda": Rates(A100, replace(A100, flops_per_ms=312e9), "data sheet of an NVIDIA A100"),
}


def rates_of(device: torch.device, tflops: float | None = None, gb_per_s: float | None = None) -> Rates:
    """Give the rates of a kind of device, with what the user knows better.

    Args:
        device: The device that is planned for.
        tflops: Arithmetic, in 10**12 operations a second; None for the default.
        gb_per_s: Memory traffic, in 10**9 bytes a second; None for the default.
    """
    rates = DEFAULT_RATES[device.type]
    if tflops is None and gb_per_s is None:
        return rates

    def known(machine: Machine) -> Machine:
        return replace(
            machine,
            flops_per_ms=machine.flops_per_ms if tflops is None else tflops * 1e9,
            bytes_per_ms=machine.bytes_per_ms if gb_per_s is None else gb_per_s * 1e6,
        )

    return Rates(known(rates.full), known(rates.half), "as given")


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """How a step is captured.

    Attributes:
        device: The device that is planned for; it need not be there.
        loss: "model" for the loss that the module returns, "sum" for the sum of its outputs, "auto" for the first
            where there is one.
        optimizer: Name of a class of torch.optim, whose state counts; "none" for none.
        autocast: Type for torch.autocast; None for none.
    """

    device: torch.device = _CPU
    loss: str = "auto"
    optimizer: str = "AdamW"
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.device.type not in DEFAULT_RATES:
            raise ConfigurationError(f"Can't plan for device {str(self.device)!r}. Choose cpu or cuda.")
        if self.loss not in LOSSES:
            hint = did_you_mean(self.loss, LOSSES)
            raise ConfigurationError(f"Unknown loss {self.loss!r}.{hint} Choose one of: {', '.join(LOSSES)}")
        known = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]
        if self.optimizer not in ("none", *known):
            hint = did_you_mean(self.optimizer, known)
            raise ConfigurationError(f"torch.optim has no optimizer {self.optimizer!r}.{hint} Name one, or none.")

    @property
    def is_stand_in(self) -> bool:
        """Whether CPU tensors stand in for those of a GPU."""
        return self.device.type == "cuda" and not torch.cuda.is_available()

    @property
    def fake_device(self) -> torch.device:
        """The device of the fake tensors."""
        return torch.device("cpu") if self.is_stand_in else self.device


@dataclass(frozen=True)
class OfflineStep:
    """A training step, captured without memory and not yet costed.

    Attributes:
        name: Class of the module.
        size: Batch size.
        options: How it was captured.
        captured: The captured parts.
        record: Which of them ran, and how they are linked.
        resident: Bytes that exist before the step, by what they are.
        stale_bytes: Gradients of the step before, freed between forward and backward.
        capture_s: Seconds taken.
    """

    name: str
    size: int
    options: OfflineOptions
    captured: tuple[Captured, ...]
    record: StepRecord
    resident: tuple[tuple[str, int], ...]
    stale_bytes: int
    capture_s: float

    @property
    def resident_bytes(self) -> int:
        """Bytes that exist before the step."""
        return sum(size for _, size in self.resident)

    def estimated(self, rates: Rates) -> Step:
        """Put it into one graph, with estimated times."""
        return self._merge([estimate_mixed(captured.graph, rates) for captured in self.captured])

    def measured(self, cache: CostCache, progress: Callable[[int, int], None] = lambda done, total: None) -> Step:
        """Put it into one graph, with the costs of its operations measured one by one on the device.

        Raises:
            ConfigurationError: If the device is not there.
        """
        if self.options.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("There is no CUDA device here to measure on. Leave --measure out for estimates.")
        return self._merge([measure(captured, cache, progress=progress) for captured in self.captured])

    def _merge(self, profiles: Sequence[Profile]) -> Step:
        calls, order = describe(self.record, dict(enumerate(profiles)))
        step = merge(calls, order, self.stale_bytes)
        return replace(step, graph=_on_gpu(step.graph, self.options.device)) if self.options.is_stand_in else step


def estimate_mixed(graph: Graph, rates: Rates) -> Profile:
    """Estimate each node's time at the rate of the type that it computes in."""
    full, half = estimate(graph, rates.full), estimate(graph, rates.half)

    def is_half(node: int) -> bool:
        return any(graph.tensors[t].dtype in HALF_TYPES for t in graph.nodes[node].outputs)

    times = tuple((half if is_half(node) else full).time_ms[node] for node in range(len(graph.nodes)))
    return replace(full, time_ms=times)


def _on_gpu(graph: Graph, device: torch.device) -> Graph:
    """Account a graph that was captured on CPU tensors as on a GPU."""
    storages = tuple(replace(s, size_bytes=allocated_bytes(s.size_bytes, device)) for s in graph.storages)
    nodes = tuple(replace(n, is_random=n.is_random or is_order_dependent_on_gpu(n.op)) for n in graph.nodes)
    return replace(graph, storages=storages, nodes=nodes)


def capture_offline(workload: Workload, options: OfflineOptions, size: int | None = None) -> OfflineStep:
    """Capture one training step of a workload on fake tensors: forward, backward, optimizer.

    Where the path that plain training takes depends on values, which fake tensors lack, the path that the model takes
    while it is compiled is captured instead.

    Args:
        workload: What to capture; it is built here.
        options: How to capture it.
        size: Batch size; None for that of the workload's inputs.

    Raises:
        CaptureError: If torch.compile can't capture the module, or the step depends on values.
        ConfigurationError: If the module, its inputs or its loss can't be used.
    """
    try:
        try:
            with eager_paths():
                return _capture(workload, options, size)
        except tensor_state.DataDependentError:
            return _capture(workload, options, size)
    except tensor_state.DataDependentError as error:
        raise CaptureError(
            f"The step of {workload.name} depends on values of its tensors ({error}), which are not there without its "
            "memory. Plan it while it trains, or give it inputs and options that don't need them."
        ) from error


def _capture(workload: Workload, options: OfflineOptions, size: int | None) -> OfflineStep:
    start = time.perf_counter()
    conductor = _Conductor()
    mode = tensor_state.fake_mode()
    built = _build(workload, options, size, mode)
    refuse(built.module)
    with mode:
        call = _on_fakes(built, options.fake_device)
        module = call.module
        module.train()
        with _autocast(options):
            loss = _loss(_forward(call, conductor, options), options.loss)
        loss.backward()
        resident = _resident(call, _optimizer_state(module, options), options.device)
    if not conductor.record.backwards:
        raise CaptureError(f"Nothing of {type(module).__name__} was captured: torch.compile ran it as it is.")
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return OfflineStep(
        name=type(module).__name__,
        size=call.size,
        options=options,
        captured=tuple(part.captured for part in conductor.parts),
        record=conductor.record,
        resident=resident,
        stale_bytes=_bytes_of(gradients, options.device, set()),
        capture_s=time.perf_counter() - start,
    )


# ---------------------------------------------------------------- the step on fake tensors


class _Conductor:
    """Runs the parts of one step with everything kept, and records them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.record = StepRecord(None, 0, 0, 0, sees_frees=False)
        self._programs: dict[Part, Program] = {}

    def take_in(self, captured: Captured) -> Part:
        """Make a part of a captured graph."""
        part = Part(captured, self)
        self.parts.append(part)
        self._programs[part] = build(captured, lower(captured.graph, keep_all(captured.graph)))
        return part

    def start(self, part: Part, arguments: Sequence[Any]) -> tuple[Program, Run]:
        """Choose the program of a forward."""
        program = self._programs[part]
        return program, self.record.begin(part, self.parts.index(part), program, arguments)

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Note the end of a forward."""
        self.record.forward_done(run, outputs)

    def backward_starts(self, run: Run, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Note the start of a backward."""
        self.record.backward_starts(run, tangents, leaves, retains)

    def was_overwritten(self, part: Part, storages: Collection[int]) -> None:
        """Leave it as it is: everything is kept."""

    def must_return(self, part: Part, positions: Collection[int]) -> None:
        """Leave it as it is: no gradients exist before this step."""

    def backward_done(self, run: Run) -> None:
        """Note the end of a backward."""
        self.record.backward_done(run)

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Leave it as it is: without memory nothing runs out of it."""


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _forward(call: ModelCall, conductor: _Conductor, options: OfflineOptions) -> Any:
    """Run the forward through torch.compile."""
    planning = planning_backend(conductor.take_in)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return planning(_with_gpu_attention(module) if options.is_stand_in else module, inputs)

    compiled = torch.compile(_call_module, backend=backend, dynamic=False)
    try:
        with dynamo.capturing_for_plans():
            return compiled(call.module, *call.args, **call.kwargs)
    except dynamo.CompileError as error:
        reason = dynamo.reason_of(error)
        raise CaptureError(f"torch.compile could not capture {type(call.module).__name__}: {reason}") from error
    finally:
        dynamo.forget_compiled(_call_module)


def _autocast(options: OfflineOptions) -> Any:
    if options.autocast is None:
        return nullcontext()
    return torch.autocast(options.fake_device.type, options.autocast)


def _loss(result: Any, kind: str) -> torch.Tensor:
    """Find the loss that a module returned, or add its outputs up.

    Raises:
        ConfigurationError: If there is none.
    """
    if kind != "sum":
        found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        if isinstance(found, (tuple, list)) and found:
            found = found[0]
        if isinstance(found, torch.Tensor) and found.dim() == 0 and found.requires_grad:
            return found
        if kind == "model":
            kind_found = "a tensor" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ConfigurationError(
                f"The module returns no loss (found {kind_found}): expected a scalar, or one named 'loss'. "
                "Give it what it makes a loss from, such as labels, or use --loss sum."
            )
    outputs = [t for t in tensor_state.leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        raise ConfigurationError("Nothing that the module returns requires a gradient: there is no step to plan.")
    return sum((t.sum() for t in outputs[1:]), outputs[0].sum())


def _build(workload: Workload, options: OfflineOptions, size: int | None, mode: Any) -> ModelCall:
    """Build a workload with as little memory as it lets us.

    Fake tensors can't have their type changed once they are parameters, and tensors of the meta device can't be read.
    A factory that needs both is given memory, on the CPU, for its weights and inputs.
    """
    for context in ((mode, torch.device(options.fake_device)), (torch.device("meta"),)):
        with ExitStack() as stack:
            for manager in context:
                stack.enter_context(manager)
            try:
                return workload.build(size)
            except ConfigurationError:
                raise
            except Exception as error:  # of the factory; the next attempt may suit it, and the last one raises
                log.debug("%s can't be built in %s: %s", workload.name, context, error)
    return workload.build(size)


def _on_fakes(call: ModelCall, device: torch.device) -> ModelCall:
    """Give everything that is not a fake tensor on the device a fake one there; the module is copied for that."""
    memo: dict[int, Any] = {}
    for value in _tensors_of(call.module):
        if not _is_fake_on(value, device) and id(value) not in memo:
            memo[id(value)] = _fake_of(value, device)

    def as_fake(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not _is_fake_on(value, device)
        return _fake_of(value, device) if is_real else value

    module = copy.deepcopy(call.module, memo) if memo else call.module
    return ModelCall(module, *call.changed(as_fake))


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Go through all tensors of a module: parameters, buffers, and plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for inner in module.modules():
        yield from (v for v in tensor_state.leaves(list(vars(inner).values())) if isinstance(v, torch.Tensor))


def _fake_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _is_fake_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor_state.is_fake(tensor) and tensor.device.type == device.type


# ---------------------------------------------------------------- resident bytes


def _optimizer_state(module: nn.Module, options: OfflineOptions) -> Iterator[torch.Tensor]:
    """Step an optimizer once on the fake tensors, and go through the state that it keeps then."""
    trained = [p for p in module.parameters() if p.requires_grad]
    if options.optimizer == "none" or not trained:
        return
    optimizer = getattr(torch.optim, options.optimizer)(trained)
    optimizer.step()
    for state in optimizer.state.values():
        yield from (v for v in tensor_state.leaves(state) if isinstance(v, torch.Tensor))


def _resident(call: ModelCall, state: Iterator[torch.Tensor], device: torch.device) -> tuple[tuple[str, int], ...]:
    """Count what exists before a step."""
    groups = {
        "parameters": call.module.parameters(),
        "buffers": call.module.buffers(),
        "optimizer state": state,
        "batch": call.tensors,
    }
    seen = set[int]()
    return tuple((name, _bytes_of(tensors, device, seen)) for name, tensors in groups.items())


def _bytes_of(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]) -> int:
    """Add up storages as a device's allocator rounds them, each once; scalars that stay on the host don't count."""
    total = 0
    for tensor in tensors:
        storage = tensor_state.storage_id(tensor)
        on_host = device.type != "cpu" and (tensor.device.type == "cpu" and not tensor.dim())
        if storage not in seen and not on_host:
            seen.add(storage)
            total += allocated_bytes(tensor.untyped_storage().nbytes(), device)
    return total


# ---------------------------------------------------------------- attention as a GPU runs it


def _with_gpu_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Replace attention, whose kernel depends on the device, in a graph that Dynamo captured."""
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        node.target = _gpu_attention
    module.recompile()
    return module


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for F.scaled_dot_product_attention with the kernel that a GPU would choose; tensors are fake.

    Args:
        query: Batch x heads x length x width.
        key: As the query, of its own length; fewer heads with `enable_gqa`.
        value: As the key.
        attn_mask: Booleans or biases, expandable to batch x heads x length x length of the keys.
        dropout_p: Probability of dropout.
        is_causal: Whether to mask what is later.
        scale: Factor of the scores, None for the default.
        enable_gqa: Whether several heads of the query share one of the key.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    if attn_mask is None and str(query.dtype).removeprefix("torch.") in HALF_TYPES:
        flash = aten._scaled_dot_product_flash_attention.default
        return cast("torch.Tensor", flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0])
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention.default
    return cast("torch.Tensor", efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0])
