"""Captured steps, as predictions of plain steps need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..calls.given import ModuleCall
from ..records.resizing import Sample
from .recorded_step import RecordedStep
from .step_kind import CapturedStep, StepKind


def described(kind: StepKind) -> CapturedStep:
    """Describe a kind of step that was planned, or return how it was described before, if nothing was learned since."""
    step, before, calls = kind.recorded, kind.recorded.resident, kind.given or ()
    source = id(step.calls), step.margin_bytes, (before.kept, before.stale_bytes, before.left_bytes), calls
    if kind.captured is None or kind.captured.source != source:
        return describe(step, calls, kind.code or kind, source)
    return kind.captured


def describe(
    step: RecordedStep, calls: Sequence[ModuleCall], code: StepKind, source: tuple[object, ...] = ()
) -> CapturedStep:
    """Describe a recorded step.

    Args:
        step: The step.
        calls: What each call of a planned module was given in it, in order.
        code: The first kind that runs the same code at other sizes.
        source: What this is made from.
    """
    total_bytes, is_on_host = step.bytes_from(0), step.calls[0].captured.device.type == "cpu"
    return CapturedStep(tuple(calls), code, total_bytes, step.margin_bytes, is_on_host, partial(_read, step), source)


def _read(recorded: RecordedStep) -> Sample:
    step = recorded.merge()
    storages = sum(len(call.call.graph.storages) for call in recorded.calls)
    return Sample((), step.graph, step.profile, storages)
