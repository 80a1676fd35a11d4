"""Steps of new sizes that need recomputation call the blocks of a model twice, and are exact and within the budget."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from argparse import Namespace
from contextlib import nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hiremate_lightning import HiRemateError, get_plan, hiremate
from hiremate_lightning.calls.module_state import ModuleState, UnknownStateError
from hiremate_lightning.calls.second_calls import OBSERVED_STEPS, SecondCalls, _PathsInGraphs
from hiremate_lightning.measuring import outside
from hiremate_lightning.measuring.outside import Outside
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.sessions import unplanned
from hiremate_lightning.targets.modules import targets_of
from tests.exact import simple_loop, train_both

pytestmark = pytest.mark.usefixtures("without_templates")
WIDTH, DEPTH = 32, 4
LENGTHS = [96, 96, 8, 8, 24, 40, 31, 80, 90, 24, 88, 33, 93, 90]


class Cache:
    """What blocks leave of a call, as models do that generate text."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)

    def forward(self, x: Tensor, *, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.seen.append(x)
            x = x * len(cache.seen)
        y = torch.tanh(nn.functional.gelu(self.first(self.norm(x))))
        return x + nn.functional.dropout(self.second(y), 0.1)


class Net(nn.Module):
    def __init__(self, make=Block, remembers: bool = False) -> None:
        super().__init__()
        self.before, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(make() for _ in range(DEPTH))
        self.remembers = remembers

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.before(x), Cache() if self.remembers else None
        for block in self.blocks:
            x = block(x) if cache is None else block(x, cache=cache)
        return x


def batch(length: int, seed: int = 0) -> Tensor:
    return torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def of_step(step: int) -> Tensor:
    return batch(LENGTHS[step], step)


BLOCKS = frozenset(f"blocks.{index}" for index in range(DEPTH))


def observe(calls: SecondCalls, model: nn.Module) -> None:
    """Run as many plain steps as it takes to see what may be called twice."""
    for _ in range(OBSERVED_STEPS):
        with calls.observed():
            loss = model(batch(8)).sum()
        calls.backward_starts()
        loss.backward()
        model.zero_grad()
        calls.step_ended()


def budget_of(length: int, make=Net) -> int:
    """Return what a plain step of a length takes, so that longer ones need recomputation."""
    model = hiremate(make(), "100%", verbose=False)
    for _ in range(3):
        model.zero_grad()
        model(batch(length)).square().mean().backward()
    return get_plan(model).unplanned_peak_bytes


def ways(model: nn.Module, loop) -> list[str]:
    """Run a loop and say how each step ran."""
    found, session, before = [], None, 0
    for step in range(len(LENGTHS)):
        loop(step)
        session = targets_of(model).session
        is_twice = session.is_plain and bool(session.steps.plain.prediction.way.paths)
        captured = session.captured_count > before
        before = session.captured_count
        found.append("twice" if is_twice else "plain" if session.is_plain else "captured" if captured else "planned")
    return found


class _Transforming(Block):
    """Takes a gradient of its own by `torch.func`, which refuses hooks on what is saved, as checkpoint sets them."""

    def forward(self, x: Tensor, *, cache: Cache | None = None) -> Tensor:
        return super().forward(x + torch.func.grad(lambda y: y.square().sum())(x), cache=cache)


@pytest.mark.parametrize(("block", "remembers"), [(Block, False), (Block, True), (_Transforming, False)])
def test_training_is_exact_and_captures_nothing_more(block, remembers):
    def make() -> Net:
        return Net(block, remembers=remembers)

    budget = budget_of(60, make)
    train_both(make, simple_loop(of_step, steps=len(LENGTHS)), budget)
    model = hiremate(make(), budget, verbose=False)

    def loop(step: int) -> None:
        model.zero_grad()
        model(of_step(step)).square().mean().backward()

    found = ways(model, loop)
    assert {found[step] for step in (7, 8, 10, 12)} == {"twice"}
    assert {found[step] for step in (4, 5, 6, 11)} == {"plain"}


def test_steps_stay_within_the_budget():
    budget = budget_of(60)
    model = hiremate(Net(), budget, verbose=False)

    def loop(step: int) -> None:
        x, resident = of_step(step), 0 if step < 4 else get_plan(model).resident_bytes

        def train() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        added = measure_peak(train)
        assert step < 4 or added + resident <= budget + 2**16

    assert "twice" in ways(model, loop)


def test_a_size_that_comes_often_gets_a_plan(monkeypatch):
    monkeypatch.setattr(unplanned, "WORTH_A_PLAN", 0)
    model = hiremate(Net(), budget_of(60), verbose=False)

    def loop(step: int) -> None:
        model.zero_grad()
        model(of_step(step)).square().mean().backward()

    found = ways(model, loop)
    assert (found[8], found[13]) == ("twice", "captured"), "both are of length 90"


@pytest.fixture
def block_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect an entry for each time that a block is computed."""
    calls, gelu = list[int](), nn.functional.gelu
    monkeypatch.setattr(nn.functional, "gelu", lambda x: (calls.append(1), gelu(x))[1])
    return calls


def test_gradients_of_a_retained_graph_are_those_of_plain_training(block_calls):
    model, plain = Net(remembers=True), Net(remembers=True)
    plain.load_state_dict(model.state_dict())
    calls = SecondCalls(model)
    observe(calls, model)
    for _ in range(2):
        found = []
        block_calls.clear()
        for net in (model, plain):
            torch.manual_seed(1)
            with calls.twice(BLOCKS), torch.autocast("cpu", torch.bfloat16):
                loss = net(batch(16)).float().square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([loss, *(p.grad for p in net.parameters()), torch.get_rng_state()])
        assert len(block_calls) == 4 * len(BLOCKS), "three times in the model, once in the plain one"
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_batch_norms_update_their_statistics_once(block_calls):
    model, plain = Net(_Norm), Net(_Norm)
    calls = SecondCalls(model)
    observe(calls, model)
    assert calls.fit >= BLOCKS
    plain.load_state_dict(model.state_dict())
    block_calls.clear()
    for net in (model, plain):
        torch.manual_seed(1)
        with calls.twice(BLOCKS):
            loss = net(batch(16)).square().mean()
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.blocks[0].norm.num_batches_tracked == OBSERVED_STEPS + 1
    assert len(block_calls) == 3 * len(BLOCKS), "twice in the model, once in the plain one"


def test_an_input_changed_after_observation_is_an_error():
    model = Net(_Adding)
    calls = SecondCalls(model)
    observe(calls, model)
    x = batch(8).requires_grad_() * 1
    with calls.twice(frozenset({"blocks.0"})):
        loss = model.blocks[0](x).square().mean()
    x.detach().add_(1)
    with pytest.raises((HiRemateError, RuntimeError), match=r"in.?place"):
        loss.backward()


def test_a_weight_changed_after_observation_is_an_error():
    """Its memory is another one then, which counts as no change in place."""
    model = Net()
    calls = SecondCalls(model)
    observe(calls, model)
    with calls.twice(BLOCKS):
        loss = model(batch(8)).square().mean()
    model.blocks[1].first.weight.data = model.blocks[1].first.weight.data * 2
    with pytest.raises(HiRemateError, match=r"Parameter 'first.weight' of module 'blocks\.1' was changed"):
        loss.backward()


FACTOR, FACTORS = 2.0, {"now": 2.0}  # of a block that reads these
OF_CONTEXT, OF_THREAD = ContextVar("factor", default=2.0), threading.local()
OF_THREAD.factor = 2.0


class _Settings:
    """Has no attributes but those of its class, until one is set."""

    factor = 2.0


def raised(x: Tensor, exponent: float) -> Tensor:
    """Raise to a power."""
    return x**exponent


def factor_of(x: Tensor) -> Tensor:
    """Compute what a block multiplies by."""
    return x.sigmoid()


def bent(x: Tensor, scale: float = 2.0, *, shift: float = 0.5) -> Tensor:
    """Compute with defaults and with an attribute of this function."""
    return torch.tanh(x * scale + shift) * bent.factor


bent.factor = 2.0


def straight(x: Tensor, scale: float = 2.0, *, shift: float = 0.5) -> Tensor:
    """Replace the code of a function."""
    return x * scale + shift


class _Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


class _Meta(type):
    factor_of_all = 2.0


class _Reading(Block, metaclass=_Meta):
    """Reads all that a second call may find changed."""

    of_class = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm_of_batch, self.register = nn.Dropout(0.2), nn.BatchNorm1d(WIDTH), None
        self.scale, self.mode, self.chosen = 2.0, "one", ["a"]
        self.inner = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.scaling, self.state, self.slotted = {"a": 2.0, "b": 3.0}, SimpleNamespace(deep={"x": [2.0]}), _Slotted()
        self.settings, self.arguments, self.times = _Settings(), Namespace(factor=2.0), partial(raised, exponent=2.0)
        self.generator, self.draws, self.counts, self.count, self.seen = random.Random(3), False, False, 0, []
        count = 2.0

        def around() -> float:
            return count

        self.around = around

    def forward(self, x: Tensor, power: float = 2.0) -> Tensor:
        y = self.norm_of_batch(self.drop(self.norm(x)).transpose(1, 2)).transpose(1, 2)
        for name in self.chosen:
            y = y + torch.tanh(self.inner[name](y) * self.scaling[name])
        y = y * self.scale * self.of_class * FACTOR * FACTORS["now"] * self.around() * factor_of(y)
        y = torch.tanh(y * type(self).factor_of_all)
        y = torch.tanh(y * self.state.deep["x"][0] * self.slotted.factor)
        y = torch.tanh(y * self.settings.factor * self.arguments.factor * OF_CONTEXT.get() * OF_THREAD.factor)
        y = torch.tanh(bent(self.times(y.abs() + 1)) ** power)
        if self.draws:
            y = y * self.generator.random() * random.random() * np.random.random()  # noqa: NPY002
        if self.counts:
            self.count, _Reading.of_class = self.count + 1, _Reading.of_class + 1
            self.seen.append(self.count)
            y = y * self.count * len(self.seen)
        y = torch.sin(self.first(y)) if self.mode == "one" else self.first(y)
        return x + self.second(y.square())


class _Otherwise(_Reading):
    """A class that a module may get in place of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin())


