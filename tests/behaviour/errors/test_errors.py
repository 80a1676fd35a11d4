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


def test_an_infeasible_budget_carries_its_numbers():
    """A handler for memory that runs out catches it."""
    with pytest.raises(torch.OutOfMemoryError, match=r"^too small$") as caught:
        raise InfeasibleBudgetError("too small", budget_bytes=1, smallest_bytes=2, module="blocks.0")
    error = caught.value
    assert (error.budget_bytes, error.smallest_bytes, error.module) == (1, 2, "blocks.0")
