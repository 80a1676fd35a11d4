"""The error for a budget that can't be met, apart from the others because it is one of torch's, and words for those."""

from __future__ import annotations

import torch

from .errors import HiRemateError


class InfeasibleBudgetError(HiRemateError, torch.OutOfMemoryError):
    """No schedule fits the budget.

    It is a `torch.OutOfMemoryError`, and its text contains the words that batch-size finders of Lightning and
    Accelerate look for, so that they back off to a smaller batch instead of stopping.

    Attributes:
        budget_bytes: The budget asked for, in bytes.
        smallest_bytes: The smallest budget for which a schedule was found, in bytes.
        module: Path of the module whose operations set that minimum, "" if unknown.
        less_bytes: How much less another process of the training has for the same step.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, smallest_bytes: int, module: str = "", less_bytes: int = 0
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.module = module
        self.less_bytes = less_bytes


def words_for_finders(device: str) -> str:
    """Return a sentence with the words by which batch-size finders of Lightning and Accelerate know such an error.

    Args:
        device: Where the costs were measured, as in `Profile.device`; estimates are for no such finder.
    """
    if device == "estimate":
        return ""
    words = "DefaultCPUAllocator: can't allocate memory." if device.startswith("cpu") else "CUDA out of memory."
    return f" Batch-size finders know this error by the words: {words}"


def explain(error: torch.OutOfMemoryError, text: str) -> None:
    """Add a note to an error: to its traceback from Python 3.11 on, to its message before."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}",)
