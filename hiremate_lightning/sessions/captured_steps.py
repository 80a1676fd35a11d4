"""Captured steps, as predictions of plain steps need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..calls.given import ModuleCall
from ..calls.second_calls import SecondCalls
from ..records.plain_ways import Calls
from ..records.resizing import Sample
from .recorded_step import RecordedStep
from .step_kind import CapturedStep, StepKind


class CapturedSteps:
    """Describes recorded steps, anew when more was learned of them.

    Args:
        second_calls: Finds what may be called twice.
    """

    def __init__(self, second_calls: SecondCalls) -> None:
        self._second_calls = second_calls

    def described(self, kind: StepKind) -> CapturedStep:
        """Describe a kind of step that was planned, or return how it was described before."""
        step, before, fit, calls = kind.recorded, kind.recorded.resident, self._second_calls.fit, kind.given or ()
        states = before.kept, before.stale_bytes, before.left_bytes
        source = id(step.calls), id(fit), step.margin_bytes, states, calls
        if kind.captured is None or kind.captured.source != source:
            return self.describe(step, calls, kind.code or kind, source)
        return kind.captured

    def describe(
        self, step: RecordedStep, calls: Sequence[ModuleCall], code: StepKind, source: tuple[object, ...] = ()
    ) -> CapturedStep:
        """Describe a recorded step.

        Args:
            step: The step.
            calls: What each call of a planned module was given in it, in order.
            code: The first kind that runs the same code at other sizes.
            source: What this is made from.
        """
        total_bytes, is_on_host = step.bytes_from(0), step.calls[0].captured.device.type == "cpu"
        read = partial(self._read, step)
        return CapturedStep(tuple(calls), code, total_bytes, step.margin_bytes, is_on_host, read, source)

    def _read(self, recorded: RecordedStep) -> tuple[Sample, Calls]:
        step, first, parameters = recorded.merge(), 0, dict[int, int]()
        for call in recorded.calls:
            parameters |= {first + tensor: identity for tensor, identity in call.parameters.items()}
            first += len(call.call.graph.tensors)
        storages = sum(len(call.call.graph.storages) for call in recorded.calls)
        return Sample((), step.graph, step.profile, storages), self._second_calls.calls_in(step, parameters)
