"""Captured code at sizes that were never traced: where it is made from traces of other sizes, and from which.

Code gets a template when it is captured with symbols for its sizes. A new size then costs a fraction of a second. Its
graph has a part of its own as any other: what is planned, recorded and proved does not ask where a graph comes from.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..capturing.template import CodeTemplate
from ..measuring.profiling import ProfileOptions
from ..records.expressions import Sizes, WrongTemplateError
from ..records.schedule import lower
from ..records.simulation import simulate
from ..running.execution import Part
from ..signatures.recorded_step import RecordedStep
from .current_step import CurrentStep
from .largest import LargestSizes
from .planned_model import PlannedModel

OF_SAMPLES = ProfileOptions(repeats=2)  # a line through the times of all samples evens them out
FAILURES = 3  # sizes of one code that no template served, and fewer that one did: then each of its sizes is traced


@dataclass
class _Code:
    """What is known of one captured code.

    Attributes:
        number: Its number; None before anything was to be made of it.
        made: For how many sizes it was made.
        failures: For how many it could not be made, or did not run as it was made.
        is_refused: Whether each of its sizes is traced.
    """

    number: int | None = None
    made: int = 0
    failures: int = 0
    is_refused: bool = False

    def is_part_of(self, recorded: RecordedStep | None) -> bool:
        """Whether a step runs it; whether it may, where that is not known."""
        if self.number is None or recorded is None:
            return True
        return any(self.number == call.captured.graph.code for call in recorded.calls)


class Templates:
    """The templates of a session, by the first part that each is made from.

    Args:
        model: The planned model.
        largest: Learns of parts.
    """

    def __init__(self, model: PlannedModel, largest: LargestSizes) -> None:
        self._model, self._parts, self._largest = model, model.parts, largest
        self._templates: weakref.WeakKeyDictionary[Part, CodeTemplate] = weakref.WeakKeyDictionary()
        self._codes: weakref.WeakKeyDictionary[object, _Code] = weakref.WeakKeyDictionary()

    def may_serve(self, recorded: RecordedStep | None) -> bool:
        """Whether a step of new sizes that begins may run by templates: else it runs as the user wrote it.

        Where graphs of earlier steps wait, what they hold is planned for each size by itself.

        Args:
            recorded: A step of the same code, None where none is recorded.
        """
        refused = [code for code in self._codes.values() if code.is_refused]
        return not (self._why_not() or self._parts.waiting() or any(code.is_part_of(recorded) for code in refused))

    def may_make(self, code: object) -> bool:
        """Whether to trace code at a few sizes, so that parts for others can be made."""
        return not self._why_not() and not self._of(code).is_refused

    def may_make_first(self, code: object) -> bool:
        """Whether to make parts of code for the first sizes that come, too.

        A first plan is made of what was traced at its own sizes. So is one for the largest sizes that users have named.
        """
        return bool(self._model.history.planned) and not self._largest.becomes

    def _why_not(self) -> str:
        """Return why no code has a template; "" where it may."""
        if self._parts.fuses:
            return "kernels are fused for their sizes"
        if self._model.options.offload != "off":
            return "programs hold the host's memory that values are offloaded to"
        return ""

    def part_at(self, code: object, samples: Sequence[tuple[Sizes, Part]], sizes: Sizes) -> Part:
        """Make a part that runs code at some sizes.

        Args:
            code: The code.
            samples: Parts that run it at other sizes, each with all that varies there.
            sizes: What varies at these sizes.

        Raises:
            NoTemplateError: If there is no template for them.
        """
        first, sizes_before = samples[0][1], tuple(varying for varying, _ in samples)
        self._of(code).number = first.captured.graph.code
        template = self._templates.get(first)
        if template is None or template.sizes != sizes_before:
            profiles = [self._parts.prepare(part, OF_SAMPLES)[1] for _, part in samples]
            costed = [(part.captured, profile) for (_, part), profile in zip(samples, profiles, strict=True)]
            template = self._templates[first] = CodeTemplate(costed, sizes_before)
        captured, profile = template.at(sizes)
        part = self._parts.add(captured, first.conductor, profile)
        part.own = first.own
        self._largest.took(part)
        self._of(code).made += 1
        return part

    def failed(self, code: object, error: Exception) -> None:
        """Learn that there was no part of code for a size, or that it did not run: no memory to prove it, say.

        Code that gave other numbers is refused at once: what is known of it is wrong, also where that does not show.
        """
        record = self._of(code)
        record.failures += 1
        too_often = record.failures >= FAILURES and 2 * record.failures >= record.made
        record.is_refused = record.is_refused or too_often or isinstance(error, WrongTemplateError)

    def _of(self, code: object) -> _Code:
        return self._codes.setdefault(code, _Code())


def predicted_peak_bytes(step: CurrentStep) -> int | None:
    """Return the peak that was predicted for a step of a new size by what it ran; None where nothing was."""
    foreseen, resident = step.comparison.foreseen, step.resident
    if foreseen is None or resident is None or not step.is_from_template:
        return None
    whole, forwards = foreseen[1].merge(), [step.forwards[place] for place in foreseen[1].places]
    decisions = whole.join([forward.program.schedule.decisions(forward.captured.graph) for forward in forwards])
    return resident.size_bytes + simulate(whole.graph, whole.profile, lower(whole.graph, decisions)).peak_bytes
