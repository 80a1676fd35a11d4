"""Hugging Face transformers: a callback that plans what its Trainer trains.

The plan begins when training does, after the Trainer has wrapped the model, and ends with it. So all of the Trainer's
arguments keep their meaning (bf16, gradient accumulation, evaluation, saving), but for those that recompute or compile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..api import get_plan, hiremate, remove_hiremate
from ..errors import ConfigurationError
from ..options import make_options
from ..planning.plan import Plan
from ..sessions.targets import Target, targets_of

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # new name and old one


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
        ConfigurationError: If another argument is out of its range; when the Trainer is made, if one of its own
            arguments recomputes or compiles.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[HiRemateTrainerCallback("10 GiB")])
    """

    def __init__(self, budget: int | float | str = "auto", *, target: Target = None, **options: Any) -> None:
        make_options(budget, **options)
        self._budget, self._target, self._options = budget, target, options
        self.plan: Plan | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse arguments that do what a plan does."""
        name = next((name for name in CHECKPOINTING if getattr(args, name, False)), None)
        if (getattr(args, "fsdp_plugin_args", None) or {}).get("activation_checkpointing"):
            name = "fsdp_config['activation_checkpointing']"
        if name is not None:
            raise ConfigurationError(
                f"The Trainer is told to recompute by itself, found {name}=True. Pass {name}=False to its arguments: "
                "what is computed again is for the plan to decide."
            )
        if args.torch_compile:
            raise ConfigurationError(
                "The Trainer is told to compile the model, found torch_compile=True. Pass torch_compile=False to its "
                "arguments: the plan captures the model by itself."
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Plan the model, as the Trainer has wrapped it."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of what Accelerate puts around it
        hiremate(model, self._budget, target=self._target, optimizer=optimizer, **self._options)
        planned = targets_of(model)
        assert planned is not None, "hiremate() has just taken it over"
        planned.session.stages.reporter.folder = Path(args.output_dir)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step that accumulates gradients."""
        self._end_step(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step: what follows (logging, evaluation, saving) is not measured."""
        self._end_step(kwargs["model"])

    def _end_step(self, model: nn.Module) -> None:
        planned = targets_of(model)
        if planned is not None:
            planned.session.end_step()
            self.plan = get_plan(model) or self.plan

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop planning the model: its calls run as before."""
        model = kwargs["model"]
        self.plan = get_plan(model) or self.plan
        remove_hiremate(model)
