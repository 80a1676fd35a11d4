"""Train PyTorch models inside a byte budget, bit for bit as before, and as fast as that budget allows."""

import random as _random
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

# rich draws a number as it is imported. The generator, and what a script draws from it next, are the user's.
_state = _random.getstate()
_import_module("rich.style")
_random.setstate(_state)
del _state

_package = _Path(__file__).resolve().parent
if not (_package / "callbacks").is_dir() and (_package.parent / "callbacks" / "__init__.py").is_file():
    # A checkout on the path, not an installed copy: here the callbacks lie beside the package, not inside it.
    __path__.append(str(_package.parent))

if TYPE_CHECKING:  # "as" passes a name on
    from .api import get_plan as get_plan
    from .api import hiremate as hiremate
    from .api import remove_hiremate as remove_hiremate
    from .buckets import bucket_lengths as bucket_lengths
    from .buckets import bucket_of as bucket_of
    from .out_of_memory import InfeasibleBudgetError as InfeasibleBudgetError
    from .planning.plan import Plan as Plan
    from .reporting.html_report import write_html as write_html
    from .reporting.plan_summary import plan_metrics as plan_metrics
    from .reporting.svg_report import write_svg as write_svg
    from .sizes.batch_size import find_max_batch_size as find_max_batch_size
    from .sizes.size_search import BatchSizeResult as BatchSizeResult

from .errors import BudgetError, CaptureError, ConfigurationError, HiRemateError, HiRemateWarning

__version__ = "0.1.0"

# Solving needs no torch, which takes seconds to import.
_LAZY = {
    "BatchSizeResult": "sizes.size_search",
    "InfeasibleBudgetError": "out_of_memory",
    "Plan": "planning.plan",
    "bucket_lengths": "buckets",
    "bucket_of": "buckets",
    "find_max_batch_size": "sizes.batch_size",
    "get_plan": "api",
    "hiremate": "api",
    "plan_metrics": "reporting.plan_summary",
    "remove_hiremate": "api",
    "write_html": "reporting.html_report",
    "write_svg": "reporting.svg_report",
}

__all__ = [*_LAZY, "BudgetError", "CaptureError", "ConfigurationError", "HiRemateError", "HiRemateWarning"]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
