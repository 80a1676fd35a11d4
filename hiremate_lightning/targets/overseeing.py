"""Checks around planned calls: they report calls that ran without a plan, and clean up after exceptions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..calls.slots import WITH_COMPILE
from ..errors import CaptureError
from ..objects import parameters_of
from ..sessions.session import Session
from ..torch_private import dynamo, hooks, tensor_state

UNPLANNED = (
    "trains without its plan: an optimizer stepped twice, and none of the planned calls ran in between. A plan runs "
    f"where a module is called; it is passed by where code calls its forward, or compiles around it. {WITH_COMPILE}"
)

warned: weakref.WeakSet[Session] = weakref.WeakSet()  # sessions that have warned of calls without a plan


def listen_to_optimizers(session: Session) -> None:
    """Call a session after each optimizer step until it closes, and warn if training passes by its plans."""
    reference = weakref.ref(session)  # the hook is global, and must not keep the session alive
    runs_before: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        session = reference()
        if session is not None:
            session.optimizer_stepped(optimizer)
            if runs_before.get(optimizer) == session.runs:
                updated = set(map(id, parameters_of(optimizer)))
                if any(id(p) in updated for p in session.root.parameters() if p.grad is not None):
                    session.was_passed_by()
                    if session not in warned:
                        session.warn(f"{type(session.root).__name__} {UNPLANNED}")
            runs_before[optimizer] = session.runs

    handle = register_optimizer_step_post_hook(stepped)
    session.closing.callback(handle.remove)
    weakref.finalize(session, handle.remove)


@contextmanager
def planned_call(session: Session, name: str, module: nn.Module) -> Iterator[None]:
    """Return the context of a planned call; after an exception, code that was not captured is tried again later.

    Labels of a profiler inside of the module are removed during the call, since they would end captured graphs.
    """
    try:
        with session.calling(name), hooks.without_labels(module) as has_labels:
            if has_labels:
                session.warn(
                    "Modules inside of planned ones have no names in the profile: the hooks of Lightning's "
                    "PyTorchProfiler, which would end captured graphs, are left out there. "
                    "PyTorchProfiler(record_module_names=False) sets none."
                )
            yield
    except BaseException:  # Ctrl-C too: Dynamo tries again to capture code that the exception interrupted
        dynamo.try_again()
        raise


def check_captured(session: Session, name: str, result: Any) -> None:
    """Refuse a call that trains but ran no captured graph, or warn of it once if earlier calls were captured.

    Calls inside of transforms of torch.func, which were warned of already, go on too.

    Raises:
        CaptureError: If anything in the result requires a gradient, and nothing was ever captured.
    """
    if requires_gradient(result):
        if session.has_warned_of_transforms(name):
            warned.add(session)
            return
        kinds = " and ".join(sorted(kind.__name__ for kind in classes_with_code(result)))
        own_code = "runs code of its own with each operation: give it x.as_subclass(torch.Tensor)."
        why = f" It returns {kinds}, which {own_code}" if kinds else ""
        if session.captured_count:
            warned.add(session)
            later = why or " Later ones are tried."
            session.warn(
                f"A call of {name} could not be captured and ran without a plan; earlier ones were planned.{later}"
            )
            return
        raise CaptureError(
            f"Nothing of {name} was captured: torch.compile ran it as it is.{session.why_uncaptured()}{why} "
            "Name submodules that can be captured with target=, or train without a plan."
        )


def classes_with_code(result: Any) -> set[type]:
    """List the classes of tensors in a result that run Python code of their own with each operation."""
    kinds = {type(tensor) for tensor in tensor_state.tensors_among(result)}
    return {kind for kind in kinds if tensor_state.has_own_code(kind)}


def requires_gradient(result: Any) -> bool:
    """Whether anything in a tree of containers requires a gradient."""
    return any(tensor.requires_grad for tensor in tensor_state.tensors_among(result))
