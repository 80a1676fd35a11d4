"""Cross entropies and their gradients are made some rows at a time, and no number changes by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hiremate_lightning import get_plan, hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.rewriting.losses import cross_entropy, cross_entropy_gradient
from hiremate_lightning.sessions import graph_programs
from hiremate_lightning.torch_private import hacks
from tests.behaviour.exactness.test_overwriting import autocast
from tests.exact import added_peaks, captured_by, network, planned_alike, simple_loop, take_steps, train_both

aten = torch.ops.aten
WIDTH, ROWS, CLASSES, CHUNK = 32, 200, 301, 128


@pytest.fixture(autouse=True)
def _many_parts(change_thresholds):
    """Take 16 rows at a time, the last time 8, where nothing says otherwise, and few classes for many."""
    change_thresholds(part_bytes=1, row_bytes=1)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).mul(9).to(dtype)


def targets(rows: int) -> Tensor:
    found = torch.arange(rows) * 7 % CLASSES
    found[::5] = -100  # do not count
    return found


ROW_COUNTS = pytest.mark.parametrize("rows", [0, 1, 8, 129, 1000])
REDUCTIONS = pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
DTYPES = pytest.mark.parametrize(
    ("of", "dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
    ids=str,
)


@ROW_COUNTS
@REDUCTIONS
@DTYPES
def test_the_loss_is_what_operations_on_all_rows_give(rows, reduction, of, dtype):
    logits, target = numbers(rows, CLASSES, dtype=of), targets(rows)
    expected = aten.nll_loss_forward(logits.to(dtype).log_softmax(1), target, None, reduction, -100)
    found = cross_entropy(logits, target, reduction, -100, [rows, CLASSES], dtype)
    assert all(torch.equal(f.nan_to_num(), e.nan_to_num()) for f, e in zip(found, expected, strict=True))


@ROW_COUNTS
@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@DTYPES
def test_the_gradient_is_what_operations_on_all_rows_give(rows, reduction, weighted, of, dtype):
    logits, target = numbers(rows, CLASSES, dtype=of), targets(rows)
    logarithms = logits.to(dtype).log_softmax(1)
    weight = numbers(CLASSES, dtype=dtype).abs() if weighted else None
    gradient = numbers(rows, dtype=dtype) if reduction == 0 else torch.tensor(0.37, dtype=dtype)
    _, total = aten.nll_loss_forward(logarithms, target, weight, reduction, -100)
    arguments = target, weight, reduction, -100, total
    expected = aten.nll_loss_backward(gradient, logarithms, *arguments)
    expected = aten._log_softmax_backward_data(expected, logarithms, 1, dtype).to(of)
    found = cross_entropy_gradient(gradient, logits, *arguments, [rows, CLASSES], dtype, [1, rows, CLASSES], of)
    assert found.shape == (1, rows, CLASSES)
    assert torch.equal(found[0].nan_to_num(), expected.nan_to_num())  # the mean of nothing is none


@pytest.mark.parametrize("shape", [(ROWS,), (10, ROWS // 10), (2, 5, ROWS // 10)], ids=str)
def test_rows_may_lie_apart(shape):
    logits, target = numbers(*shape[:-1], shape[-1] + 1, CLASSES, dtype=torch.bfloat16), targets(ROWS)
    logits = logits[..., 1:, :]
    flat = logits.reshape(-1, CLASSES).float().log_softmax(1)
    expected = aten.nll_loss_forward(flat, target, None, 1, -100)
    found = cross_entropy(logits, target, 1, -100, [ROWS, CLASSES], torch.float32)
    assert all(map(torch.equal, found, expected))


def test_a_class_that_is_none_is_the_error_of_pytorch():
    with pytest.raises(IndexError, match="Target 301 is out of bounds"):
        cross_entropy(numbers(8, CLASSES), torch.full((8,), CLASSES), 1, -100, [8, CLASSES], torch.float32)


@pytest.mark.parametrize(("part_bytes", "rows"), [(1, 16), (40 * 4 * CLASSES, 40), (2**20, 104)], ids=str)
def test_beside_the_result_only_parts_are_allocated(change_thresholds, part_bytes, rows):
    change_thresholds(part_bytes=part_bytes)
    logits, target, shape = numbers(ROWS, CLASSES, dtype=torch.bfloat16), targets(ROWS), [ROWS, CLASSES]
    part = 4 * rows * CLASSES
    peak = measure_peak(lambda: cross_entropy(logits, target, 2, -100, shape, torch.float32))
    assert part <= peak <= part + 40 * ROWS
    one = torch.ones(())
    arguments = target, None, 2, -100, one, shape, torch.float32, shape, torch.bfloat16
    assert measure_peak(lambda: cross_entropy_gradient(one, logits, *arguments)) == 2 * ROWS * CLASSES + 2 * part


# ---------------------------------------------------------------- choice


@network(
    lambda loss, dropout, classes: {
        "loss": loss,
        "words": nn.Embedding(CLASSES, WIDTH),
        "body": nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)),
        "head": nn.Linear(WIDTH, classes),
    }
)
def judged(self, x: Tensor) -> Any:
    """A model of words, and a loss."""
    words = self.words(x)
    return self.loss(self.head(words + self.body(words)), x.roll(1, 1))


def model_of(
    loss: Callable[[Tensor, Tensor], Any],
    dtype: torch.dtype = torch.bfloat16,
    classes: int = CLASSES,
    dropout: float = 0.1,
) -> nn.Module:
    return judged(loss, dropout, classes).to(dtype)


def entropy(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(y.float().flatten(0, 1), x.flatten(), **options)


def with_penalty(y: Tensor, x: Tensor) -> Tensor:
    y = y.float().flatten(0, 1)
    return F.cross_entropy(y, x.flatten()) + y.logsumexp(1).square().mean()


def weighted(y: Tensor, x: Tensor) -> Tensor:
    return entropy(y, x, weight=torch.ones(y.shape[-1]))


smoothed = partial(entropy, label_smoothing=0.1)
each = partial(entropy, reduction="none")


def entropy_as_it_is(y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), x.flatten())


def logs(y: Tensor) -> Tensor:
    return y.float().flatten(0, 1).log_softmax(-1)


def batch(seed: int) -> Tensor:
    return torch.randint(CLASSES, (4, ROWS // 4), generator=torch.Generator().manual_seed(seed))


CHOICES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "half": (lambda: model_of(entropy), 2),
    "autocast": (lambda: autocast(model_of(entropy_as_it_is, torch.float32)), 2),
    "returned logits": (lambda: model_of(lambda y, x: (entropy(y, x), y)), 2),
    "one for each row": (lambda: model_of(each), 2),
    "weighted": (lambda: model_of(weighted), 1),  # the gradient
    "single precision": (lambda: model_of(entropy, torch.float32), 2),
    "half all through": (lambda: model_of(entropy_as_it_is), 2),
    "shifted": (lambda: model_of(lambda y, x: entropy(y[:, :-1], x[:, 1:])), 2),
    "returned converted": (lambda: model_of(lambda y, x: (lambda z: (entropy(z, x), z))(y.float())), 2),
    "another term": (lambda: model_of(with_penalty), 2),
    "smoothed": (lambda: model_of(smoothed), 0),
    "logarithms read": (lambda: model_of(lambda y, x: (lambda z: F.nll_loss(z, x.flatten()) - z.mean())(logs(y))), 0),
    "by columns": (lambda: model_of(lambda y, x: F.cross_entropy(y.float().transpose(1, 2), x)), 0),
}


@pytest.mark.usefixtures("_kernels_uncompiled")
def test_a_loss_is_made_by_rows_beside_fused_kernels_too():
    graph = captured_by(model_of(entropy), batch(0), compile="inductor").graph
    assert {"hiremate.cross_entropy", "hiremate.cross_entropy_gradient"} <= {node.op for node in graph.nodes}


# ---------------------------------------------------------------- training


def total(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.mean()


@pytest.mark.parametrize(
    ("name", "budget"),
    [*((name, "80%") for name in CHOICES), ("half", "100%"), ("returned logits", "100%"), ("weighted", "100%")],
)
def test_training_is_exact_with_the_expected_joined_losses(name, budget):
    make, count = CHOICES[name]
    plan = train_both(make, simple_loop(batch, loss_of=total), budget)
    assert sum(node.op.startswith("hiremate.cross_entropy") for node in plan.graph.nodes) == count


MANY = 20 * CLASSES
LOGITS = ROWS * MANY
PEAKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the bytes of logits and of what is made of them
    "half": (lambda: model_of(entropy, classes=MANY), 2),
    "single precision": (lambda: model_of(entropy, torch.float32, MANY), 4),
    "weighted": (lambda: model_of(weighted, classes=MANY), 2 + 4),  # while the loss is computed
}


@pytest.mark.parametrize(("make", "itemsize"), PEAKS.values(), ids=PEAKS)
def test_the_peak_is_as_planned_and_mostly_the_logits(change_thresholds, make, itemsize):
    plainly, planned = added_peaks(make(), batch(0))
    parts = 2 * 4 * 16 * MANY
    gradients = 4 * MANY * (WIDTH + 1)
    assert itemsize * LOGITS <= planned <= itemsize * LOGITS + parts + gradients + 0.05 * LOGITS
    assert planned <= plainly - 4 * LOGITS
    change_thresholds(row_bytes=2**40)
    assert planned <= added_peaks(make(), batch(0))[1] - 2 * LOGITS


@pytest.mark.parametrize("name", ["half", "single precision"])
def test_the_peak_without_a_plan_is_that_of_plain_pytorch(name):
    module = PEAKS[name][0]()
    module(batch(0)).backward()
    plainly = measure_peak(lambda: module(batch(0)).backward())
    hiremate(module, "50%", verbose=False)
    plan = take_steps(module, lambda _: batch(0), 4, loss_of=lambda loss: loss, clears="never")
    assert plan.unplanned_peak_bytes - plan.resident_bytes == pytest.approx(plainly, rel=0.01)
    assert plan.planned_peak_bytes - plan.resident_bytes < 0.45 * plainly
    assert plan.solution.recompute_ms == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("holds", [False, True], ids=["dropped", "held"])
def test_returned_logits_that_nobody_holds_are_overwritten(dtype, holds):
    logs, peaks, held = [], [], []
    for is_planned in (False, True):
        torch.manual_seed(0)
        module = model_of(lambda y, x: (entropy(y, x), y), dtype, MANY, dropout=0.0)
        if is_planned:
            hiremate(module, "100%", verbose=False)

        def step(module: nn.Module = module) -> Tensor | None:
            module.zero_grad()
            loss, logits = module(batch(0))
            kept = logits if holds else None
            del logits
            loss.backward()
            return None if kept is None else kept.detach().clone()

        for _ in range(5):
            held.append(step())
        logs.append([p.grad.clone() for p in module.parameters()])
        peaks.append(measure_peak(step))
    plan = get_plan(module)
    assert all(map(torch.equal, *logs))
    assert not holds or all(torch.equal(logits, held[0]) for logits in held)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes
    assert peaks[1] <= peaks[0] - 4 * LOGITS
    added = (plan.planned_peak_bytes - plan.resident_bytes) / (dtype.itemsize * LOGITS)
    assert 2 < added < 3 if holds else 1 < added < 2


def test_a_budget_that_fits_with_logits_freed_is_not_refused(monkeypatch):
    """Nor is memory needed to run the first step beyond its budget."""
    monkeypatch.setattr(graph_programs, "free_bytes", lambda device: 0)

    def train(budget: str | int) -> Any:
        torch.manual_seed(0)
        module = hiremate(model_of(lambda y, x: (entropy(y, x), y), torch.float32, MANY), budget, verbose=False)
        take_steps(module, lambda _: batch(0), 4, loss_of=lambda y: y[0], clears="never")
        return get_plan(module)

    needed = train("100%").planned_peak_bytes
    plan = train(needed + 2**16)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes <= needed + 2**16
    assert needed - plan.resident_bytes < 2 * 4 * LOGITS


def test_the_gradient_of_one_loss_for_each_row_may_come_expanded():
    module = hiremate(model_of(each, classes=MANY), "100%", verbose=False)
    plan = take_steps(module, lambda _: batch(0), 5, loss_of=torch.mean, clears="never")
    assert plan.measured.peak_bytes == plan.planned_peak_bytes
    assert plan.planned_peak_bytes - plan.resident_bytes < 1.7 * 2 * LOGITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_that_are_returned_may_be_changed_in_place(dtype):
    """Plain training has taken their logarithms by then."""

    def changed(results: tuple[Tensor, Tensor]) -> Tensor:
        loss, logits = results
        logits.detach()[..., :3] = 0
        return loss

    train_both(lambda: model_of(lambda y, x: (entropy(y, x), y), dtype), simple_loop(batch, loss_of=changed))


@network(lambda: {"logits": nn.Parameter(torch.randn(ROWS, CLASSES)), "words": model_of(entropy)})
def table(self, x: Tensor) -> Tensor:
    """Logits that are a weight, which the step itself changes once it has their loss."""
    loss = F.cross_entropy(self.logits, x.flatten()) + self.words(x)
    with torch.no_grad():
        self.logits.mul_(0.9)
    return loss


@network(lambda: {"words": nn.Embedding(CLASSES, WIDTH), "head": nn.Linear(WIDTH, CLASSES)})
def cleared(self, x: Tensor) -> Tensor:
    """Logits of a graph before, which the one of the loss clears."""
    logits = self.head(self.words(x).float().relu()).flatten(0, 1)
    torch._dynamo.graph_break()
    loss = F.cross_entropy(logits, x.flatten())
    with torch.no_grad():
        logits.zero_()
    return loss


@pytest.mark.parametrize("make", [table, cleared])
def test_logits_changed_in_place_by_the_step_are_not_read_again(make):
    train_both(make, simple_loop(batch, loss_of=lambda loss: loss), on_infeasible="warn")


@network(lambda of: {"layer": nn.Linear(WIDTH, 200), "of": of})
def of_bytes(self, x: Tensor) -> Tensor:
    """Classes as bytes, among them 156, which is what -100 would be as one."""
    return self.of(self.layer(x), torch.arange(ROWS).remainder(200).to(torch.uint8))


OF_BYTES = {
    "mean": F.cross_entropy,
    "none": lambda z, t: F.cross_entropy(z, t, reduction="none"),
    "ignored": lambda z, t: F.cross_entropy(z, t, ignore_index=199),
    "weighted": lambda z, t: F.cross_entropy(z, t, weight=torch.linspace(0, 1, 200)),
    "smoothed": lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1),
    "logarithms": lambda z, t: F.nll_loss(z.log_softmax(1), t),
}


@pytest.mark.parametrize("row_bytes", [1, 2**20], ids=["by rows", "whole"])
@pytest.mark.parametrize("of", OF_BYTES.values(), ids=OF_BYTES)
def test_classes_may_be_bytes(change_thresholds, of, row_bytes):
    change_thresholds(row_bytes=row_bytes)
    train_both(lambda: of_bytes(of), simple_loop(lambda _: numbers(ROWS, WIDTH), steps=3), "100%")


def test_torch_still_traces_no_loss_of_bytes():
    """Where this fails torch was mended, and `byte_targets` can go."""
    with FakeTensorMode(), pytest.raises(RuntimeError, match="Expected dtype int32/int64 for index"):
        F.cross_entropy(torch.ones(2, 3), torch.ones(2, dtype=torch.uint8))


def test_logits_are_there_for_another_backward():
    def backward_twice(module: nn.Module) -> list[Tensor | None]:
        loss = module(batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in module.parameters()]

    torch.manual_seed(0)
    planned_alike(model_of(entropy, torch.float32, dropout=0.0), backward_twice, "100%")


class InChunks(torch.autograd.Function):
    """Log-probabilities by tiles of a buffer, as trl computes them: no tile of the last chunk is contiguous."""

    @staticmethod
    def forward(ctx, hidden, weight, at):
        ctx.set_materialize_grads(False)
        buffer = hidden.new_empty(len(hidden), CHUNK)
        total, found = hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))
        for start in range(0, len(weight), CHUNK):
            part = weight[start : start + CHUNK]
            tile = buffer[:, : len(part)]
            torch.mm(hidden, part.t(), out=tile)
            total += tile.exp().sum(-1)
            here = (at >= start) & (at < start + len(part))
            found.copy_(torch.where(here, tile.gather(1, (at - start).clamp(0, len(part) - 1)[:, None])[:, 0], found))
        ctx.save_for_backward(hidden, weight, at, total)
        return found - total.log(), None

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, weight, at, total = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        buffer = hidden.new_empty(len(hidden), CHUNK)
        for start in range(0, len(weight), CHUNK):
            part = weight[start : start + CHUNK]
            tile = buffer[:, : len(part)]
            torch.mm(hidden, part.t(), out=tile)
            is_target = torch.arange(start, start + len(part)) == at[:, None]
            tile.copy_(gradient[:, None] * (is_target.float() - tile.exp() / total[:, None]))
            of_hidden.addmm_(tile, part)
            of_weight[start : start + len(part)].addmm_(tile.t(), hidden)
        return of_hidden, of_weight, None


@network(
    lambda: {
        "layers": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
        "head": nn.Linear(WIDTH, CLASSES, bias=False),
        "at": targets(ROWS).abs(),
    }
)
def chunked_model(self, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + layer(x).tanh()
    return -InChunks.apply(x, self.head.weight, self.at)[0].mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_loss_that_writes_its_tiles_by_out_is_planned_whole():
    """Its second result is None, and tiles are parts of a buffer, both of which end Dynamo's graph by themselves."""
    loop = simple_loop(lambda index: numbers(ROWS, WIDTH).roll(index, 0) / 9, loss_of=lambda loss: loss)
    plan = train_both(chunked_model, loop, "80%")
    assert plan.proved == "forward 1 of 1 graph, gradients 1 of 1"


