"""The torch.compile backend trains as without it, plans all that shares its options as one, and refuses by name."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

import hiremate_lightning
from hiremate_lightning import (
    BudgetError,
    ConfigurationError,
    HiRemateError,
    HiRemateWarning,
    InfeasibleBudgetError,
    get_plan,
    hiremate,
    remove_hiremate,
)
from hiremate_lightning.targets.compiled import sessions
from tests.exact import assert_same, network
from tests.loops import assert_within_budget
from tests.processes import run_python

WIDTH, ROWS = 48, 384


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Begin with empty caches: torch runs what it compiled for one model with another of the same kind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def chain(depth: int = 2) -> nn.Sequential:
    block = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(depth) for layer in block))


@torch.compiler.disable
def look_at(x: torch.Tensor) -> torch.Tensor:
    """Run outside of every graph."""
    return x


@network(lambda: {"first": chain(1), "second": chain(1)})
def halves(self, x: torch.Tensor) -> torch.Tensor:
    """Two chains with a graph break in between."""
    return self.second(look_at(self.first(x)))


def compiled(model: Callable, **options) -> Callable:
    settings = {"budget": "70%", "verbose": False, **options}
    return torch.compile(model, backend="hiremate", options=settings)


def train(call: Callable, model: nn.Module, rows: Sequence[int] = (ROWS,) * 5, accumulate: int = 1) -> list:
    """Take AdamW steps; keep losses and gradients bit for bit."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: list = []
    for index, count in enumerate(rows):
        loss = call(torch.randn(count, WIDTH)).square().mean()
        loss.backward()
        kept += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return kept


def assert_trains_the_same(
    build: Callable[[], nn.Module], compile_it: Callable[[nn.Module], Callable] = compiled, **how
) -> nn.Module:
    """Train with and without the backend; give the model that was trained with it."""
    torch.manual_seed(5)
    plain = build()
    model = copy.deepcopy(plain)
    expected = train(plain, plain, **how)

    found = train(compile_it(model), model, **how)

    assert_same(found, expected)
    assert_same(model.state_dict(), plain.state_dict())
    return model


def error_of(model: nn.Module, **settings) -> BaseException:
    """Give what the backend raises while torch compiles."""
    with pytest.raises(Exception, match="backend='hiremate' raised") as caught:
        torch.compile(model, backend="hiremate", **settings)(torch.randn(ROWS, WIDTH))
    return caught.value.inner_exception


def test_the_backend_is_found_without_importing_the_package():
    code = (
        "import sys, torch\n"
        "assert 'hiremate' in torch.compiler.list_backends()\n"
        "assert 'hiremate_lightning' not in sys.modules\n"
        "model = torch.nn.Linear(4, 4)\n"
        "options = {'budget': '8GiB', 'verbose': False}\n"
        "call = torch.compile(model, backend='hiremate', options=options)\n"
        "for _ in range(2): call(torch.ones(2, 4)).sum().backward()\n"
        "assert 'hiremate_lightning' in sys.modules\n"
    )
    result = run_python("-c", code, cwd="/")

    assert result.returncode == 0, result.stderr


def test_graphs_on_both_sides_of_a_break_are_planned_as_one_step():
    model = assert_trains_the_same(halves)

    assert_within_budget(get_plan(model))
    assert calls_of_each_plan(model) == [2]
    root = session_of(model).root
    assert {id(p) for p in root.parameters()} == {id(p) for p in model.parameters()}
    assert {id(b) for b in root.buffers()} == {id(b) for b in model.buffers()}


