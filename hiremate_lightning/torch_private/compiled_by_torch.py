"""Find what users compiled with `torch.compile`, and make each captured call of it one custom operator.

Dynamo inlines compiled functions like all others. The nodes of such a call are marked, cut out of the captured graph
(`cut_out`), and compiled with the author's options into the same kernels: see `inductor`. From then on the call is one
custom operator: measured, saved or recomputed. A function that can't be one operator breaks the graph, and runs as it
does without a plan: see `_why_apart`.
"""

from __future__ import annotations

import gc
import inspect
import operator
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from . import autocasting, readings
from .hacks import instead_of
from .inductor import KernelCall, KernelOperation, NotCompiledError, context_of, end_graph_at, ended

__all__ = ["NotCompiledError"]

_MARK = "hiremate_user_compiled"
_WRAPPERS = "torch._dynamo.eval_frame"  # the module of torch.compile's wrappers


def original(compiled: Any) -> Any:
    """Return what was passed to `torch.compile` for an object that it returned; return other objects as they are."""
    inside = vars(compiled) if hasattr(compiled, "__dict__") else {}
    if "dynamo_ctx" in inside:
        return original(compiled._orig_mod)
    if inside.get("_torchdynamo_wrapper_id") == id(compiled):
        return original(compiled._torchdynamo_orig_callable)
    return compiled


def compiled_around(module: nn.Module) -> list[nn.Module]:
    """Return the modules that torch.compile returned for a module, for its submodules, or for modules around it."""
    module_ids = set(map(id, module.modules()))
    compiled = [thing for thing in gc.get_objects() if type(thing) is OptimizedModule and id(thing) not in module_ids]
    return [thing for thing in compiled if any(id(inner) in module_ids for inner in thing.modules())]


