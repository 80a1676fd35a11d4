"""Gradients of parameters that several runs of captured graphs share are those of eager PyTorch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.exact import adamw, leave_behind, loop_of, network, train_both

WORDS, WIDTH = 32, 48


class Tied(nn.Module):
    """A language model whose embedding is its head, too; the second output may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.dropout(self.inner(self.embedding(words)).tanh(), 0.1, self.training)
        return F.linear(hidden, self.embedding.weight), hidden @ self.embedding.weight.t().abs()


class Broken(Tied):
    """The same in two captured graphs, one of which reads the weights once."""

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embedding(words)
        torch._dynamo.graph_break()
        hidden = self.inner(hidden).tanh()
        return F.linear(hidden, self.embedding.weight), hidden @ self.embedding.weight.t().abs()


def critic() -> nn.Module:
    """Divide weights by their norm, which is computed from the weights."""
    layers = (spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(WIDTH, 1)))
    return scoring(nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers))


@network(lambda net: {"net": net})
def scoring(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    score = self.net(words)
    return score, score.relu()


def both(model, words):
    first, second = model(words)
    return first.square().mean() + second.mean()


def twice(model, words):
    return both(model, words) + both(model, words.flip(0))


def three_times(model, words):
    return twice(model, words) + 0.1 * both(model, words.roll(1))


def once_with_one_output(model, words):
    return both(model, words) + model(words.flip(0))[0].square().mean()


def twice_backwards(model, words):
    loss = twice(model, words)
    loss.backward(retain_graph=True)
    return loss


def words_of(index):
    return torch.randint(WORDS, (8, 64), generator=torch.Generator().manual_seed(index))


def loop(loss_of, accumulate=1):
    return loop_of(lambda model, index: loss_of(model, words_of(index)), 4, adamw, accumulate)


@pytest.mark.parametrize("loss_of", [twice, three_times, once_with_one_output])
@pytest.mark.parametrize("make", [Tied, Broken, critic])
def test_a_module_called_several_times_in_a_step_is_exact(make, loss_of):
    train_both(make, loop(loss_of))


@pytest.mark.parametrize(("loss_of", "accumulate"), [(twice, 2), (twice_backwards, 1)])
def test_accumulated_gradients_and_second_backwards_are_exact(loss_of, accumulate):
    train_both(Tied, loop(loss_of, accumulate))


def test_gradients_that_are_asked_for_are_returned():
    def loop(model):
        log = []
        for index in range(4):
            words = words_of(index)
            log += torch.autograd.grad(twice(model, words), list(model.parameters()), materialize_grads=True)
            twice(model, words).backward(inputs=[model.embedding.weight])
            log += leave_behind(model)
        return log

    train_both(lambda: Broken().double(), loop)
