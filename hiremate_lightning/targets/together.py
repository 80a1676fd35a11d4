"""Models that train in the same memory: they are put into one, which has one plan and one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ..options import SessionOptions
from ..units import Budget

NAMES_DIFFER = ("budget", "verbose")  # options that may be others for each of them


class Together(nn.Module):
    """Models in one module that is never called."""


def together(models: Sequence[nn.Module]) -> nn.Module:
    """Put models into one; those that were put together before come out of theirs."""
    if len(models) == 1:
        return models[0]
    parts = [part for model in models for part in (model.children() if isinstance(model, Together) else [model])]
    names = list[str]()
    for model in parts:
        name = type(model).__name__
        names.append(f"{name}{sum(n.startswith(name) for n in names) or ''}")
    whole: nn.Module = type("And".join(names), (Together,), {})()
    for name, model in zip(names, parts, strict=True):
        whole.add_module(name, model)
    return whole


def options_together(one: SessionOptions, other: SessionOptions) -> SessionOptions | None:
    """Return the options of a plan in place of two: the smaller budget; None where they ask for different things."""
    budget = _smaller(one.budget, other.budget)
    kept = replace(other, **{name: getattr(one, name) for name in NAMES_DIFFER})
    return None if budget is None or kept != one else replace(one, budget=budget)


def _smaller(one: Budget, other: Budget) -> Budget | None:
    """Return the smaller of two budgets, None where one is in bytes and the other is a share."""
    if one.size_bytes is not None and other.size_bytes is not None:
        return min(one, other, key=lambda budget: budget.size_bytes or 0)
    if one.share is not None and other.share is not None:
        return min(one, other, key=lambda budget: budget.share or 0.0)
    return one if one.is_auto and other.is_auto else None
