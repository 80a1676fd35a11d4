"""Captured code at sizes that were never traced, made from traces of other sizes.

Code that is captured with symbols for its sizes can be made so. A new size then costs a fraction of a second. Its
graph has a part of its own as any other: what is recorded and proved does not ask where a graph comes from.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .. import thresholds
from ..capturing.code_at_sizes import CodeAtSizes
from ..records.expressions import Sizes, WrongAtSizesError
from ..running.execution import Part
from ..signatures.recorded_step import RecordedStep
from .planned_model import PlannedModel

REPEATS_OF_SAMPLES = 2  # a line through the times of all samples evens them out
FAILURES = 3  # sizes of one code that could not be made, and fewer that could: then each of its sizes is traced


@dataclass
class _Code:
    """What is known of one captured code."""

    number: int | None = None  # its number; None before anything was to be made of it
    made: int = 0  # for how many sizes it was made
    failures: int = 0  # for how many it could not be made, or did not run as it was made
    is_refused: bool = False  # whether each of its sizes is traced


class NewSizes:
    """Makes captured code for sizes that were not traced, from the parts of a few that were."""

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._parts = model, model.parts
        self._at_sizes: weakref.WeakKeyDictionary[Part, CodeAtSizes] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[object, _Code] = weakref.WeakKeyDictionary()

    def may_serve(self, recorded: RecordedStep | None) -> bool:
        """Whether a step of new sizes that begins may run by made code: else it runs as the user wrote it.

        Where graphs of earlier steps wait, what they hold is planned for each size by itself. Where no step of the same
        code is recorded, no code may be refused.
        """
        refused = {code.number for code in self._codes.values() if code.is_refused}
        of_step = refused if recorded is None else {None, *(call.captured.graph.code for call in recorded.calls)}
        return not (self._cannot_be_made or self._parts.waiting() or refused & of_step)

    def may_make(self, code: object, is_first: bool = False) -> bool:
        """Whether to trace code at a few sizes, so that parts for others can be made; also for the first that come.

        A first plan is made of what was traced at its own sizes. So is one for the largest sizes that users have named.
        """
        has_plan = bool(self._model.history.planned) and not self._model.largest.becomes
        return (has_plan or not is_first) and not self._cannot_be_made and not self._of(code).is_refused

    @property
    def _cannot_be_made(self) -> bool:
        """Whether no code can be made for new sizes: that is switched off, kernels are fused, or plans may offload."""
        is_off = not thresholds.current.makes_code
        return is_off or self._parts.fuses or self._model.options.offload != "off"

    def part_at(self, code: object, samples: Sequence[tuple[Sizes, Part]], sizes: Sizes) -> Part:
        """Make a part that runs code at some sizes, from parts for others, each with all that varies there.

        Raises:
            SizesDifferError: If these do not tell.
        """
        first, sizes_before = samples[0][1], tuple(varying for varying, _ in samples)
        self._of(code).number = first.captured.graph.code
        at_sizes = self._at_sizes.get(first)
        if at_sizes is None or at_sizes.sizes != sizes_before:
            profiles = [self._parts.costs_of(part, REPEATS_OF_SAMPLES) for _, part in samples]
            costed = [(part.captured, profile) for (_, part), profile in zip(samples, profiles, strict=True)]
            at_sizes = self._at_sizes[first] = CodeAtSizes(costed, sizes_before)
        captured, profile = at_sizes.at(sizes)
        part = self._parts.add(captured, first.conductor, profile)
        part.own = first.own
        self._model.largest.took(part)
        self._of(code).made += 1
        return part

    def failed(self, code: object, error: Exception) -> None:
        """Learn that there was no part of code for a size, or that it did not run: no memory to prove it, say.

        Code that gave other numbers is refused at once: what is known of it is wrong, also where that does not show.
        """
        record = self._of(code)
        record.failures += 1
        too_often = record.failures >= FAILURES and 2 * record.failures >= record.made
        record.is_refused = record.is_refused or too_often or isinstance(error, WrongAtSizesError)

    def _of(self, code: object) -> _Code:
        return self._codes.setdefault(code, _Code())
