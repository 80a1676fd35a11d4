"""Strategies: each takes a `Problem` and gives a `Solution`."""

from .base import Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .chains import min_memory, rotor
from .least_memory import least_memory, smallest_budget
from .refine import phases
from .selections import knapsack, twremat
from .turn_point import lower_bound, none, turn_point

__all__ = [
    "Problem",
    "Solution",
    "SolveOptions",
    "Status",
    "get_strategy",
    "knapsack",
    "least_memory",
    "lower_bound",
    "min_memory",
    "none",
    "phases",
    "replay",
    "rotor",
    "smallest_budget",
    "strategy_names",
    "turn_point",
    "twremat",
]
