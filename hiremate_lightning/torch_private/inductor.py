"""Compile small graphs with Inductor, and functions of `torch.compile` into custom operators (see `compiled_by_torch`).

Inductor is imported at its first use: that takes a second, and warns of what PyTorch itself has deprecated.

AOTAutograd and Inductor run with the options and the forward/backward partition of the author's torch.compile. The
function's outputs are kept apart from tensors saved for its backward, which may be views of outputs or inputs.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import CompileContext, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from ..housekeeping import log
from . import tensor_state
from .facts import expect
from .tensor_state import layout_of

Compiled = Callable[[list[Any]], Sequence[torch.Tensor]]

_OPTIONS = {"fallback_random": True, "triton.cudagraphs": False, "freezing": False}
ended = weakref.WeakSet[Any]()  # functions that can't be one operator: graphs break at their calls
_kernels: dict[str, UserKernels] = {}  # by `UserKernels.name`
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size, strides, type, device
_Shown = tuple[tuple[_Layout, bool], ...]  # each input's layout, and whether it gets a gradient


def compile_graph(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
    """Compile a graph of ATen operators without changes in place, for inputs of these layouts, passed in a list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        with config.patch(_OPTIONS), FakeTensorMode():
            fakes = list(map(tensor_state.laid_out_like, inputs))
            traced = make_fx(module, select_decomp_table())(*fakes)
        returned = traced.graph.output_node()
        results: Any = returned.args[0]
        returned.meta["user_visible_output_idxs"] = list(range(len(results)))  # keep the strides of the trace
        with config.patch(_OPTIONS):
            compiled: Compiled = compile_fx_inner(traced, fakes, is_inference=True)
    return compiled


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A captured call of a function that torch.compile returned to its author, with the autocast settings around it."""

    function: Any
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    remembers: bool

    @property
    def name(self) -> str:
        """The function's name in the user's code, with its class."""
        return str(self.function.__qualname__).rpartition("<locals>.")[2]


def context_of(function: Any) -> Any:
    """Return the torch.compile context of a compiled function: its options, and the backend as a callback."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index("self")].cell_contents


def function_of(node: fx.Node) -> str:
    """Return the name of the compiled function whose forward operator a node calls, "" for other nodes."""
    return _kernels[str(node.args[1])].function if node.target is torch.ops.hiremate.run_compiled.default else ""


def end_graph_at(function: Any) -> None:
    """Make Dynamo capture code again, with a graph break at this function."""
    ended.add(function)
    raise TensorifyScalarRestartAnalysis


class NotCompiledError(Exception):
    """A compiled function was traced with inputs that no kernels exist for: call `compile`, then trace again."""

    def __init__(self, operation: KernelOperation, shown: _Shown) -> None:
        super().__init__(f"{operation.name} is not compiled yet")
        self.compile = partial(operation.compile, shown)


