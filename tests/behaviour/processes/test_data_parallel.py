"""DistributedDataParallel: graphs end where buckets do, are planned together, and fill these in the order of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hiremate_lightning import hiremate, remove_hiremate
from hiremate_lightning.testing import captured_count, is_from_other_sizes
from tests.exact import drawn, simple_loop, train_both

WIDTH = 128


pytestmark = pytest.mark.usefixtures("one_process")
batch = drawn(256, WIDTH)


class Blocks(nn.Module):
    """Residual blocks, whose weights fill several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def varied(index: int) -> Tensor:
    return batch(index)[: 256 - 32 * (index % 3)]


def compressed(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def projected(model: DistributedDataParallel) -> None:
    """Let PowerSGD compress what lies in a bucket, by matrices that it draws one after the other."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


WAYS = {
    "small buckets": ({"bucket_cap_mb": 0.1}, lambda model: None, batch),
    "several buckets, many sizes": ({}, lambda model: None, varied),
    "small buckets, in half precision": ({"bucket_cap_mb": 0.5, "static_graph": True}, compressed, batch),
    "PowerSGD": ({"bucket_cap_mb": 100}, projected, batch),  # with two buckets gloo can wait for ever
}


@pytest.mark.parametrize(("options", "prepare", "make_batch"), WAYS.values(), ids=WAYS)
def test_a_replicated_model_trains_as_without_a_plan(options, prepare: Callable[..., None], make_batch):
    def make() -> nn.Module:
        model = DistributedDataParallel(Blocks(), **options)
        prepare(model)
        return model

    train_both(make, simple_loop(make_batch), "75%")


@pytest.mark.usefixtures("made_code_at_once")
def test_new_sizes_of_a_replicated_model_are_not_traced():
    sizes, seen = [256, 256, 200, 180, 230, 250, 190, 240, 210, 221], []

    def rows(index: int) -> Tensor:
        return batch(index)[: sizes[index]]

    train_both(lambda: DistributedDataParallel(Blocks()), simple_loop(rows, steps=len(sizes)), "55%")
    model = hiremate(DistributedDataParallel(Blocks()), "55%", verbose=False)
    for index in range(len(sizes)):
        model(rows(index)).square().mean().backward()
        seen.append((is_from_other_sizes(model), captured_count(model)))
        model.zero_grad()
    assert all(is_made for is_made, _ in seen[4:])
    assert len({count for _, count in seen[4:]}) == 1


def test_the_first_gradients_come_in_the_order_of_eager():
    """Buckets are filled in it: what three processes or more add up depends on the place in a bucket."""
    orders = []
    for is_planned in (False, True):
        model = DistributedDataParallel(Blocks())
        order: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(name))
        if is_planned:
            hiremate(model, "100%", verbose=False)
        model(batch(0)).square().mean().backward()
        remove_hiremate(model)
        orders.append(order)

    assert orders[1] == orders[0]