def compiled_inside(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that torch.compile returned."""
    return [part for part in module.modules() if type(part) is OptimizedModule]


def runs_eager(module: nn.Module) -> bool:
    """Whether a module was returned by torch.compile and calls the original module directly: see `run_eager`."""
    inner = getattr(vars(module).get("forward"), "__self__", None)
    return isinstance(module, OptimizedModule) and inner is module._orig_mod


def run_eager(compiled: Any) -> Callable[[], None]:
    """Make what torch.compile returned call the original module directly; return a function that undoes that."""
    before = compiled.forward
    compiled.forward = compiled._orig_mod.__call__
    return lambda: setattr(compiled, "forward", before)


def is_compiled_by(compiled: nn.Module, backend: Callable[..., Any]) -> bool:
    """Whether a module was compiled with a backend."""
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    innermost = innermost_backend(callback) if callable(callback) else None
    return getattr(innermost, "compiler_fn", innermost) is backend


def under_way() -> list[Any]:
    """Return the functions and modules whose compiled calls are running, innermost first; only the frames show them."""
    owners: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals if frame.f_globals.get("__name__") == _WRAPPERS else {}
        if callable(names.get("fn")) and callable(names.get("callback")):  # torch.compiler.disable has no callback
            function = names["fn"]
            while function is not None:
                bound = getattr(function, "__self__", None)
                owners += [function] if bound is None else [function, bound]
                function = vars(function).get("__wrapped__") if hasattr(function, "__dict__") else None
        frame = frame.f_back
    return owners


@instead_of("torch._dynamo.variables.functions.WrapperUserFunctionVariable.call_function")
def functions(inline: Any, variable: Any, tracer: Any, *arguments: Any) -> Any:
    """Inline a wrapper; mark the nodes of a call if torch.compile made the wrapper, break the graph at TorchScript.

    Marks make each call of a compiled function one operator; without them its results are those of eager PyTorch.
    """
    wrapper = variable.wrapper_obj
    if isinstance(wrapper, torch.jit.ScriptFunction):
        explanation = "it runs as its author scripted it, outside of captured graphs"
        readings.end_graph(f"{wrapper.name} is TorchScript", explanation)
    if hasattr(wrapper, "cache_info"):
        return readings.call_cached(inline, variable, tracer, *arguments)
    is_compiled = variable.attr_to_trace == "_torchdynamo_inline" and _is_compiled(wrapper)
    read = partial(inline, variable, tracer, *arguments)
    return _marked(tracer, wrapper, read) if is_compiled else read()


@instead_of("torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call")
def methods(inline: Any, parent: Any, function: Any, arguments: list[Any], *positional: Any, **options: Any) -> Any:
    """Inline a function; mark the nodes of a method that was compiled in its class."""
    owner: type | None = None
    first = arguments[0] if arguments and isinstance(function, UserFunctionVariable) else None
    # Peek at an argument: Dynamo names the line that first reads an argument if a guard on it fails.
    if type(first) is LazyVariableTracker and not first.is_realized():
        owner = first.peek_type()
    elif isinstance(first, UserDefinedObjectVariable):
        owner = first.python_type()
    wrapper: Any = None if owner is None else inspect.getattr_static(owner, function.get_name(), None)
    is_method = _is_compiled(wrapper) and wrapper._torchdynamo_orig_callable is function.get_function()
    read = partial(inline, parent, function, arguments, *positional, **options)
    return _marked(parent, wrapper, read) if is_method else read()


def is_authors(compiler: Any) -> bool:
    """Whether the compiler of a capture is an author's torch.compile with Inductor, not ours."""
    return type(innermost_backend(compiler)) is torch._TorchCompileInductorWrapper


def _is_compiled(function: Any) -> bool:
    """Whether torch.compile returned this function itself, not one that a decorator put around it later."""
    attribute = inspect.getattr_static(function, "_is_torch_compile", False)
    return bool(attribute) and getattr(function, "_torchdynamo_wrapper_id", None) == id(function)


def _marked(tracer: Any, function: Any, inline: Callable[[], Any]) -> Any:
    context = context_of(function)
    backend = innermost_backend(context.callback)
    if getattr(backend, "compiler_name", "") == "eager":  # this backend runs the code as it is
        with readings.as_compiled():
            return inline()
    reason = _why_apart(function, context, backend)
    if reason:
        explanation = f"it stays as it is compiled, outside of captured graphs, since {reason}"
        readings.end_graph(f"{function.__name__} is compiled by its author", explanation)
    before = set(tracer.output.graph.nodes)
    call = KernelCall(function, autocasting.settings(), torch.is_autocast_cache_enabled())
    with readings.as_compiled():
        result = inline()
    for node in tracer.output.graph.nodes:
        if node not in before and node.op != "placeholder":
            node.meta[_MARK] = call  # nested calls get the mark of the outermost function
    return result


def _why_apart(function: Any, context: Any, backend: Any) -> str:
    """Return why a compiled function can't be one operator of a graph, "" if it can."""
    if function in ended:
        return "it writes to its arguments, or returns views"
    if type(backend) is not torch._TorchCompileInductorWrapper:
        return "another backend than Inductor compiles it"
    if backend.config.get("triton.cudagraphs"):
        return "it runs in CUDA graphs"
    return "it is compiled with dynamic=True" if context._dynamic else ""


def cut_out(module: fx.GraphModule) -> list[KernelOperation]:
    """Replace the marked nodes of each call of a compiled function by one operation; return the operations."""
    operations = []
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        calls: dict[KernelCall, list[fx.Node]] = {}
        for node in inner.graph.nodes:
            if _MARK in node.meta:
                calls.setdefault(node.meta[_MARK], []).append(node)
        for call, nodes in calls.items():
            if operation := _cut(inner, call, nodes):
                operations.append(operation)
        if operations:
            inner.recompile()
    return operations


def _cut(module: fx.GraphModule, call: KernelCall, nodes: list[fx.Node]) -> KernelOperation | None:
    inside = set(nodes)
    read = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    if not results:
        return None
    if not all(isinstance(node.meta.get("example_value"), torch.Tensor) for node in (*read, *results)):
        end_graph_at(call.function)
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        values[node] = graph.placeholder(node.name)
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].meta = {}
    graph.output(tuple(values[node] for node in results))
    callers = {next(reversed(node.meta.get("nn_module_stack") or {"": None})) for node in nodes}
    operation = KernelOperation(call, fx.GraphModule(module, graph), len(callers) > 1)
    with module.graph.inserting_after(nodes[-1]):
        whole = module.graph.call_function(operation, tuple(read))
    origin = {name: value for name, value in nodes[-1].meta.items() if name != _MARK}
    whole.meta = {**origin, "example_value": tuple(node.meta["example_value"] for node in results)}
    after = whole
    for position, node in enumerate(results):
        with module.graph.inserting_after(after):
            after = module.graph.call_function(operator.getitem, (whole, position))
        after.meta = {**origin, "example_value": node.meta["example_value"]}
        node.replace_all_uses_with(after, lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    return operation
