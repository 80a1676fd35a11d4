"""Captures a training step without the memory that it takes, and costs it without the device.

The module is built, called and differentiated on *fake* tensors, which have shape, type and device but no memory. It
goes through the same front end and records as in training. A first step captures its graphs. A second step counts the
bytes that uncaptured code allocates and frees, FSDP2's gathers included. So bytes equal those of training, except for
workspaces, which only a device can measure and which count as 0. Times are estimates from operation counts and stated
rates, unless they are measured operation by operation.

Without a CUDA device torch can't differentiate fake CUDA tensors. A step for a GPU is then captured on CPU tensors, as
a step for several GPUs always is. Its bytes are counted as on a GPU: blocks are rounded as CUDA's allocator rounds
them, and attention uses the kernels of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..capturing.backend import capture_opaque, planning_backend
from ..capturing.capture import Captured
from ..errors import CaptureError, ConfigurationError, did_you_mean, place_of
from ..measuring.profiling import CostCache, measure
from ..measuring.recorded_calls import calls_of
from ..measuring.recording import StepMeasurement
from ..measuring.runs import Run
from ..memory.allocator import storage_bytes
from ..records.costs import Profile, estimate
from ..records.schedule import keep_all, lower
from ..records.step import MergedStep, merge
from ..running.accumulation import Leaves
from ..running.execution import Conductor, GraphRuntime
from ..running.program import Program, build
from ..torch_private import dynamo, readings, sharding, tensor_state
from .factory import ModelCall, Workload, build_on_fakes, same_tensors
from .without_device import ONE, CountingMeter, Layout, Rates, on_gpu, planned_paths, with_gpu_attention

_CPU = torch.device("cpu")
LIGHTNING_MODULES = {"lightning.LightningModule", "pytorch_lightning.LightningModule"}
ACCUMULATED = "accumulated gradients"  # a part of the resident bytes
STEPS = 4  # most steps to run until one captures nothing new


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """Options for the capture of a step."""

    device: torch.device = _CPU  # the device to plan for; it may be missing
    # "model" for the loss that the module returns, "sum" for the sum of its outputs, "auto" for the first, if any
    loss: str = "auto"
    optimizer: str = "AdamW"  # class name in torch.optim, whose state counts as resident; or "none"
    autocast: torch.dtype | None = None  # type for torch.autocast
    layout: Layout = ONE  # how the module is sharded over processes
    # When the loop frees gradients: "before" the forward, "after-forward", or "accumulate" for a step that adds to the
    # gradients of earlier steps; "auto" for "after-forward" if the module is a LightningModule, else "before".
    zero_grad: str = "auto"

    def __post_init__(self) -> None:
        """Check the optimizer's name, which needs torch; the command line checks the rest."""
        names = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"]
        if self.optimizer not in ("none", *names):
            hint = did_you_mean(self.optimizer, names)
            raise ConfigurationError(f"torch.optim has no optimizer {self.optimizer!r}.{hint} Name one, or none.")

    @property
    def is_stand_in(self) -> bool:
        """Whether CPU tensors replace GPU tensors: if there is no GPU, or if the plan is for several GPUs."""
        return self.device.type == "cuda" and (self.layout.count > 1 or not torch.cuda.is_available())

    @property
    def fake_device(self) -> torch.device:
        """The device of the fake tensors."""
        return torch.device("cpu") if self.is_stand_in else self.device