def _set(name: str, value: Any):
    return lambda block, patch: setattr(block, name, value)


def _around(block: _Reading, _: pytest.MonkeyPatch) -> None:
    block.around.__closure__[0].cell_contents = 3.0


def _hook(block: _Reading, _: pytest.MonkeyPatch) -> None:
    block.first.register_forward_hook(lambda module, given, result: result * 2)


def _hook_all(block: _Reading, patch: pytest.MonkeyPatch) -> None:
    shared = nn.modules.module._global_forward_hooks
    patch.setitem(shared, 2**31, lambda module, given, result: result * 2)


CHANGES = {
    "a float": _set("scale", 3.0),
    "a text": _set("mode", "other"),
    "a list in place": lambda block, _: block.chosen.append("b"),
    "another list": _set("chosen", ["b"]),
    "a dictionary": lambda block, _: block.scaling.update(a=5.0),
    "an object deep inside": lambda block, _: block.state.deep["x"].__setitem__(0, 5.0),
    "an object with slots": lambda block, _: setattr(block.slotted, "factor", 5.0),
    "an attribute that stands before one of a class": lambda block, _: setattr(block.settings, "factor", 5.0),
    "a namespace": lambda block, _: setattr(block.arguments, "factor", 5.0),
    "a keyword of a partial function": lambda block, _: block.times.keywords.update(exponent=3.0),
    "a context variable": lambda block, _: OF_CONTEXT.set(5.0),
    "a variable of a thread": lambda block, patch: patch.setattr(OF_THREAD, "factor", 5.0),
    "evaluation mode": lambda block, _: block.eval(),
    "a dropout's probability": lambda block, _: setattr(block.drop, "p", 0.7),
    "its class": _set("__class__", _Otherwise),
    "an attribute of its class": lambda block, patch: patch.setattr(_Reading, "of_class", 3.0),
    "an attribute of its metaclass": lambda block, patch: patch.setattr(_Meta, "factor_of_all", 3.0),
    "a new attribute of an outer class": lambda block, patch: patch.setattr(Block, "draws", True, raising=False),
    "a method of its class": lambda block, patch: patch.setattr(_Reading, "forward", Block.forward),
    "its own forward": lambda block, _: setattr(block, "forward", lambda x: x.sin()),
    "a global name": lambda block, patch: patch.setattr(sys.modules[__name__], "FACTOR", 3.0),
    "a global dictionary": lambda block, patch: patch.setitem(FACTORS, "now", 3.0),
    "a global function": lambda block, patch: patch.setattr(sys.modules[__name__], "factor_of", torch.tanh),
    "a variable around a function": _around,
    "defaults of a function": lambda block, patch: patch.setattr(bent, "__defaults__", (3.0,)),
    "named defaults of a function": lambda block, patch: patch.setattr(bent, "__kwdefaults__", {"shift": 1.0}),
    "a named default in place": lambda block, patch: patch.setitem(bent.__kwdefaults__, "shift", 1.0),
    "an attribute of a function": lambda block, patch: patch.setattr(bent, "factor", 3.0),
    "code of a function": lambda block, patch: patch.setattr(bent, "__code__", straight.__code__),
    "defaults of its forward": lambda block, patch: patch.setattr(_Reading.forward, "__defaults__", (3.0,)),
    "a hook": _hook,
    "a hook of all modules": _hook_all,
    "a module in it": lambda block, _: setattr(block, "first", nn.Linear(WIDTH, 128)),
    "a module taken away": lambda block, _: delattr(block, "first"),
    "a parameter": lambda block, _: setattr(block.first, "weight", nn.Parameter(torch.ones(128, WIDTH))),
    "no gradients": lambda block, _: block.requires_grad_(False),
    "a buffer": lambda block, _: setattr(block.norm_of_batch, "running_mean", torch.ones(WIDTH)),
    "Python's random numbers": lambda block, _: (random.seed(9), np.random.seed(9)),  # noqa: NPY002
}


