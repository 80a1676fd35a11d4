"""Gradients that are added where they appear: the same numbers, and no second set of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.signatures.limits import CLEARLY_RISEN
from hiremate_lightning.testing import session_of
from tests.exact import adamw, drawn, loop_of, network, square_error, train_both

WIDTH, ROWS, DEPTH, MICRO = 128, 4, 4, 3
batch = drawn(ROWS, WIDTH)
OTHER_TYPES = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the weights' type")


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)]


@network(
    lambda: {
        "body": nn.Sequential(*(layer for _ in range(DEPTH) for layer in layers())),
        "scale": nn.Parameter(torch.ones(())),
    }
)
def wide(self, x: torch.Tensor) -> torch.Tensor:
    """A chain whose weights outweigh its activations, with dropout."""
    return self.body(x) * self.scale


def tied() -> nn.Module:
    """Let two layers share a weight and a bias."""
    model = wide()
    model.body[4].weight, model.body[8].bias = model.body[0].weight, model.body[0].bias
    return model


@network(lambda: {"wide": wide(), "norm": nn.RMSNorm(WIDTH)})
def normed(self, x: torch.Tensor) -> torch.Tensor:
    """The same in other types, with a norm whose gradient is in single precision on a CPU."""
    return self.wide(self.norm(x.to(self.norm.weight.dtype)))


def loop(loss_of=lambda model, x: square_error(model(x)), before=lambda model, step: None, keep=False):
    """Make a loop of optimizer steps over several micro-batches each."""

    def each(model, index):
        if index % MICRO == 0:
            before(model, index // MICRO)
        return loss_of(model, batch(index)) / MICRO

    return loop_of(each, 3 * MICRO, adamw, MICRO, set_to_none=not keep)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def micro_batch(model: nn.Module, x: torch.Tensor) -> None:
    square_error(model(x)).backward()


def peak_of(model: nn.Module) -> int:
    x = batch(9)
    return measure_peak(lambda: micro_batch(model, x))


def taking(grad_dtype: torch.dtype | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Make a model of some type whose weights take gradients of another, or of any."""
    model = normed().to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    return model


def accumulating(budget="1 GiB", make=wide) -> nn.Module:
    """Plan a model, and leave it with gradients and a plan that counts on them."""
    model = hiremate(make(), budget, verbose=False)
    for index in range(4):
        micro_batch(model, batch(index))
    return model


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "zeroed"])
@pytest.mark.parametrize("make", [wide, tied])
def test_gradients_that_are_added_are_those_of_plain_training(make, keep):
    train_both(make, loop(keep=keep))


@OTHER_TYPES
@pytest.mark.parametrize(
    ("dtype", "taken"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, None)],
    ids=str,
)
def test_gradients_of_another_type_are_added_as_in_eager(dtype, taken):
    """The first backward of each step makes them, the others add to them."""
    each = loop_of(lambda model, index: square_error(model(batch(index))), 4 * MICRO, accumulate=MICRO)
    train_both(lambda: taking(taken, dtype), each)


@OTHER_TYPES
def test_one_set_of_gradients_of_another_type_exists():
    """FSDP2's weights in half precision accumulate gradients in single precision since PyTorch 2.15."""
    eager, model = taking(torch.float32), accumulating(make=lambda: taking(torch.float32))
    for _ in range(2):
        eager_bytes = peak_of(eager)
    assert peak_of(model) <= eager_bytes < sum(p.grad.nbytes for p in model.parameters()) / 2
    plan = get_plan(model)
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes


def decayed(model, x):
    """Add a second term that reads parameters."""
    return square_error(model(x)) + sum(p.square().sum() for p in model.parameters())


def called_twice(model, x):
    return square_error(model(x)) + square_error(model(x + 1))


def part_of_a_graph(model, step):
    """Leave a gradient that is part of a graph, which is left to autograd."""
    model.body[5].weight.grad = torch.zeros(WIDTH, requires_grad=True)


@pytest.mark.parametrize(
    "options",
    [{"loss_of": decayed}, {"loss_of": called_twice}, {"before": part_of_a_graph}],
    ids=["decay", "twice", "graph"],
)
def test_what_autograd_adds_itself_is_summed_first(options):
    train_both(wide, loop(**options))