class OfflineStep(Conductor):
    """A training step captured without memory and not yet costed: the latest step that ran, with everything kept."""

    def __init__(self, call: ModelCall, options: OfflineOptions) -> None:
        self.name, self.size, self.options = type(call.module).__name__, call.size, options
        self.zero_grad = options.zero_grad
        if options.zero_grad == "auto":  # as the training loop of the module's framework does
            names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(call.module).__mro__}
            self.zero_grad = "after-forward" if names & LIGHTNING_MODULES else "before"
        self.runtimes: list[GraphRuntime] = []  # one for each graph captured so far
        self.measurement = StepMeasurement(None)  # the runs of the step, and how they are linked
        self.meter = CountingMeter(options.device)  # counts memory and sent bytes
        self.resident: dict[str, int] = {}  # bytes that exist before the step, by kind
        self.gradients_bytes, self.capture_s = 0, 0.0  # bytes of gradients that this process keeps; seconds
        self.breaks: tuple[str, ...] = ()  # reasons of graph breaks, with places in the code
        self._call = call
        self._programs: dict[GraphRuntime, Program] = {}
        self._path = ""  # path of the module that is being called
        self._paths: list[str] = []  # paths of the modules that ran

    @property
    def captured(self) -> tuple[Captured, ...]:
        """The captured graphs."""
        return tuple(runtime.captured for runtime in self.runtimes)

    @property
    def resident_bytes(self) -> int:
        """Bytes that exist before the step."""
        return sum(self.resident.values())

    @property
    def stale_bytes(self) -> int:
        """Bytes of the previous step's gradients, if they are freed between forward and backward."""
        return self.gradients_bytes if self.zero_grad == "after-forward" else 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that a step sends to other processes in the counted collectives, by rings as in NCCL."""
        sent, layout = self.meter.sent, self.options.layout
        gathered = (sent["gathered"] + sent["scattered"]) * (layout.shards - 1) // layout.shards
        return gathered + 2 * sent["reduced"] * (layout.parts - 1) // layout.parts

    def estimated(self, rates: Rates) -> MergedStep:
        """Return the step as one graph, with estimated times."""
        return self._merge([estimate(captured.graph, rates.machine) for captured in self.captured])

    def measured(self, progress: Callable[[int, int], None] = lambda done, total: None) -> MergedStep:
        """Return the step as one graph, with operations measured one by one on the device, which must exist."""
        if self.options.is_stand_in:
            raise ConfigurationError("There is no CUDA device here to measure on. Leave --measure out for estimates.")
        cache = CostCache()
        return self._merge([measure(captured, cache, progress=progress) for captured in self.captured])

    def _merge(self, profiles: Sequence[Profile]) -> MergedStep:
        """Merge the calls of the step, with modules by their paths in the model."""
        for runtime, profile in zip(self.runtimes, profiles, strict=True):
            runtime.profile = profile
        calls, order = calls_of(self.measurement)
        for index, run in enumerate(self.measurement.planned):
            # FSDP2 reduces whole gradients before it adds their shards: the whole gradients stay in the graph.
            if self.zero_grad == "accumulate" and self.options.layout.shards == 1:
                calls[index] = calls[index].without_gradients(run.added)
            if path := self._paths[run.index]:
                graph = calls[index].graph
                nodes = tuple(replace(node, module=f"{path}.{node.module}".rstrip(".")) for node in graph.nodes)
                calls[index] = replace(calls[index], graph=replace(graph, nodes=nodes))
        step = merge(calls, order, self.stale_bytes)
        return replace(step, graph=on_gpu(step.graph, self.options.device)) if self.options.is_stand_in else step

    def run(self, undo: ExitStack) -> None:
        """Run the step until it captures nothing more; `undo` discards the compiled code."""
        root, options = self._call.module.train(), self.options
        function = self._compile_parts(root, undo)
        trained = [p for p in root.parameters() if p.requires_grad]
        has_optimizer = trained and options.optimizer != "none"
        optimizer = getattr(torch.optim, options.optimizer)(trained) if has_optimizer else None
        self._run_once(function)
        if optimizer is not None:
            optimizer.step()
        for _ in range(STEPS):
            count = len(self.runtimes)
            self._count_resident(optimizer)
            root.zero_grad()
            self._paths.clear()
            self.meter = CountingMeter(options.device, sharding.resized_tensors(root))
            self.measurement = StepMeasurement(None, root=root, meter=self.meter)
            try:
                self._run_once(function)
            finally:
                self.measurement.close()
            if len(self.runtimes) == count:
                break
        if not self.measurement.backwards:
            raise CaptureError(f"Nothing of {self.name} was captured: torch.compile ran it as it is.")

    def _compile_parts(self, root: nn.Module, undo: ExitStack) -> Callable[..., Any]:
        """Compile the whole module, or the modules around its FSDP units; return a function that calls the module."""
        planning = planning_backend(self._take_in)

        def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            return planning(with_gpu_attention(module) if self.options.is_stand_in else module, inputs)

        def call_part(path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._path = path
            return compiled(type(module).forward, module, *args, **kwargs)

        paths = planned_paths(root)
        undo.callback(dynamo.forget_compiled, _call)
        compiled = torch.compile(_call, backend=backend, dynamic=False)
        if "" in paths:
            return compiled
        for path in paths:
            module = root.get_submodule(path)
            module.forward = partial(call_part, path, module)
        return _call

    def _take_in(self, captured: Captured) -> GraphRuntime:
        runtime = GraphRuntime(captured, self, len(self.runtimes))
        self.runtimes.append(runtime)
        self._programs[runtime] = build(captured, lower(captured.graph, keep_all(captured.graph)))
        return runtime

    def _run_once(self, function: Callable[..., Any]) -> None:
        call, options = self._call, self.options
        try:
            with _autocast(options):
                loss = _loss(function(call.module, *call.args, **call.kwargs), options.loss)
        except dynamo.CompileError as error:
            reason = dynamo.reason_of(error)
            raise CaptureError(f"torch.compile could not capture {self.name}: {reason}") from error
        self.measurement.backward_called()  # on fake tensors nothing else reports it
        loss.backward()

    def _count_resident(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count the bytes that exist before a step, each storage once, without scalars on the host."""
        module, device, seen = self._call.module, self.options.device, set[int]()
        state = [] if optimizer is None else tensor_state.leaves(list(optimizer.state.values()))
        groups: dict[str, Iterable[Any]] = {
            "parameters": module.parameters(),
            "buffers": module.buffers(),
            "optimizer state": state,
            "batch": self._call.tensors,
            ACCUMULATED: (p.grad for p in module.parameters()),
        }
        for name, values in groups.items():
            tensors = [t for t in values if isinstance(t, torch.Tensor)]
            counted = [t for t in tensors if device.type == "cpu" or t.device.type != "cpu" or t.dim()]
            self.resident[name] = storage_bytes(counted, device, seen)
        self.gradients_bytes = self.resident[ACCUMULATED]
        if self.zero_grad != "accumulate":
            del self.resident[ACCUMULATED]

    def start(self, runtime: GraphRuntime, arguments: Sequence[Any]) -> tuple[Program, Run]:
        """Return the program that keeps everything, and its recorded run."""
        program = self._programs[runtime]
        self._paths.append(self._path)
        return program, self.measurement.begin(runtime, program, arguments)

    def forward_done(self, run: Run, outputs: Sequence[Any]) -> None:
        """Record the end of a forward."""
        self.measurement.forward_done(run, outputs)

    def backward_starts(self, run: Run, tangents: Sequence[Any], leaves: Leaves, retains: bool) -> None:
        """Record the start of a backward."""
        self.measurement.backward_starts(run, tangents, leaves, retains)

    def backward_done(self, run: Run) -> None:
        """Record the end of a backward."""
        self.measurement.backward_done(run)


