"""The error for a budget that can't be met, apart from the others because it is one of torch's, and words for those."""

from __future__ import annotations

import torch

from .errors import HiRemateError


class InfeasibleBudgetError(HiRemateError, torch.OutOfMemoryError):
    """No schedule fits the budget.

    It is a `torch.OutOfMemoryError`, and its argument ends with the words that batch-size finders of Lightning and
    Accelerate look for, so that they back off to a smaller batch instead of stopping. People read it without them.

    Args:
        device: Where the step runs, for these words; "estimate" for no device, and no such words.

    Attributes:
        budget_bytes: The budget asked for, in bytes.
        smallest_bytes: The smallest budget for which a schedule was found, in bytes.
        module: Path of the module whose operations set that minimum, "" if unknown.
        less_bytes: How much less another process of the training has for the same step.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_bytes: int,
        module: str = "",
        less_bytes: int = 0,
        device: str = "estimate",
    ) -> None:
        words = " DefaultCPUAllocator: can't allocate memory." if device.startswith("cpu") else " CUDA out of memory."
        self._for_finders = "" if device == "estimate" else words
        super().__init__(message + self._for_finders)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.module = module
        self.less_bytes = less_bytes

    def __str__(self) -> str:
        """Return what people read."""
        return str(self.args[0]).replace(self._for_finders, "") if self._for_finders else str(self.args[0])


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note to an error: to its traceback from Python 3.11 on, to its message before."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = ("\n".join([*map(str, error.args), text]),)
