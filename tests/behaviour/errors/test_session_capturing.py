"""What is captured once, and what is captured again."""

from __future__ import annotations

import copy
import gc
import time
import warnings

import pytest
import torch
from torch import nn

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.sessions.messages import CAPTURES
from hiremate_lightning.targets import entry_points
from hiremate_lightning.testing import captured_count, session_of
from hiremate_lightning.torch_private import dynamo
from tests.exact import assert_same, network, quiet, recorded
from tests.life import ROWS, Net, assert_exact, batch, gradients, make, planned, step, warm_up


class Chooses(Net):
    """Chooses in its first call how to compute, and keeps that, as heads for classification of transformers do."""

    def __init__(self, also: bool = False) -> None:
        super().__init__()
        self.kind, self.also = None, also

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.kind is None:
            self.kind = "tanh" if x.is_floating_point() else "sin"
            x = x * 2 if self.also else x
        return x.tanh() if self.kind == "tanh" else x.sin()


@pytest.mark.parametrize(("also", "graphs"), [(False, 1), (True, 2)], ids=["nothing else", "something else"])
def test_an_attribute_set_in_the_first_call_costs_no_new_trace(also, graphs):
    """Dynamo reads the code once more. Where its graph is another one then, that is traced and runs."""
    torch.manual_seed(1)
    plain = Chooses(also)
    model = hiremate(copy.deepcopy(plain), "75%", verbose=False)
    for index in range(3):
        torch.manual_seed(index)
        expected = step(plain, index)
        torch.manual_seed(index)
        assert torch.equal(step(model, index), expected)
        assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert captured_count(model) == 2
    assert session_of(model).model.runtimes.count == graphs


class Weighted(Net):
    """Computes with a number that changes."""

    def __init__(self, use) -> None:
        super().__init__()
        self.use, self.weight = use, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(super().forward(x), self.weight)


@pytest.mark.parametrize(
    ("use", "captured"),
    [(lambda y, w: y + w * y.square(), 2), (lambda y, w: y.clamp(-w, w), CAPTURES + 1)],
)
def test_a_changing_number_is_captured_once_more_or_warned_of(use, captured):
    plain, planned = Weighted(use), Weighted(use)
    planned.load_state_dict(plain.state_dict())
    hiremate(planned, "90%", verbose=False)
    with recorded() as warned:
        for index in range(CAPTURES + 1):
            for model in (plain, planned):
                torch.manual_seed(index)
                model.weight = 1 + index / 10
                step(model, index)
            assert_same(gradients(planned), gradients(plain))
    assert captured_count(planned) == captured
    assert len([text for text in warned if "captured code again in each of 8" in text]) == (captured > 2)


def appends(seen: list[torch.Tensor], output: torch.Tensor) -> None:
    seen.append(output.detach().mean())


@pytest.mark.parametrize(("append", "is_named"), [(appends, True), (torch.compiler.disable(appends), False)])
def test_a_growing_list_that_ends_each_capture_is_named(append, is_named):
    model, seen = hiremate(Net(), "100%", verbose=False), []
    model.body[0].register_forward_hook(lambda module, inputs, output: append(seen, output))
    with recorded() as warned:
        for index in range(CAPTURES + 1):
            step(model, index)
    causes = [text.partition("torch.compile names: ")[2] for text in warned if "captured code again" in text]
    assert len(causes) == is_named
    assert all(f"== {CAPTURES - 2}" in text and "seen.append" in text for text in causes)
    assert len(seen) == CAPTURES + 1


@network(lambda: {"one": Net(), "other": Net()})
def two_nets(self, x: torch.Tensor, first: bool) -> torch.Tensor:
    """Calls one of two networks."""
    return self.one(x) if first else self.other(x)