def step_with(change, model: nn.Module, calls: SecondCalls, twice: frozenset[str]) -> list[Tensor | None]:
    """Run a forward that calls some modules twice, change something in each block, and run the backward."""
    torch.manual_seed(1)
    with calls.twice(twice):
        loss = model(batch(16)).square().mean()
    before = [*model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        for block in model.blocks:
            change(block, patch)
        changed = [dict(vars(module)) for module in model.modules()]
        loss.backward()
    assert changed == [vars(module) for module in model.modules()], "the second call has left something behind"
    return [loss, *(parameter.grad for parameter in before)]


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_before_the_backward_does_not_change_it(name):
    """The first calls' values are those of plain training; what they did not find stays where it was put."""
    found = []
    for twice in (BLOCKS, frozenset()):
        torch.manual_seed(0)
        model = Net(_Reading)
        calls = SecondCalls(model)
        observe(calls, model)
        assert calls.fit >= BLOCKS
        found.append(copy_context().run(step_with, CHANGES[name], model, calls, twice))
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["draws", "counts"])
def test_what_modules_begin_to_do_later_is_done_once(name, monkeypatch):
    found = []
    for twice in (BLOCKS, frozenset()):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        monkeypatch.setattr(_Reading, "of_class", 2.0)
        model = Net(_Reading)
        calls = SecondCalls(model)
        observe(calls, model)
        for block in model.blocks:
            setattr(block, name, True)
        left = [step_with(lambda block, patch: None, model, calls, twice) for _ in range(2)]
        done = [random.random(), np.random.random(), _Reading.of_class, [block.seen for block in model.blocks]]  # noqa: NPY002
        found.append(([t for step in left for t in step if t is not None], done))
    (ours, ours_done), (plain, plain_done) = found
    assert all(map(torch.equal, ours, plain))
    assert ours_done == plain_done


