"""Train PyTorch models inside a byte budget, bit for bit as before, and as fast as that budget allows."""

from pathlib import Path as _Path

_package = _Path(__file__).resolve().parent
if not (_package / "callbacks").is_dir() and (_package.parent / "callbacks" / "__init__.py").is_file():
    # A checkout on the path, not an installed copy: here the callbacks lie beside the package, not inside it.
    __path__.append(str(_package.parent))

from .api import get_plan, hiremate, remove_hiremate
from .errors import BudgetError, CaptureError, ConfigurationError, HiRemateError, HiRemateWarning, InfeasibleBudgetError
from .plan import Plan

__all__ = [
    "BudgetError",
    "CaptureError",
    "ConfigurationError",
    "HiRemateError",
    "HiRemateWarning",
    "InfeasibleBudgetError",
    "Plan",
    "get_plan",
    "hiremate",
    "remove_hiremate",
]

__version__ = "0.1.0"
