"""Set Dynamo to capture graphs as plans need them, and read what it failed on and why graphs broke."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import re
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum
from typing import Any, cast

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.eval_frame import reset_code, set_code_exec_strategy
from torch._dynamo.exc import TorchDynamoException as CompileError
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.pgo import CodeId, get_code_state
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import (
    CleanupManager,
    TensorStaticReason,
    counters,
    graph_break_reasons,
    guard_failures,
    orig_code_map,
)
from torch._dynamo.utils import tensor_always_has_static_shape as _has_static_shape
from torch._dynamo.variables import builder
from torch.nn.modules import module as nn_module

from ..housekeeping import collecting_what_it_leaves, log
from ..objects import attempt, is_of
from . import autocasting, compiled_by_torch, hacks, readings
from .hacks import Stage, replaced

__all__ = ["CompileError"]

_DYNAMO_LOG = logging.getLogger("torch._dynamo.convert_frame")


@contextmanager
def capturing_for_plans(
    warn: Callable[[str], None] | None = None,
    sizes_vary: bool = False,
    vary: Iterable[int] = (),
    answers: Callable[[], AbstractContextManager[None]] = readings.as_in_eager,
) -> Iterator[None]:
    """Patch Dynamo's entry, settings and warnings during a planned call, so that it captures as plans need it.

    * Sizes are static or, with `sizes_vary`, symbols for sizes that Dynamo found to vary and for the numbers in `vary`:
      see `EachSize`. A number that changes from call to call (a module's count of steps, the weight of a loss term)
      becomes an input of the graph from its second value on; otherwise each step would be captured again.
    * Dynamo's settings are `_WISHES`; the table of `hacks` lists what it traces differently, and why. Code that asks
      whether it is compiled gets the answer of eager PyTorch, or that of `answers`: see `readings`.
    * Graph breaks are not logged or warned of, unless the user enabled torch's logs: see `graph_breaks`.
    * Code that Dynamo or AOTAutograd fail on runs uncaptured, and what it calls is captured on its own. `warn` gets the
      error; without `warn` it is raised. Code that raises while it is traced may be wrong itself: if it then raises
      uncaptured, `warn` gets nothing, and the next call captures it again.
    """

    @functools.cache
    def hear() -> None:  # at a call's first capture: setup takes time, and few calls capture
        numbers, config = ",".join(map(str, vary)), cast(Any, torch.compiler.config)
        if numbers and hasattr(config, "dynamic_values"):  # before 2.13, symbols come with a second size
            hearing.enter_context(config.patch(dynamic_values=numbers))
        hearing.enter_context(_warned_of_failures(warn))

    def capture_planned(code: types.CodeType, *arguments: Any, **options: Any) -> Any:
        hear()
        if compiled_by_torch.is_authors(arguments[4]):
            return _capture(code, *arguments, **options)
        with counting_seconds(), answers():
            return _capture_in_turn(sizes_vary, code, *arguments, **options)

    stand_ins = (convert_frame, "_compile", capture_planned), (_innermost, "hear", hear)
    with replaced(*stand_ins), hacks.applied(Stage.CALLING), ExitStack() as hearing:
        yield


@contextmanager
def counting_seconds() -> Iterator[None]:
    """Add the block's time to `capturing_s`: a capture, or a trace at a new size. A nested block counts once."""
    before_s, start = _seconds.capturing, time.perf_counter()
    try:
        yield
    finally:
        _seconds.capturing = before_s + time.perf_counter() - start


def capturing_s() -> float:
    """Return the seconds that captures and traces took in this process."""
    return float(_seconds.capturing)


def named_ranges(tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (dimension, smallest, largest size) for dimensions that a user bounded by `torch._dynamo.mark_dynamic`."""
    marks = getattr(tensor, "_dynamo_dynamic_range", ())
    return sorted((mark.dim, mark.min or 1, mark.max) for mark in marks if mark.max is not None)


class Varying(IntEnum):
    """Which numbers of captured code may vary without another capture."""

    SIZES = 0  # sizes that have varied, which are symbols, and floats
    FLOATS = 1  # floats; each size is a constant
    NOTHING = 2  # each size and each float is a constant


def _capture_with(varying: Varying, code: types.CodeType, *arguments: Any, **options: Any) -> Any:
    static = True, TensorStaticReason.NOT_TENSOR
    has_static_shape = _has_static_shape if varying is Varying.SIZES else lambda *_, **__: static
    is_static = builder, "tensor_always_has_static_shape", has_static_shape
    settings = dynamo_config.patch(specialize_float=varying is Varying.NOTHING, **_SETTINGS)
    # These loggers print graph breaks over many lines: disable them unless the user enabled them.
    logs_of_breaks = [(each, "disabled", True) for each in _BREAK_LOGS if not each.isEnabledFor(logging.INFO)]
    with (
        autocasting.releasing_frames(),  # around the collection, which may free frames of earlier captures
        settings,
        replaced(is_static, *logs_of_breaks),
        warnings.catch_warnings(),
        collecting_what_it_leaves(),
        hacks.applied(Stage.CAPTURING),  # within the collection, which frees traces of repeated modules
    ):
        warnings.filterwarnings("ignore", "Error detected in")  # warned if a backward fails in a trace
        warnings.filterwarnings("ignore", "Dynamo detected a call to a .functools.lru_cache")  # see `readings`
        if logs_of_breaks:  # some graph breaks are also warned of
            warnings.filterwarnings("ignore", "Dynamo (does not know how to|cannot) trace")
        log.debug("capturing %s", code.co_name)
        return _capture(code, *arguments, **options)


def _capture_in_turn(sizes_vary: bool, code: types.CodeType, *arguments: Any, **options: Any) -> Any:
    """Capture code with as many varying numbers as Dynamo does not fail on, and with no more from then on.

    Constant floats are tried for code that was captured before: there a float that varies may cause the failure.
    """
    most = _most_varying.get(code, Varying.SIZES)
    first = most if sizes_vary else max(most, Varying.FLOATS)
    last = Varying.NOTHING if code in _most_varying else Varying.FLOATS
    for varying in list(Varying)[first : last + 1]:
        try:  # an error in the guards' log may be gone in the next try
            with replaced((_GUARDS_LOG, "disabled", varying < last or _GUARDS_LOG.disabled)):
                result = _capture_with(varying, code, *arguments, **options)
            break
        except Exception as error:  # any error; after the last try Dynamo runs the code uncaptured or fails
            if varying == last:
                _give_up(code, error)
                raise
            log.debug("%s is captured again, with numbers that vary less", code.co_name, exc_info=True)
    _most_varying[code] = varying if varying > first else most
    return result


def _give_up(code: types.CodeType, error: Exception) -> None:
    """Record that Dynamo failed on code and, if the code itself may be wrong, the error's text in `_in_doubt`."""
    _given_up.add(_whole(code))
    if isinstance(error, TorchRuntimeError):
        _in_doubt[code] = _with_explanation(str(error)).rpartition(_GOT)[2].split(_LINE_END)[0]
    elif _RAISED in str(error):  # since 2.14, if code re-raises, for example after a `finally`
        _in_doubt[code] = str(error).partition(_RAISED)[2].split("\n")[0].split(_LINE_END)[0]


def _whole(code: types.CodeType) -> types.CodeType:
    """Return the function's code of which this code is the rest after a graph break, or the code itself."""
    rest_of = ContinueExecutionCache.generated_code_metadata.get(code)
    whole: types.CodeType = code if rest_of is None else rest_of.code
    return whole


def given_up_count() -> int:
    """Return the number of functions that Dynamo gave up, plus the number of graph breaks so far."""
    return len(_given_up) + len(graph_break_reasons)


def latest_break() -> Any:
    """Return the latest graph break in this process, None without one."""
    return graph_break_reasons[-1] if graph_break_reasons else None


def gave_up(module: torch.nn.Module, since: Any = None) -> bool:
    """Whether Dynamo gave up a module's forward, or its rest after a graph break.

    From given-up code Dynamo captures only callees that are not torch's own (`nn.Linear`, `nn.Sequential`). A forward
    of torch's own is shared by all models: it counts as given up if a graph broke in it, or in a callee, after `since`.
    """
    function = attempt(lambda: module.forward, None, f"the forward of {type(module).__name__}")
    seen = set[int]()  # only a function's `__wrapped__` is trusted
    while is_of(function, (types.FunctionType, types.MethodType)) and id(function) not in seen:
        if getattr(function, "__code__", None) in _given_up:
            return True
        seen.add(id(function))
        function = getattr(function, "__wrapped__", None)
    forward = inspect.getattr_static(type(module), "forward", None)  # reading a TorchScript forward fails
    is_of_torch = type(forward) is types.FunctionType and str(forward.__module__).startswith("torch.nn.")
    if not is_of_torch:  # generated code has no module
        return False
    code = forward.__code__
    lines = {line for *_, line in code.co_lines()}
    later = itertools.takewhile(lambda reason: reason is not since, reversed(graph_break_reasons))
    frames = (frame for reason in later for frame in reason.user_stack)
    return any(frame.lineno in lines and frame.filename == code.co_filename for frame in frames)


_capture: Any = convert_frame._compile
_WISHES: dict[str, Any] = {
    "recompile_limit": 256,  # beyond these limits Dynamo silently runs code uncaptured
    "accumulated_recompile_limit": 4096,
    "use_numpy_random_stream": True,  # NumPy draws the random numbers, not torch
    "skip_nnmodule_hook_guards": False,  # guard hooks that a module gets or loses later
    "allow_unspec_int_on_nn_module": True,
    "trace_autograd_ops": True,
    "inline_invoke_subgraph": True,  # capture `torch.compiler.nested_compile_region` like other code
    "run_gc_after_compile": False,  # it would move what the capture holds to the old generation
}
_SETTINGS = {name: wish for name, wish in _WISHES.items() if hasattr(dynamo_config, name)}
_FROM_NOW_ON = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)  # capture code at its next call
_WHY = "Explanation: "  # begins the explanation of a graph break's reason
_SITE = re.compile(r"^.*/site-packages/")
_GOT, _LINE_END = ": got ", r"\n"  # before an error's repr in such a line; a line end in that repr
_RAISED = "context: raised exception "  # before an error that traced code did not handle
_BREAK_LOGS = [logging.getLogger(f"torch._dynamo.{name}") for name in ("exc", "variables.tensor")]
_GUARDS_LOG = logging.getLogger("torch._guards")
# For code that Dynamo captured at least once: the most numbers that may vary without a failure.
_most_varying: weakref.WeakKeyDictionary[types.CodeType, Varying] = weakref.WeakKeyDictionary()
_given_up: weakref.WeakSet[types.CodeType] = weakref.WeakSet()  # code that Dynamo failed on in every mode
_innermost = types.SimpleNamespace(hear=lambda: None)  # starts listening for failures in the innermost planned call
_seconds = types.SimpleNamespace(capturing=0.0)
_in_doubt: dict[types.CodeType, str] = {}  # error text of code that raised in a trace, until it has run uncaptured


@contextmanager
def _warned_of_failures(warn: Callable[[str], None] | None) -> Iterator[None]:
    """Let Dynamo run uncaptured what it fails on, and pass the errors in its log to `warn`, at any log level."""
    enclosing = dict(_in_doubt)  # those of the enclosing call
    _in_doubt.clear()
    level, was_quiet = _DYNAMO_LOG.level, not _DYNAMO_LOG.isEnabledFor(logging.WARNING)
    suppress_errors = dynamo_config.suppress_errors

    def heed(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno < logging.WARNING:
            return not was_quiet or record.levelno > logging.WARNING
        if warn is None:
            raise error
        if not isinstance(error, TorchRuntimeError):
            warn(_in_brief(getattr(error, "inner_exception", error)))
        return False

    if was_quiet:
        _DYNAMO_LOG.setLevel(logging.WARNING)
    dynamo_config.suppress_errors = _DYNAMO_LOG.isEnabledFor(logging.WARNING)  # False if all logging is disabled
    _DYNAMO_LOG.addFilter(heed)
    try:
        yield
    except BaseException:  # Ctrl-C too: it is unknown whether the code works uncaptured
        for code in _in_doubt:  # let Dynamo capture it at its next call
            _given_up.discard(_whole(code))
            set_code_exec_strategy(code, _FROM_NOW_ON)
        raise
    else:
        if warn is not None:
            for reason in _in_doubt.values():
                warn(reason)
    finally:
        _in_doubt.clear()
        _in_doubt.update(enclosing)
        dynamo_config.suppress_errors = suppress_errors
        _DYNAMO_LOG.removeFilter(heed)
        if was_quiet:
            _DYNAMO_LOG.setLevel(level)


def log_failure(error: Exception) -> None:
    """Report a failed capture through Dynamo's log, as Dynamo reports its own failures: see `capturing_for_plans`."""
    _innermost.hear()
    _DYNAMO_LOG.log(logging.WARNING, "a graph runs uncaptured", exc_info=error)


def reason_of(error: CompileError) -> str:
    """Return why Dynamo failed: the error of the user's code with its line, or else Dynamo's own text."""
    if not isinstance(error, TorchRuntimeError):
        return _with_explanation(_in_brief(error))
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None and (
        isinstance(cause, CompileError) or repr(inner) in str(cause)
    ):
        cause = inner
    lines = [frame for frame in error.real_stack or () if not readings.is_of_tools(frame.filename)]
    place = f" ({lines[-1].filename}:{lines[-1].lineno}, in {lines[-1].name})" if lines else ""
    return f"{type(cause).__name__}: {cause}{place}"


def graph_breaks() -> Counter[str]:
    """Count this process's graph breaks by torch.compile's short reason and the place in the code."""
    breaks, placed = Counter[str](), set[str]()
    for ended in graph_break_reasons:
        if ended.graph_break and ended.user_stack:
            frames = [frame for frame in ended.user_stack if not readings.is_of_tools(frame.filename)]
            reason, frame = _with_explanation(ended.reason), (frames or ended.user_stack)[-1]
            placed.add(reason)
            breaks[f"{reason} (at {_SITE.sub('', frame.filename)}:{frame.lineno}, in {frame.name})"] += 1
    for text, count in counters["graph_break"].items():
        if _with_explanation(text) not in placed:
            breaks[_with_explanation(text)] += count
    return breaks


def failed_guards() -> Counter[str]:
    """Count this process's failed guards by guard and place.

    Of "0/1: len(module.seen) == 3  # seen.append(...)  # net.py:5" the text after the first colon is counted.
    """
    lines = (reason.split("\n")[0] for reasons in guard_failures.values() for reason in reasons)
    return Counter(" ".join(line.partition(": ")[2].split()) for line in lines)


def _with_explanation(reason: str) -> str:
    """Return the title and the explanation of a graph break's reason, without its hints and its link."""
    title, *lines = (line.strip() for line in reason.strip().split("\n"))
    why = next((line.removeprefix(_WHY) for line in lines if line.startswith(_WHY)), "")
    return f"{title}: {why}".rstrip(".") if why else title.rstrip(".")


def _in_brief(error: BaseException) -> str:
    kind = "" if isinstance(error, CompileError) else f"{type(error).__name__}: "  # Dynamo's errors contain it
    return kind + str(error).strip().split("\n\n")[0]


def hooks_of_all_modules() -> tuple[Any, ...]:
    """Return the keys of torch's global module hooks, by kind; code that reads them is captured again on a change."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return tuple(tuple(getattr(nn_module, f"_global_{kind}_hooks")) for kind in kinds)


def forget_compiled(function: Callable[..., Any]) -> None:
    """Drop what Dynamo compiled for a function, and the sizes that it recorded there."""
    reset_code(function.__code__)
    # Dynamo keeps names in the function's module until its bytecode is freed, which may be never.
    for index, made in tuple(CleanupManager.instance.refs.items()):
        if orig_code_map.get(made()) is function.__code__:
            CleanupManager.instance._remove_id(index)
    _most_varying.pop(function.__code__, None)
    get_code_state().pop(CodeId.make(function.__code__), None)


def try_again() -> None:
    """Let Dynamo capture code again that it gave up for good, for example because the code raised."""
    for seen in tuple(input_codes.seen):
        code = seen()
        if code is not None:
            set_code_exec_strategy(code, _FROM_NOW_ON)
