"""Kernels that add in any order, on a simulated GPU: plans give eager's numbers, and proofs say what differs.

Eager PyTorch itself has other last bits in each step there. So plans are compared in two ways: bit for bit where the
same sums are added in the same order, drawn by a seed, and by rounding where each call adds in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from tests.exact import Log, differing, leave_behind
from tests.simulated_gpu import torch_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch_cuda.is_installed(), reason="runs by python -m tests.simulated_gpu"),
]
WORDS, WIDTH, STEPS = 64, 32, 4


class Reader(nn.Module):
    """Attention over words of which some occur twice, and rows that are scattered."""

    def __init__(self, scatter: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scatter, self.words = scatter, nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(WIDTH, 3 * WIDTH), "wide": nn.Linear(WIDTH, 4 * WIDTH),
                           "back": nn.Linear(4 * WIDTH, WIDTH), "norm": nn.RMSNorm(WIDTH)})
            for _ in range(3)
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in layer["mix"](layer["norm"](x)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.dropout(layer["back"](F.gelu(layer["wide"](x))), 0.1)
        return self.scatter(x, ids)


def index_add(x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(WORDS, WIDTH, device=x.device, dtype=x.dtype).index_add(0, ids.flatten(), x.flatten(0, 1))


def index_put(x: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(WORDS, WIDTH, device=x.device, dtype=x.dtype).index_put((ids,), x, accumulate=True)


def scatter_add(x: Tensor, ids: Tensor) -> Tensor:
    rows = ids.flatten()[:, None].expand(-1, WIDTH)
    return torch.zeros(WORDS, WIDTH, device=x.device, dtype=x.dtype).scatter_add(0, rows, x.flatten(0, 1))


def train(
    scatter: Callable[[Tensor, Tensor], Tensor], budget: str | None, dtype: torch.dtype, seed: int | None
) -> tuple[Log, nn.Module]:
    """Take steps of SGD on the simulated GPU, with an order of its own for each, or for each call."""
    torch.manual_seed(0)
    module = Reader(scatter).to("cuda", dtype)
    if budget is not None:
        hiremate(module, budget, verbose=False, on_infeasible="warn")
    optimizer, log = torch.optim.SGD(module.parameters(), lr=1e-2), []
    for index in range(STEPS):
        ids = torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(index)).cuda()
        optimizer.zero_grad()
        with torch_cuda.any_order(None if seed is None else seed + index):
            loss = module(ids).float().square().mean()
            loss.backward()
        optimizer.step()
        log += [loss.detach().clone(), *leave_behind(module), torch.cuda.get_rng_state()]
    return log, module


@pytest.mark.parametrize(
    ("scatter", "dtype"), [(index_add, torch.bfloat16), (index_put, torch.float32), (scatter_add, torch.float32)]
)
def test_plans_are_eager_bit_for_bit_in_each_order_of_sums(scatter, dtype):
    expected = train(scatter, None, dtype, seed=100)[0]
    assert differing(train(scatter, None, dtype, seed=200)[0], expected), "the order changes nothing"
    found, module = train(scatter, "60%", dtype, seed=100)
    plan = get_plan(module)
    assert plan is not None
    assert plan.schedule.recomputed(plan.graph)
    assert not differing(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_proof_says_what_eager_adds_in_any_order(dtype, recwarn):
    module = train(index_add, "60%", dtype, seed=None)[1]
    plan = get_plan(module)
    assert plan is not None
    assert plan.proved == "forward 1 of 1 graph (1 up to rounding), gradients 1 of 1 (1 up to rounding)"
    own = [words for words in plan.rounded if "two runs of eager PyTorch differ by" in words]
    assert any("gradient" in words for words in own)
    assert not [w for w in recwarn if "runs as it was written" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_any_order_plans_differ_as_eager_does(dtype):
    """The tolerance of the first step's gradients is what two eager runs differ by, four times."""

    def gradients(budget: str | None) -> list[Tensor]:
        module = train(index_add, budget, dtype, seed=None)[1]
        return [p.grad.double() for p in module.parameters() if p.grad is not None]

    first, second, planned = gradients(None), gradients(None), gradients("60%")
    own, ours = (
        max(float((a - b).abs().max()) for a, b in zip(first, other, strict=True)) for other in (second, planned)
    )
    assert 0 < ours <= 4 * own


def test_deterministic_algorithms_add_in_one_order():
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        expected, again = (train(index_add, budget, torch.float32, seed=None)[0] for budget in (None, "60%"))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert not differing(again, expected)


def test_wrong_gradients_are_refused_in_any_order(scaled_gradients):
    """What eager itself differs by hides no gradients that are off by 1 %."""
    scaled_gradients(1.01)
    with pytest.warns(HiRemateWarning, match="as captured it gives other numbers"):
        train(index_add, "60%", torch.float32, seed=None)
