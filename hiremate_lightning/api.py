"""The functions for scripts: plan a model, stop planning it, look at its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from .calls.refused import refuse
from .errors import ConfigurationError
from .options import SizeRanges, refuse_changes
from .planning.plan import Plan
from .planning.planner import make_options
from .sessions.session import Session
from .targets import compiled
from .targets.candidates import Target
from .targets.modules import Targets, give_way, targets_of
from .torch_private import compiled_by_torch

Planned = TypeVar("Planned", bound=nn.Module | Callable[..., Any])
FABRIC_WRAPPER = "_FabricModule"  # by its name: this module loads without Lightning


def hiremate(
    model: nn.Module,
    budget: int | float | str = "auto",
    *,
    target: Target = None,
    optimizer: torch.optim.Optimizer | None = None,
    time_limit_s: float = 30.0,
    max_plans: int = 8,
    on_infeasible: str = "raise",
    cache_dir: str | Path | None = None,
    solver: str = "portfolio",
    compile: str | None = None,
    offload: str = "off",
    host_budget: int | str = "auto",
    verify: str | int = "first",
    sizes: SizeRanges | None = None,
    recomputable_operators: Sequence[str] = (),
    verbose: bool | Literal["full"] = True,
) -> nn.Module:
    """Train a model within a budget of bytes, with the same numbers.

    The model is planned at its first training steps and stays what it is: same class, parameters, state_dict. A second
    call changes the budget and plans again, without capturing again. It may name an optimizer and be silent; what else
    it leaves out stays as it was.

    Args:
        model: The module to train. What DistributedDataParallel or Fabric put around it is planned inside.
        budget: Bytes ("12 GiB", "800 MB", an int) that must not be passed at any moment of a training step, all that is
            allocated on the device included; or a share ("60%", a float in (0, 1]) of what the unplanned step adds to
            what exists before it, the largest so far; or "auto" for what the device has free.
        target: Paths of the submodules to plan; None for the outermost ones that are called.
        optimizer: Its state counts once it exists; found by itself at its first step where not given.
        time_limit_s: Seconds for solving one plan, counted as the work of an idle core: a busy machine takes longer and
            finds the same. The clock ends it after 10 s and four times as long, with a warning.
        max_plans: Most plans to make, one for each step signature (input shapes, for example). After that, a step runs
            by the plan of another input shape if it fits, else at the least memory.
        on_infeasible: "raise" if nothing fits the budget, or "warn" to train on with the least memory found.
        cache_dir: Folder for measured costs and plans, reused by later runs; None for no files.
        solver: Leave it at the default, "portfolio", the best of several strategies. The others are for comparison:
            "segments", without a MIP solver; "none"; or a method of a paper: "hilp", "rockmate", "rotor", "pofo",
            "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr"; see docs/formulation.md.
        compile: "inductor" to fuse operations into kernels that Inductor makes, None for PyTorch's own; see
            docs/compiled.md.
        offload: "auto" to let plans put values into the host's memory between forward and backward if that is faster
            than to compute them again, or if nothing else fits, in up to half of what the host has free; "always
            allowed" for as much as host_budget names; "off" for never. See docs/offloading.md.
        host_budget: Most bytes of the host's memory for offloaded values, of this process ("64 GiB", an int); "auto"
            for half of what is free as planning begins, shared by the processes of a machine.
        verify: "first" to prove captured code against eager PyTorch at its first run, a number of steps to prove it at
            as many runs, "off" to believe it; see docs/limits.md.
        sizes: Smallest and largest size of a dimension of an argument, such as `{"input_ids": {1: (1, 4096)}}`.
            Dimensions of the same size, those of masks for example, follow. The largest sizes are planned in the first
            steps: a budget that is too small for them is refused then, and shares are of them.
            `torch._dynamo.mark_dynamic(tensor, dim, min=, max=)` on what the call is given asks for the same.
        recomputable_operators: Custom operators with Python code that give the same numbers when they run again, by
            name ("mylibrary::attention"). Others with Python code run once in a step, and their results are kept.
        verbose: Whether to report, on rank zero: a line when a plan is made, one when it was measured, one that says
            how to see more or where its page is; "full" for the whole table of the plan.

    Returns:
        The same module.

    Raises:
        BudgetError: If the budget can't be read.
        ConfigurationError: If the model or an argument can't be used; nothing is changed then.

    Example:
        >>> model = hiremate(model, budget="10 GiB")
    """
    # `locals()` holds only the arguments here.
    take_over(**locals())
    return model


def take_over(
    model: nn.Module,
    budget: int | float | str = "auto",
    *,
    target: Target = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Targets:
    """Plan a model as `hiremate` does, with its arguments and errors; return the targets that plan its calls."""
    if isinstance(budget, nn.Module):
        raise ConfigurationError(
            f"The model comes first, then the budget: expected hiremate(model, {_named(model)}), found a "
            f"{type(budget).__name__} as the budget."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ConfigurationError(
            f"optimizer must be a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), "
            f"found {_named(optimizer)}. Leave it out where there are several, or none yet: all are found as they step."
        )
    asked = make_options(budget, **options)
    root = inside_wrappers(model)
    targets = None
    if isinstance(root, nn.Module):
        give_way(root)
        targets = targets_of(root)
    if targets is not None and any(root is module for module in targets.root.modules()):
        refuse_changes(targets.session.options, asked)
        targets.candidates.refuse_others(root, target)
        targets.session.set_budget(asked.budget)
        if asked.verbose is not True:  # the default changes nothing
            targets.session.reporter.verbose = asked.verbose
    else:
        refuse(model)  # the wrapper too: Fabric compiles the model there
        if targets is not None:
            raise ConfigurationError(
                f"Can't plan {type(root).__name__}: a part of it is planned already. Call remove_hiremate(model) first."
            )
        targets = Targets(root, Session(root, asked), target)
        targets.attach()
    if optimizer is not None:
        targets.session.watch_optimizer(optimizer)
    return targets


def _named(value: object) -> str:
    """Return a wrong argument in words: its text if that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__


def inside_wrappers(model: Any) -> Any:
    """Return the module inside of the wrappers of DistributedDataParallel and Fabric."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == FABRIC_WRAPPER:
        model = model.module
    return model


def remove_hiremate(model: Planned) -> Planned:
    """Stop planning a model; it runs as it did before. A model that is not planned is left alone.

    Of what was compiled with `torch.compile(backend="hiremate")`, all that shares its options stops with it.

    Args:
        model: The model that `hiremate()` planned, or a model or function that was compiled.

    Raises:
        ConfigurationError: If it is no module, and was not compiled.
    """
    session = _session_of(model, "remove_hiremate")
    if session is not None:
        session.close()
    return model


def get_plan(model: nn.Module | Callable[..., Any]) -> Plan | None:
    """Return the plan of a model's latest step signature. There is none before the second training step.

    Args:
        model: The model that `hiremate()` planned; or the model or function that was compiled with
            `torch.compile(backend="hiremate")`, as it was before or as it is after that.

    Raises:
        ConfigurationError: If it is no module, and was not compiled.
    """
    session = _session_of(model, "get_plan")
    return None if session is None else session.plan


def _session_of(model: Any, function: str) -> Session | None:
    """Return the session that plans a model, None for none."""
    inside = compiled_by_torch.original(model)
    targets = targets_of(inside) if isinstance(inside, nn.Module) else None
    session = compiled.session_of(inside) if targets is None else targets.session
    if session is None and inside is model and not isinstance(model, nn.Module):
        raise ConfigurationError(f"{function} takes the model that hiremate() planned, found {_named(model)}.")
    return session
