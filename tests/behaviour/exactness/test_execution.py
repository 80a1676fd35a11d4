"""Programs compute what plain training computes, whatever their schedule, and complain as PyTorch does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hiremate_lightning.capturing.backend import planning_backend
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.rewriting.kernels import apply_dropout_mask
from hiremate_lightning.running.execution import GraphRuntime
from hiremate_lightning.running.program import build
from hiremate_lightning.torch_private.operators import shortest
from tests.exact import assert_same, network
from tests.tiny import recompute_lazily

ROWS, WIDTH = 256, 16


@network(
    lambda: {
        **{name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "last")},
        "norm": nn.BatchNorm1d(WIDTH),
        "dropout": nn.Dropout(0.3),
    }
)
def net(self, x: torch.Tensor) -> torch.Tensor:
    """Dropout, batch norm, an in-place ReLU, a skip connection and a view."""
    y = self.norm(self.first(x)).relu_()
    y = x + self.dropout(self.second(y)).view(2, -1, WIDTH).flatten(0, 1)
    return self.last(torch.tanh(y))


class Conductor:
    """Runs every runtime by the schedule that a function of its graph gives."""

    def __init__(self, decide) -> None:
        self.decide = decide
        self.runtimes: list[GraphRuntime] = []
        self.heard: list[str] = []

    def take_in(self, captured):
        runtime = GraphRuntime(captured, self)
        self.runtimes.append(runtime)
        return runtime

    def start(self, runtime, arguments):
        captured = runtime.captured
        self.heard.append("start")
        return build(captured, lower(captured.graph, self.decide(captured.graph))), "run"

    def forward_done(self, run, outputs):
        self.heard.append(f"forward done {run}")

    def backward_starts(self, run, tangents, leaves, retains):
        self.heard.append(f"backward starts {run}")

    def was_overwritten(self, runtime, storages):
        self.heard.append("was overwritten")

    def settings_changed(self):
        self.heard.append("settings changed")

    def name_of(self, tensor):
        return "A weight"

    def must_return(self, runtime, positions):
        self.heard.append("must return")

    def backward_done(self, run):
        self.heard.append(f"backward done {run}")


def nothing_kept(graph):
    return recompute_lazily(graph, ())


def every_other_kept(graph):
    return recompute_lazily(graph, range(0, len(graph.storages), 2))


def compiled(model: nn.Module, decide):
    torch.compiler.reset()  # all calls share one line of code, for which Dynamo compiles no more than eight times
    conductor = Conductor(decide)
    call = torch.compile(lambda x: model(x), backend=planning_backend(conductor.take_in), dynamic=False)
    return call, conductor


def make(kind=net, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return kind().to(dtype), torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)


def results(model, x, call):
    """Do two steps and list all that must be equal."""
    torch.manual_seed(2)
    losses = []
    for _ in range(2):
        loss = call(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters()), x.grad, *model.buffers(), torch.get_rng_state()]


def exact_by(decide, make):
    """Fail where steps by a schedule differ from plain ones; return the graph that ran."""
    model, x = make()
    expected = results(model, x, model)
    model, x = make()
    call, conductor = compiled(model, decide)
    assert_same(results(model, x, call), expected)
    (runtime,) = conductor.runtimes
    return runtime.captured.graph


@network(lambda: {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
def drops(self, x):
    return self.second(nn.functional.dropout(torch.tanh(self.first(x)), 0.1))


@pytest.mark.parametrize(("kind", "dtype"), [(net, torch.float32), (drops, torch.bfloat16)])
@pytest.mark.parametrize("decide", [keep_all, nothing_kept, every_other_kept])
def test_every_schedule_is_exact(decide, kind, dtype):
    exact_by(decide, partial(make, kind, dtype))


def held(model, x, decide):
    """Measure what a forward takes with all that it holds at its end."""
    call, _ = compiled(model, decide)
    call(x)
    outputs = []
    return measure_peak(lambda: outputs.append(call(x)))


def test_keeping_nothing_keeps_less_than_keeping_all():
    assert held(*make(), nothing_kept) < held(*make(), keep_all)


def test_a_backward_calls_operators_by_their_shortest_way():
    """The conductor hears of each stage in order, and a program saves what its schedule saves."""
    model, x = make()
    call, conductor = compiled(model, keep_all)
    call(x).sum().backward()
    assert conductor.heard == ["start", "forward done run", "backward starts run", "backward done run"]

    captured = conductor.runtimes[0].captured
    module = build(captured, lower(captured.graph, keep_all(captured.graph))).backward_module
    products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) > 1
    assert all(shortest(product) is torch.mm for product in products)

    program = build(captured, lower(captured.graph, nothing_kept(captured.graph)))
    positions = {*program.saved.returned, *program.saved.views, *(position for position, _ in program.saved.watched)}
    assert positions <= set(range(len(program.schedule.saved)))


@network(lambda: {"last": nn.Linear(WIDTH, WIDTH)})
def ends(self, x):
    """Its output is what the backward reads."""
    return torch.tanh(self.last(x))


@pytest.mark.parametrize("decide", [keep_all, nothing_kept])
@pytest.mark.parametrize(
    ("kind", "changed", "refusing"),
    [
        (net, lambda model, x, output: model.last.weight, (keep_all, nothing_kept)),
        (net, lambda model, x, output: x, (keep_all, nothing_kept)),
        (ends, lambda model, x, output: output, (keep_all,)),  # else it is computed again
        (net, lambda model, x, output: model.last.bias, ()),  # no backward reads it
    ],
    ids=["weight", "batch", "output", "bias"],
)
def test_a_saved_value_that_changes_in_place_is_refused(decide, kind, changed, refusing):
    model, x = kind(), torch.randn(ROWS, WIDTH)
    call, _ = compiled(model, decide)
    output = call(x)
    loss = output.sum()
    with torch.no_grad():
        changed(model, x, output).add_(1)
    if decide not in refusing:
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_buffers_that_the_step_itself_updates_are_not_refused():
    model, x = make()
    call, _ = compiled(model, keep_all)
    first, second = call(x).sum(), call(x).sum()  # the second forward updates the statistics again
    (first + second).backward()


def test_a_retained_graph_gives_the_same_gradients_again():
    """One that is not retained says what PyTorch says."""
    model, x = make()
    call, _ = compiled(model, nothing_kept)
    loss = call(x).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, g + g) for p, g in zip(model.parameters(), first, strict=True))
    with pytest.raises(RuntimeError, match=r"(?s)backward through the graph a second time.*retain_graph=True"):
        loss.backward()


def test_inference_graphs_run_as_they_are():
    model, x = make()
    call, conductor = compiled(model.eval(), keep_all)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert not conductor.runtimes


@pytest.mark.parametrize("probability", [0.1, 0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replayed_dropout_is_the_dropout_bit_for_bit(probability, dtype):
    x = torch.randn(1000, dtype=dtype)
    output, mask = torch.native_dropout(x, probability, train=True)
    assert torch.equal(apply_dropout_mask(x, mask, 1.0 / (1.0 - probability)), output)
