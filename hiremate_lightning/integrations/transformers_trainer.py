"""Hugging Face transformers: a callback that plans the model of a Trainer.

Planning begins with training, after the Trainer has wrapped the model, and ends with training. So the Trainer's
arguments keep their meaning (bf16, gradient accumulation, evaluation, saving), except those for gradient checkpointing
and torch.compile, which the plan replaces during training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..api import remove_hiremate, take_over
from ..planning.plan import Plan
from ..planning.planner import make_options
from ..targets.candidates import Target
from ..targets.modules import targets_of


class HiRemateTrainerCallback(TrainerCallback):
    """Train within a budget of bytes, with the same numbers as without a plan.

    A page about the plan is written to hiremate_plan.html in the Trainer's output_dir.

    Args:
        budget: As for `hiremate`.
        target: As for `hiremate`.
        options: The other arguments of `hiremate`, by name.

    Attributes:
        plan: The latest plan, None before the first one; it stays after training.

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
        """Plan the model that the Trainer has wrapped."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps the optimizer
        planned = take_over(model, self._budget, target=self._target, optimizer=optimizer, **self._options)
        planned.session.reporter.folder = Path(args.output_dir)
        planned.session.replace_compiling()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step or accumulation step, so that logging, evaluation and saving after it are not measured."""
        planned = targets_of(kwargs["model"])
        if planned is not None:
            planned.session.end_step()
            self.plan = planned.session.plan or self.plan

    on_substep_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop planning the model: its calls run eager again."""
        remove_hiremate(kwargs["model"])
