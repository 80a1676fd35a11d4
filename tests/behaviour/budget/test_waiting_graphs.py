"""Loops in which graphs wait for a later backward: what they hold is counted, and shares are of the whole iteration."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, get_plan, hiremate, remove_hiremate
from hiremate_lightning.measuring.resident import BESIDE
from hiremate_lightning.measuring.resident_memory import held_for_backwards
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.testing import is_eager, session_of
from tests.exact import assert_foreseen, differing, leave_behind, quiet

ROWS, WIDTH = 512, 32
ITERATIONS = 7

Loop = Callable[[nn.Module, int], None]


def draw(index: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def make_net(width: int = 4 * WIDTH, out: int = 8) -> nn.Module:
    first, second = (nn.Linear(WIDTH, width), nn.Tanh()), (nn.Linear(width, width), nn.GELU())
    return nn.Sequential(*first, *second, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))


def make_pair() -> nn.Module:
    return nn.ModuleDict({"one": make_net(out=WIDTH), "other": make_net(out=WIDTH)})


def meta_learning(model: nn.Module, index: int) -> None:
    """First-order MAML over three tasks: the outer losses wait for one backward."""
    losses = []
    for task in range(3):
        x, y = draw(10 * index + task, ROWS, WIDTH), draw(10 * index + task + 5, ROWS, 8)
        inner = F.mse_loss(model(x), y)
        gradients = torch.autograd.grad(inner, list(model.parameters()))
        pairs = zip(model.named_parameters(), gradients, strict=True)
        losses.append(F.mse_loss(functional_call(model, {name: p - 0.1 * g for (name, p), g in pairs}, (x,)), y))
    sum(losses).backward()


def train_adversaries(generator: nn.Module, critic: nn.Module, index: int) -> None:
    """Train as the DCGAN tutorial does: the generator's graph waits while the critic is trained."""
    critic(draw(index, ROWS, WIDTH)).mean().backward()
    fake = generator(draw(index + 100, ROWS, WIDTH))
    (-critic(fake.detach()).mean()).backward()
    critic.zero_grad()
    critic(fake).mean().backward()


def two_encoders(model: nn.Module, index: int) -> None:
    """The first encoder's graph waits until the second one has been trained against its results."""
    one = model["one"](draw(index, ROWS, WIDTH))
    other = model["other"](draw(index + 100, ROWS, WIDTH))
    (one.detach() * other).mean().backward()
    target = model["other"](draw(index + 200, ROWS, WIDTH))
    (one * target.detach()).mean().backward()


def iterate(model: nn.Module, loop: Loop, peaks: list[int]) -> list[torch.Tensor | None]:
    """Train, and measure what the last iteration takes; its gradients are there before, as its parameters are."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.01), list[torch.Tensor | None]()
    for index in range(ITERATIONS):
        if index == ITERATIONS - 1:
            gc.collect()
            resident = sum(t.nbytes for p in model.parameters() for t in (p, p.grad) if t is not None)
            peaks.append(resident + measure_peak(lambda: loop(model, ITERATIONS)))
        else:
            loop(model, index)
        optimizer.step()
        log += leave_behind(model)
        optimizer.zero_grad(set_to_none=False)
    return log


def plainly_and_planned(
    make: Callable[[], nn.Module], loop: Loop, share: float
) -> tuple[nn.Module, list[int], list[list[torch.Tensor | None]]]:
    """Train plain, and within a share of its peak; return the planned model, and the peaks and logs of both."""
    peaks, logs = list[int](), []
    for is_planned in (False, True):
        torch.manual_seed(1)
        model = make()
        if is_planned:
            hiremate(model, int(share * peaks[0]), verbose=False, on_infeasible="warn")
        with quiet():
            logs.append(iterate(model, loop, peaks))
    return model, peaks, logs


@pytest.mark.parametrize(
    ("make", "loop", "share"),
    [
        (make_net, meta_learning, 0.95),
        (partial(make_net, 8 * WIDTH), meta_learning, 0.93),
        (make_pair, lambda model, index: train_adversaries(*model.values(), index), 1.1),
        (make_pair, two_encoders, 0.95),
    ],
    ids=["meta learning", "wide meta learning", "adversarial networks", "two encoders"],
)
def test_what_waiting_graphs_hold_counts(make, loop, share):
    """So does what lies beside them: values that losses have saved, and weights that a script has made."""
    model, peaks, logs = plainly_and_planned(make, loop, share)
    assert not differing(logs[1], logs[0])
    plans = session_of(model).plans
    found = max(plan.measured.peak_bytes or 0 for plan in plans.values())
    budget_bytes = get_plan(model).budget_bytes
    assert found <= budget_bytes
    assert peaks[1] <= budget_bytes
    waits = any("graphs that wait for their backward" in dict(plan.resident_parts) for plan in plans.values())
    assert waits == (loop is not two_encoders)  # there the piece beside which a graph waits has no backward of its own
    target_bytes = ROWS * 8 * 4  # of the first task, made before the first forward
    assert not waits or peaks[1] <= found + target_bytes
    remove_hiremate(model)


def with_heavy_losses(model: nn.Module, index: int) -> None:
    """First-order MAML whose losses save several values of the size of the outputs, and more than the networks do."""
    losses = []
    for task in range(3):
        x, y = draw(10 * index + task, ROWS, WIDTH), torch.arange(ROWS) % WIDTH
        inner = F.cross_entropy(model["one"](x), y)
        gradients = torch.autograd.grad(inner, list(model["one"].parameters()))
        pairs = zip(model["one"].named_parameters(), gradients, strict=True)
        scores = functional_call(model["one"], {name: p - 0.1 * g for (name, p), g in pairs}, (x,))
        wide = torch.cat([scores.exp(), scores.tanh()], 1).softmax(1)
        losses.append(wide.log().mean() + F.cross_entropy(F.layer_norm(scores, (WIDTH,)), y))
    sum(losses).backward()


def test_what_losses_save_beside_waiting_graphs_counts_once():
    model, peaks, _ = plainly_and_planned(make_pair, with_heavy_losses, 0.97)
    plans = session_of(model).plans.values()
    resident = sum(p.nbytes for p in model["one"].parameters())
    found = max(plan.measured.peak_bytes for plan in plans)
    assert peaks[1] == pytest.approx(found, abs=ROWS * 8)  # the first task's target
    assert peaks[1] <= get_plan(model).budget_bytes
    assert any(dict(plan.resident_parts).get(BESIDE, 0) > 2 * resident for plan in plans)


def for_another(model: nn.Module, index: int) -> None:
    """An encoder's graph waits while its target is computed by another one, which is not trained in this step."""
    one = model["one"](draw(index, ROWS, WIDTH))
    model["other"](draw(index + 100, ROWS, WIDTH)).square().mean().backward()
    target = model["other"](draw(index + 200, ROWS, WIDTH))
    similar = one @ target.detach().t()
    similar.softmax(1).log().diagonal().mean().neg().backward()


