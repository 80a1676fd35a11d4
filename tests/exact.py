"""Train a small module twice, plainly and inside a budget, and compare everything bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate, remove_hiremate
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.planning.plan import Plan
from hiremate_lightning.reporting.terminal import plan_table
from hiremate_lightning.testing import session_of

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))  # the release that runs

Log = list[Tensor | None]
Loop = Callable[[nn.Module], Log]


class _Network(nn.Module):
    """A module with members that are made anew for each instance."""

    make_members: Callable[..., dict[str, Any]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        for name, member in self.make_members(*arguments, **options).items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)


def network(
    make_members: Callable[..., dict[str, Any]], **attributes: Any
) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """Make a class of modules from a function that is their forward, and one that makes their members from arguments.

    The class is called as the function is, in the way of classes.
    """

    def make_class(forward: Callable[..., Any]) -> type[nn.Module]:
        name = "".join(word.capitalize() for word in forward.__name__.split("_"))
        forward.__code__ = forward.__code__.replace(co_name="forward")  # as tracebacks and guards call it
        members = {"make_members": staticmethod(make_members), "forward": forward, "__module__": forward.__module__}
        return type(name, (_Network,), {**members, **attributes})

    return make_class


def drawn(*shape: int) -> Callable[..., Tensor]:
    """Make a function that draws a batch of a shape, the same batch for the same number."""

    def draw(seed: int = 0) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return draw


def square_error(output: Tensor) -> Tensor:
    """Reduce an output to a loss."""
    return output.float().square().mean()


def leave_behind(module: nn.Module) -> Log:
    """Copy all that a training has changed: parameters, gradients, buffers, and the random state."""
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [*(t.detach().clone() for t in module.state_dict().values()), *gradients, torch.get_rng_state()]


def loop_of(
    loss_of: Callable[[Any, int], Tensor],
    steps: int = 4,
    make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    set_to_none: bool = True,
) -> Loop:
    """Make a loop that logs losses and all that each backward leaves behind.

    Args:
        loss_of: Returns the loss of a module for the backward of a number.
        steps: How many backwards.
        make_optimizer: Makes an optimizer from parameters; None for gradients alone.
        accumulate: Backwards before the optimizer steps, and gradients are cleared.
        set_to_none: Whether gradients are freed, not zeroed.
    """

    def loop(module: nn.Module) -> Log:
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad]) if make_optimizer else None
        log: Log = []
        for index in range(steps):
            if index % accumulate == 0:
                (optimizer or module).zero_grad(set_to_none)
            loss = loss_of(module, index)
            loss.backward()
            if optimizer is not None and (index + 1) % accumulate == 0:
                optimizer.step()
            log += [loss.detach().clone(), *leave_behind(module)]
        return log

    return loop


adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def simple_loop(
    make_batch: Callable[[int], Any], steps: int = 5, loss_of: Callable[[Any], Tensor] = square_error
) -> Loop:
    """Make a loop of AdamW steps that logs losses and all that each step leaves behind."""
    return loop_of(lambda module, index: loss_of(module(make_batch(index))), steps, adamw)


def take_steps(
    module: Callable[..., Any],
    make_batch: Callable[[int], Any],
    steps: int = 3,
    *,
    loss_of: Callable[[Any], Tensor] = square_error,
    optimizer: torch.optim.Optimizer | None = None,
    clears: str = "before",
) -> Plan | None:
    """Train for some steps; return the plan, None without one.

    Gradients are cleared "before" a step, in its "middle", at its "end" or "never".
    """
    for index in range(steps):
        if clears == "before":
            (optimizer or module).zero_grad()
        loss = loss_of(module(make_batch(index)))
        if clears == "middle":
            (optimizer or module).zero_grad()
        loss.backward()
        del loss
        if optimizer is not None:
            optimizer.step()
        if clears == "end":
            (optimizer or module).zero_grad()
    return get_plan(module)


def table_of(plan: Plan) -> str:
    """Draw the table of a plan."""
    console = Console(width=110)
    with console.capture() as capture:
        console.print(plan_table(plan))
    return capture.get()


def captured_by(module: nn.Module, *inputs: Any, **options: Any) -> Captured:
    """Plan a module, which stays planned, run one forward, and return the first captured graph."""
    hiremate(module, "100%", verbose=False, **options)(*inputs)
    return captured_graphs(module)[0]


def captured_graphs(module: nn.Module) -> list[Captured]:
    """List the captured graphs of a planned module."""
    return [graph.captured for graph in session_of(module).model.runtimes.all]


def proved(module: nn.Module) -> str:
    """Count in words how many forwards and gradients of a planned module are proved."""
    return session_of(module).model.proofs.words()


def added_peaks(module: nn.Module, batch: Tensor) -> tuple[int, int]:
    """Measure what a step adds at its peak, gradients there before: plainly, and planned without recomputation.

    Of the plan that is what is predicted, too.
    """
    module(batch).backward()
    plainly = measure_peak(lambda: module(batch).backward())
    hiremate(module, "100%", verbose=False)
    for _ in range(4):
        module(batch).backward()
    plan = get_plan(module)
    remove_hiremate(module)
    assert plan is not None, "nothing was planned"
    assert plan.measured.peak_bytes == plan.planned_peak_bytes, (plan.measured, plan.planned_peak_bytes)
    return plainly, plan.planned_peak_bytes - plan.resident_bytes


def assert_foreseen(model: nn.Module, **tolerance: float) -> Plan:
    """Fail where the measured peak is not the planned one, within a tolerance of `pytest.approx`; return the plan."""
    plan = get_plan(model)
    assert plan is not None, "nothing was planned"
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, **tolerance)
    return plan


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Fail where two values differ, or what they hold: dictionaries, lists and tuples of tensors and other values."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{index}]")
    else:
        assert found == expected, where


def planned_alike(
    plain: nn.Module, act: Callable[[nn.Module], Sequence[Tensor | None]], budget: int | float | str, **options: Any
) -> nn.Module:
    """Do the same with a module and with a planned copy of it; fail where the results differ, return the copy."""
    planned = hiremate(copy.deepcopy(plain), budget, **{"verbose": False, **options})
    expected = act(plain)
    assert differing(act(planned), expected) == []
    return planned


@contextmanager
def quiet() -> Iterator[None]:
    """Don't show warnings of the package: where a budget can't be met, the least memory does as well here.

    What could not be captured is an error all the same: it would be compared with itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiRemateWarning)
        warnings.filterwarnings("error", "torch.compile could not capture", HiRemateWarning)
        yield


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect the texts of the package's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HiRemateWarning)
        texts: list[str] = []
        yield texts
    texts.extend(str(w.message) for w in caught if issubclass(w.category, HiRemateWarning))


