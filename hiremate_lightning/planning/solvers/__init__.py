"""Strategies: each takes a `Problem` and gives a `Solution`."""

from . import methods
from .base import UNLIMITED, Problem, Solution, SolveOptions, Status, get_strategy, replay, strategy_names
from .curve import Curve, curve
from .least_memory import smallest_budget
from .portfolio import portfolio
from .refine import phases
from .segments import segments
from .turn_point import lower_bound, none, turn_point

__all__ = [
    "UNLIMITED",
    "Curve",
    "Problem",
    "Solution",
    "SolveOptions",
    "Status",
    "curve",
    "get_strategy",
    "lower_bound",
    "methods",
    "none",
    "phases",
    "portfolio",
    "replay",
    "segments",
    "smallest_budget",
    "strategy_names",
    "turn_point",
]
