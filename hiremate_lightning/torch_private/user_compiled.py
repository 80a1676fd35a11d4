"""Functions that their author compiled, inside of captured code: they stay compiled, each call one operation.

Dynamo reads through them as through any other function. What it captures of such a call is marked (`marking_calls`),
cut out of its graph (`cut_out`), and compiled by PyTorch's Inductor as the author's torch.compile does it: with the same
options, the same partition into forward and backward, so into the same kernels. Two operators run those kernels, one
the forward and one the backward. To all that follows they are custom operators: measured, kept or computed again.

What can't be one operation ends the graph, and runs as it does without a plan: functions compiled by another backend
than Inductor, with CUDA graphs or with dynamic=True, and those that write to their arguments or return views of them.

All of this is private to PyTorch; `tests/test_user_compiled.py` fails loudly where it moves.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, unimplemented
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import CompileContext, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from . import tensor_state

log = logging.getLogger("hiremate_lightning")

_MARK = "hiremate_user_compiled"
_ended = weakref.WeakSet[Any]()  # functions that were found to be no single operation
_kernels: dict[str, Kernels] = {}  # by name
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # size, strides, type, device
_Shown = tuple[tuple[_Layout, bool], ...]  # of inputs, and whether each gets a gradient
_inline = WrapperUserFunctionVariable.call_function
_inline_call = InliningInstructionTranslator.inline_call.__func__  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function that its author compiled, as Dynamo captured it.

    Attributes:
        function: What torch.compile gave.
        autocast: By type of device, whether autocast was on around it, and its type; and whether it remembers casts.
    """

    function: Any
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    remembers: bool


# ---------------------------------------------------------------- what Dynamo reads


def _call_function(variable: Any, tracer: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
    """Read through a wrapper; mark what is captured of it where torch.compile made it."""
    if variable.attr_to_trace != "_torchdynamo_inline" or not _is_compiled(variable.wrapper_obj):
        return _inline(variable, tracer, arguments, named)
    return _marked(tracer, variable.wrapper_obj, lambda: _inline(variable, tracer, arguments, named))


def _call_inline(
    cls: Any, parent: Any, function: Any, arguments: list[Any], named: dict[str, Any], **options: Any
) -> Any:
    """Read through a function; mark what is captured of a method that was compiled in its class."""
    wrapper = _wrapper_of(function, arguments)
    if wrapper is None:
        return _inline_call(cls, parent, function, arguments, named, **options)
    return _marked(parent, wrapper, lambda: _inline_call(cls, parent, function, arguments, named, **options))


WHILE_CAPTURING = (
    (WrapperUserFunctionVariable, "call_function", _call_function),
    (InliningInstructionTranslator, "inline_call", classmethod(_call_inline)),
)


def is_authors(compiler: Any) -> bool:
    """Whether an author's torch.compile captures code, with Inductor: not our own."""
    return type(innermost_backend(compiler)) is torch._TorchCompileInductorWrapper


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile gave a function itself, not one that a decorator put around it since."""
    attribute = inspect.getattr_static(function, "_is_torch_compile", False)
    return bool(attribute) and getattr(function, "_torchdynamo_wrapper_id", None) == id(function)


def _wrapper_of(function: Any, arguments: list[Any]) -> Any:
    """Find what torch.compile made of a method in its class, None where that was not compiled."""
    owner = arguments[0] if arguments else None
    if not isinstance(owner, UserDefinedObjectVariable) or not isinstance(function, UserFunctionVariable):
        return None
    found = inspect.getattr_static(owner.python_type(), function.get_name(), None)
    is_its = _is_compiled(found) and found._torchdynamo_orig_callable is function.get_function()
    return found if is_its else None


def _context_of(function: Any) -> Any:
    """Find what torch.compile was asked for where it made a function."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index("self")].cell_contents


def _marked(tracer: Any, function: Any, inline: Callable[[], Any]) -> Any:
    context = _context_of(function)
    backend = innermost_backend(context.callback)
    if getattr(backend, "compiler_name", "") == "eager":  # it changes nothing about what runs
        return inline()
    reason = _why_apart(function, context, backend)
    if reason:
        name = function.__name__
        unimplemented(
            gb_type=f"{name} is compiled by its author",
            context=name,
            explanation=f"it stays as it is compiled, outside of captured graphs, since {reason}",
            hints=[],
        )
    before = set(tracer.output.graph.nodes)
    call = Call(function, *_autocast())
    result = inline()
    for node in tracer.output.graph.nodes:
        if node not in before and node.op != "placeholder":
            node.meta[_MARK] = call  # the outermost function's, where one calls another
    return result


def _why_apart(function: Any, context: Any, backend: Any) -> str:
    """Give the reason why a function can't be one operation of a graph, "" where it can."""
    if function in _ended:
        return "it writes to its arguments, or returns views"
    if type(backend) is not torch._TorchCompileInductorWrapper:
        return "another backend than Inductor compiles it"
    if backend.config.get("triton.cudagraphs"):
        return "it runs in CUDA graphs"
    return "it is compiled with dynamic=True" if context._dynamic else ""


def _autocast() -> tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]:
    devices = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")]
    return tuple(devices), torch.is_autocast_cache_enabled()


