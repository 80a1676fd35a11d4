"""Functions for tests and benchmarks: how a planned model runs, and the same plans on every machine.

All other internals of a session may change from release to release.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import nn

from . import thresholds
from .planning.plan import Plan
from .sessions.current_step import CurrentStep
from .sessions.modes import Mode
from .sessions.session import Session
from .targets.modules import targets_of
from .torch_private.hacks import replaced

OWN_PLAN, OTHER_PLAN, LEAST_MEMORY = "own plan", "plan of another step", "least memory"
EAGER, OFFLOADED, GIVEN_BACK = Mode.EAGER.value, Mode.OFFLOADED.value, Mode.GIVEN_BACK.value


@dataclass(frozen=True, slots=True)
class StepView:
    """How the latest step of a model runs, or ran."""

    signature: tuple[int, ...]  # numbers of its captured graphs, in the order of their forwards; empty if eager
    modes: tuple[str, ...]  # how each of its forwards runs; one entry for the whole step if it runs eager


def session_of(model: nn.Module) -> Session:
    """Return the session of a planned model; raise a ValueError for another one."""
    targets = targets_of(model)
    if targets is None:
        raise ValueError(f"expected a model that hiremate() planned, found a plain {type(model).__name__}")
    return targets.session


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """Return the plans of a model, one for each step signature, in the order in which they were first made."""
    return tuple(session_of(model).plans.values())


def captured_count(model: nn.Module) -> int:
    """Return how many graphs were captured so far."""
    return session_of(model).captured_count


def is_eager(model: nn.Module) -> bool:
    """Return whether the step under way runs eager."""
    return session_of(model).is_eager


def is_from_other_sizes(model: nn.Module) -> bool:
    """Return whether captured graphs of the step under way were made from traces of other sizes."""
    step = session_of(model).steps.current
    return step is not None and step.is_from_other_sizes


def runs(model: nn.Module) -> int:
    """Return how many forwards of planned modules ran so far."""
    return session_of(model).runs


def end_step(model: nn.Module) -> None:
    """End the step under way now, instead of when the next one begins."""
    session_of(model).end_step()


def step_under_way(model: nn.Module) -> StepView | None:
    """Describe the step under way, None between two steps. A step lasts until the next one begins."""
    step = session_of(model).steps.current
    return None if step is None else StepView(step.graphs, tuple(_ways(step)))


def _ways(step: CurrentStep) -> Iterator[str]:
    if step.eager is None:
        for forward in step.forwards:
            is_own = forward.signature is not None and forward.signature.graphs == step.graphs
            yield OWN_PLAN if is_own else LEAST_MEMORY if forward.mode is Mode.LEAST else OTHER_PLAN
    else:
        yield step.eager.mode.value


def changed_thresholds(**changes: float) -> AbstractContextManager[None]:
    """Return a context in which some fields of `Thresholds` have other values.

    With `measures_times=False` plans are the same on every machine: times are estimated, bytes are still measured.
    """
    changed = replace(thresholds.current, **changes)  # type: ignore[arg-type]
    return replaced((thresholds, "current", changed))
