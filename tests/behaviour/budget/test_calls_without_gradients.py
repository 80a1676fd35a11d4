"""What a script computes from calls without gradients, before the next call with them, counts for the budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.memory.metering import MemoryMeter
from tests.exact import differing, recorded, take_steps

ROWS, CHUNK, WIDTH, STEPS = 512, 128, 32, 6
TEXT = "without gradients, and what was computed until the next call with gradients, took"


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU())]
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), *layers, nn.Linear(4 * WIDTH, WIDTH))


def plan_net(budget: int | str = "60%") -> nn.Module:
    model = make_net()
    hiremate(model, budget, verbose=False)
    return model


def contrastive_loss(embeddings: list[torch.Tensor]) -> torch.Tensor:
    """Compute a loss of all pairs: its table of ROWS x ROWS numbers is the largest value of the iteration."""
    one, other = (F.normalize(torch.cat(embeddings[i::2])) for i in range(2))
    return F.cross_entropy(20 * one @ other.T, torch.arange(len(one)))


def cached_gradients(model: nn.Module, index: int, rows: int = ROWS) -> torch.Tensor:
    """GradCache: embeddings without gradients, their loss, then calls with gradients chunk by chunk."""
    generator = torch.Generator().manual_seed(index)
    chunks = torch.randn(2 * rows, WIDTH, generator=generator).split(CHUNK)
    with torch.no_grad():
        embeddings = [model(chunk).detach().requires_grad_() for chunk in chunks]
    loss = contrastive_loss(embeddings)
    loss.backward()
    for chunk, embedding in zip(chunks, embeddings, strict=True):
        (model(chunk) * embedding.grad).sum().backward()
    return loss.detach()


def train(model: nn.Module, rows: int = ROWS, steps: int = STEPS) -> list[torch.Tensor]:
    """Train, and return losses, gradients of each step and weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values = []
    for index in range(steps):
        optimizer.zero_grad()
        values.append(cached_gradients(model, index, rows))
        values += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*values, *(p.detach() for p in model.parameters())]


def trained(steps: int = 3) -> tuple[nn.Module, torch.Tensor]:
    """Train a planned model on one chunk; return both."""
    model, x = plan_net("80%"), torch.randn(CHUNK, WIDTH, generator=torch.Generator().manual_seed(1))
    take_steps(model, lambda _: x, steps)
    return model, x


@pytest.fixture
def silent() -> Iterator[None]:
    """Fail if a warning names calls without gradients."""
    with recorded() as warned:
        yield
    assert not [text for text in warned if TEXT in text]


def test_a_loss_of_cached_embeddings_above_the_budget_warns() -> None:
    """The peak in the warning is true."""
    plain, model = train(make_net()), plan_net()
    with pytest.warns(HiRemateWarning, match=TEXT) as warned:
        values = train(model)
    assert not differing(plain, values)
    model.zero_grad()
    gc.collect()
    with MemoryMeter(torch.device("cpu")) as meter:
        cached_gradients(model, 0)
    added_bytes = max(interval.peak_bytes for interval in meter.intervals)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    (text,) = (str(w.message) for w in warned if TEXT in str(w.message))
    number, unit = text.split(" took ")[1].split(",")[0].split()
    assert unit == "MiB"
    # The first chunk counts as existing, so nothing but the batch of the script is missing in the warning.
    assert float(number) * 2**20 == pytest.approx(weights_bytes + added_bytes, rel=0.03)


@pytest.mark.usefixtures("silent")
def test_cached_embeddings_within_the_budget_do_not_warn() -> None:
    model = plan_net(64 * 2**20)
    train(model)
    assert get_plan(model) is not None


@pytest.mark.usefixtures("silent")
def test_an_optimizer_ends_the_watch_on_calls_without_gradients() -> None:
    """A validation in training mode, before the optimizer steps, is not measured together with that step."""
    model, x = trained(steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            model(x[:1])
        optimizer.step()
        assert not MemoryMeter.is_running(torch.device("cpu"))
        torch.empty(2**22)  # 16 MiB, not in a run of calls without gradients


@pytest.mark.usefixtures("silent")
def test_a_late_optimizer_state_raises_what_calls_may_take() -> None:
    """A share of the budget is of what a step adds to all that exists, so to a state that came late, too."""
    model, x = trained(steps=0)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        take_steps(model, lambda _: x, 4, clears="never")
        optimizer.step()
        with torch.no_grad():
            model(x)


def test_many_calls_without_gradients_are_not_watched_for_ever() -> None:
    """Those in eval mode are not watched at all."""
    model, x = trained()
    model.eval()
    with torch.no_grad():
        model(x)
        assert not MemoryMeter.is_running(torch.device("cpu"))
        model.train()
        model(x)
        assert MemoryMeter.is_running(torch.device("cpu"))
        for _ in range(100):
            model(x[:1])
    assert not MemoryMeter.is_running(torch.device("cpu"))
