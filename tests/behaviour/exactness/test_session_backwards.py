"""What users may do between a forward and its backward, and after it."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate, remove_hiremate
from hiremate_lightning.errors import CaptureError, HiRemateError
from hiremate_lightning.memory.metering import MemoryMeter, measure_peak
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.testing import session_of
from tests.exact import Log, assert_same, leave_behind, network, recorded, take_steps, train_both
from tests.life import MANY, Net, assert_exact, batch, gradients, make, planned, step, warm_up


def test_a_step_whose_backward_failed_is_not_planned():
    @network(lambda: {"first": make(1), "last": make(2)})
    def breaks(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        between = self.first(x)
        torch._dynamo.graph_break()
        return between, self.last(between)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    def train(model: nn.Module, failing: int) -> nn.Module:
        for index in range(5):
            model.zero_grad()
            between, result = model(batch(index, MANY))
            if index == failing:
                between.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                result.square().mean().backward()
            del between, result
        return model

    expected = get_plan(train(hiremate(breaks(), "70%", verbose=False), failing=-1))
    for failing in (0, 1):
        found = get_plan(train(hiremate(breaks(), "70%", verbose=False), failing))
        assert found.unplanned_peak_bytes == expected.unplanned_peak_bytes
        assert found.planned_peak_bytes <= found.budget_bytes == expected.budget_bytes
        assert found.measured.peak_bytes == found.planned_peak_bytes


def test_a_weight_s_new_memory_before_the_backward_is_an_error():
    """PyTorch counts no such change, and plain training reads the old or the new memory, as operators please."""
    model = warm_up(planned("50%"))
    name, weight = [(name, own) for name, own in model.named_parameters() if own.dim() == 2][-1]
    before = weight.data
    for is_put_back in (True, False):
        loss = model(batch(0)).square().mean()
        weight.data = before * 2
        if is_put_back:
            weight.data = before
            loss.backward()
        else:
            with pytest.raises(HiRemateError, match=f"Parameter '{name}' got other memory between a forward and its"):
                loss.backward()


@pytest.mark.parametrize("around_both", [False, True])
def test_settings_around_the_forward_alone_are_announced(around_both):
    model = planned("70%")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(2):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
                loss = model(batch(index, MANY)).square().mean()
                if not around_both:
                    stack.close()
                loss.backward()
    warned = [warning for warning in caught if "Settings of PyTorch" in str(warning.message)]
    assert len(warned) == (not around_both)


@pytest.mark.parametrize("clear_late", [False, True], ids=["at the top", "after the forward"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_before_or_after_the_forward(clear_late, set_to_none):
    def act(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for index in range(6):
            if not clear_late:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(batch(index)).square().mean()
            if clear_late:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        plan = get_plan(model)
        if plan is not None:
            assert plan.measured.peak_bytes <= plan.budget_bytes
        return [*losses, *model.parameters()]

    assert_exact(act, warm=0)


def accumulated(model):
    model.zero_grad()
    take_steps(model, batch, 4, clears="never")
    return gradients(model)


def second_backward_failed(model):
    output = model(batch())
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()
    del output
    return [step(model, index) for index in range(3)]


def forward_without_backward(model):
    model(batch(5))
    losses = [step(model, index) for index in range(2)]
    model(batch(6))
    return [*losses, step(model, 3), *gradients(model)]


def evaluated_before_backward(model):
    model.zero_grad()
    loss = model(batch(5)).square().mean()
    with torch.no_grad():
        model.eval()
        model(batch(6))
        model.train()
    loss.backward()
    return [loss.detach(), *gradients(model)]


def plan_removed(model):
    model.zero_grad()
    loss = model(batch(5)).square().mean()
    remove_hiremate(model)
    loss.backward()
    return [loss.detach(), *gradients(model), step(model, 6)]


def plan_swapped(model, budget):
    model.zero_grad()
    loss = model(batch(5)).square().mean()
    if targets_of(model) is not None:
        hiremate(model, budget, verbose=False)
    loss.backward()
    first = gradients(model)
    return [loss.detach(), *first, step(model, 6), *gradients(model)]


def gradients_of_inputs(model):
    x = batch(5).requires_grad_()
    model(x).square().mean().backward()
    return [x.grad]


def gradients_asked_for(model):
    model.zero_grad()
    found = torch.autograd.grad(model(batch(5)).square().mean(), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    return list(found)


def frozen(model):
    model.body.requires_grad_(False)
    losses = [step(model, index) for index in range(4)]
    return [*losses, *gradients(model)]


ACTS = [
    *((act, {}) for act in (accumulated, second_backward_failed, forward_without_backward, evaluated_before_backward)),
    *((act, {}) for act in (plan_removed, gradients_of_inputs, gradients_asked_for)),
    *((partial(plan_swapped, budget=budget), {"budget": "85%"}) for budget in ("100%", "70%")),
    (frozen, {"budget": "100%", "warm": 0}),
]


@pytest.mark.parametrize(("act", "options"), ACTS, ids=lambda act: getattr(act, "__name__", None))
def test_what_happens_around_a_backward_changes_no_number(act, options):
    assert_exact(act, **options)


@pytest.mark.parametrize("until", ["the next forward", "a second backward", "the end of the step"])
def test_what_a_retained_backward_keeps_is_planned_for(until):
    model, held, batches = planned("60%"), [None], [batch(index, MANY) for index in range(8)]

    def train():
        for x in batches:
            model.zero_grad()
            held[0] = model(x).square().mean()
            held[0].backward(retain_graph=True)
            if until == "a second backward":
                held[0].backward()
            if until == "the end of the step":
                held[0] = None

    train()
    held[0] = None
    model.zero_grad()
    peak_bytes, plan = measure_peak(train), get_plan(model)
    assert plan.solution.recompute_ms > 0
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert peak_bytes <= plan.budget_bytes - plan.resident_bytes
    if until == "the end of the step":
        assert plan.planned.peak_bytes == pytest.approx(peak_bytes, abs=1024)


@pytest.mark.parametrize("retains", [True, False])
def test_retained_tensors_are_not_watched(retains):
    """What was kept for another backward consists of tensors that Python knows, as those that a script holds."""
    model = hiremate(nn.Sequential(nn.Linear(128, 128), nn.GELU()), "100%", verbose=False)
    for index in range(2):
        output = model(batch(index, rows=256, width=128)) * 2
        record = session_of(model).steps.current.measurement
        output.sum().backward(retain_graph=retains)

    assert len(record._unwatch) == 2  # the batch, and the product


@network(lambda: {"first": make(1), "iterated": make(2), "last": make(3)})
def equilibrium(self, x: torch.Tensor) -> torch.Tensor:
    """Solves for the gradient in a hook, which holds what was computed beside the result that it is set on."""
    x = self.first(x)
    with torch.no_grad():
        found = self.iterated(x) + x
    result, start = self.iterated(found) + x, found.detach().requires_grad_()
    once_more = self.iterated(start) + x

    def solve(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.autograd.grad(once_more, start, gradient, retain_graph=True)[0]

    result.register_hook(solve)
    torch._dynamo.graph_break()
    return self.last(result)


@network(lambda: {"trunk": make(1), "one": make(2), "other": make(3)})
def branches(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = self.trunk(x)
    return self.one(x), self.other(x)


def test_a_hook_on_a_result_is_called_only_with_its_gradient():
    def train(model: nn.Module) -> list[int]:
        calls = []
        for index in range(4):
            one, other = model(batch(index))
            one.register_hook(lambda gradient: calls.append(gradient.numel()))
            (other if index % 2 else one + other).square().mean().backward()
        return calls

    assert train(hiremate(branches(), "100%", verbose=False)) == train(branches()) == [batch().numel()] * 2


def test_graphs_that_a_hook_holds_do_not_pile_up():
    kept = []

    def loop(module: nn.Module) -> Log:
        log: Log = []
        for index in range(7):
            module.zero_grad()
            module(batch(index)).square().mean().backward()
            log += leave_behind(module)
            kept.append(len(session_of(module).model.runtimes.retained()) if get_plan(module) else 0)
        return log

    train_both(equilibrium, loop)
    assert kept[-1] == kept[-4] <= 2, f"graphs retained after each step: {kept}"


def test_a_late_second_backward_does_not_cut_the_next_step_short():
    model = warm_up(planned(), steps=3)
    session, output = session_of(model), model(batch())
    output.sum().backward(retain_graph=True)
    session.end_step()
    with recorded():
        output.sum().backward()
        (model(batch(1)) * model(batch(2))).sum().backward()
    assert session.steps.current.graphs == (0, 0)


def test_a_forward_without_a_backward_leaks_nothing():
    model = warm_up(planned(), steps=5)
    x = batch()
    kept = []
    with MemoryMeter(torch.device("cpu")) as meter:
        for _ in range(4):
            kept = [model(x)]
            del kept[:]
            gc.collect()
            meter.mark("after")
    live = [interval.start_bytes for interval in meter.intervals if interval.label == "after"]
    assert max(live) - live[0] <= 1024, live


def test_a_backward_outlives_its_model():
    plain, model = make(), warm_up(planned(), steps=3)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    results = []
    for owner in (plain, model):
        torch.manual_seed(3)
        x = batch(7).requires_grad_()
        results.append((x, owner(x).square().mean()))
    del owner, plain, model
    gc.collect()
    for _, loss in results:
        loss.backward()
    assert torch.equal(results[0][0].grad, results[1][0].grad)


def test_many_gradients_at_once_are_refused():
    model = warm_up(planned("100%"))
    model.zero_grad()
    out = model(batch(5))
    with pytest.raises(CaptureError, match="can't take many gradients at once, as is_grads_batched=True"):
        torch.autograd.grad(out, list(model.parameters()), torch.stack([out, out]).detach(), is_grads_batched=True)


def test_an_exception_in_the_forward_leaves_the_next_step_exact():
    class Fails(Net):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("the user's own")
            return super().forward(x)

    def run(is_planned):
        torch.manual_seed(1)
        model = Fails()
        if is_planned:
            hiremate(model, "75%", verbose=False)
        torch.manual_seed(2)
        warm_up(model, 3)
        model.fails = True
        with pytest.raises(KeyError, match="the user's own"):
            step(model, 3)
        model.fails = False
        return [step(model, 4), *gradients(model)]

    assert_same(run(True), run(False))
