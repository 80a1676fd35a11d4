"""Every private torch API that has no module of its own, and nothing else.

Checked on the torch versions in `CHECKED_VERSIONS`; `tests/test_torch_private.py` fails loudly when one of them moves.
What they are for:

* AOTAutograd with our own partitioner: the only way to the joint forward and backward graph of what Dynamo captured;
* the slot that `nn.Module.compile` uses: the only way to take over a call that keeps state_dict, deepcopy and pickle as
  they are;
* boxed code generation of FX graphs, so that arguments die as they are used;
* a tensor's version and storage, which Python does not tell.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import reset_code, set_code_exec_strategy
from torch._dynamo.exc import TorchDynamoException as CompileError
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.pgo import CodeId, get_code_state
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import TensorStaticReason
from torch._dynamo.utils import tensor_always_has_static_shape as _has_static_shape
from torch._dynamo.variables import ConstantVariable, builder
from torch._dynamo.variables.misc import LoggingLoggerVariable
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTInput,
    SavedForBackwardsAOTOutput,
)
from torch._functorch._aot_autograd.runtime_wrappers import _AutogradSavedState as _SavedState
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, OutputType, PlainTensorMeta
from torch._functorch.partitioners import _extract_fwd_bwd_outputs, _has_tag_is_backward, _is_tangent
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentError
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as leaves
from torch.utils._pytree import tree_map as map_leaves

from .garbage import collecting_what_it_leaves

__all__ = ["CompileError", "DataDependentError", "HigherOrderOperator", "OpOverload", "leaves", "map_leaves"]

log = logging.getLogger("hiremate_lightning")
_DYNAMO_LOG = logging.getLogger("torch._dynamo.convert_frame")

CHECKED_VERSIONS = ("2.13",)

Boxed = Callable[[list[Any]], Sequence[Any]]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Boxed]


def make_backend(partition: Callable[..., Any], forward: Compiler, backward: Compiler, inference: Compiler) -> Any:
    """Build a torch.compile backend from a partitioner of the joint graph and three compilers; no decompositions."""
    _heed_tokens()
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )


def joint_outputs(joint: fx.GraphModule, num_forward: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Split the outputs of a joint graph: forward values, backward values, and AOTAutograd's descriptions of both."""
    return _extract_fwd_bwd_outputs(joint, num_fwd_outputs=num_forward)


def called(node: fx.Node) -> Any:
    """Give the function that the user's code called where a node was captured, None where that is not known."""
    stack = node.meta.get("source_fn_stack")
    return stack[-1][1] if stack else None


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph is the gradient of an output."""
    return bool(_is_tangent(node))


def is_tagged_backward(node: fx.Node) -> bool:
    """Whether autograd, not the user's forward, made this node."""
    return bool(_has_tag_is_backward(node))


def describe_saved(index: int) -> Any:
    """Describe a saved value to AOTAutograd."""
    return SavedForBackwardsAOTOutput(index)


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """Find the mode in which fake values were made."""
    mode = detect_fake_mode(values)
    return mode if mode is not None else FakeTensorMode()


def fake_mode() -> FakeTensorMode:
    """Make a mode in which tensors have shapes, types and devices, and no memory; it copies real ones that it meets."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made in a fake mode."""
    return isinstance(tensor, FakeTensor)


def overwritten_inputs(placeholders: Sequence[fx.Node], descriptions: Sequence[Any]) -> list[fx.Node]:
    """List the inputs that are written to after the forward, by AOTAutograd's descriptions of the forward's outputs."""
    written = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    return [p for p in placeholders if p.meta.get("desc") in written]


def allow_retain_graph() -> None:
    """Tell AOTAutograd that no saved buffer is reused, so that `retain_graph=True` stays legal.

    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def take_over_results() -> tuple[int, ...]:
    """Keep AOTAutograd from making results of views that a graph returns, which `unviewed` is to do; give where.

    It would do so where nobody can see any more whether the caller changes them in place.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return ()
    meta = context.fw_metadata
    found = tuple(meta.num_mutated_inp_runtime_indices + i for i in meta.unsafe_view_out_indices)
    meta.unsafe_view_out_indices, meta.num_unsafe_view_outputs = [], 0
    return found


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Give the same memory as a tensor that is no view of another one, as autograd sees it."""
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # type: ignore[no-any-return]


def returns_the_wrong_values(forward_outputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd has put an input where the captured function returns a value of its own.

    Seen in torch 2.13 where one graph overwrites an input that needs a gradient and returns another one that it
    overwrites (spectral norm): the caller would get that input, of another shape or, worse, of the same.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return False
    meta = context.fw_metadata
    own = (OutputType.non_alias, OutputType.unsafe_view_alias)
    returned = forward_outputs[meta.num_mutated_inp_runtime_indices :]
    return any(
        info.output_type in own and isinstance(value, fx.Node) and value.op == "placeholder"
        for info, value in zip(meta.output_info, returned, strict=False)
    )


class _Anything:
    """Equals whatever it is compared with."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, _: object) -> bool:
        return True


