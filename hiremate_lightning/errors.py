"""The exception tree, and the one warning class, of the package.

Every error says what was expected, what was found, where, and what to do. `HiRemateError` is the root; an error that
users already handle under a standard name inherits that name too (`ValueError`, `torch.OutOfMemoryError`).
"""

from __future__ import annotations

import torch


class HiRemateError(Exception):
    """Root of all errors raised by this package."""


class HiRemateWarning(UserWarning):
    """A fall-back, or something to know about a plan; each is announced once."""


class BudgetError(HiRemateError, ValueError):
    """A budget that can't be read: wrong type, unit or range."""


class ConfigurationError(HiRemateError, ValueError):
    """A set-up that can't be planned: wrong argument, wrong target, or another tool that already does the same."""


class CaptureError(HiRemateError, RuntimeError):
    """The training step could not be captured as a graph."""


class ScheduleError(HiRemateError, RuntimeError):
    """A schedule that computes from a value that is not there, or frees one that is not there."""


class InfeasibleBudgetError(HiRemateError, torch.OutOfMemoryError):
    """No schedule fits the budget.

    It is a `torch.OutOfMemoryError`, and its text contains the words that batch-size finders of Lightning and
    Accelerate look for, so that they back off to a smaller batch instead of stopping.

    Attributes:
        budget_bytes: The budget asked for, in bytes.
        smallest_bytes: The smallest budget for which a schedule was found, in bytes.
        module: Path of the module whose operations set that minimum, "" if unknown.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int, module: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.module = module
