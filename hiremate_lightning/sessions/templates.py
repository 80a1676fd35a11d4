"""Captured code at sizes that were never traced: where it is made from traces of other sizes, and from which.

Code gets a template when a second size comes that would be traced. A new size then costs milliseconds, and its graph
has a part of its own as any other: what is planned, recorded and proved does not ask where a graph comes from.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from ..capturing.template import CodeTemplate
from ..records.expressions import NoTemplateError, Sizes
from ..running.execution import Conductor, Part
from .planned_model import PlannedModel

log = logging.getLogger("hiremate_lightning")

FAILURES = 3  # sizes that no template served, after which steps of new sizes are not captured for one


class Templates:
    """The templates of a session, by the first part that each is made from.

    Args:
        model: The planned model.
    """

    def __init__(self, model: PlannedModel) -> None:
        self._model, self._parts = model, model.parts
        self._templates: weakref.WeakKeyDictionary[Part, CodeTemplate] = weakref.WeakKeyDictionary()
        self._failures = 0

    @property
    def may_serve(self) -> bool:
        """Whether a step of new sizes that begins may run by templates: else it runs as the user wrote it.

        Where graphs of earlier steps wait, what they hold is planned for each size by itself.
        """
        return self._failures < FAILURES and not self._why_not() and not self._parts.waiting()

    def _why_not(self) -> str:
        """Return why no code has a template now; "" where it may."""
        if self._parts.fuses:
            return "kernels are fused for their sizes"
        if self._model.options.offload != "off":
            return "programs hold the host's memory that values go away to"
        return ""

    def part_at(self, samples: Sequence[tuple[Sizes, Part]], sizes: Sizes, conductor: Conductor) -> Part:
        """Make a part that runs code at some sizes.

        Args:
            samples: Parts that run the same code at other sizes, each with all that varies there.
            sizes: What varies at these sizes.
            conductor: Of the part.

        Raises:
            NoTemplateError: If there is no template for them.
        """
        try:
            if why := self._why_not():
                raise NoTemplateError(f"No code has a template: {why}")
            captured, profile = self._template_of(samples).at(sizes)
        except NoTemplateError:
            self._failures += 1
            raise
        part = self._parts.add(captured, conductor, profile)
        part.own = samples[0][1].own
        return part

    def failed(self) -> None:
        """Learn that code of a template did not run: its proof failed, or there was no memory for it."""
        self._failures += 1

    def _template_of(self, samples: Sequence[tuple[Sizes, Part]]) -> CodeTemplate:
        first, sizes = samples[0][1], tuple(varying for varying, _ in samples)
        template = self._templates.get(first)
        if template is None or template.sizes != sizes:
            profiles = [self._parts.prepare(part)[1] for _, part in samples]
            costed = [(part.captured, profile) for (_, part), profile in zip(samples, profiles, strict=True)]
            template = self._templates[first] = CodeTemplate(costed, sizes)
        return template