def take_gradients_as_they_come() -> None:
    """Tell AOTAutograd to hand on the gradients of outputs with their own strides.

    It would copy them to the strides that it guessed, and some kernels would add in another order than eager's do.
    To be called inside the forward compiler.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        for meta in context.fw_metadata.subclass_tangent_meta:
            if isinstance(meta, PlainTensorMeta) and meta.memory_format is not None:
                meta.memory_format = MemoryFormatMeta(size=_Anything(), stride=_Anything())  # type: ignore[arg-type]


def version_of(tensor: torch.Tensor) -> int:
    """Count the in-place changes of a tensor; -1 for one made in inference mode, which has no count."""
    return -1 if tensor.is_inference() else tensor._version


def is_batched(value: Any) -> bool:
    """Whether a tensor stands for the many that `torch.autograd.grad` got with is_grads_batched."""
    return isinstance(value, torch.Tensor) and bool(torch._C._functorch.is_legacy_batchedtensor(value))


def is_transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap) or forward-mode differentiation is under way."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def let_gradients_be_absent(token: torch.Tensor) -> None:
    """Ask that the backward that gets this token be called with None for gradients that never came, not with zeros.

    To be called in a forward that a backend of `make_backend` runs, which saves the token.
    """
    token.takes_absent = True  # type: ignore[attr-defined]


def _heed_tokens() -> None:
    """Let AOTAutograd look at the tokens that a forward saves; what has none of ours is saved as ever."""
    save = _SavedState.save_from_forward
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def save_and_look(state: Any, context: Any, values: Sequence[Any]) -> None:
        save(state, context, values)
        if any(getattr(value, "takes_absent", False) for value in values):
            context.set_materialize_grads(False)

    setattr(_SavedState, "save_from_forward", save_and_look)  # noqa: B010  a method can't be assigned


def keep_busy(milliseconds: float = 0.5) -> None:
    """Let the current CUDA device wait about so long, in which the host can launch what follows."""
    torch.cuda._sleep(int(2_000_000 * milliseconds))  # clock cycles


def outermost_autocasts(graph: fx.Graph) -> dict[str, int]:
    """Number the blocks of autocast that are within no other and remember casts, by the names of the nodes in them."""
    depth, number, remembers, found = 0, 0, True, dict[str, int]()
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            if depth == 0:
                number, remembers = number + 1, node.args[-1] is not False
            depth += 1
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            depth -= 1
        elif depth and remembers:
            found[node.name] = number
    return found


def is_symbolic(value: Any) -> bool:
    """Whether a traced tensor has a size that is not a number yet."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def mark_boxed(function: Boxed) -> Boxed:
    """Tell AOTAutograd that a function empties its argument list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def storage_id(tensor: torch.Tensor) -> int:
    """Identify a storage, fake ones included, as long as a tensor on it lives."""
    return int(tensor.untyped_storage()._cdata)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds another one, of which it is a view."""
    return bool(tensor._is_view())


def is_alone_on_storage(tensor: torch.Tensor) -> bool:
    """Whether nobody else holds a tensor's storage, by itself or by a tensor, but for the one that it is a view of."""
    storage = tensor.untyped_storage()  # the Python object that others have too, where they have one
    count: int = torch._C._storage_Use_Count(storage._cdata)
    is_only = count == 2 + is_view(tensor)  # its own, this Python object's, and that of the tensor it is a view of
    return is_only and sys.getrefcount(storage) == _OWN_REFERENCES


def _count_own_references() -> int:
    tensor = torch.empty(0)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OWN_REFERENCES = _count_own_references()  # to the Python object of a storage that only a function and a tensor have


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Give the dense tensors that a tensor is made of: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Give the bytes of all storages of some tensors, each once, by their identities."""
    parts = (part for tensor in tensors for part in dense_parts(tensor))
    return {storage_id(part): part.untyped_storage().nbytes() for part in parts}


def watch_storage(tensor: torch.Tensor) -> Callable[[], bool]:
    """Give a function that tells whether a tensor's storage still lives, without keeping it alive."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def at_release(tensor: torch.Tensor, function: Callable[[], None]) -> None:
    """Call a function when a tensor's storage is about to be released, whoever holds it until then."""
    weakref.finalize(tensor.untyped_storage(), function).atexit = False


