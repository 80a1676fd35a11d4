"""Cross entropies and their gradients are made some rows at a time, and no number changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate, losses
from hiremate_lightning.losses import cross_entropy, cross_entropy_gradient
from hiremate_lightning.metering import measure_peak
from hiremate_lightning.targets import targets_of

from .exact import added_peaks, simple_loop, train_both

aten = torch.ops.aten
WIDTH, ROWS, CLASSES = 32, 200, 301


@pytest.fixture(autouse=True)
def _many_parts(monkeypatch):
    """Take 16 rows at a time, the last time 8, where nothing says otherwise."""
    monkeypatch.setattr(losses, "PART_BYTES", 1)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).mul(9).to(dtype)


def targets(rows: int) -> Tensor:
    found = torch.arange(rows) * 7 % CLASSES
    found[::5] = -100  # do not count
    return found


ROW_COUNTS = pytest.mark.parametrize("rows", [0, 1, 7, 8, 128, 129, ROWS, 1000])
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
    told = target, weight, reduction, -100, total
    expected = aten.nll_loss_backward(gradient, logarithms, *told)
    expected = aten._log_softmax_backward_data(expected, logarithms, 1, dtype).to(of)
    found = cross_entropy_gradient(gradient, logits, *told, [rows, CLASSES], dtype, [1, rows, CLASSES], of)
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
def test_beside_the_result_only_parts_are_allocated(monkeypatch, part_bytes, rows):
    monkeypatch.setattr(losses, "PART_BYTES", part_bytes)
    logits, target, shape = numbers(ROWS, CLASSES, dtype=torch.bfloat16), targets(ROWS), [ROWS, CLASSES]
    part = 4 * rows * CLASSES
    peak = measure_peak(lambda: cross_entropy(logits, target, 2, -100, shape, torch.float32))
    assert part <= peak <= part + 40 * ROWS
    one = torch.ones(())
    told = target, None, 2, -100, one, shape, torch.float32, shape, torch.bfloat16
    assert measure_peak(lambda: cross_entropy_gradient(one, logits, *told)) == 2 * ROWS * CLASSES + 2 * part


# ---------------------------------------------------------------- choice


class Words(nn.Module):
    """A model of words in half precision, and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.loss = loss
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        words = self.words(x)
        return self.loss(self.head(words + self.body(words)), x.roll(1, 1))


class Autocast(Words):
    """Single precision, half only where autocast says so."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__(loss, torch.float32)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def entropy(y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(y.float().flatten(0, 1), x.flatten())


def with_penalty(y: Tensor, x: Tensor) -> Tensor:
    y = y.float().flatten(0, 1)
    return F.cross_entropy(y, x.flatten()) + 1e-3 * y.logsumexp(1).square().mean()


def smoothed(y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(y.float().flatten(0, 1), x.flatten(), label_smoothing=0.1)


def logs(y: Tensor) -> Tensor:
    return y.float().flatten(0, 1).log_softmax(-1)


def batch(seed: int) -> Tensor:
    return torch.randint(CLASSES, (4, ROWS // 4), generator=torch.Generator().manual_seed(seed))


CHOICES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "half": (lambda: Words(entropy), 2),
    "autocast": (lambda: Autocast(lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten())), 2),
    "returned logits": (lambda: Words(lambda y, x: (entropy(y, x), y)), 2),
    "one for each row": (
        lambda: Words(lambda y, x: F.cross_entropy(y.float().flatten(0, 1), x.flatten(), reduction="none")),
        2,
    ),
    "weighted": (
        lambda: Words(lambda y, x: F.cross_entropy(y.float().flatten(0, 1), x.flatten(), torch.ones(CLASSES))),
        1,  # the gradient
    ),
    "single precision": (lambda: Words(entropy, torch.float32), 2),
    "half all through": (lambda: Words(lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten())), 2),
    "shifted": (
        lambda: Words(lambda y, x: F.cross_entropy(y[:, :-1].float().flatten(0, 1), x[:, 1:].flatten())),
        2,
    ),
    "returned converted": (lambda: Words(lambda y, x: (lambda z: (entropy(z, x), z))(y.float())), 2),
    "another term": (lambda: Words(with_penalty), 2),
    "smoothed": (lambda: Words(smoothed), 0),
    "logarithms read": (lambda: Words(lambda y, x: (lambda z: F.nll_loss(z, x.flatten()) - z.mean())(logs(y))), 0),
    "by columns": (lambda: Words(lambda y, x: F.cross_entropy(y.float().transpose(1, 2), x)), 0),
}


@pytest.mark.parametrize(("make", "count"), CHOICES.values(), ids=CHOICES)
def test_only_losses_whose_logarithms_nothing_else_reads_are_joined(make, count):
    module = hiremate(make(), "100%", verbose=False)
    module(batch(0))
    (part,) = targets_of(module).session.parts.all
    ops = [node.op for node in part.captured.graph.nodes]
    assert sum(op.startswith("hiremate.cross_entropy") for op in ops) == count


# ---------------------------------------------------------------- training


def total(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output.mean()


@pytest.mark.parametrize("budget", ["100%", "80%"])
@pytest.mark.parametrize(("make", "count"), CHOICES.values(), ids=CHOICES)
def test_training_is_exact(make, count, budget):
    train_both(make, simple_loop(batch, loss_of=total), budget, on_infeasible="warn")


@pytest.mark.parametrize("make", [CHOICES["half"][0], CHOICES["autocast"][0]], ids=["half", "autocast"])
def test_the_peak_is_what_was_planned_and_lies_below_that_of_three_operations(monkeypatch, make):
    plainly, planned = added_peaks(make(), batch(0))
    logits = 4 * ROWS * CLASSES  # in single precision
    assert planned <= plainly - logits
    monkeypatch.setattr(losses, "join", lambda joint: None)
    assert planned <= added_peaks(make(), batch(0))[1] - 0.3 * logits