def test_an_unplanned_part_of_an_iteration_over_budget_warns():
    model = hiremate(make_pair(), "4 MiB", verbose=False, on_infeasible="warn")
    with pytest.warns(HiRemateWarning) as warned:
        iterate(model, for_another, [])
    (text,) = {str(w.message) for w in warned if str(w.message).startswith("A part of an iteration took")}
    assert "above the budget, and has no plan" in text


def regularized(model: nn.Module, index: int) -> None:
    """As TRADES: a graph of the attack, which needs no backward, lives until the weights have been trained."""
    x = draw(index, ROWS, WIDTH)
    attacked = (x + 0.01).requires_grad_()
    loss = (model(attacked) - model(x)).square().mean()
    (gradient,) = torch.autograd.grad(loss, [attacked])
    attacked = (attacked + gradient.sign()).detach()
    (model(x).square().mean() + (model(attacked) - model(x)).square().mean()).backward()
    del loss


@pytest.mark.parametrize("budget", ["1 GiB", "80%"])
def test_graphs_that_wait_keep_all_where_there_is_room(budget):
    """A share is of what an iteration of plain training adds."""
    peaks = list[int]()
    for is_planned in (False, True):
        torch.manual_seed(1)
        model = hiremate(make_net(), budget, verbose=False) if is_planned else make_net()
        iterate(model, regularized, peaks)
    resident = 2 * sum(p.nbytes for p in model.parameters())
    if budget == "1 GiB":
        assert peaks[1] == pytest.approx(peaks[0], rel=0.06)
    else:
        assert 0.7 < (peaks[1] - resident) / (peaks[0] - resident) <= 0.81, peaks


def retained(model: nn.Module, index: int) -> None:
    """A graph stays for another backward while another one is trained; so does the batch that it has saved."""
    output = model["one"](draw(index, 4 * ROWS, WIDTH))
    torch.autograd.grad(output.square().mean(), list(model["one"].parameters()), retain_graph=True)
    model["other"](draw(index + 100, 4 * ROWS, WIDTH)).square().mean().backward()
    del output


def parts_met_by(act: Callable[[nn.Module, int], None]) -> list[dict[str, int]]:
    """Train plain, and within 85 % of its peak, which a plan has met; return the resident parts of all plans."""
    model, peaks, _ = plainly_and_planned(make_pair, act, 0.85)
    plans = list(session_of(model).plans.values())
    assert max(plan.measured.peak_bytes for plan in plans) == pytest.approx(peaks[1], abs=1024)
    return [dict(plan.resident_parts) for plan in plans]