def int_hint(value: Any) -> int:
    """Read a size that may be symbolic, without guarding on it."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 0
    return int(value)


def real_mode() -> Any:
    """Leave the tracing modes for a while, so that operations run on real tensors."""
    return _disable_current_modes()


CALL_SLOT = "_compiled_call_impl"


def get_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Give the function that stands in for a module's call, None where there is none."""
    call: Callable[..., Any] | None = module.__dict__.get(CALL_SLOT)
    return call


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let a function stand in for a module's call, hooks included; None restores the module."""
    if call is None:
        module.__dict__.pop(CALL_SLOT, None)
    else:
        module.__dict__[CALL_SLOT] = call


def plain_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as if nothing stood in for it: hooks, then its forward as found now."""
    return module._call_impl(*args, **kwargs)


@contextmanager
def capturing_for_plans(tell: Callable[[str], None] | None = None, sizes_vary: bool = False) -> Iterator[None]:
    """Let Dynamo capture as plans need it.

    * Tensors have the sizes that they have, or where these vary, symbols for those that are found to: see `EachSize`.
      A number that changes from call to call (a module that counts its steps) is an input of the graph from its second
      value on, or each step would be captured anew.
    * A function is compiled as often as it takes: beyond its limits Dynamo would run it uncaptured in silence.
    * NumPy draws its own random numbers, or Dynamo would let torch draw them.
    * A hook that a module gets later, or loses, is seen: its call is captured anew.
    * A log's message does not end a graph if it is said only once, or not at all.
    * Code that Dynamo or AOTAutograd fail on runs as it is, and what it calls is captured on its own. The error is told
      or, where there is no one to tell, raised. So are errors of the code itself, which are seen as it is traced.
    """
    settings = _unused_settings.pop() if _unused_settings else _settings_for_plans()
    capture = _capture_with_symbols if sizes_vary else _capture_with_numbers
    try:
        with settings, replaced((convert_frame, "_compile", capture)), _told_of_failures(tell):
            yield
    finally:
        _unused_settings.append(settings)


@contextmanager
def replaced(*stand_ins: tuple[Any, str, Any]) -> Iterator[None]:
    """Put something in the place of attributes, each given by its owner and its name, for a while."""
    originals = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(stand_ins, originals, strict=True):
            setattr(owner, name, original)


def _always_static(*_: Any, **__: Any) -> tuple[bool, TensorStaticReason]:
    return True, TensorStaticReason.NOT_TENSOR


def _capture_with(has_static_shape: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    is_static = builder, "tensor_always_has_static_shape", has_static_shape
    with replaced(is_static, *_WHILE_CAPTURING), collecting_what_it_leaves():
        return _capture(*arguments, **options)


def _capture_with_numbers(code: types.CodeType, *arguments: Any, **options: Any) -> Any:
    """Capture code with numbers for all sizes."""
    try:
        return _capture_with(_always_static, code, *arguments, **options)
    except Exception:  # Dynamo runs it as it is, or fails
        rest_of = ContinueExecutionCache.generated_code_metadata.get(code)
        _given_up.add(code if rest_of is None else rest_of.code)
        raise


def given_up_count() -> int:
    """Count the functions that Dynamo gave up so far."""
    return len(_given_up)


def gave_up(module: torch.nn.Module) -> bool:
    """Whether Dynamo gave up a module's forward, or what follows a break in it.

    Of what such code calls, Dynamo captures only what is not of torch itself (`nn.Linear`, `nn.Sequential`).
    """
    function: Any = module.forward
    while function is not None:
        if getattr(function, "__code__", None) in _given_up:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _capture_with_symbols(code: types.CodeType, *arguments: Any, **options: Any) -> Any:
    """Capture code with symbols for sizes that vary, or with numbers where Dynamo fails on those."""
    if code not in _without_symbols:
        try:
            with replaced((_GUARDS_LOG, "disabled", True)):  # it calls an error what is put right here
                return _capture_with(_has_static_shape, code, *arguments, **options)
        except Exception:  # whatever Dynamo fails on: if it is not the symbols it fails again
            log.debug("%s is captured again, with numbers for its sizes", code.co_name, exc_info=True)
    result = _capture_with_numbers(code, *arguments, **options)
    _without_symbols.add(code)
    return result


def _log_early(variable: Any, tracer: Any, name: str, values: list[Any], named: dict[str, Any]) -> Any:
    """Log what is logged once, as transformers does by `logger.warning_once`, when it is captured; so is what isn't."""
    level = getattr(logging, name.upper(), None)
    is_constant = all(value.is_python_constant() for value in (*values, *named.values()))
    if name.endswith("_once") and is_constant:
        constants = {key: value.as_python_constant() for key, value in named.items()}
        getattr(variable.value, name)(*(value.as_python_constant() for value in values), **constants)
    elif level is None or variable.value.isEnabledFor(level):
        return _break_graph(variable, tracer, name, values, named)
    return ConstantVariable.create(None)


