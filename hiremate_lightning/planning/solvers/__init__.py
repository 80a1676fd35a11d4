"""Strategies: each takes a `Problem` and gives a `Solution`."""

from .base import UNLIMITED, Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .chains import min_memory, rotor
from .checkmate import checkmate
from .curve import Curve, curve
from .hilp import hilp
from .least_memory import least_memory, smallest_budget
from .portfolio import portfolio
from .refine import phases
from .selections import knapsack, twremat
from .turn_point import lower_bound, none, turn_point

__all__ = [
    "UNLIMITED",
    "Curve",
    "Problem",
    "Solution",
    "SolveOptions",
    "Status",
    "checkmate",
    "curve",
    "get_strategy",
    "hilp",
    "knapsack",
    "least_memory",
    "lower_bound",
    "min_memory",
    "none",
    "phases",
    "portfolio",
    "replay",
    "rotor",
    "smallest_budget",
    "strategy_names",
    "turn_point",
    "twremat",
]