@network(
    lambda write, dtype: {
        "first": nn.Linear(WIDTH, WIDTH),
        "last": nn.Linear(WIDTH, WIDTH),
        "write": write,
        "dtype": dtype,
    }
)
def tiled(self, x: Tensor) -> Tensor:
    """Writes every other column of a buffer by `out=`."""
    x = self.first(x)
    tile = x.new_zeros(len(x), 2 * WIDTH, dtype=self.dtype)[:, ::2]
    self.write(x, tile)
    return self.last(x + tile.to(x.dtype))


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], Any], torch.dtype]] = {
    "a product": (lambda x, tile: torch.mm(x.detach(), x.detach()[:WIDTH], out=tile), torch.float32),
    "a sum of another type": (lambda x, tile: torch.add(x.detach(), x.detach(), out=tile), torch.float64),
    "drawn": (lambda x, tile: torch.randn(x.shape, out=tile), torch.float32),
    "drawn in another type": (lambda x, tile: torch.randn(x.shape, out=tile), torch.float64),
}


@pytest.mark.parametrize(("write", "dtype"), WRITES.values(), ids=WRITES)
def test_a_result_that_out_takes_is_exact(write, dtype):
    """Random numbers are drawn in another order into columns than into rows, and just once."""
    train_both(lambda: tiled(write, dtype), simple_loop(lambda index: numbers(ROWS, WIDTH).roll(index, 0) / 9), "100%")


def test_a_result_with_gradients_that_out_takes_is_an_error():
    module = tiled(lambda x, tile: torch.mm(x, x[:WIDTH], out=tile), torch.float32)
    hiremate(module, "100%", verbose=False)
    with pytest.raises(
        RuntimeError, match=r"functions with out=\.\.\. arguments don't support automatic differentiation"
    ):
        module(numbers(ROWS, WIDTH))


def test_a_result_that_is_traced_by_copying_is_proved_as_written():
    """The proof runs the call with `out=` itself, so that it sees where the copy has other numbers."""
    seen = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node for node in module.graph.nodes if "out" in node.kwargs)
        return module

    write, dtype = WRITES["a product"]
    with hacks.applied(hacks.Stage.CAPTURING):
        torch.compile(tiled(write, dtype), backend=backend)(numbers(ROWS, WIDTH))
    assert len(seen) == 1
