"""Strategies: each takes a `Problem` and returns a `Solution`. Importing a strategy's module registers it."""

from . import methods, portfolio  # noqa: F401
