"""Strategies: each takes a `Problem` and returns a `Solution`."""

from . import methods, portfolio
from .base import UNLIMITED, Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .least_memory import smallest_budget
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
    "portfolio",
    "replay",
    "smallest_budget",
    "strategy_names",
]