class KernelOperation:
    """A call of a compiled function, and the code captured of it, as one operation of a captured graph.

    Attributes:
        calls_modules: Whether it calls modules other than the caller.
    """

    def __init__(self, call: KernelCall, module: fx.GraphModule, calls_modules: bool) -> None:
        self.name, self.calls_modules = call.name, calls_modules
        self.__name__ = f"compiled_{call.function.__name__}"
        self._call, self._module = call, module
        self._compiled: dict[_Shown, UserKernels | None] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the results, with gradients; raise `NotCompiledError` if a trace needs kernels for new layouts."""
        shown = tuple((layout_of(tensor), torch.is_grad_enabled() and tensor.requires_grad) for tensor in inputs)
        if shown not in self._compiled:
            if any(isinstance(i, (FakeTensor, FunctionalTensor)) for i in inputs):
                raise NotCompiledError(self, shown)
            layouts = [layout for layout, _ in shown]
            alike = next((key for key in self._compiled if [layout for layout, _ in key] == layouts), None)
            if alike is None:
                self.compile(shown)
            shown = alike or shown  # captured code runs without gradients when it is compared
        kernels = self._compiled[shown]
        if kernels is None:
            results: tuple[torch.Tensor, ...] = self._module(*inputs)
            return results
        if kernels.backward is None or not torch.is_grad_enabled():
            returned = torch.ops.hiremate.run_compiled(inputs, kernels.name)
            return tuple(returned[at] for at in kernels.outputs)
        outputs: tuple[torch.Tensor, ...] = _Differentiated.apply(kernels, *inputs)  # type: ignore[no-untyped-call]
        return outputs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def compile(self, shown: _Shown) -> None:
        """Compile kernels for inputs of these layouts, outside of all tracing.

        If that fails while Dynamo captures, the graph breaks at the function; later the captured code runs in its
        place.
        """
        try:
            devices = {device.index or 0 for (*_, device), _ in shown if device.type == "cuda"}
            with tensor_state.real_mode(), torch.random.fork_rng(devices=devices):
                made, results = _compile(self._call, self._module, shown)
                with torch.no_grad():
                    kernels = _try(self._call, shown, made, results)
            self._compiled[shown] = _kernels[kernels.name] = kernels
        except Exception:  # any error of a compiler: the function may raise it again when it runs by itself
            log.debug("%s is no single operation", self.name, exc_info=True)
            if CompileContext.try_get() is not None:
                end_graph_at(self._call.function)
            self._compiled[shown] = None


def _empty(layout: _Layout) -> torch.Tensor:
    size, strides, dtype, device = layout
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


@dataclass(frozen=True)
class _View:
    """The place of a tensor that kernels return: a position among inputs and results of the forward operator.

    `layout` is size, strides and offset of a view of the tensor there; None for the tensor itself.
    """

    position: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, source: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return source
        size, strides, offset = self.layout
        return source.as_strided(size, strides, int(source.storage_offset()) + offset)


@dataclass(frozen=True, eq=False)
class UserKernels:
    """A compiled function's kernels for inputs of fixed layouts.

    Attributes:
        name: The function's name, with a hash of its code and layouts.
        function: The function's name in the user's code, with its class.
        forward: Takes the inputs in a list; returns outputs and saved tensors.
        backward: Takes saved tensors and gradients in a list; returns gradients. None without gradients.
        results: Layouts of what the forward operator returns.
        returned: Positions of the results among what `forward` returns.
        outputs: Positions of the function's outputs among the results.
        differentiable: Positions of the outputs with gradients.
        saved: The place of each tensor that the backward reads.
        tangents: Strides of the output gradients that the backward reads.
        gradients: Layouts of what the backward operator returns.
        gradient_of: For each input, the position of its gradient in `gradients`; None without one.
    """

    name: str
    function: str
    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any] | None
    results: tuple[_Layout, ...]
    returned: tuple[int, ...]
    outputs: tuple[int, ...]
    differentiable: tuple[int, ...]
    saved: tuple[_View, ...]
    tangents: tuple[tuple[int, ...], ...]
    gradients: tuple[_Layout, ...]
    gradient_of: tuple[int | None, ...]

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of the forward operator."""
        values = self.forward(list(inputs))
        return [values[position] for position in self.returned]

    @property
    def kept(self) -> list[int]:
        """Positions of inputs and results that the backward reads, each once."""
        return list(dict.fromkeys(view.position for view in self.saved))

    def run_backward(self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the backward operator, each on a storage of its own."""
        assert self.backward is not None, "what has gradients has a backward"
        tensors = dict(zip(self.kept, kept, strict=True))
        arguments = [view.of(tensors[view.position]) for view in self.saved]
        for tangent, strides in zip(tangents, self.tangents, strict=True):
            arguments.append(tensor_state.with_strides(tangent, strides))
        used_storages = {tensor_state.storage_id(a) for a in (*arguments, *tangents)}
        gradients = []
        for gradient in [g for g in self.backward(arguments) if g is not None]:
            storage = tensor_state.storage_id(gradient)
            gradients.append(gradient.clone() if storage in used_storages else gradient)
            used_storages.add(storage)
        return gradients


class _Differentiated(torch.autograd.Function):
    """Runs kernels as custom operators: a trace sees one operator for the forward and one for the backward."""

    @staticmethod
    def forward(ctx: Any, kernels: UserKernels, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = torch.ops.hiremate.run_compiled(inputs, kernels.name)
        ctx.kernels = kernels
        ctx.save_for_backward(*((*inputs, *results)[at] for at in kernels.kept))
        outputs = tuple(results[at] for at in kernels.outputs)
        ctx.mark_non_differentiable(*(o for at, o in enumerate(outputs) if at not in kernels.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernels: UserKernels = ctx.kernels
        tangents_read = [tangents[position] for position in kernels.differentiable]
        gradients = torch.ops.hiremate.run_compiled_backward(ctx.saved_tensors, tangents_read, kernels.name)
        return (None, *(None if at is None else gradients[at] for at in kernels.gradient_of))


_library = torch.library.Library("hiremate", "DEF")
_library.define("run_compiled(Tensor[] inputs, str name) -> Tensor[]")
_library.define("run_compiled_backward(Tensor[] kept, Tensor[] gradients, str name) -> Tensor[]")
_library.impl("run_compiled", lambda inputs, name: _kernels[name].run(inputs), "CompositeExplicitAutograd")
_library.impl(
    "run_compiled_backward",
    lambda kept, gradients, name: _kernels[name].run_backward(kept, gradients),
    "CompositeExplicitAutograd",
)


torch.library.register_fake(
    "hiremate::run_compiled", lambda inputs, name: list(map(_empty, _kernels[name].results)), lib=_library
)
torch.library.register_fake(
    "hiremate::run_compiled_backward",
    lambda kept, gradients, name: list(map(_empty, _kernels[name].gradients)),
    lib=_library,
)


def _compile(call: KernelCall, module: fx.GraphModule, shown: _Shown) -> tuple[list[tuple[fx.GraphModule, Any]], Any]:
    """Compile a forward, and a backward if an input has a gradient; return both and AOTAutograd's output records.

    Raise `NotShownError` if more than the kernels has to run: writes to arguments, views as outputs, other effects.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made, metas = list[tuple[fx.GraphModule, Any]](), list[Any]()

    def inner(module: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
        made.append((module, compile_fx_inner(module, *arguments, **options)))
        metas.append(TracingContext.get().fw_metadata)
        return made[-1][1]

    backend = innermost_backend(context_of(call.function).callback)
    settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    has_gradients = any(gets_one for _, gets_one in shown)
    mode, graph = FakeTensorMode(), fx.Graph()
    with mode:
        inputs = [_empty(layout).requires_grad_(gets_one) for layout, gets_one in shown]
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    with (
        tracing(TracingContext(mode)),
        functorch_config.patch(settings),
        ExitStack() as autocasts,
        torch.set_grad_enabled(has_gradients),
    ):
        for kind, is_on, dtype in call.autocast:
            autocasts.enter_context(torch.autocast(kind, dtype, is_on, call.remembers))
        compile_fx(copy, inputs, inner_compile=inner, config_patches=backend.config)  # type: ignore[attr-defined]
    meta, unaliased = metas[0], (OutputType.non_alias, OutputType.unsafe_view_alias)
    does_more = meta.num_mutated_inp_runtime_indices or meta.num_intermediate_bases or meta.tokens
    gives_new = all(info.output_type in unaliased for info in meta.output_info)
    expect(len(made) == 1 + has_gradients and not does_more and gives_new, "a function of kernels alone")
    return made, meta.output_info


def _try(call: KernelCall, shown: _Shown, made: list[tuple[fx.GraphModule, Any]], results: Any) -> UserKernels:
    """Run the kernels on zeros, to read the layouts of their outputs and which of these are views."""
    inputs = [_empty(layout).zero_() for layout, _ in shown]
    (_, forward), *backwards = made
    values = list(forward(list(inputs)))
    views, returned = _find(inputs, values)
    outputs, saved = views[: len(results)], views[len(results) :]
    is_own = all(view.position >= len(inputs) and view.layout is None for view in outputs)
    expect(is_own, "results of its own")
    differentiable = tuple(at for at, info in enumerate(results) if info.requires_grad)
    backward, tangents, gradients = None, list[torch.Tensor](), list[torch.Tensor | None]()
    for source, backward in backwards:  # at most one
        read = [node.meta["val"] for node in source.graph.find_nodes(op="placeholder")]
        expect(len(read) == len(saved) + len(differentiable), "a backward that reads only tensors")
        tangents = [_empty(layout_of(value)).zero_() for value in read[len(saved) :]]
        gradients = list(backward([*values[len(results) :], *tangents]))
    positions = [at for at, gradient in enumerate(gradients) if gradient is not None]
    texts = [*(module.code for module, _ in made), repr(shown), repr(call.autocast)]
    return UserKernels(
        name=f"{call.function.__name__}_{hashlib.sha256(''.join(texts).encode()).hexdigest()[:12]}",
        function=call.name,
        forward=forward,
        backward=backward,
        results=tuple(layout_of(values[position]) for position in returned),
        returned=returned,
        outputs=tuple(view.position - len(inputs) for view in outputs),
        differentiable=differentiable,
        saved=saved,
        tangents=tuple(tangent.stride() for tangent in tangents),
        gradients=tuple(layout_of(gradient) for gradient in gradients if gradient is not None),
        gradient_of=tuple(positions.index(at) if at in positions else None for at in range(len(shown))),
    )


def _find(inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> tuple[tuple[_View, ...], tuple[int, ...]]:
    """Return the place of each kernel output, and the positions of the first output on each new storage."""
    sources = {tensor_state.storage_id(tensor): (at, tensor) for at, tensor in enumerate(inputs)}
    views, returned = list[_View](), list[int]()
    for at, tensor in enumerate(tensors):
        storage = tensor_state.storage_id(tensor)
        if storage not in sources:
            sources[storage] = len(inputs) + len(returned), tensor
            returned.append(at)
        position, source = sources[storage]
        offset = int(tensor.storage_offset()) - int(source.storage_offset())
        is_same = (layout_of(tensor), offset) == (layout_of(source), 0)
        views.append(_View(position, None if is_same else (*layout_of(tensor)[:2], offset)))
    return tuple(views), tuple(returned)
