"""Models that train in the same memory: they are put into one, which has one plan and one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ..options import SessionOptions

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
    budgets = one.budget, other.budget
    have_one_form = len({(budget.size_bytes is None, budget.share is None) for budget in budgets}) == 1
    kept = replace(other, **{name: getattr(one, name) for name in NAMES_DIFFER})
    if kept != one or not have_one_form:
        return None
    return replace(one, budget=min(budgets, key=lambda budget: budget.size_bytes or budget.share or 0))
