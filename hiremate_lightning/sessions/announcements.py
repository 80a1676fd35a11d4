"""What a session warns of: each text once, with what ended captured graphs where that may be the cause."""

from __future__ import annotations

import warnings
from collections import Counter

from ..errors import HiRemateWarning
from ..torch_private import dynamo

CAPTURES = 8  # consecutive steps in which something is captured before that is announced: it goes on like that
REASONS = 5  # why graphs end that a message lists, the most frequent first


class Announcements:
    """The warnings of one session."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._breaks = dynamo.graph_breaks()
        self._captured = 0  # graphs when the latest step ended
        self._capturing_steps = 0  # consecutive steps in each of which something was captured
        self._failed_guards = Counter[str]()  # before the last of so many steps

    def say(self, text: str, found: str = "") -> None:
        """Warn, once for each text, whatever was found."""
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text + found, HiRemateWarning, stacklevel=2)

    def say_over(self, text: str) -> None:
        """Warn that a step takes more than its budget, and name what ended captured graphs."""
        self.say(text, self.why_over())

    def why_uncaptured(self) -> str:
        """Return, as a sentence or "", what has ended torch.compile's graphs since this session began."""
        reasons = [reason for reason, _ in (dynamo.graph_breaks() - self._breaks).most_common()]
        others = f"; and {len(reasons) - REASONS} more" if len(reasons) > REASONS else ""
        return f" What ends its graphs: {'; '.join(reasons[:REASONS])}{others}." if reasons else ""

    def why_over(self) -> str:
        """Return, as sentences or "", why code that ends graphs may be what a budget is not met for."""
        reasons = self.why_uncaptured()
        if not reasons:
            return ""
        return (
            " Code between captured graphs has no plan, and what one graph hands to the next is kept. Code that "
            f"torch.compile can capture needs less.{reasons}"
        )

    def step_ended(self, captured: int) -> bool:
        """Learn how many graphs there are after a step; warn where each step captures something.

        Returns:
            Whether the step captured nothing.
        """
        is_usual = captured == self._captured
        self._capturing_steps, self._captured = 0 if is_usual else self._capturing_steps + 1, captured
        if self._capturing_steps == CAPTURES - 1:
            self._failed_guards = dynamo.failed_guards()
        if self._capturing_steps == CAPTURES:
            failed = [*(dynamo.failed_guards() - self._failed_guards)]
            found = f" What had been captured is for this alone: {failed[-1]}" if failed else ""
            self.say(
                f"Something was captured anew in each of {CAPTURES} steps, one after the other, which takes time: "
                "input shapes change, numbers that code computes with, or the length of a list that it appends to. Pad "
                "to a few shapes; hand changing numbers over as tensors; append in a function with "
                "@torch.compiler.disable; or name what keeps its shapes with target=, a detector's backbone say.",
                found,
            )
        return is_usual