def test_a_graph_break_warns_in_our_words_alone():
    """Dynamo would ask whoever times a layer to file an issue."""

    class Timed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(x)
            self.took = time.perf_counter()
            return hidden.square()

    model = hiremate(Timed(), "100%", verbose=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step(model)
    assert not [str(w.message) for w in warned if "Dynamo does not know how to trace" in str(w.message)]


def test_graph_breaks_of_another_model_are_not_counted():
    torch.manual_seed(0)
    broken = planned("100%")
    broken.body[0].register_forward_hook(torch.compiler.disable(lambda module, inputs, output: None))
    with quiet():
        warm_up(broken)
    model = hiremate(two_nets(), "100%", verbose=False)
    for index in range(8):
        model.zero_grad()
        model(batch(index), index < 4).square().mean().backward()  # a warning would be an error
    assert captured_count(model) == 2


def test_what_was_compiled_goes_with_its_model():
    """Dynamo names compiled code in the module of the function: as in a notebook that makes one model after another."""

    def compiled() -> list[str]:
        gc.collect()
        return [name for name in vars(entry_points) if name.startswith("__compiled_fn")]

    before = compiled()
    model = warm_up(planned("90%"))
    assert len(compiled()) > len(before)
    del model
    assert compiled() == before


def test_training_goes_on_after_torch_compiler_reset():
    def act(model):
        losses = []
        for index, rows in enumerate((200, 190, 190, 180, 180, 200)):
            losses.append(step(model, index, rows))
            torch.compiler.reset()
            gc.collect()
        return [*losses, *gradients(model)]

    assert_exact(act)


@pytest.mark.parametrize("has_buffers", [True, False])
def test_buffers_updated_inside_checkpoint_are_warned_of(has_buffers):
    class Checkpointing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            body = self.body if has_buffers else self.body[0]
            return self.head(torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))

    model = hiremate(Checkpointing(), "90%", verbose=False, on_infeasible="warn")
    with recorded() as warned:
        step(model, 0)
    assert any("around code that updates buffers" in text for text in warned) == has_buffers


@pytest.mark.usefixtures("_captures_all")
@pytest.mark.usefixtures("without_made_code")
def test_a_size_that_is_captured_twice_keeps_its_plan():
    """Dynamo captures the first sizes as they are, and once more with symbols: what was made of the first runs both."""
    model = planned("90%", max_plans=3)
    with recorded() as warned:
        for rows in (ROWS, 200, 160, ROWS):
            warm_up(model, steps=6, rows=rows)
    session = session_of(model)
    assert not warned
    assert session.captured_count == 3
    assert get_plan(model).measured.peak_bytes is not None
    assert len({plan.solution.recompute for plan in session.plans.values()}) <= 3


@pytest.mark.filterwarnings("ignore:The measured peak")  # what the other model keeps is outside of the plan
@pytest.mark.parametrize("share_a_loss", [False, True])
def test_two_planned_models_train_side_by_side(share_a_loss):
    def run(is_planned):
        models = [planned("90%", seed=s, on_infeasible="warn") if is_planned else make(s) for s in (1, 2)]
        torch.manual_seed(4)
        losses = []
        for index in range(5):
            if share_a_loss:
                for model in models:
                    model.zero_grad()
                models[1](models[0](batch(index))).square().mean().backward()
            else:
                losses += [step(model, index) for model in models]
        if is_planned and not share_a_loss:
            assert all(get_plan(model).measured.peak_bytes is not None for model in models)
        return [*losses, *gradients(models[0]), *gradients(models[1])]

    assert_same(run(True), run(False))


def test_a_model_called_on_its_own_output_is_exact():
    """Of two calls beside each other see the run "twice-called" of `tests/event_log.py`."""

    def act(model):
        for index in range(5):
            model.zero_grad()
            model(model(batch(index))).square().mean().backward()
        return gradients(model)

    assert_exact(act, warm=0)


@pytest.mark.filterwarnings("ignore::hiremate_lightning.HiRemateWarning")
def test_the_third_different_call_gives_varying_sizes_symbols(monkeypatch):
    """Dynamo alone has a symbol for a size from the capture on in which that size differs."""
    known, capturing = list[set[int]](), dynamo.capturing_for_plans

    def capture(tell, sizes_vary, vary):
        known.append(set(vary))
        return capturing(tell, sizes_vary, known[-1])

    monkeypatch.setattr(dynamo, "capturing_for_plans", capture)
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.GELU(), nn.Tanh()) for _ in range(4)]
    model = hiremate(nn.Sequential(*layers), "1 KiB", on_infeasible="warn", verbose=False)  # no size fits as it is
    for height, width in ((24, 24), (32, 24), (32, 40)):
        model(torch.randn(4, 3, height, width)).square().mean().backward()
    assert known[0] == set()
    assert known[-1] == {32, 40}