def held_inputs(model: nn.Module, index: int) -> None:
    """A loop holds an output, whose graph holds a batch that gets gradients, while another network is trained."""
    x = draw(index, 4 * ROWS, WIDTH).requires_grad_()
    output = model["one"](x)
    output.square().mean().backward()
    del x
    model["other"](draw(index + 100, 4 * ROWS, WIDTH)).square().mean().backward()
    del output


def test_retained_values_and_inputs_that_outputs_hold_count():
    assert any(parts.get("graphs retained for another backward") for parts in parts_met_by(retained))
    held = {parts.get("inputs that these outputs hold") for parts in parts_met_by(held_inputs)}
    assert 2 * 4 * ROWS * WIDTH * 4 in held  # with their gradient


def test_inputs_that_a_waiting_graph_holds_count():
    """Its backward does not read them: their gradient is wanted."""
    model, kept = hiremate(make_pair(), "1 GiB", verbose=False), []
    for index in range(3):
        x = (draw(index, ROWS, WIDTH) > 0).float().requires_grad_()
        waiting = model["one"](x).sum()
        kept.append(x.nbytes)
        del x
        model["other"](draw(index + 100, ROWS, WIDTH)).square().mean().backward()
        session = session_of(model)
        held = {
            t.untyped_storage()._cdata: t.nbytes
            for s in session.model.runtimes.waiting()
            for t in held_for_backwards([s[1]])
        }
        assert kept[-1] in held.values()
        waiting.backward()


def test_what_is_retained_counts_again_where_it_has_grown():
    """Steps are counted in the first ones, and seldom afterwards."""
    model, found = hiremate(make_pair(), "1 GiB", verbose=False), []
    for index, rows in enumerate([2048, 2048, *[512] * 9, 2048]):
        output = model["one"](draw(index, rows, WIDTH))
        torch.autograd.grad(output.square().mean(), list(model["one"].parameters()), retain_graph=True)
        model["other"](draw(index + 100, ROWS, WIDTH)).square().mean().backward()
        if index > 8:
            parts = session_of(model).plans[1,].resident_parts
            found.append(dict(parts).get("graphs retained for another backward", 0))
        del output
    assert found[-1] > 3 * found[-2] > 0, found


def test_a_dropped_forward_holds_what_its_plan_counts():
    """Where graphs wait and there is room, forwards without a backward keep everything for it."""
    model = nn.ModuleDict({name: make_net(out=WIDTH) for name in ("one", "other", "dropped")})
    hiremate(model, "1 GiB", verbose=False)
    for index in range(5):
        waiting = model["one"](draw(index, ROWS, WIDTH)).square().mean()
        model["other"](draw(index + 100, ROWS, WIDTH)).square().mean().backward()
        waiting.backward()
        model["dropped"](draw(index, 8 * ROWS, WIDTH))
        model["other"](draw(index + 100, ROWS, WIDTH)).square().mean().backward()
    assert_foreseen(model, rel=0.01)


@pytest.mark.filterwarnings("ignore:The first step of another signature took")
def test_a_dropped_forward_that_ran_by_a_plan_will_hold_less():
    """A loop trains a generator and a critic in turns, the critic on pictures that are drawn with gradients."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
    hiremate(model, "60%", verbose=False)
    for index in range(8):
        pictures = model(draw(index, 4 * ROWS, 64))
        if index % 2 == 0:
            pictures.square().mean().backward()
    (plan,) = (plan for kind, plan in session_of(model).plans.items() if len(kind) == 2)
    assert plan.measured.peak_bytes == pytest.approx(plan.planned_peak_bytes, rel=0.01)
    assert plan.planned_peak_bytes <= plan.budget_bytes


def test_capturing_resumes_after_an_unplanned_retained_graph():
    """What the graph holds of code that runs as the user wrote it is unknown in the steps after it."""
    model, plain = hiremate(make_net(), "1 GiB", verbose=False), []
    for rows in (512, 512, 512, 256, 384):
        loss = model(draw(rows, rows, WIDTH)).square().mean()
        plain.append(is_eager(model))
        loss.backward(retain_graph=True)
    assert plain == [False, False, False, True, False]


def test_running_statistics_change_while_an_eager_graph_waits():
    """PyTorch's batch norm saves its statistics for its backward, and updates them without counting that."""
    results = []
    for is_planned in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        if is_planned:
            hiremate(model, "1 GiB", verbose=False)
        waiting = model[1](model[0].weight @ torch.ones(WIDTH, WIDTH))  # an eager call of the same norm
        plain = F.batch_norm(draw(2, ROWS, WIDTH).requires_grad_(), model[1].running_mean, model[1].running_var)
        before = model[1].running_mean._version
        model(draw(1, ROWS, WIDTH)).square().mean().backward()
        assert model[1].running_mean._version == before
        (plain.sum() + waiting.sum()).backward()
        results.append([p.grad for p in model.parameters()])
    assert not differing(*results)