def differing(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> list[int]:
    """List the positions at which two logs differ in any bit."""
    assert len(found) == len(expected)
    pairs = enumerate(zip(found, expected, strict=True))
    return [i for i, (a, b) in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]


def train_both(make: Callable[[], nn.Module], loop: Loop, budget: int | float | str = "80%", **options: Any) -> Plan:
    """Run a loop with a plain module and with a planned one, from the same seeds; return the plan.

    Fail where anything differs that the loop returns.
    """
    logs = []
    for is_planned in (False, True):
        torch.manual_seed(3)
        module = make()
        torch.manual_seed(4)
        if not is_planned:
            logs.append(loop(module))
            continue
        with quiet():
            hiremate(module, budget, **{"verbose": False, "on_infeasible": "warn", **options})
            logs.append(loop(module))
        plan = get_plan(module)
        remove_hiremate(module)
    wrong = differing(logs[1], logs[0])
    assert not wrong, f"{len(wrong)} of {len(logs[0])} differ, the first ones at {wrong[:5]}"
    assert plan is not None, "nothing was planned"
    peak, is_feasible = plan.measured.peak_bytes, plan.planned_peak_bytes <= plan.budget_bytes
    assert peak is None or not is_feasible or peak <= plan.budget_bytes, f"{peak:,} of {plan.budget_bytes:,} bytes"
    return plan


def train_eager(make: Callable[[], nn.Module], loop: Loop) -> list[str]:
    """Run a loop with a plain module and with one that can't be planned; return the warnings.

    Fail where anything differs, or is planned.
    """
    logs = []
    with recorded() as warned:
        for is_planned in (False, True):
            torch.manual_seed(3)
            module = make()
            torch.manual_seed(4)
            logs.append(loop(hiremate(module, "100%", verbose=False) if is_planned else module))
    assert not differing(logs[1], logs[0])
    assert get_plan(module) is None
    remove_hiremate(module)
    return warned
