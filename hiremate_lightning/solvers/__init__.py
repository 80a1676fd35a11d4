"""Strategies: each takes a `Problem` and gives a `Solution`."""

from .base import Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .least_memory import least_memory, smallest_budget
from .refine import phases
from .turn_point import lower_bound, none, turn_point

__all__ = [
    "Problem",
    "Solution",
    "SolveOptions",
    "Status",
    "get_strategy",
    "least_memory",
    "lower_bound",
    "none",
    "phases",
    "replay",
    "smallest_budget",
    "strategy_names",
    "turn_point",
]