def test_settings_that_end_before_the_backward_later_are_an_error():
    model = Net()
    calls = SecondCalls(model)
    observe(calls, model)
    with calls.twice(BLOCKS), sdpa_kernel(SDPBackend.MATH):
        loss = model(batch(8)).square().mean()
    with pytest.raises(HiRemateError, match="settings of PyTorch"):
        loss.backward()


class _Scaling(TorchFunctionMode):
    """Changes what GELU gives, wherever it is active."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 1.5 if function is nn.functional.gelu else result


def test_a_function_mode_of_the_call_is_there_in_its_second_one():
    found = []
    for twice in (False, True):
        torch.manual_seed(0)
        model = Net()
        calls = SecondCalls(model)
        observe(calls, model)
        with calls.twice(BLOCKS) if twice else nullcontext(), _Scaling():
            loss = model(batch(8)).square().mean()
            loss.backward()  # the mode sees this call, and is left in it
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_step_that_fails_makes_no_module_unfit():
    model = Net()
    calls = SecondCalls(model)
    with calls.observed():
        model(batch(8)).sum()  # nothing of this step follows
    with torch.no_grad():
        model.blocks[0].first.weight.add_(1)
    calls.step_begins()
    observe(calls, model)
    assert calls.fit >= BLOCKS


class _Adding(Block):
    """Saves nothing that its input is for autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.norm.weight)


