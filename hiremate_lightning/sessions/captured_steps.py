"""Captured steps, as predictions of plain steps need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..records.resizing import Sample
from ..records.ways import Calls
from .kinds import Kind
from .known import Known
from .plain_steps import CapturedStep, ModuleCall
from .second_calls import SecondCalls


class CapturedSteps:
    """Describes known kinds of steps, anew when more was learned of them.

    Args:
        second_calls: Finds what may be called twice.
    """

    def __init__(self, second_calls: SecondCalls) -> None:
        self._second_calls = second_calls
        self._described: dict[Kind, tuple[tuple[object, ...], CapturedStep]] = {}

    def described(self, kind: Kind, known: Known, calls: Sequence[ModuleCall], code: Kind) -> CapturedStep:
        """Describe a kind of step, or return how it was described before.

        Args:
            kind: The kind.
            known: What is known of it.
            calls: What each call of a planned module was given in it, in order.
            code: The first kind that runs the same code at other sizes.
        """
        fit, resident = self._second_calls.fit, known.resident
        before = resident.kept, resident.stale_bytes, resident.left_bytes
        state = id(known.calls), id(fit), known.margin_bytes, before, tuple(calls)
        found = self._described.get(kind)
        if found is None or found[0] != state:
            self._described[kind] = found = state, self.describe(known, calls, code)
        return found[1]

    def describe(self, known: Known, calls: Sequence[ModuleCall], code: Kind) -> CapturedStep:
        """Describe a step that is known."""
        total_bytes, is_on_host = known.bytes_from(0), known.calls[0].captured.device.type == "cpu"
        read = partial(self._read, known)
        return CapturedStep(tuple(calls), code, total_bytes, known.margin_bytes, is_on_host, read)

    def _read(self, known: Known) -> tuple[Sample, Calls]:
        step, first, parameters = known.merge(), 0, dict[int, int]()
        for own in known.calls:
            parameters |= {first + tensor: identity for tensor, identity in own.parameters.items()}
            first += len(own.call.graph.tensors)
        storages = sum(len(own.call.graph.storages) for own in known.calls)
        return Sample((), step.graph, step.profile, storages), self._second_calls.calls_in(step, parameters)
