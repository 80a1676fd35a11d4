"""What users put around the calls of a planned model, or inside of its backward."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from hiremate_lightning import CaptureError, ConfigurationError, HiRemateWarning, get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.targets.modules import targets_of
from hiremate_lightning.testing import captured_count, end_step, session_of
from tests.exact import (
    TORCH,
    Log,
    assert_same,
    drawn,
    loop_of,
    network,
    planned_alike,
    simple_loop,
    square_error,
    take_steps,
    train_both,
)
from tests.faults import change_captures

ROWS, WIDTH = 256, 32


def layers(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def batch(seed: int, rows: int = ROWS) -> torch.Tensor:
    return drawn(rows, WIDTH)(seed)


def is_profiled() -> bool:
    return torch.autograd._profiler_enabled()


def train_in_the_backward(model: nn.Module, steps: int = 6) -> list[torch.Tensor]:
    """Let each parameter have an optimizer of its own, which steps as soon as the gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def use(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(use)
    take_steps(model, batch, steps, clears="never")
    return [p.detach() for p in model.parameters()]


def test_optimizers_stepping_in_the_backward_leave_no_profiler():
    model = planned_alike(layers(), train_in_the_backward, "70%")
    end_step(model)
    assert not is_profiled()
    plan = get_plan(model)
    assert plan.measured.peak_bytes is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoint_around_a_planned_model_is_announced(is_reentrant):
    inputs = []

    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        inputs.append(batch(index).requires_grad_())
        return square_error(checkpoint(model, inputs[-1], use_reentrant=is_reentrant))

    train = loop_of(loss_of, 4, torch.optim.SGD)
    with pytest.warns(HiRemateWarning, match="was called inside of a backward, as torch.utils.checkpoint") as caught:
        model = planned_alike(layers(), train, "70%")
    assert_same([x.grad for x in inputs[4:]], [x.grad for x in inputs[:4]])
    assert len([w for w in caught if issubclass(w.category, HiRemateWarning)]) == 1
    assert not is_profiled()
    for index in range(3):  # and without checkpoint it is planned
        model(batch(index)).square().mean().backward()
    assert get_plan(model) is not None


class Inside(nn.Module):
    """Layers within checkpoint, and one after them; what is given in a list has no gradient by the reentrant way."""

    def __init__(self, is_reentrant: bool, is_listed: bool, trains: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.is_reentrant, self.is_listed, self.trains = is_reentrant, is_listed, trains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) if self.trains else x
        given = [y] if self.is_listed else y
        return self.last(y + checkpoint(self.inner, given, use_reentrant=self.is_reentrant))

    def inner(self, given: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
        return self.second(given[0] if isinstance(given, list) else given).tanh()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoint_inside_gives_the_same_parameters_gradients(is_reentrant, is_listed, trains):
    train_both(lambda: Inside(is_reentrant, is_listed, trains), simple_loop(batch, steps=3))


def test_checkpoint_without_gradients_warns_as_ever():
    model = hiremate(Inside(is_reentrant=True, is_listed=False, trains=False), "100%", verbose=False)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        model(batch(0)).sum().backward()


def test_hooks_that_replace_saved_tensors_are_refused():
    model = hiremate(layers(), "100%", verbose=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = model(batch(0)).square().mean()
    with pytest.raises(CaptureError, match="Hooks on saved tensors"):
        loss.backward()


@network(lambda: {"body": layers(4), "head": nn.Linear(WIDTH, WIDTH // 2)})
def on_itself(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
    """Conditions itself on what it gives without a condition."""
    if condition is None:
        with torch.no_grad():
            condition = self(x, torch.zeros(len(x), WIDTH // 2))
    return self.head(self.body(torch.cat([x[:, : WIDTH // 2], condition], 1)))


def test_a_forward_may_call_its_own_module():
    torch.manual_seed(0)
    assert get_plan(planned_alike(on_itself(), simple_loop(batch, steps=4), "80%")) is not None


@network(lambda: {})
def waves(self, x: torch.Tensor) -> torch.Tensor:
    """Computes without weights of its own."""
    for _ in range(8):
        x = x.sin() + x.tanh().square()
    return x


@pytest.mark.parametrize("make", [lambda: layers().requires_grad_(False), waves], ids=["frozen", "without weights"])
def test_what_trains_its_input_alone_is_planned(make):
    def train_input(module: nn.Module) -> list[torch.Tensor]:
        x = nn.Parameter(batch(0, 16 * ROWS))
        optimizer = torch.optim.Adam([x])
        take_steps(module, lambda _: x, 4, optimizer=optimizer)
        return [x.grad, x.detach()]

    assert get_plan(planned_alike(make(), train_input, "60%")).solution.recompute_ms > 0


def test_a_model_sharing_a_part_with_a_planned_one_is_refused():
    shared = layers()
    first, second = nn.Sequential(shared, nn.Linear(WIDTH, 4)), nn.Sequential(shared, nn.Linear(WIDTH, 4))
    hiremate(first, "90%", verbose=False)
    with pytest.raises(ConfigurationError, match="it is planned already"):
        hiremate(second, "60%", verbose=False)
    assert session_of(first).options.budget.share == 0.9


def test_a_model_without_shapes_is_refused():
    with pytest.raises(ConfigurationError, match="its parameters have no shape yet"):
        hiremate(nn.Sequential(nn.LazyLinear(4)), "80%")


@pytest.mark.parametrize("grows", ["gradients", "optimizer state"])
def test_what_grows_late_is_planned_for_at_once(grows):
    """Beyond the steps in which all is counted each time."""
    model, rows = layers(), 1024
    weights = sum(p.nbytes for p in model.parameters())
    first, second = torch.optim.SGD(model.parameters(), 1e-3), torch.optim.AdamW(model.parameters(), 1e-3)
    budget = 3 * weights + 12 * batch(0, rows).nbytes
    hiremate(model, budget, optimizer=first, verbose=False)

    def peak(index: int) -> int:
        """Take a step, and give its peak with all that exists before it."""
        x = batch(index, rows)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        states = [v for s in second.state.values() for v in s.values() if v.ndim]
        resident = sum(t.nbytes for t in (x, *model.parameters(), *gradients, *states))
        return resident + measure_peak(lambda: model(x).square().mean().backward())

    for index in range(24):
        if grows != "gradients" or index < 20:
            first.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HiRemateWarning)
            used = peak(index) if index >= 20 else model(batch(index, rows)).square().mean().backward()
        assert index < 20 or used <= budget
        (second if grows == "optimizer state" and index >= 20 else first).step()
    assert get_plan(model).resident_bytes > 2 * weights


def halve_later(model: nn.Module, add: Callable[[nn.Module], RemovableHandle]) -> Log:
    """Train with a hook that comes after three steps and goes after six."""
    before = gradients_of(model, 3)
    handle = add(model)
    between = gradients_of(model, 3)
    handle.remove()
    return [*before, *between, *gradients_of(model, 3)]


def halve_output(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


LATE_HOOKS = {
    "forward": lambda model: model[2].register_forward_hook(halve_output),
    "forward pre": lambda model: model[2].register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,)),
    "backward": lambda model: model[2].register_full_backward_hook(lambda _, given, __: (given[0] / 2,)),
    "of all modules": lambda _: register_module_forward_hook(halve_output),
    "before all modules": lambda _: register_module_forward_pre_hook(lambda _, inputs: (inputs[0] / 2,)),
}


@pytest.mark.parametrize("add", LATE_HOOKS.values(), ids=LATE_HOOKS)
@pytest.mark.filterwarnings("ignore:A call of Sequential could not be captured")
def test_hooks_that_come_later_and_go_are_heard(add):
    assert get_plan(planned_alike(layers(), partial(halve_later, add=add), "70%")) is not None


def gradient_by_transform(model: nn.Module) -> torch.Tensor:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradient = torch.func.grad(lambda w: torch.func.functional_call(model, w, (batch(0),)).square().mean())
    return gradient(weights)["0.weight"]


def slope_forwards(model: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(batch(0), batch(1)))).tangent.detach()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # used by torch's forward mode
@pytest.mark.parametrize("transform", [gradient_by_transform, slope_forwards])
def test_transforms_run_a_planned_model_as_it_is(transform):
    plain = layers()
    model = hiremate(copy.deepcopy(plain), "70%", verbose=False)
    with pytest.warns(HiRemateWarning, match="inside of a transform of torch.func"):
        assert torch.equal(transform(model), transform(plain))
    assert torch.equal(transform(model), transform(plain))  # without a second warning
    take_steps(model, batch, 2, clears="never")
    assert get_plan(model) is not None


@network(lambda: {"blocks": nn.ModuleList(nn.Sequential(*layers(2), nn.Dropout(0.1)) for _ in range(3))})
def nested(self, x: torch.Tensor) -> torch.Tensor:
    """Blocks in a loop over lists, which is captured as one graph where nothing fails."""
    for block in self.blocks:
        x = x + block(x)
    return x


def gradients_of(model: nn.Module, steps: int = 5) -> Log:
    torch.manual_seed(1)
    return loop_of(lambda module, index: square_error(module(batch(index))), steps)(model)


def train_beside(plain: nn.Module) -> tuple[nn.Module, list[str]]:
    """Train a planned copy with the gradients of the plain module; return the copy and the warnings."""
    with pytest.warns(HiRemateWarning) as warned:
        model = planned_alike(plain, gradients_of, "80%")
    return model, [str(warning.message) for warning in warned]


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_parts_of_code_that_cannot_be_compiled_are_planned(monkeypatch, request, level):
    def fail_on_large_graphs(graph, capture):
        if len(graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)) > 2:
            raise AssertionError("too large")
        return capture()

    change_captures(monkeypatch, fail_on_large_graphs)
    log = logging.getLogger("torch._dynamo.convert_frame")
    request.addfinalizer(partial(log.setLevel, log.level))
    log.setLevel(level)
    model, texts = train_beside(nested())
    assert texts == [
        "torch.compile could not capture a part of Nested, which runs without a plan: AssertionError: too large",
        "Nothing of Nested was captured as a whole; from the next step on its parts are planned.",
    ]
    assert (log.level, log.filters) == (level, [])
    plan = get_plan(model)
    assert plan.schedule.recomputed(plan.graph)
    assert plan.measured.peak_bytes <= plan.budget_bytes


@network(lambda: {"body": layers()})
def marked(self, x: torch.Tensor) -> torch.Tensor:
    """Has places that tensors in a list name, which runs, but not as it is traced: no tensor has a value there."""
    marks = torch.zeros(len(x), 1)
    marks[list(torch.arange(4)), [0] * 4] = 1.0
    return self.body(x) * marks


def test_code_that_fails_in_tracing_is_eager_its_parts_planned():
    model, texts = train_beside(marked())
    assert "could not capture a part of Marked, which runs without a plan: RuntimeError(" in texts[0]
    assert get_plan(model).schedule.recomputed(get_plan(model).graph)


def runs_by_step(model: nn.Module, steps: int) -> list[int]:
    """Count the captured graphs that run in each step; what a step raises is passed over."""
    session, counts = session_of(model), []
    for index in range(steps):
        before = session.runs
        with suppress(ArithmeticError, KeyboardInterrupt):
            model(batch(index)).square().mean().backward()
        counts.append(session.runs - before)
    return counts


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 can't trace code that raises an exception made before")
@pytest.mark.parametrize("raised", [ArithmeticError("not finite"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_what_a_forward_raises_leaves_the_plan(raised):
    def stop(*_: Any) -> None:
        raise raised

    model = hiremate(layers(), "70%", verbose=False)
    assert runs_by_step(model, 3) == [1, 1, 1]
    solution = get_plan(model).solution
    handle = model[3].register_forward_hook(stop)
    assert runs_by_step(model, 1) == [0]
    handle.remove()
    assert runs_by_step(model, 3) == [1, 1, 1]
    assert get_plan(model).solution == solution


@network(lambda: {"layers": layers()})
def refuses_large(self, x: torch.Tensor) -> torch.Tensor:
    """Checks its input, as user code does."""
    if x.max() > 10:
        raise ArithmeticError("too large")
    return self.layers(x)


def test_a_first_batch_that_the_model_refuses_leaves_no_trace():
    model = hiremate(refuses_large(), "70%", verbose=False)
    with pytest.raises(ArithmeticError, match="too large"):
        model(batch(0) + 100)
    counts = runs_by_step(model, 4)
    fresh = hiremate(refuses_large(), "70%", verbose=False)
    assert counts == runs_by_step(fresh, 4)


@pytest.mark.filterwarnings("ignore:A call of Sequential could not be captured")
def test_planning_comes_back_when_a_backward_hook_goes():
    model = hiremate(layers(), "70%", verbose=False)
    assert runs_by_step(model, 3) == [1, 1, 1]
    handle = model[2].register_full_backward_hook(lambda *_: None)
    assert runs_by_step(model, 5) == [0] * 5
    handle.remove()
    assert runs_by_step(model, 6)[-2:] == [1, 1]


def test_models_are_planned_in_threads_in_turn_and_side_by_side():
    """Both are in the middle of a measured step at once; calls take turns, as the limits ask for."""
    models = [layers(), *(hiremate(layers(), "70%", verbose=False) for _ in range(2))]
    turns, found = threading.Lock(), {}

    def work(number: int) -> None:
        seen = []
        for index in range(5):
            with turns:
                models[number].zero_grad()
                loss = models[number](batch(index)).square().mean()
            with turns:
                loss.backward()
                seen += [p.grad.clone() for p in models[number].parameters()]
        found[number] = seen

    work(0)
    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, model in enumerate(models[1:], 1):
        assert_same(found[number], found[0])
        assert get_plan(model).measured.peak_bytes <= get_plan(model).budget_bytes


class Pair(tuple):
    """Has two numbers, and no length, as the irreducible representations of e3nn."""

    def __len__(self):
        raise NotImplementedError


@network(lambda: {"linear": nn.Linear(8, 8), "pairs": [Pair((2, 3))]})
def times_pairs(self, x):
    return sum(self.linear(x) * factor + term for factor, term in self.pairs)


def test_tuples_without_a_length_are_captured_and_seen_to_change(recwarn):
    plain, x = times_pairs(), torch.randn(4, 8)
    module = hiremate(copy.deepcopy(plain), "100%", verbose=False)
    for pair in (Pair((2, 3)), Pair((2, 3)), Pair((5, 3))):
        module.pairs[0] = plain.pairs[0] = pair
        result = module(x)
        assert torch.equal(result, plain(x))
        result.sum().backward()
    assert captured_count(module) == 2
    assert not [str(w.message) for w in recwarn]


class Unchecked(torch.autograd.Function):
    """Writes a part of a tensor unseen by autograd, as torchdiffeq does in its solvers of adaptive steps."""

    @staticmethod
    def forward(ctx, scratch: torch.Tensor, value: torch.Tensor, index: int) -> torch.Tensor:
        ctx.index = index
        scratch.data[..., index] = value
        return scratch

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, gradient[..., ctx.index], None


@network(lambda: {"slope": nn.Linear(16, 16), "weights": nn.Parameter(torch.rand(4))})
def steps_by_stages(self, x: torch.Tensor) -> torch.Tensor:
    """Adds up stages of which each reads those before; it looks at the data between them, and ends the graph there."""
    stages = Unchecked.apply(torch.empty(*x.shape, 4), self.slope(x), 0)
    for index in range(3):
        if x.sum() > 1e9:
            break
        x = x + (stages[..., : index + 1] * self.weights[: index + 1]).sum(-1)
        stages = Unchecked.apply(stages, self.slope(x).tanh(), index + 1)
    return x + (stages * 0.5).sum(-1)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:.*was captured as a whole"
)
def test_code_captured_alone_changes_tensors_unseen_by_autograd():
    train_both(steps_by_stages, simple_loop(lambda index: torch.randn(64, 16) / (1 + index)), "100%")


class Remembers:
    """A forward that stands in for a model's during one step, as sentence-transformers' MatryoshkaLoss puts there."""

    def __init__(self, forward) -> None:
        self.forward, self.seen = forward, []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.forward(x))
        return self.seen[-1]


def test_parts_are_planned_where_each_step_has_its_own_forward():
    torch.manual_seed(0)
    model = hiremate(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), "100%", verbose=False)
    targets = targets_of(model)
    own, captured = model.forward, []

    def step() -> None:
        model.forward = Remembers(own)
        model(torch.randn(256, 16)).square().mean().backward()
        model.forward = own
        captured.append(targets.session.captured_count)

    step()
    step()
    with pytest.warns(HiRemateWarning, match="another forward again and again"):
        step()
    for _ in range(4):
        step()
    assert captured[-1] == captured[-3]
    assert get_plan(model) is not None


@network(lambda: {"generator": nn.Linear(8, 16), "critic": nn.Linear(16, 1)})
def generates(self, x: torch.Tensor) -> torch.Tensor:
    """Two networks; the model itself is what calls the first one."""
    return self.generator(x)


def test_calls_in_which_nothing_trains_leave_what_was_captured():
    """As in a Lightning module that toggles its optimizers: what is generated for the critic has no gradient."""
    torch.manual_seed(0)
    model = hiremate(generates(), "100%", verbose=False)
    captured = []
    for _ in range(4):
        for trains in (True, False):
            model.generator.requires_grad_(trains)
            model.critic(model(torch.randn(64, 8))).mean().backward()
        captured.append(captured_count(model))
    assert captured[1:] == captured[:1] * 3


class RecurrentFirst(nn.Module):
    """Nothing of it is captured as a whole; what is captured comes after what can't be."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 64, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 16))

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0])


@pytest.mark.filterwarnings("ignore:.*could not be captured", "ignore:.*captured as a whole")
def test_what_runs_before_the_first_part_is_measured_each_step():
    torch.manual_seed(0)
    model = hiremate(RecurrentFirst(), "100%", verbose=False)
    x = torch.randn(32, 64, 16)

    def step() -> None:
        model(x).square().mean().backward()

    def clean() -> None:  # else what earlier steps left is released in one of them
        model.zero_grad()
        gc.collect()

    for _ in range(5):
        clean()
        step()
    plan = get_plan(model)
    added_bytes = plan.measured.peak_bytes - plan.resident_bytes
    clean()
    peak_bytes = measure_peak(step)
    assert added_bytes == pytest.approx(peak_bytes, rel=0.001)


class Cached(torch.autograd.Function):
    """A loss that hands its gradients on by calling the model again inside of the backward, part by part."""

    @staticmethod
    def forward(ctx, model, parts, start):
        with torch.no_grad():
            outputs = [model(part) for part in parts]
        ctx.model, ctx.parts, ctx.outputs = model, parts, outputs
        return torch.cat(outputs).square().mean() + 0 * start

    @staticmethod
    def backward(ctx, gradient):
        outputs = [output.detach().requires_grad_() for output in ctx.outputs]
        with torch.enable_grad():
            (torch.cat(outputs).square().mean() * gradient).backward()
            for part, output in zip(ctx.parts, outputs, strict=True):
                (ctx.model(part) * output.grad).sum().backward()
        return None, None, torch.zeros(())


def test_new_calls_inside_a_backward_run_as_written():
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        return Cached.apply(model, batch(index)[: 5 + index].split(3), torch.zeros((), requires_grad=True))

    with pytest.warns(HiRemateWarning, match=r"loss that embeds a batch in parts \(GradCache\)") as caught:
        model = planned_alike(layers(), loop_of(loss_of, 4, torch.optim.SGD), "70%")
    assert len([w for w in caught if issubclass(w.category, HiRemateWarning)]) == 1
    assert captured_count(model) == 0
