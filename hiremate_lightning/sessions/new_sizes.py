"""Makes captured code for sizes that were never traced, from traces of other sizes.

This needs code that Dynamo captured with symbols for its sizes. A new size then costs a fraction of a second, and gets
a `GraphRuntime` of its own, which is recorded and proved like that of a trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from .. import thresholds
from ..capturing.code_at_sizes import CodeAtSizes
from ..records.expressions import Sizes, WrongAtSizesError
from ..running.execution import GraphRuntime
from ..signatures.recorded_step import RecordedStep
from .planned_model import PlannedModel

FAILURES = 3  # trace each size of a code after so many failures, if fewer than twice as many sizes could be made


@dataclass
class _Code:
    """Counts of the sizes that were made for one captured code."""

    number: int | None = None  # its number (`Graph.code`); None before a size was to be made
    made: int = 0  # sizes for which it was made
    failures: int = 0  # sizes for which it could not be made, or failed as it ran
    is_refused: bool = False  # whether each of its sizes is traced from now on


class NewSizes:
    """Makes captured code for sizes that were not traced, from a few that were."""

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._runtimes = model, model.runtimes
        self._at_sizes: weakref.WeakKeyDictionary[GraphRuntime, CodeAtSizes] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[object, _Code] = weakref.WeakKeyDictionary()

    def may_serve(self, recorded: RecordedStep | None) -> bool:
        """Whether a step of new sizes that begins may run by made code.

        It may not while graphs of earlier steps wait for their backward: what these hold is planned for each size. If
        `recorded`, a step of the same code, is None, no code at all may be refused.
        """
        refused = {code.number for code in self._codes.values() if code.is_refused}
        of_step = refused if recorded is None else {None, *(call.captured.graph.code for call in recorded.calls)}
        return not (self._cannot_be_made or self._runtimes.waiting() or refused & of_step)

    def may_make(self, code: object, is_first: bool = False) -> bool:
        """Whether to trace code at a few sizes and make it for others; `is_first` if it has no samples yet.

        A model without a plan traces its first sizes, so that the first plan is of a trace. So does a model whose user
        named the largest sizes.
        """
        has_plan = bool(self._model.history.planned) and not self._model.largest.becomes
        return (has_plan or not is_first) and not self._cannot_be_made and not self._of(code).is_refused

    @property
    def _cannot_be_made(self) -> bool:
        """Whether no code can be made: a threshold switches it off, kernels are fused, or plans may offload."""
        is_off = not thresholds.current.makes_code
        return is_off or self._runtimes.fuses or self._model.options.offload != "off"

    def runtime_at(self, code: object, samples: Sequence[tuple[Sizes, GraphRuntime]], sizes: Sizes) -> GraphRuntime:
        """Make the runtime of code at some sizes, from samples: those of traced sizes, each with its sizes.

        Raises:
            SizesDifferError: If the samples do not determine the code at these sizes.
        """
        first, sizes_before = samples[0][1], tuple(varying for varying, _ in samples)
        self._of(code).number = first.captured.graph.code
        at_sizes = self._at_sizes.get(first)
        if at_sizes is None or at_sizes.sizes != sizes_before:
            profiles = [self._runtimes.measure_once(runtime) for _, runtime in samples]
            costed = [(runtime.captured, profile) for (_, runtime), profile in zip(samples, profiles, strict=True)]
            at_sizes = self._at_sizes[first] = CodeAtSizes(costed, sizes_before)
        captured, profile = at_sizes.at(sizes)
        runtime = self._runtimes.add(captured, first.conductor, profile)
        runtime.own = first.own
        self._model.largest.took(runtime)
        self._of(code).made += 1
        return runtime

    def failed(self, code: object, error: Exception) -> None:
        """Count that no code could be made for a size, or that it failed, as without memory to prove it.

        Code that gave other numbers than eager PyTorch is refused at once: its other sizes may be wrong unnoticed.
        """
        record = self._of(code)
        record.failures += 1
        too_often = record.failures >= FAILURES and 2 * record.failures >= record.made
        record.is_refused = record.is_refused or too_often or isinstance(error, WrongAtSizesError)

    def _of(self, code: object) -> _Code:
        return self._codes.setdefault(code, _Code())
