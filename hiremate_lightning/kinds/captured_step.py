"""A captured step as predictions of plain steps need it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from ..calls.given import ModuleCall
from ..records.resizing import Sample
from .recorded_step import RecordedStep


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A step that was captured, as predictions of plain steps need it (`plain_steps`).

    Attributes:
        calls: What each call of a planned module was given in it, in order.
        code: Stands for its code: equal for all steps that run the same code, at whatever sizes.
        total_bytes: Bytes of all its values.
        margin_bytes: By how much it was measured above what was predicted.
        is_on_host: Whether it ran on a CPU, which reads what was put aside in the memory of its files.
        read: Returns the step, its inputs left out.
        source: What it was made from: where that changes, it is made anew.
    """

    calls: tuple[ModuleCall, ...]
    code: Hashable
    total_bytes: int
    margin_bytes: int
    is_on_host: bool
    read: Callable[[], Sample]
    source: tuple[object, ...] = ()

    @cached_property
    def sample(self) -> Sample:
        """The step."""
        return self.read()


def describe(
    step: RecordedStep, calls: Sequence[ModuleCall], code: Hashable, source: tuple[object, ...] = ()
) -> CapturedStep:
    """Describe a recorded step.

    Args:
        step: The step.
        calls: What each call of a planned module was given in it, in order.
        code: Stands for its code: equal for all steps that run the same code, at whatever sizes.
        source: What this is made from.
    """
    total_bytes, is_on_host = step.bytes_from(0), step.calls[0].captured.device.type == "cpu"
    return CapturedStep(tuple(calls), code, total_bytes, step.margin_bytes, is_on_host, partial(_read, step), source)


def _read(recorded: RecordedStep) -> Sample:
    step = recorded.merge()
    storages = sum(len(call.call.graph.storages) for call in recorded.calls)
    return Sample((), step.graph, step.profile, storages)
