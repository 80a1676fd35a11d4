"""Hugging Face transformers: a callback that plans what its Trainer trains.

The plan begins when training does, after the Trainer has wrapped the model, and ends with it. So all of the Trainer's
arguments keep their meaning (bf16, gradient accumulation, evaluation, saving), but for those that recompute or compile:
the plan takes their place for as long as it lasts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..api import get_plan, hiremate, remove_hiremate
from ..planning.plan import Plan
from ..planning.planner import make_options
from ..targets.candidates import Target
from ..targets.modules import targets_of


class HiRemateTrainerCallback(TrainerCallback):
    """Train within a budget of bytes, with the same numbers.

    The plan is written as a page to the Trainer's output_dir, hiremate_plan.html.

    Args:
        budget: As for `hiremate`.
        target: As for `hiremate`.
        options: The other arguments of `hiremate`, by name.

    Attributes:
        plan: The latest plan, None before there is one; it stays after training.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If another argument is out of its range.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[HiRemateTrainerCallback("10 GiB")])
    """

    def __init__(self, budget: int | float | str = "auto", *, target: Target = None, **options: Any) -> None:
        make_options(budget, **options)
        self._budget, self._target, self._options = budget, target, options
        self.plan: Plan | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan the model, as the Trainer has wrapped it."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of what Accelerate puts around it
        hiremate(model, self._budget, target=self._target, optimizer=optimizer, **self._options)
        planned = targets_of(model)
        assert planned is not None, "hiremate() has just taken it over"
        planned.session.reporter.folder = Path(args.output_dir)
        planned.session.replace_compiling()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step, or one that accumulates: what follows (logging, evaluation, saving) is not measured."""
        model = kwargs["model"]
        planned = targets_of(model)
        if planned is not None:
            planned.session.end_step()
            self.plan = get_plan(model) or self.plan

    on_substep_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop planning the model: its calls run as before."""
        model = kwargs["model"]
        self.plan = get_plan(model) or self.plan
        remove_hiremate(model)
