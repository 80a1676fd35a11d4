"""Hugging Face Accelerate: prepare a model for training within a budget.

The plan is attached to the inner module. So Accelerate's wrappers (autocast, DistributedDataParallel, gradient
accumulation) and its `unwrap_model`, `get_state_dict` and `save_state` work as without a plan.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ..api import remove_hiremate, take_over
from ..calls.refused import DISTRIBUTED_TYPES
from ..errors import BudgetError, ConfigurationError
from ..options import ENVIRONMENT_BUDGET
from ..planning.plan import Plan
from ..planning.planner import make_options
from ..reporting.plan_summary import plan_metrics
from ..targets.candidates import Target

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


def prepare_hiremate(
    accelerator: Accelerator,
    *objects: Any,
    budget: int | float | str | None = None,
    target: Target = None,
    **options: Any,
) -> Any:
    """Plan the model among the objects within a budget, and call `accelerator.prepare`.

    If the accelerator has trackers, the numbers of each plan are logged to them as `hiremate/...` metrics; their step
    is the number of optimizer steps since this call.

    Args:
        accelerator: The accelerator.
        objects: The arguments of `accelerator.prepare`; exactly one of them is a module.
        budget: As for `hiremate`; None for the environment variable HIREMATE_BUDGET, or "auto" if it is not set.
        target: As for `hiremate`.
        options: The other arguments of `hiremate`, by name.

    Returns:
        What `accelerator.prepare` returns.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If this kind of training can't be planned; nothing is changed then.

    Example:
        >>> model, optimizer, loader = prepare_hiremate(accelerator, model, optimizer, loader, budget="10 GiB")
    """
    if not hasattr(accelerator, "distributed_type"):
        raise ConfigurationError(
            f"The accelerator comes first: expected prepare_hiremate(accelerator, model, ...), found a "
            f"{type(accelerator).__name__}."
        )
    _refuse(accelerator)
    modules = [o for o in objects if isinstance(o, nn.Module)]
    if len(modules) != 1:
        raise ConfigurationError(
            f"prepare_hiremate plans one module, found {len(modules)}. Put the modules that train together into one "
            "nn.Module, and prepare the others with accelerator.prepare."
        )
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    session = take_over(
        modules[0],
        _chosen_budget() if budget is None else budget,
        target=target,
        optimizer=optimizers[0] if len(optimizers) == 1 else None,
        **options,
    ).session

    def log_numbers(plan: Plan) -> None:
        if accelerator.trackers:
            accelerator.log(plan_metrics(plan, len(session.plans)), step=session.updates)

    session.listeners.append(log_numbers)
    try:
        prepared = accelerator.prepare(*objects)
    except BaseException:  # also after Ctrl-C the model must be as before
        remove_hiremate(modules[0])
        raise
    session.replace_compiling()
    return prepared


def _chosen_budget() -> str:
    """Return the budget from the environment variable; a BudgetError names the variable."""
    budget = os.environ.get(ENVIRONMENT_BUDGET, "auto")
    try:
        make_options(budget)
    except BudgetError as error:
        raise BudgetError(f"The environment variable {ENVIRONMENT_BUDGET} is no budget. {error}") from error
    return budget


def _refuse(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    is_sharded = kind == DistributedType.FSDP and getattr(accelerator, "is_fsdp2", False)
    if kind not in SUPPORTED and not is_sharded:
        reason = DISTRIBUTED_TYPES.get(kind.value, "it was never tried. Launch one process, or with --multi_gpu (DDP).")
        raise ConfigurationError(f"prepare_hiremate can't plan under {kind.value}: {reason}")