# ---------------------------------------------------------------- what is cut out


def cut_out(module: fx.GraphModule) -> list[Operation]:
    """Put one call in the place of what Dynamo captured of each call of a compiled function; return these.

    Args:
        module: What Dynamo captured; it is changed.
    """
    found = []
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for call, nodes in _calls(inner.graph).items():
            if operation := _cut(inner, call, nodes):
                found.append(operation)
        if found:
            inner.recompile()
    return found


def _calls(graph: fx.Graph) -> dict[Call, list[fx.Node]]:
    calls: dict[Call, list[fx.Node]] = {}
    for node in graph.nodes:
        if _MARK in node.meta:
            calls.setdefault(node.meta[_MARK], []).append(node)
    return calls


def _cut(module: fx.GraphModule, call: Call, nodes: list[fx.Node]) -> Operation | None:
    inside = set(nodes)
    read = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    if not given:
        return None
    if not all(isinstance(node.meta.get("example_value"), torch.Tensor) for node in (*read, *given)):
        _end_graph_at(call.function)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        values[node] = graph.placeholder(node.name)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta = {}
    graph.output(tuple(values[node] for node in given))
    operation = Operation(call, fx.GraphModule(module, graph))
    with module.graph.inserting_after(nodes[-1]):
        whole = module.graph.call_function(operation, tuple(read))
    origin = {name: value for name, value in nodes[-1].meta.items() if name != _MARK}
    whole.meta = {**origin, "example_value": tuple(node.meta["example_value"] for node in given)}
    after = whole
    for position, node in enumerate(given):
        with module.graph.inserting_after(after):
            after = module.graph.call_function(operator.getitem, (whole, position))
        after.meta = {**origin, "example_value": node.meta["example_value"]}
        node.replace_all_uses_with(after, lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return operation


def _end_graph_at(function: Any) -> None:
    """Let Dynamo capture its code again, with the graph ended at a function."""
    _ended.add(function)
    raise TensorifyScalarRestartAnalysis


# ---------------------------------------------------------------- what runs


class NotCompiledError(Exception):
    """A compiled function was traced with inputs for which there are no kernels yet; make them, and trace again."""

    def __init__(self, operation: Operation, shown: _Shown) -> None:
        super().__init__(f"{operation.name} is not compiled yet")
        self.operation, self.shown = operation, shown

    def compile(self) -> None:
        """Make the kernels, outside of all tracing."""
        self.operation.compile(self.shown)


class Operation:
    """A call of a compiled function, as one operation of a captured graph.

    Args:
        call: Where it was.
        module: What it computes.
    """

    def __init__(self, call: Call, module: fx.GraphModule) -> None:
        self.name = call.function.__name__
        self.__name__ = f"compiled_{self.name}"
        self._call, self._module = call, module
        self._compiled: dict[_Shown, Kernels | None] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute its results, with gradients.

        Raises:
            NotCompiledError: Where there are no kernels for such inputs yet.
        """
        shown = _show(inputs)
        if shown not in self._compiled:
            if any(isinstance(i, (FakeTensor, FunctionalTensor)) for i in inputs):
                raise NotCompiledError(self, shown)
            alike = next((known for known in self._compiled if _layouts(known) == _layouts(shown)), None)
            if alike is None:
                self.compile(shown)
            shown = alike or shown  # the captured code runs without gradients, to be compared
        kernels = self._compiled[shown]
        if kernels is None:
            results: tuple[torch.Tensor, ...] = self._module(*inputs)
            return results
        if kernels.backward is None or not torch.is_grad_enabled():
            return kernels.outputs_among(torch.ops.hiremate.run_compiled(inputs, kernels.name))
        outputs: tuple[torch.Tensor, ...] = _Differentiated.apply(kernels, *inputs)
        return outputs

    @torch._dynamo.disable
    def compile(self, shown: _Shown) -> None:
        """Make the kernels for inputs of these shapes, outside of all tracing.

        Where that fails while Dynamo captures, its graph is to end at the function; later the function is read through.
        """
        try:
            self._compiled[shown] = kernels = _Maker(self._call, self._module, shown).make()
            _kernels[kernels.name] = kernels
        except Exception:  # whatever a compiler may fail with: the function meets it, or not, as it runs by itself
            log.debug("%s is no single operation", self.name, exc_info=True)
            if CompileContext.try_get() is not None:
                _end_graph_at(self._call.function)
            self._compiled[shown] = None


def _show(inputs: Sequence[torch.Tensor]) -> _Shown:
    return tuple((_layout(tensor), torch.is_grad_enabled() and tensor.requires_grad) for tensor in inputs)


def _layouts(shown: _Shown) -> list[_Layout]:
    return [layout for layout, _ in shown]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device


def _empty(layout: _Layout) -> torch.Tensor:
    size, strides, dtype, device = layout
    return torch.empty_strided(size, strides, dtype=dtype, device=device)


@dataclass(frozen=True)
class _View:
    """Where a tensor that kernels hand on is found: in an input, or in a result, of the forward's operator.

    Attributes:
        is_input: Whether in an input.
        position: Of it.
        layout: Size, strides, and offset beyond that of what it is found in; None where it is that itself.
    """

    is_input: bool
    position: int
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, source: torch.Tensor) -> torch.Tensor:
        if self.layout is None:
            return source
        size, strides, offset = self.layout
        return source.as_strided(size, strides, int(source.storage_offset()) + offset)


@dataclass(frozen=True, eq=False)
class Kernels:
    """A compiled function's kernels for inputs of definite shapes.

    Attributes:
        name: Of the function, and of what it computes.
        forward: Takes inputs in a list, returns outputs and what the backward reads.
        backward: Takes what it reads and gradients in a list, returns gradients; None where there is none.
        results: What the forward's operator returns.
        returned: Which of what `forward` returns that is, by position.
        outputs: Positions of the function's outputs among the results.
        differentiable: Which outputs have gradients, by position.
        saved: Where to find what the backward reads.
        tangents: Strides of the gradients that the backward reads.
        gradients: What the backward's operator returns.
        gradient_of: By input, the position of its gradient among these; None where it has none.
    """

    name: str
    forward: Callable[[list[Any]], Any]
    backward: Callable[[list[Any]], Any] | None
    results: tuple[_Layout, ...]
    returned: tuple[int, ...]
    outputs: tuple[int, ...]
    differentiable: tuple[int, ...] = ()
    saved: tuple[_View, ...] = ()
    tangents: tuple[tuple[int, ...], ...] = ()
    gradients: tuple[_Layout, ...] = ()
    gradient_of: tuple[int | None, ...] = ()

    def outputs_among(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """List the function's outputs."""
        return tuple(results[position] for position in self.outputs)

    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward."""
        given = self.forward(list(inputs))
        return [given[position] for position in self.returned]

    @property
    def kept(self) -> list[tuple[bool, int]]:
        """Inputs and results that the backward reads, each once."""
        return list(dict.fromkeys((view.is_input, view.position) for view in self.saved))

    def run_backward(self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the backward."""
        assert self.backward is not None, "what has gradients has a backward"
        there = dict(zip(self.kept, kept, strict=True))
        arguments = [view.of(there[view.is_input, view.position]) for view in self.saved]
        for tangent, strides in zip(tangents, self.tangents, strict=True):
            arguments.append(_laid_out(tangent, strides))
        taken = {tensor_state.storage_id(a) for a in (*arguments, *tangents)}
        gradients = [g for g in self.backward(arguments) if g is not None]
        return _of_their_own(gradients, taken)


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _of_their_own(tensors: Sequence[torch.Tensor], taken: set[int]) -> list[torch.Tensor]:
    """Copy what shares its memory with something else."""
    own = []
    for tensor in tensors:
        storage = tensor_state.storage_id(tensor)
        own.append(tensor.clone() if storage in taken else tensor)
        taken.add(storage)
    return own


class _Differentiated(torch.autograd.Function):
    """Runs kernels by operators, so that a trace sees one for the forward and one for the backward."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = torch.ops.hiremate.run_compiled(inputs, kernels.name)
        ctx.kernels = kernels
        ctx.save_for_backward(*(inputs[at] if is_input else results[at] for is_input, at in kernels.kept))
        outputs = kernels.outputs_among(results)
        ctx.mark_non_differentiable(*(o for at, o in enumerate(outputs) if at not in kernels.differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernels: Kernels = ctx.kernels
        own = [tangents[position] for position in kernels.differentiable]
        gradients = torch.ops.hiremate.run_compiled_backward(ctx.saved_tensors, own, kernels.name)
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


@torch.library.register_fake("hiremate::run_compiled", lib=_library)
def _(inputs: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    return list(map(_empty, _kernels[name].results))


@torch.library.register_fake("hiremate::run_compiled_backward", lib=_library)
def _(kept: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    return list(map(_empty, _kernels[name].gradients))


# ---------------------------------------------------------------- how kernels are made


class _Maker:
    """Compiles what a function computes as its author's torch.compile does, and takes the kernels from there."""

    def __init__(self, call: Call, module: fx.GraphModule, shown: _Shown) -> None:
        self._call, self._module, self._shown = call, module, shown
        self._has_gradients = any(gets_one for _, gets_one in shown)
        self._made: list[tuple[fx.GraphModule, Any]] = []  # the forward, and the backward where there is one
        self._meta: Any = None

    def make(self) -> Kernels:
        devices = {device.index or 0 for (*_, device), _ in self._shown if device.type == "cuda"}
        with tensor_state.real_mode(), torch.random.fork_rng(devices=devices):
            self._compile()
            self._check()
            with torch.no_grad():
                return self._try()

    def _compile(self) -> None:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(module: fx.GraphModule, *arguments: Any, **options: Any) -> Any:
            made = compile_fx_inner(module, *arguments, **options)
            self._made.append((module, made))
            self._meta = self._meta or TracingContext.get().fw_metadata
            return made

        backend = innermost_backend(_context_of(self._call.function).callback)
        settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
        mode = FakeTensorMode()
        with mode:
            inputs = [_empty(layout).requires_grad_(gets_one) for layout, gets_one in self._shown]
        module = fx.GraphModule(self._module, fx.Graph())
        module.graph.output(module.graph.graph_copy(self._module.graph, {}))
        module.recompile()
        with (
            tracing(TracingContext(mode)),
            functorch_config.patch(settings),
            self._autocast(),
            torch.set_grad_enabled(self._has_gradients),
        ):
            compile_fx(module, inputs, inner_compile=inner, config_patches=backend.config)  # type: ignore[attr-defined]

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device_type, is_on, dtype in self._call.autocast:
                options = {"dtype": dtype, "enabled": is_on, "cache_enabled": self._call.remembers}
                stack.enter_context(torch.autocast(device_type, **options))
            yield

    def _check(self) -> None:
        """Refuse what AOTAutograd does more for than call kernels."""
        meta, own = self._meta, (OutputType.non_alias, OutputType.unsafe_view_alias)
        is_plain = (
            len(self._made) == 1 + self._has_gradients
            and not meta.num_mutated_inp_runtime_indices
            and not meta.num_intermediate_bases
            and not meta.tokens
            and all(info.output_type in own for info in meta.output_info)
        )
        if not is_plain:
            raise ValueError("it writes to its arguments, or returns views")

    def _try(self) -> Kernels:
        """Run the kernels on made-up inputs, to see how what they hand on lies in memory."""
        inputs = [_empty(layout).zero_() for layout, _ in self._shown]
        forward = self._made[0][1]
        given = list(forward(list(inputs)))
        views, returned = _find(inputs, given)
        count = len(self._meta.output_info)
        if any(view.is_input or view.layout is not None for view in views[:count]):
            raise ValueError("it returns views")
        kernels = Kernels(
            name=f"{self._call.function.__name__}_{self._digest()}",
            forward=forward,
            backward=None,
            results=tuple(_layout(given[position]) for position in returned),
            returned=returned,
            outputs=tuple(view.position for view in views[:count]),
        )
        return self._with_backward(kernels, given, views[count:]) if self._has_gradients else kernels

    def _with_backward(self, kernels: Kernels, given: list[torch.Tensor], saved: tuple[_View, ...]) -> Kernels:
        source, backward = self._made[1]
        differentiable = tuple(at for at, info in enumerate(self._meta.output_info) if info.requires_grad)
        read = [node.meta["val"] for node in source.graph.find_nodes(op="placeholder")]
        if len(read) != len(saved) + len(differentiable):
            raise ValueError("its backward reads more than tensors")
        strides = tuple(tuple(map(int, value.stride())) for value in read[len(saved) :])
        tangents = [_empty(_layout(value)).zero_() for value in read[len(saved) :]]
        gradients = backward([*given[len(self._meta.output_info) :], *tangents])
        there = [at for at, gradient in enumerate(gradients) if gradient is not None]
        return replace(
            kernels,
            backward=backward,
            differentiable=differentiable,
            saved=saved,
            tangents=strides,
            gradients=tuple(_layout(gradients[at]) for at in there),
            gradient_of=tuple(there.index(at) if at in there else None for at in range(len(self._shown))),
        )

    def _digest(self) -> str:
        described = [*(module.code for module, _ in self._made), repr(self._shown), repr(self._call.autocast)]
        return hashlib.sha256("".join(described).encode()).hexdigest()[:12]


def _find(inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> tuple[tuple[_View, ...], tuple[int, ...]]:
    """Find where tensors that kernels hand on lie, and which of them are the first in memory of their own."""
    sources = {tensor_state.storage_id(tensor): (True, at, tensor) for at, tensor in enumerate(inputs)}
    views, returned = list[_View](), list[int]()
    for at, tensor in enumerate(given):
        storage = tensor_state.storage_id(tensor)
        if storage not in sources:
            sources[storage] = False, len(returned), tensor
            returned.append(at)
        is_input, position, source = sources[storage]
        offset = tensor.storage_offset() - source.storage_offset()
        is_same = (_layout(tensor), offset) == (_layout(source), 0)
        views.append(_View(is_input, position, None if is_same else (*_layout(tensor)[:2], offset)))
    return tuple(views), tuple(returned)
