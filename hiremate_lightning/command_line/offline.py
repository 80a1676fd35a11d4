"""Capture a training step without the memory that it takes, and cost it without the device.

The module is built, called and differentiated on *fake* tensors, which have shape, type and device but no memory, and
goes through the same front end and records as in training. A first step captures its parts. A second one counts what
code outside of them makes and releases, FSDP2's gathers among it. So bytes are those of training, but for what only a
device can tell: workspaces, which are taken as 0. Times are estimates from operation counts and stated rates, unless
they are measured operation by operation.

Without a CUDA device torch can't differentiate fake CUDA tensors. A step for a GPU is then captured on CPU
tensors, as a step for several GPUs always is. It is accounted as on a GPU: blocks rounded as CUDA's allocator rounds
them, attention by the kernels that a GPU runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..capturing.backend import capture_opaque, planning_backend
from ..capturing.capture import Captured
from ..errors import CaptureError, ConfigurationError, did_you_mean, place_of
from ..measuring.describing import describe
from ..measuring.profiling import CostCache, measure
from ..measuring.recording import Existing, StepRecord
from ..measuring.runs import Run
from ..memory.allocator import storage_bytes
from ..records.costs import Profile, estimate
from ..records.schedule import keep_all, lower
from ..records.step import Call, Step, merge
from ..running.accumulation import Leaves
from ..running.execution import Conductor, Part
from ..running.program import Program, build
from ..torch_private import dynamo, readings, sharding, tensor_state
from .factory import ModelCall, Workload
from .sharded import ONE, Layout, planned_paths
from .without_device import CountingMeter, Rates, build_on_fakes, on_gpu, same_tensors, with_gpu_attention

_CPU = torch.device("cpu")
LIGHTNING_MODULES = {"lightning.LightningModule", "pytorch_lightning.LightningModule"}
ACCUMULATED = "accumulated gradients"  # a part of what is resident
STEPS = 4  # the most to run until one captures nothing


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """How a step is captured.

    Attributes:
        device: The device that is planned for; it need not be there.
        loss: "model" for the loss that the module returns, "sum" for the sum of its outputs, "auto" for the first
            where there is one.
        optimizer: Name of a class of torch.optim, whose state counts; "none" for none.
        autocast: Type for torch.autocast; None for none.
        layout: How the module is spread over processes.
        zero_grad: When the loop frees gradients: "before" the forward, "after-forward", or "accumulate" for a step that
            adds to those of the steps before; "auto" for what loops do that a module of this class is made for.
    """

    device: torch.device = _CPU
    loss: str = "auto"
    optimizer: str = "AdamW"
    autocast: torch.dtype | None = None
    layout: Layout = ONE
    zero_grad: str = "auto"

    def __post_init__(self) -> None:
        """Check the optimizer, whose names torch alone knows; the command line checks the rest."""
        names = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]
        if self.optimizer not in ("none", *names):
            hint = did_you_mean(self.optimizer, names)
            raise ConfigurationError(f"torch.optim has no optimizer {self.optimizer!r}.{hint} Name one, or none.")

    @property
    def is_stand_in(self) -> bool:
        """Whether CPU tensors stand in for those of a GPU: where there is none, or where several are planned for."""
        return self.device.type == "cuda" and (self.layout.count > 1 or not torch.cuda.is_available())

    @property
    def fake_device(self) -> torch.device:
        """The device of the fake tensors."""
        return torch.device("cpu") if self.is_stand_in else self.device


@dataclass(frozen=True)
class OfflineStep:
    """A training step, captured without memory and not yet costed."""

    name: str  # class of the module
    size: int  # batch size of this process
    options: OfflineOptions
    captured: tuple[Captured, ...]
    recorded: OfflineRun  # which of these graphs ran, how they are linked, and what ran outside
    resident: tuple[tuple[str, int], ...]  # bytes that exist before the step, by what they are
    gradients_bytes: int  # of the parameters that this process keeps
    zero_grad: str  # when the loop frees gradients: before, after-forward or accumulate
    breaks: tuple[str, ...]  # what has ended graphs, with its place in the code
    sent_bytes: int  # to other processes in a step
    capture_s: float

    @property
    def resident_bytes(self) -> int:
        """Bytes that exist before the step."""
        return sum(size for _, size in self.resident)

    @property
    def stale_bytes(self) -> int:
        """Gradients of the step before that are freed between forward and backward."""
        return self.gradients_bytes if self.zero_grad == "after-forward" else 0

    def estimated(self, rates: Rates) -> Step:
        """Put it into one graph, with estimated times."""
        return self._merge([estimate(captured.graph, rates.machine) for captured in self.captured])

    def measured(self, cache: CostCache, progress: Callable[[int, int], None] = lambda done, total: None) -> Step:
        """Put it into one graph, with the costs of its operations measured one by one on the device, which is there."""
        if self.options.is_stand_in:
            raise ConfigurationError("There is no CUDA device here to measure on. Leave --measure out for estimates.")
        return self._merge([measure(captured, cache, progress=progress) for captured in self.captured])

    def _merge(self, profiles: Sequence[Profile]) -> Step:
        # FSDP2 reduces whole gradients before it adds their shards: those stay in the graph.
        are_added = self.zero_grad == "accumulate" and self.options.layout.shards == 1
        step = merge(*self.recorded.describe(profiles, are_added), self.stale_bytes)
        return replace(step, graph=on_gpu(step.graph, self.options.device)) if self.options.is_stand_in else step


def capture_offline(workload: Workload, options: OfflineOptions, size: int | None = None) -> OfflineStep:
    """Capture one training step of a workload on fake tensors: forward, backward, optimizer.

    Where the path that plain training takes depends on values, which fake tensors lack, the path that the model takes
    while it is compiled is captured instead. The batch size is that of the workload's inputs unless it is given.

    Raises:
        CaptureError: If torch.compile can't capture the module, or the step depends on values.
        ConfigurationError: If the module, its inputs or its loss can't be used.
    """
    capture_opaque()
    try:
        try:
            return _capture(workload, options, size)
        except tensor_state.DATA_DEPENDENT:
            return _capture(workload, options, size, readings.as_compiled)
    except tensor_state.DATA_DEPENDENT as error:
        raise CaptureError(
            f"The step of {workload.name} depends on values of its tensors{place_of(error)}, which are not there "
            "without its memory. Plan it while it trains, or give it inputs and options that don't need them."
        ) from error


def _capture(
    workload: Workload,
    options: OfflineOptions,
    size: int | None,
    answers: Callable[[], AbstractContextManager[None]] = readings.as_in_eager,
) -> OfflineStep:
    start, breaks = time.perf_counter(), dynamo.graph_breaks()
    mode, layout, device = tensor_state.fake_mode(), options.layout, options.fake_device
    call = build_on_fakes(workload, device, size, mode)
    name = type(call.module).__name__  # fully_shard() gives it another class
    zero_grad = _zero_grad(call.module) if options.zero_grad == "auto" else options.zero_grad
    with ExitStack() as undo:
        mesh = undo.enter_context(layout.processes(device))
        undo.enter_context(dynamo.capturing_for_plans(answers=answers))
        if workload.inputs:
            with mode:
                _check_inputs(call, options)
        layout.spread(call.module, mesh)  # outside of the mode: meshes are made of tensors too
        with mode:
            call.module.train()
            run = OfflineRun(name, options, call.module, undo)
            trained = [p for p in call.module.parameters() if p.requires_grad]
            has_optimizer = trained and options.optimizer != "none"
            optimizer = getattr(torch.optim, options.optimizer)(trained) if has_optimizer else None
            run.step(call, optimizer)
            for _ in range(STEPS):
                count = len(run.parts)
                gradients = (p.grad for p in trained if p.grad is not None)
                gradients_bytes = _bytes_of(gradients, options.device, set())
                call.module.zero_grad()
                resident = _resident(call, optimizer, options.device)
                with run.recording():
                    run.step(call, None)
                if len(run.parts) == count:
                    break
    if not run.record.backwards:
        raise CaptureError(f"Nothing of {name} was captured: torch.compile ran it as it is.")
    return OfflineStep(
        name=name,
        size=call.size,
        options=options,
        captured=tuple(part.captured for part in run.parts),
        recorded=run,
        resident=(*resident, (ACCUMULATED, gradients_bytes)) if zero_grad == "accumulate" else resident,
        gradients_bytes=gradients_bytes,
        zero_grad=zero_grad,
        breaks=tuple(reason for reason, _ in (dynamo.graph_breaks() - breaks).most_common()),
        sent_bytes=layout.sent_bytes(run.meter),
        capture_s=time.perf_counter() - start,
    )


def _zero_grad(module: nn.Module) -> str:
    """Return when the loops free gradients that a module is made for."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(module).__mro__}
    return "after-forward" if names & LIGHTNING_MODULES else "before"


