"""The exception tree: one root, and the standard names under which users handle each error already."""

from __future__ import annotations

import pytest
import torch

from hiremate_lightning import errors
from hiremate_lightning.errors import HiRemateError, HiRemateWarning
from hiremate_lightning.out_of_memory import InfeasibleBudgetError


@pytest.mark.parametrize(
    ("error", "standard"),
    [
        (errors.BudgetError, ValueError),
        (errors.ConfigurationError, ValueError),
        (errors.CaptureError, RuntimeError),
        (errors.ScheduleError, RuntimeError),
        (InfeasibleBudgetError, torch.OutOfMemoryError),
    ],
)
def test_each_error_has_the_root_and_a_standard_name(error: type[Exception], standard: type[Exception]):
    assert issubclass(error, HiRemateError)
    assert issubclass(error, standard)


def test_every_error_of_the_module_is_under_the_root():
    """The warning is a user's warning, and no error."""
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert [error for error in found if not issubclass(error, (HiRemateError, HiRemateWarning))] == []
    assert issubclass(HiRemateWarning, UserWarning)
    assert not issubclass(HiRemateWarning, HiRemateError)
