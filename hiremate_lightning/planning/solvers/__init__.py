"""Strategies: each takes a `Problem` and gives a `Solution`."""

from . import methods
from .base import UNLIMITED, Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .least_memory import smallest_budget
from .portfolio import portfolio
from .search import none
from .turn_point import lower_bound

__all__ = [
    "UNLIMITED",
    "Problem",
    "Solution",
    "SolveOptions",
    "Status",
    "get_strategy",
    "lower_bound",
    "methods",
    "none",
    "portfolio",
    "replay",
    "smallest_budget",
    "strategy_names",
]