def test_hooks_see_what_they_see_in_plain_training():
    seen = []

    def hook(model, step):
        if step == 1:
            first, second, *_ = model.parameters()
            first.register_hook(lambda g: 2 * g)
            second.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    train_both(wide, loop(before=hook))
    half = len(seen) // 2
    assert half == 2 * MICRO
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_run_in_the_order_of_plain_training(register):
    """They draw noise, so another order gives other weights."""
    order = []

    def hook(model, step):
        def disturb(name, value):
            order.append(name)
            gradient = value if register == "register_hook" else value.grad
            noise = 1e-2 * torch.randn_like(gradient)
            if register == "register_hook":
                return gradient + noise
            gradient.add_(noise)
            return None

        if step == 0:
            for name, parameter in model.named_parameters():
                getattr(parameter, register)(partial(disturb, name))

    train_both(wide, loop(before=hook))
    half = len(order) // 2
    assert order[:half] == order[half:]


def test_a_gradient_that_was_asked_for_is_returned():
    model = accumulating()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(HiRemateWarning, match="two sets"):
        gradients = torch.autograd.grad(square_error(model(batch(0))), list(model.parameters()))
    assert all(g is not None for g in gradients)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_one_set_of_gradients_exists_and_is_foreseen():
    """The first micro-batch fits the plan of the others."""
    model = accumulating()
    plan = get_plan(model)
    assert plan.planned_peak_bytes - plan.resident_bytes < weight_bytes(model) / 2
    assert peak_of(model) == pytest.approx(plan.planned_peak_bytes - plan.resident_bytes, abs=8)
    model.zero_grad()
    assert peak_of(model) + plan.resident_bytes - weight_bytes(model) <= plan.planned_peak_bytes


def test_where_two_sets_are_needed_they_are_planned_for():
    model = accumulating()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g)
    with pytest.warns(HiRemateWarning, match="two sets"):
        micro_batch(model, batch(5))
    micro_batch(model, batch(6))
    plan = get_plan(model)
    assert plan.planned_peak_bytes - plan.resident_bytes >= weight_bytes(model)
    assert plan.measured.peak_bytes <= plan.planned_peak_bytes


@network(lambda: {"first": wide(), "second": wide()})
def in_parts(self, x: torch.Tensor) -> torch.Tensor:
    """Two parts of a graph each, with many rows in the first: much is in memory when gradients of the second exist."""
    hidden = self.first(x.repeat(16, 1))
    torch._dynamo.graph_break()
    return self.second(hidden.unflatten(0, (16, -1)).mean(0))


@pytest.mark.filterwarnings("ignore:.*was not captured as a whole")
def test_a_plan_stays_where_an_optimizer_made_its_state_since():
    model, solutions = in_parts(), []
    hiremate(model, "75%", verbose=False, time_limit_s=2)
    session_of(model).listeners.append(lambda plan: solutions.append(plan.solution))
    loop()(model)  # planned from the second micro-batch on, which has gradients; the fourth has the state and none
    assert len(solutions) > MICRO
    assert all(solution is solutions[0] for solution in solutions)


def train_with_gradients_that_stay(budget):
    """Give each plan of a few steps whose gradients are zeroed, not freed."""
    model, plans = wide(), []
    hiremate(model, budget, verbose=False, time_limit_s=2)
    session_of(model).listeners.append(plans.append)
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(5):
        micro_batch(model, batch(index).repeat(16, 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return plans


def test_gradients_that_stay_after_an_optimizer_step_are_planned():
    """The bytes that a share gives where gradients stay are used."""
    first, *_, last = train_with_gradients_that_stay("60%")
    rooms = [plan.budget_bytes - plan.planned_peak_bytes for plan in (first, last)]
    assert last.budget_bytes > first.budget_bytes
    assert rooms[1] - rooms[0] <= CLEARLY_RISEN * (last.budget_bytes - last.resident_bytes)
    assert last.measured.peak_bytes <= last.budget_bytes
    plans = train_with_gradients_that_stay(last.budget_bytes)
    assert plans[-1].measured.peak_bytes == plans[-1].planned_peak_bytes <= last.budget_bytes
    assert all(plan.solution is plans[-1].solution for plan in plans[1:])  # none was made with a margin
