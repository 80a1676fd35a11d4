"""Results of captured code get nodes of their own in autograd's graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from hiremate_lightning.torch_private.aot import give_own_nodes


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.seen = [gradient is None for gradient in gradients]
        return sum(g * factor for g, factor in zip(gradients, (2, 3), strict=True) if g is not None)


class _Held:
    """What a hook holds beside a result."""


def two_results() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    return x, *_Two.apply(x)


def lives_on(has_own_nodes: bool) -> bool:
    """Whether what a hook on one result holds, beside another result, is still there after all was used."""
    _, one, other = two_results()
    if has_own_nodes:
        give_own_nodes([one, other])
    held = _Held()
    reference = weakref.ref(held)
    one.register_hook(lambda gradient, held=held, other=other: gradient * other.detach())
    one.sum().backward(retain_graph=True)
    del one, other, held
    gc.collect()
    return reference() is not None


def test_what_a_hook_holds_is_freed_where_results_have_own_nodes():
    assert lives_on(has_own_nodes=False)
    assert not lives_on(has_own_nodes=True)


def test_results_with_own_nodes_are_the_same_tensors_unchanged():
    x, one, other = two_results()
    results = [one, other, x, one, 3, other[1:]]
    versions = one._version, other._version
    give_own_nodes(results)
    assert [id(result) for result in results[:2]] == [id(one), id(other)]
    assert (one._version, other._version) == versions
    assert one.grad_fn is not other.grad_fn
    one.mul_(2)
    assert one._version == versions[0] + 1
    (one * other).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 24.0))


def test_a_gradient_that_never_comes_stays_away():
    _, one, other = two_results()
    node = one.grad_fn
    give_own_nodes([one, other])
    other.sum().backward()
    assert node.seen == [True, False]
