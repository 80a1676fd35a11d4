"""Joins models that train in the same step into one, which has one plan and one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ..options import STAY, SessionOptions


class Together(nn.Module):
    """A module that holds joined models and is never called."""


def together(models: Sequence[nn.Module]) -> nn.Module:
    """Return one module with all models as children, also those of modules joined before."""
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
    """Return the options of one plan in place of two, with the smaller budget; None if they can't be joined."""
    budgets = one.budget, other.budget
    have_one_form = len({(budget.size_bytes is None, budget.share is None) for budget in budgets}) == 1
    if not have_one_form or any(getattr(one, name) != getattr(other, name) for name in STAY):
        return None
    return replace(one, budget=min(budgets, key=lambda budget: budget.size_bytes or budget.share or 0))