class _Already:
    """A loss that passes through the rest of the loss unchanged."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def square(self) -> _Already:
        return self

    def mean(self) -> torch.Tensor:
        return self.loss


def with_loss(model: nn.Module) -> Callable:
    """Compile a function around the model and its loss."""
    step = compiled(lambda x: model(x).square().mean())
    return lambda x: _Already(step(x))


def with_evaluation(model: nn.Module) -> Callable:
    """Evaluate between steps."""
    call = compiled(model)

    def run(x: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            call(x)
        model.train()
        return call(x)

    return run


def halves_compiled(model: nn.Module) -> Callable:
    """Compile two parts with equal options, which are planned as one step."""
    first, second = compiled(model.first), compiled(model.second)
    return lambda x: second(first(x))


# Torch makes sizes dynamic; each gets its own plan all the same.
SIZES = (ROWS,) * 3 + (400,) * 5 + (480,) * 5


@pytest.mark.parametrize(
    ("build", "compile_it", "how", "calls"),
    [
        (chain, compiled, {}, [1]),
        (chain, compiled, {"rows": SIZES}, [1, 1, 1]),
        (chain, with_loss, {}, [1]),
        (chain, with_evaluation, {}, [1]),
        (halves, halves_compiled, {}, [2]),
    ],
    ids=["model", "sizes", "with its loss", "evaluated", "in halves"],
)
def test_a_compiled_model_trains_the_same_within_its_budget(build, compile_it, how, calls):
    model = assert_trains_the_same(build, compile_it, **how)

    assert_within_budget(get_plan(model))
    assert calls_of_each_plan(model) == calls
    assert get_plan(model).planning.capture_s > 0


def test_gradients_add_up_over_steps():
    model = assert_trains_the_same(chain, lambda m: compiled(m, on_infeasible="warn"), accumulate=2)

    assert get_plan(model) is not None


def test_a_function_without_parameters_is_planned():
    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().exp() * x.cos()).sum()

    gradients, x = [], torch.randn(ROWS, WIDTH)
    call = compiled(layer, budget="7.5 GiB")
    assert hiremate_lightning.get_plan(call) is None
    for function in (layer, call, call, call):
        leaf = x.clone().requires_grad_()
        function(leaf * 2).backward()
        gradients.append(leaf.grad)

    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert str(hiremate_lightning.get_plan(call).budget) == "7.50 GiB"


def test_what_was_not_compiled_has_no_plan():
    assert get_plan(chain(1)) is None
    with pytest.raises(ConfigurationError, match=r"get_plan takes the model that hiremate\(\) planned, found"):
        hiremate_lightning.get_plan(chain)


def test_a_second_model_of_the_same_kind_runs_by_the_same_plan():
    models = [assert_trains_the_same(chain) for _ in range(2)]

    first, second = (session_of(model) for model in models)
    assert first is second
    assert len(first.plans) == 1


def test_a_model_of_another_kind_inherits_no_session_of_one_gone():
    for depth in (1, 2):
        model = chain(depth)
        train(compiled(model), model, rows=(ROWS,) * 2)
        assert len(session_of(model).plans) == 1
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def session_of(model: nn.Module):
    own = {id(p) for p in model.parameters()}
    return next(s for s, model in sessions() if any(id(p) in own for p in model.parameters()))


def calls_of_each_plan(model: nn.Module) -> list[int]:
    """Give the number of graphs in each plan of a model's session."""
    return [len(signature) for signature in session_of(model).plans]


NAMES = "budget, time_limit_s, max_plans, on_infeasible, cache_dir, solver, compile, offload, host_budget, verify"
UNKNOWN = f"The backend 'hiremate' has no option 'margin'. Valid options: {NAMES}, recomputable_operators, verbose."


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"options": {"budget": "1 GiB", "margin": 0.1}}, ConfigurationError, UNKNOWN),
        ({"options": {"budget": "10 bananas"}}, BudgetError, "'bananas' is not one of the units"),
        ({"options": {"solver": "oracle"}}, ConfigurationError, "Unknown solver 'oracle'"),
        ({"options": {"bugdet": "1 GiB"}}, ConfigurationError, "has no option 'bugdet'. Did you mean 'budget'?"),
        ({"options": {"max_plans": 0}}, ConfigurationError, "max_plans must be at least 1"),
        ({"mode": "max-autotune"}, ConfigurationError, "has no modes, found mode='max-autotune'. Pass options="),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict, kind: type[HiRemateError], words: str):
    error = error_of(chain(1), **settings)

    assert isinstance(error, kind)
    assert words in str(error)
    assert words is not UNKNOWN or str(error) == UNKNOWN


def test_a_budget_that_nothing_fits_is_refused_with_the_smallest():
    with pytest.raises(InfeasibleBudgetError, match=r"The budget 1.00 KiB .* is too small for Sequential"):
        train(compiled(model := chain(1), budget="1 KiB"), model)