_capture, _break_graph = convert_frame._compile, LoggingLoggerVariable.call_method
_WHILE_CAPTURING = (
    (LoggingLoggerVariable, "call_method", _log_early),
    (dynamo_config, "run_gc_after_compile", False),  # it would take what the capture still holds for old
)
_GUARDS_LOG = logging.getLogger("torch._guards")
_without_symbols: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # code that Dynamo failed on with symbols
_given_up: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # code that it failed on altogether

# Kept, since making one takes longer than using it; not shared, since several calls may be under way.
_unused_settings: list[Any] = []


@contextmanager
def _told_of_failures(tell: Callable[[str], None] | None) -> Iterator[None]:
    """Let Dynamo go on without what it fails on, and hear of it from its log, however quiet a user has made that."""
    level, was_quiet = _DYNAMO_LOG.level, not _DYNAMO_LOG.isEnabledFor(logging.WARNING)

    def heed(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno < logging.WARNING:
            return not was_quiet or record.levelno > logging.WARNING
        if tell is None or isinstance(error, TorchRuntimeError):
            raise error
        tell(_in_brief(getattr(error, "inner_exception", error)))
        return False

    if was_quiet:
        _DYNAMO_LOG.setLevel(logging.WARNING)
    dynamo_config.suppress_errors = _DYNAMO_LOG.isEnabledFor(logging.WARNING)  # not where all logging is disabled
    _DYNAMO_LOG.addFilter(heed)
    try:
        yield
    finally:
        _DYNAMO_LOG.removeFilter(heed)
        if was_quiet:
            _DYNAMO_LOG.setLevel(level)


def tell_of_failure(error: Exception) -> None:
    """Tell of what could not be captured as Dynamo tells of its own failures: see `capturing_for_plans`."""
    _DYNAMO_LOG.log(logging.WARNING, "a graph runs uncaptured", exc_info=error)


def _in_brief(error: BaseException) -> str:
    kind = "" if isinstance(error, CompileError) else f"{type(error).__name__}: "  # Dynamo's name it themselves
    return kind + str(error).strip().split("\n\n")[0]


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Name the hooks that run for each module; captured code that asks for them is captured anew where they change."""
    return (
        tuple(nn_module._global_forward_pre_hooks),
        tuple(nn_module._global_forward_hooks),
        tuple(nn_module._global_backward_pre_hooks),
        tuple(nn_module._global_backward_hooks),
    )


def _settings_for_plans() -> Any:
    return dynamo_config.patch(
        recompile_limit=256,
        accumulated_recompile_limit=4096,
        use_numpy_random_stream=True,
        skip_nnmodule_hook_guards=False,
        suppress_errors=False,
        allow_unspec_int_on_nn_module=True,
        specialize_float=True,
        trace_autograd_ops=True,
    )


def add_input(graph: fx.Graph, last: fx.Node | None, name: str) -> fx.Node:
    """Add an input to captured code after its last one, with what AOTAutograd asks of each: where it comes from."""
    with graph.inserting_after(last):
        added = graph.placeholder(name)
    added._dynamo_source = None
    return added


def input_position(placeholder: fx.Node) -> int | None:
    """Give the position among the inputs of the captured function, None for what AOTAutograd added."""
    description = placeholder.meta.get("desc")
    return description.idx if isinstance(description, PlainAOTInput) else None


def has_expandable_segments() -> bool:
    """Whether CUDA's caching allocator grows its segments in place, by the environment or by a call."""
    settings = str(torch._C._accelerator_getAllocatorSettings()).replace(" ", "")
    return "expandable_segments:True" in settings


def forget_compiled(function: Callable[..., Any]) -> None:
    """Drop what Dynamo compiled for a function, and the sizes that it saw there."""
    reset_code(function.__code__)
    _without_symbols.discard(function.__code__)
    get_code_state().pop(CodeId.make(function.__code__), None)


def try_again() -> None:
    """Let Dynamo capture what it gave up for good, as it does with code in which something is raised while it traces.

    What it captured before stays. Code that it gives up again costs the time to trace it.
    """
    for seen in tuple(input_codes.seen):
        code = seen()
        if code is not None:
            set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def on_optimizer_step(hook: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call a function after each step of any optimizer; the handle that is returned removes it."""
    return register_optimizer_step_post_hook(lambda optimizer, args, kwargs: hook(optimizer))


def before_optimizer_step(hook: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call a function before each step of any optimizer; the handle that is returned removes it."""
    return register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: hook(optimizer))


def process_group_store() -> tuple[Any, int] | None:
    """Give the key-value store of the process group and the rank of this process; None outside of a group."""
    group = torch.distributed
    if not group.is_available() or not group.is_initialized() or group.get_world_size() == 1:
        return None
    return group.PrefixStore("hiremate", group.distributed_c10d._get_default_store()), group.get_rank()
