"""Code that torch.compile reads otherwise than Python does takes, in a planned step, the path of plain training."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from hiremate_lightning import hiremate
from hiremate_lightning.capturing.backend import OPAQUE
from hiremate_lightning.testing import session_of
from tests.exact import captured_by, drawn, network, planned_alike, simple_loop, take_steps, train_both

ROWS, SIZE = 32, 16


@network(
    lambda factor: {"first": nn.Linear(SIZE, 4 * SIZE), "last": nn.Linear(4 * SIZE, SIZE), "factor": factor},
)
def scaled(self, x):
    """Multiplies by what a function says in the middle of its forward."""
    y = torch.tanh(self.first(x))
    return self.last(torch.tanh(y * self.factor(y)))


def batch(_: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, SIZE)


def train_scaled(make_factor) -> None:
    """Compare plain with planned training; each has a factor of its own, and the same random numbers."""

    def make() -> nn.Module:
        np.random.seed(0)  # noqa: NPY002
        return scaled(make_factor())

    train_both(make, simple_loop(batch), "100%")


def captured_count(factor) -> int:
    model = hiremate(scaled(factor), "100%", verbose=False)
    take_steps(model, batch, 2, clears="never")
    return session_of(model).captured_count


# ---------------------------------------------------------------- questions


def _of_module() -> bool:
    return torch.compiler.is_compiling()


def _of_transformers() -> bool:
    return pytest.importorskip("transformers.utils.import_utils").is_tracing()


QUESTIONS = {
    "compiler": torch.compiler.is_compiling,
    "wrapped": _of_module,
    "dynamo": torch.compiler.is_dynamo_compiling,
    "exporting": torch.compiler.is_exporting,
    "_dynamo": torch._dynamo.is_compiling,
    "_utils": torch._utils.is_compiling,
    "scripting": torch.jit.is_scripting,
    "tracing": torch.jit.is_tracing,
    "transformers": _of_transformers,
}


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.filterwarnings("ignore:.*is_compiling")
def test_a_planned_step_hears_what_plain_training_hears(name):
    asks = QUESTIONS[name]
    asks()
    train_scaled(lambda: lambda y: 0.5 if asks() else 2.0)


@pytest.mark.parametrize("wrap", [torch.compiler.allow_in_graph, torch.compile(backend="eager")], ids=["opaque", "own"])
def test_a_function_put_into_graphs_or_compiled_hears_it_too(wrap):
    """A function that Dynamo does not read, and that is traced while torch compiles, or that its author compiled."""
    scale = wrap(lambda y: y * (0.5 if torch.compiler.is_compiling() else 2.0))
    train_scaled(lambda: scale)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_backward_of_an_autograd_function_hears_it_too():
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return (4 * y).round()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (0.5 if torch.compiler.is_compiling() else 2.0)

    train_scaled(lambda: Rounded.apply)


def test_a_question_after_cuda_graphs_ends_no_graph():
    """transformers asks so inside of a `try`, since builds for the CPU raise an error."""

    def scale(_):
        try:
            return 0.5 if torch.cuda.is_current_stream_capturing() else 2.0
        except RuntimeError:
            return 2.0

    assert captured_count(scale) == 1
    train_scaled(lambda: scale)


def test_torch_itself_hears_that_it_is_compiled():
    """checkpoint asks in order to be traceable; so does what stands in the place of a module's call."""

    @network(lambda: {"inner": scaled(lambda y: 2.0)})
    def checkpointed(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    captured = captured_by(checkpointed(), batch())
    assert any(node.checkpoint is not None for node in captured.graph.nodes)
    with pytest.raises(Exception, match=r"torch.compile is around a module that is planned"):
        torch.compile(hiremate(scaled(lambda y: 2.0), "100%", verbose=False), backend="eager")(batch())


@pytest.mark.models
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers_is_one_graph():
    """Its variables of a context can't be captured, and it asks in order to do without them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=SIZE, n_head=2, vocab_size=50, attn_pdrop=0)
    model = hiremate(transformers.GPT2LMHeadModel(config).train(), "100%", verbose=False)
    ids = torch.arange(20).view(2, 10)
    for _ in range(2):
        model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert session_of(model).captured_count == 1


# ---------------------------------------------------------------- caches and NumPy


def drawn_once():
    @functools.lru_cache
    def noise(size):
        return torch.rand(size)

    return lambda y: noise(y.shape[-1])


def counted_once():
    calls = [0]

    @functools.lru_cache
    def count(_):
        calls[0] += 1
        return float(calls[0])

    return lambda y: count(y.shape[-1])


def counted_in_each_step():
    count = itertools.count(1)
    return lambda y: float(next(count))


FACTORS = {
    "a cached random number": drawn_once,
    "a cached count of calls": counted_once,
    "a counter of the process": counted_in_each_step,
    "NumPy's own generator": lambda: lambda y: np.random.rand(1).item(),  # noqa: NPY002  as models do
    **{  # torch in NumPy's place adds in another order
        name: lambda name=name: lambda y: float(np.mean(getattr(np, name)(y.detach().numpy() / 3)))
        for name in ("sum", "mean", "std", "exp")
    },
}


@pytest.mark.parametrize("make_factor", FACTORS.values(), ids=FACTORS)
def test_caches_counters_and_numpy_work_as_in_plain_training(make_factor):
    train_scaled(make_factor)


@functools.lru_cache
def positions(size):
    return torch.arange(float(size)) / size


@pytest.mark.parametrize("factor", [lambda y: positions(y.shape[-1]), lambda y: np.sqrt(np.prod(y.shape))])
def test_cached_functions_and_numpy_of_sizes_end_no_graph(factor):
    assert captured_count(factor) == 1


# ---------------------------------------------------------------- opaque functions


def test_an_opaque_function_is_captured_with_what_surrounds_it(monkeypatch):
    name, function = OPAQUE[0]
    module = types.ModuleType(name)

    def contract(equation, *operands):
        assert threading.get_ident()  # which Dynamo does not trace
        return torch.einsum(equation, *operands)

    setattr(module, function, contract)
    monkeypatch.setitem(sys.modules, name, module)

    @network(lambda: {"weight": nn.Parameter(torch.randn(8, 8))})
    def contracting(self, x):
        return torch.tanh(module.einsum("bi,io->bo", torch.tanh(x), self.weight))

    planned = planned_alike(contracting(), simple_loop(drawn(16, 8)), "100%")
    assert session_of(planned).captured_count == 1