class _Norm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class _Counting(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class _CountingDeep(Block):
    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(counts={"calls": 0})

    def forward(self, x: Tensor) -> Tensor:
        self.state.counts["calls"] += 1
        return super().forward(x)


class _CountingClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class _Listing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses = []

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.mean())
        return super().forward(x)


class _Keeping(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.latest = super().forward(x)
        return self.latest


class _Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class _Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda *_: None)


class _Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _TwiceNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _GivenModule(Block):
    def forward(self, x: Tensor, other: nn.Module | None = None) -> Tensor:
        return super().forward(x)


class _GivingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.before)
        return x


class _InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class _ChangingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        y = sum(block(x * 1) if index else block(x) for index, block in enumerate(self.blocks))
        for given in self.given:
            given.add_(1)
        return y

    def __init__(self) -> None:
        super().__init__(_Giving)
        self.given = []
        for block in self.blocks:
            block.outer = [self.given]


class _Giving(Block):
    """Reads its input in no way that autograd has to save it for, and hands it out."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.norm.weight
        self.outer[0].append(x)
        return y


class _Scaled(Block):
    scale = 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class _SettingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.scale = 2
        x = super().forward(x)
        for block in self.blocks:
            block.scale = 1
        return x


class _OwnGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(1, generator=self.generator)


GENERATOR, SEEN, COUNT = torch.Generator(), [], itertools.count()


def note() -> int:
    """Count a call, in a list of this file."""
    SEEN.append(1)
    return len(SEEN)


def remember() -> int:
    """Count a call, in an attribute of this function."""
    remember.calls += 1
    return remember.calls


remember.calls = 0


class _OutsideAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * remember())


class _OutsideGenerator(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(1, generator=GENERATOR)


class _OutsideList(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * note())


class _OutsideIterator(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * next(COUNT))


class _Inheriting(_CountingClass):
    """Its base counts for all of its kind."""

    def forward(self, x: Tensor) -> Tensor:
        _CountingClass.calls += 1
        return Block.forward(self, x)


class _NumbersOfNumPy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.numbers.random()


def _counting_around() -> type[Block]:
    count = 0

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return super().forward(x * count)

    return Counting


class _AttendingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class _ReplacingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for weight in self.blocks.parameters():
            weight.data = weight.data * 1.01
        return x


UNFIT = {
    "weights that are replaced": _ReplacingNet,
    "settings that end before the backward": _AttendingNet,
    "a generator of its file": lambda: Net(_OutsideGenerator),
    "a list of its file, in a function": lambda: Net(_OutsideList),
    "a counter in an attribute of a function": lambda: Net(_OutsideAttribute),
    "an iterator of its file": lambda: Net(_OutsideIterator),
    "a counter of the class that it inherits from": lambda: Net(_Inheriting),
    "a generator of NumPy": lambda: Net(_NumbersOfNumPy),
    "a counter in a function around it": lambda: Net(_counting_around()),
    "an input changed in place": lambda: Net(_InPlace),
    "an input changed later": lambda: _ChangingNet(),
    "an attribute that is set for the call": lambda: _SettingNet(_Scaled),
    "a generator of its own": lambda: Net(_OwnGenerator),
    "a counter": lambda: Net(_Counting),
    "a counter in an object": lambda: Net(_CountingDeep),
    "a counter of the class": lambda: Net(_CountingClass),
    "a list": lambda: Net(_Listing),
    "a result that it keeps": lambda: Net(_Keeping),
    "Python's random numbers": lambda: Net(_Drawing),
    "a hook": lambda: Net(_Hooked),
    "called twice": lambda: _TwiceNet(_Twice),
    "a module as argument": lambda: _GivingNet(_GivenModule),
}


@pytest.mark.parametrize("name", UNFIT)
def test_modules_whose_second_call_is_another_are_called_once(name):
    model = UNFIT[name]()
    calls = SecondCalls(model)
    observe(calls, model)
    assert not BLOCKS & calls.fit
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_hooks_that_come_later_are_called_once(block_calls):
    model, seen = Net(), []
    calls = SecondCalls(model)
    observe(calls, model)
    model.blocks[1].first.register_forward_hook(lambda *_: seen.append(1))
    block_calls.clear()
    with calls.twice(BLOCKS):
        loss = model(batch(8)).square().mean()
    loss.backward()
    assert seen == [1]
    assert len(block_calls) == 2 * len(BLOCKS) - 1


def test_hooks_of_all_modules_are_called_once(block_calls):
    model, seen = Net(), []
    calls = SecondCalls(model)
    observe(calls, model)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.append(module))
    block_calls.clear()
    with calls.twice(BLOCKS):
        loss = model(batch(8)).square().mean()
    loss.backward()
    handle.remove()
    assert len(block_calls) == len(BLOCKS)
    assert set(BLOCKS) <= {path for path, module in model.named_modules() if seen.count(module) == 1}
    assert len(seen) == len(set(seen))


def test_nodes_are_found_below_the_module_whose_code_was_captured():
    paths = _PathsInGraphs(nn.ModuleDict({"net": nn.ModuleDict({"blocks": nn.ModuleList([Up(), Up()]), "head": Up()})}))
    blocks = frozenset({"net.blocks.0", "net.blocks.1"})
    assert paths.calls_in(_step("blocks.0.up", "blocks.0", "head", "blocks.1.up"), {}, blocks) == {
        "net.blocks.0": [[0, 1]],
        "net.blocks.1": [[3]],
    }
    assert paths.calls_in(_step("net.blocks.0.up", "net.head"), {}, blocks) == {"net.blocks.0": [[0]]}


def test_parameters_show_which_of_several_modules_it_is():
    """An encoder and a decoder that are captured apart look alike from inside."""
    root = nn.ModuleDict({"one": nn.ModuleList([Up()]), "two": nn.ModuleList([Up()])})
    paths, both = _PathsInGraphs(root), frozenset({"one.0", "two.0"})
    assert paths.calls_in(_step("0.up"), {}, both) == {}
    assert paths.calls_in(_step("0.up"), {7: id(root["two"][0].up.weight)}, both) == {"two.0": [[0]]}


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


def _step(*modules: str) -> SimpleNamespace:
    nodes = [SimpleNamespace(module=module, inputs=(7,)) for module in modules]
    graph = SimpleNamespace(nodes=nodes, forward=range(len(nodes)))
    return SimpleNamespace(graph=graph, owners=[(0, index) for index in range(len(nodes))])


class _Holding(nn.Module):
    """Reads something beside its argument."""

    def __init__(self, thing) -> None:
        super().__init__()
        self.thing = thing

    def forward(self, x: Tensor) -> Tensor:
        return x * len(str(self.thing))


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (iter(range(3)), "it reads an iterator"),
        ([{"number": i} for i in range(40_000)], "it reads too much beside its arguments"),
        (np.zeros(2**17), "it reads a large NumPy array"),
        (ContextVar("empty"), "it reads a context variable without a value"),
    ],
    ids=["iterator", "many things", "array", "context variable"],
)
def test_what_a_module_reads_may_not_be_known(thing, reason):
    with pytest.raises(UnknownStateError, match=reason):
        ModuleState(_Holding(thing), Outside)


def test_a_module_that_runs_too_much_code_is_not_known(monkeypatch):
    monkeypatch.setattr(outside, "_MOST_CODE", 0)

    with pytest.raises(UnknownStateError, match="it runs too much code"):
        ModuleState(_Holding(1), Outside)