def capture_offline(workload: Workload, options: OfflineOptions, size: int | None = None) -> OfflineStep:
    """Capture one training step of a workload on fake tensors: forward, backward, optimizer.

    If the path of eager training depends on values, which fake tensors lack, the path that the model takes under
    torch.compile is captured instead. `size` replaces the batch size of the workload's inputs.

    Raises:
        CaptureError: If torch.compile can't capture the module, or the step depends on values.
        ConfigurationError: If the module, its inputs or its loss can't be used.
    """
    capture_opaque()
    for answers in (readings.as_in_eager, readings.as_compiled):
        try:
            return _capture(workload, options, size, answers)
        except tensor_state.DATA_DEPENDENT as error:
            reason = error
    raise CaptureError(
        f"The step of {workload.name} depends on values of its tensors{place_of(reason)}, which are not there "
        "without its memory. Plan it while it trains, or give it inputs and options that don't need them."
    ) from reason


def _capture(workload: Workload, options: OfflineOptions, size: int | None, answers: Callable[[], Any]) -> OfflineStep:
    start, breaks = time.perf_counter(), dynamo.graph_breaks()
    mode, device = tensor_state.fake_mode(), options.fake_device
    call = build_on_fakes(workload, device, size, mode)
    step = OfflineStep(call, options)  # before fully_shard() gives the module another class
    with ExitStack() as undo:
        mesh = undo.enter_context(options.layout.processes(device)) if options.layout.count > 1 else None
        undo.enter_context(dynamo.capturing_for_plans(answers=answers))
        if workload.inputs:
            with mode:
                _check_inputs(call, options)
        options.layout.spread(call.module, mesh)  # outside of the fake mode: a mesh needs real tensors
        with mode:
            step.run(undo)
    step.breaks = tuple(reason for reason, _ in (dynamo.graph_breaks() - breaks).most_common())
    step.capture_s = time.perf_counter() - start
    return step


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _check_inputs(call: ModelCall, options: OfflineOptions) -> None:
    """Call a copy of a module with the command line's inputs, to report a wrong shape as an error of the inputs."""
    try:
        copied = same_tensors(call.module)
    except Exception:  # the module can't be copied: the capture will show errors
        return
    called = ""

    def note_call(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal called
        shapes = _shapes(tensor_state.tensors_among(inputs))
        called = f" The last module called is {name}, {module}, with {shapes or 'no tensor'}."

    for name, module in copied.named_modules():
        is_leaf = next(module.children(), None) is None and not isinstance(module, torch.jit.ScriptModule)
        if name and is_leaf:
            module.register_forward_pre_hook(partial(note_call, name))
    with torch.no_grad(), _autocast(options), tensor_state.without_log_of_fakes():
        try:
            copied.train()(*call.args, **call.kwargs)
        except tensor_state.DATA_DEPENDENT:
            return
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            line = next(iter(str(error).splitlines()), "")
            raise ConfigurationError(
                f"{type(call.module).__name__} can't be called with --input {_shapes(call.tensors)}: "
                f"{line}{place_of(error)}{called} Give --input the shapes that its forward takes, the batch first."
            ) from error


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)


def _autocast(options: OfflineOptions) -> torch.autocast:
    return torch.autocast(options.fake_device.type, options.autocast, enabled=options.autocast is not None)


def _loss(result: Any, kind: str) -> torch.Tensor:
    """Return the loss that a module returned, or the sum of its outputs."""
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