AROUND = r"^A torch\.compile is around a module that is planned.*without"


@pytest.mark.parametrize(
    ("make", "compile_it", "words"),
    [
        (chain, lambda model: compiled(lambda x: model(x)), "Sequential is planned already by .*without torch.compile"),
        (halves, lambda model: torch.compile(model, backend="hiremate"), AROUND),
        (halves, lambda model: torch.compile(model, backend="eager"), AROUND),
    ],
    ids=["a function around it", "hiremate", "eager"],
)
def test_a_planned_model_that_is_compiled_is_refused_with_advice(make, compile_it, words):
    model = hiremate(make(), "1 GiB", verbose=False)

    with pytest.raises(ConfigurationError, match=words):
        compile_it(model)(torch.randn(ROWS, WIDTH))


def test_a_model_that_was_planned_once_may_be_compiled():
    model = hiremate(chain(1), "90%", verbose=False)
    remove_hiremate(model)

    train(compiled(model), model, rows=(ROWS,) * 2)

    assert get_plan(model) is not None


def test_a_plan_that_compiling_passes_by_is_warned_of():
    model = hiremate(chain(1), "90%", verbose=False)
    call = torch.compile(lambda x: model(x), backend="eager")

    with pytest.warns(HiRemateWarning, match=r"Sequential trains without its plan.*backend='hiremate'"):
        train(call, model, rows=(ROWS,) * 4)


def test_the_plan_is_found_by_what_was_compiled():
    """By the model as it was and as it is now, by a function around it, and by the function as torch returned it."""
    model, inner = chain(1), chain(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return inner(x).square().mean()

    whole, around = compiled(model), compiled(step, budget="85%")
    train(whole, model, rows=(ROWS,) * 2)
    train(lambda x: _Already(around(x)), inner, rows=(ROWS,) * 2)

    found = hiremate_lightning.get_plan(whole), hiremate_lightning.get_plan(around)
    assert [str(plan.budget) for plan in found] == ["70%", "85%"]
    assert found[0] == hiremate_lightning.get_plan(model)
    assert found[1] == hiremate_lightning.get_plan(step) == hiremate_lightning.get_plan(inner)


def test_a_removed_compiled_model_trains_on_without_plan():
    """At sizes that were captured before, and at new ones; another model with equal options is still planned."""
    torch.manual_seed(5)
    plain, other = chain(), chain(1)
    model = copy.deepcopy(plain)
    call = compiled(model, budget="81%")
    train(call, model)
    train(plain, plain)

    assert remove_hiremate(call) is call

    assert hiremate_lightning.get_plan(model) is None
    for rows in ((ROWS,) * 2, (400,) * 3):
        found, expected = train(call, model, rows), train(plain, plain, rows)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        train(compiled(other, budget="81%"), other, rows)
        assert hiremate_lightning.get_plan(other) is not None
    assert hiremate_lightning.get_plan(call) is None


def test_a_removed_compiled_model_may_be_planned():
    model = chain(1)
    train(compiled(model, budget="82%"), model, rows=(ROWS,) * 2)
    remove_hiremate(model)

    hiremate(model, "90%", verbose=False)
    train(model, model, rows=(ROWS,) * 2)

    assert str(hiremate_lightning.get_plan(model).budget) == "90%"


def test_the_advice_on_a_compiled_model_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("hiremate_lightning"), "propagate", False)
    model = chain(1)
    call = compiled(model, verbose=True)
    train(call, model)

    printed = capsys.readouterr().err
    full, code = re.search(r"more: (options=.*) shows a table; (.*) writes a page", printed).groups()
    exec(code, {"model": call})
    assert (tmp_path / "plan.html").stat().st_size
    options: dict = {}
    exec(full.replace("...", "'budget': '83%'"), options)
    model = chain(1)
    train(torch.compile(model, backend="hiremate", options=options["options"]), model, rows=(ROWS,) * 2)
    assert "| module " in capsys.readouterr().err


def test_a_compiled_model_is_refused_by_hiremate():
    with pytest.raises(ConfigurationError, match="compiled already"):
        hiremate(compiled(chain(1)), "1 GiB")