# ---------------------------------------------------------------- the step on fake tensors


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class OfflineRun(Conductor):
    """Runs steps of a module through torch.compile with everything kept, and records each in the place of the last.

    Args:
        name: Class of the module.
        options: How to capture it.
        root: The module, whose planned parts are compiled: the whole, or the code between its FSDP units.
        undo: Ends what compiles them.

    Attributes:
        parts: The graphs captured so far.
        record: The latest step.
        meter: Counts the memory of that step.
    """

    def __init__(self, name: str, options: OfflineOptions, root: nn.Module, undo: ExitStack) -> None:
        self._name, self._options, self._root, self._undo = name, options, root, undo
        self.parts: list[Part] = []
        self.record = StepRecord(None, Existing())
        self.meter = CountingMeter(options.device)
        self._programs: dict[Part, Program] = {}
        self._path = ""  # of the module that is being called
        self._paths: list[str] = []  # of the modules that ran
        self._call: Callable[..., Any] = _call_module
        paths = planned_paths(root)
        if "" in paths:
            self._call = self._compiled(_call_module)
            return
        compiled = self._compiled(_call_forward)
        for path in paths:
            module = root.get_submodule(path)
            module.forward = partial(self._call_part, path, compiled, module)

    def _call_part(self, path: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._path = path
        return compiled(*args, **kwargs)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        planning = planning_backend(self._take_in)

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return planning(with_gpu_attention(module) if self._options.is_stand_in else module, inputs)

        self._undo.callback(dynamo.forget_compiled, function)
        return torch.compile(function, backend=backend, dynamic=False)

    def _take_in(self, captured: Captured) -> Part:
        part = Part(captured, self)
        self.parts.append(part)
        self._programs[part] = build(captured, lower(captured.graph, keep_all(captured.graph)))
        return part

    def step(self, call: ModelCall, optimizer: torch.optim.Optimizer | None) -> None:
        """Run a step."""
        try:
            with _autocast(self._options):
                loss = _loss(self._call(call.module, *call.args, **call.kwargs), self._options.loss)
        except dynamo.CompileError as error:
            reason = dynamo.reason_of(error)
            raise CaptureError(f"torch.compile could not capture {self._name}: {reason}") from error
        self.record.backward_called()  # in a mode of tensors without memory nobody else reports it
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one step."""
        self._paths.clear()
        self.meter = CountingMeter(self._options.device, sharding.resized_tensors(self._root))
        self.record = StepRecord(None, Existing(), self._root, self.meter)
        try:
            yield
        finally:
            self.record.close()

    @property
    def runs(self) -> list[Run]:
        """The runs of the latest step that have a backward, in the order of their forwards."""
        return [run for run in self.record.runs if run.index in self.record.backwards]

    def describe(self, profiles: Sequence[Profile], are_added: bool = False) -> tuple[list[Call], list[int]]:
        """Return the calls of the latest step, with the modules by their paths in the model, and the backwards' order.

        Args:
            profiles: Costs of each captured graph.
            are_added: Whether gradients of parameters are added to those that exist, and die at once.
        """
        calls, order = describe(self.record, dict(enumerate(profiles)))
        if are_added:
            calls = [call.without_gradients(run.added) for call, run in zip(calls, self.runs, strict=True)]
        for index, run in enumerate(self.runs):
            if path := self._paths[run.index]:
                graph = calls[index].graph
                nodes = tuple(replace(node, module=f"{path}.{node.module}".rstrip(".")) for node in graph.nodes)
                calls[index] = replace(calls[index], graph=replace(graph, nodes=nodes))
        return calls, order

    # ---------------------------------------------------------------- conductor of the parts

    def start(self, part: Part, arguments: Sequence[Any]) -> tuple[Program, Run]:
        """Run what keeps everything."""
        program = self._programs[part]
        self._paths.append(self._path)
        return program, self.record.begin(part, self.parts.index(part), program, arguments)

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record the end of a forward."""
        self.record.forward_done(run, outputs)

    def backward_starts(self, run: Run, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a backward."""
        self.record.backward_starts(run, tangents, leaves, retains)

    def backward_done(self, run: Run) -> None:
        """Record the end of a backward."""
        self.record.backward_done(run)

    def name_of(self, tensor: torch.Tensor) -> str:
        """Describe a tensor."""
        return f"A tensor of shape {tuple(tensor.shape)}"


def _check_inputs(call: ModelCall, options: OfflineOptions) -> None:
    """Call a copy of a module with the inputs that the command line named: a wrong shape is no fault of the capture."""
    shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in call.tensors)
    try:
        copied = same_tensors(call.module)
    except Exception:  # of a module that can't be copied: the capture will show what is wrong
        return
    called = list[str]()
    for name, module in copied.named_modules():
        is_leaf = next(module.children(), None) is None and not isinstance(module, torch.jit.ScriptModule)
        if name and is_leaf:
            module.register_forward_pre_hook(partial(_note_call, called, name))
    with torch.no_grad(), _autocast(options), tensor_state.without_log_of_fakes():
        try:
            copied.train()(*call.args, **call.kwargs)
        except tensor_state.DATA_DEPENDENT:
            return
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            line = next(iter(str(error).splitlines()), "")
            raise ConfigurationError(
                f"{type(call.module).__name__} can't be called with --input {shapes}: {line}{place_of(error)}"
                f"{''.join(called)} Give --input the shapes that its forward takes, the batch first."
            ) from error


def _note_call(called: list[str], name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Describe the call of a module that comes last."""
    shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in tensor_state.tensors_among(inputs))
    called[:] = [f" The last module called is {name}, {module}, with {shapes or 'no tensor'}."]


def _autocast(options: OfflineOptions) -> Any:
    if options.autocast is None:
        return nullcontext()
    return torch.autocast(options.fake_device.type, options.autocast)


def _loss(result: Any, kind: str) -> torch.Tensor:
    """Find the loss that a module returned, or add its outputs up."""
    if kind != "sum":
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        if isinstance(loss, (tuple, list)) and loss:
            loss = loss[0]
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            return loss
        if kind == "model":
            kind_found = "a tensor" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ConfigurationError(
                f"The module returns no loss (found {kind_found}): expected a scalar, or one named 'loss'. "
                "Give it what it makes a loss from, such as labels, or use --loss sum."
            )
    outputs = [tensor for tensor in tensor_state.tensors_among(result) if tensor.requires_grad]
    if not outputs:
        raise ConfigurationError("Nothing that the module returns requires a gradient: there is no step to plan.")
    return sum((t.sum() for t in outputs[1:]), outputs[0].sum())


# ---------------------------------------------------------------- resident bytes


def _resident(
    call: ModelCall, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> tuple[tuple[str, int], ...]:
    """Count what exists before a step."""
    state = [] if optimizer is None else tensor_state.leaves(list(optimizer.state.values()))
    groups = {
        "parameters": call.module.parameters(),
        "buffers": call.module.buffers(),
        "optimizer state": (value for value in state if isinstance(value, torch.Tensor)),
        "batch": call.tensors,
    }
    seen = set[int]()
    return tuple((name, _bytes_of(tensors, device, seen)) for name, tensors in groups.items())


def _bytes_of(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]) -> int:
    """Add up storages that were not seen; scalars that stay on the host don't count."""
    is_host = device.type == "cpu"
    return storage_bytes((t for t in tensors if is_host or t.device.type != "cpu" or t.dim()), device, seen)
