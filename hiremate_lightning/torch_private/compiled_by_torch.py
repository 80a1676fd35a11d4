"""What `torch.compile` returned: what that was made of, whose calls are under way, and how to run it uncompiled.

`torch.compile(module)` returns a module around the first one, whose `forward` is the compiled call.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend

_WRAPPERS = "torch._dynamo.eval_frame"  # the module whose functions run in the place of what is compiled


def original(compiled: Any) -> Any:
    """Return what was given to `torch.compile`; what was not returned by it is its own original."""
    inside = vars(compiled) if hasattr(compiled, "__dict__") else {}
    if "dynamo_ctx" in inside:
        return original(compiled._orig_mod)
    if inside.get("_torchdynamo_wrapper_id") == id(compiled):
        return original(compiled._torchdynamo_orig_callable)
    return compiled


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that was handed to torch.compile, None where this is not what torch.compile returned."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def compiled_around(module: nn.Module) -> list[nn.Module]:
    """List what torch.compile returned for a module, for parts of it, or for what is wrapped around it."""
    own = set(map(id, module.modules()))
    compiled = [thing for thing in gc.get_objects() if type(thing) is OptimizedModule and id(thing) not in own]
    return [thing for thing in compiled if any(id(inner) in own for inner in thing.modules())]


def compiled_inside(module: nn.Module) -> list[nn.Module]:
    """List the parts of a module that torch.compile returned."""
    return [part for part in module.modules() if type(part) is OptimizedModule]


def runs_eager(module: nn.Module) -> bool:
    """Whether this is what torch.compile returned, and it calls the module itself for now."""
    inner = inside_compiled(module)
    return inner is not None and getattr(vars(module).get("forward"), "__self__", None) is inner


def run_eager(compiled: nn.Module) -> Callable[[], None]:
    """Make what torch.compile returned call the module itself; return a function that undoes that."""
    before: Any = compiled.forward
    inner = inside_compiled(compiled)
    assert inner is not None, "torch.compile returned it"
    compiled.forward = inner.__call__
    return lambda: setattr(compiled, "forward", before)


def is_compiled_by(compiled: nn.Module, backend: Callable[..., Any]) -> bool:
    """Whether torch.compile was asked for a backend."""
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    innermost = innermost_backend(callback) if callable(callback) else None
    return getattr(innermost, "compiler_fn", innermost) is backend


# ---------------------------------------------------------------- calls


def under_way() -> list[Any]:
    """List the functions and modules whose compiled calls are under way, innermost first.

    Only the frames of these calls know: a backend is given a graph, and not what the graph is of.
    """
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
