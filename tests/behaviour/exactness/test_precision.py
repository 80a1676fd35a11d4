"""Reduced precision and memory formats: bit for bit as without a plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from hiremate_lightning import HiRemateWarning, get_plan, hiremate
from hiremate_lightning.callbacks import HiRemateCallback
from tests.exact import (
    Log,
    differing,
    drawn,
    leave_behind,
    loop_of,
    network,
    quiet,
    simple_loop,
    square_error,
    train_both,
)
from tests.trainers import quiet_trainer

ROWS, WIDTH = 256, 16
rows = drawn(ROWS, WIDTH)
pictures = drawn(16, 3, 12, 12)


def layers() -> nn.Sequential:
    block = (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2))
    return nn.Sequential(*block, nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def pictures_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.GELU(),
        nn.Conv2d(8, 4, 1),
    )


@network(lambda: {"first": nn.Linear(WIDTH, WIDTH), "layers": layers()})
def autocast_inside(self, x: Tensor) -> Tensor:
    x = self.first(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.layers(x).float() + x


@network(lambda: {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "single", "last")})
def single_precision_inside(self, x: Tensor) -> Tensor:
    """Attention with dropout computes in single precision on the CPU, whatever it is given; and a layer opts out."""
    heads = self.first(x).view(4, 2, -1, WIDTH // 2)
    x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(x.shape)
    with torch.autocast("cpu", enabled=False):
        x = torch.tanh(self.single(x.float()))
    return self.last(x)


SCALERS = {
    "no scaler": {"enabled": False},
    "scaled": {},
    "scaled too much, so that steps are skipped": {"init_scale": 2.0**60, "growth_interval": 2},
}


@pytest.mark.parametrize("make", [layers, single_precision_inside])
@pytest.mark.parametrize("scaler_options", SCALERS.values(), ids=SCALERS)
def test_autocast_around_the_call_is_exact(scaler_options, make):
    """In half precision with a scaler of gradients, and clipped then."""

    def loop(module: nn.Module) -> Log:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", **scaler_options)
        log: Log = []
        for index in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16 if scaler.is_enabled() else torch.bfloat16):
                loss = square_error(module(rows(index)))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            left = [t.nan_to_num() for t in leave_behind(module)]  # gradients of a step that is skipped are no numbers
            log += [loss.detach(), torch.tensor(scaler.get_scale()), *left]
        return log

    train_both(make, loop)


class Shared(nn.Module):
    """Applies a layer three times; uses a weight in a product and in single precision, before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.tied, self.explicit = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.tied.weight.sum(0)
        for _ in range(3):
            x = torch.tanh(self.again(x)).to(x.dtype) + x
        x = torch.tanh(self.tied(self.tied(x))).float() * self.tied.weight.mean(1)
        weight = self.explicit.weight
        return x + F.linear(x.bfloat16(), weight.bfloat16()) + F.linear(x.bfloat16(), weight.to(torch.bfloat16))


class SharedInside(Shared):
    """Opens autocast itself, in so many blocks."""

    def __init__(self, blocks: int, remembers: bool = True) -> None:
        super().__init__()
        self.blocks, self.remembers = blocks, remembers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.blocks):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.remembers):
                x = super().forward(x).float()
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("remembers", [True, False])
def test_gradients_of_a_layer_that_autocast_casts_once_are_exact(dtype, remembers):
    def loss_of(module: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=remembers):
            return square_error(module(rows(index)))

    train_both(Shared, loop_of(loss_of))


@network(lambda times: {"again": nn.Linear(WIDTH, WIDTH), "rest": layers(), "times": times})
def again(self, x: Tensor) -> Tensor:
    """Applies layers to rows, the first of them so many times."""
    for _ in range(self.times):
        x = torch.tanh(self.again(x)).to(x.dtype) + x
    return self.rest(x)


def in_one_block(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square_error(module(x) - module(y)) + square_error(module(x * y))


def one_of_three_unused(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return sum(square_error(output) for output in (module(x), module(y), module(x + y))[::2])


def in_two_blocks(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return in_one_block(module, x, y) + in_one_block(module, y, x)


def one_outside(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return in_one_block(module, x, y) + square_error(module(y))


def without_memory_of_casts(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        return square_error(module(x) - module(y))


def of_other_sizes(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square_error(module(x)) + square_error(module(y[:-3]))


@pytest.mark.parametrize(
    "loss_of", [in_one_block, one_of_three_unused, in_two_blocks, one_outside, without_memory_of_casts, of_other_sizes]
)
@pytest.mark.parametrize("times", [1, 3])
def test_calls_that_share_the_casts_of_a_block_are_exact(loss_of, times):
    """Autocast casts a weight once in a block, so that the gradients of all calls are added up in half precision."""
    loop = loop_of(lambda module, index: loss_of(module, rows(index), rows(index + 10)), accumulate=2)
    train_both(partial(again, times), loop, "60%")


class SharedInCheckpoints(nn.Module):
    """Calls a layer in each of several checkpoints, without gradients too where that is asked for."""

    def __init__(self, blocks: int = 1, enters: bool = False, without_gradients: bool = False) -> None:
        super().__init__()
        self.blocks, self.enters, self.without_gradients = blocks, enters, without_gradients
        self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def block(self, x: Tensor, own: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.enters else nullcontext():
            if self.without_gradients:
                with torch.no_grad():
                    x = x + self.shared(x)
            return self.shared(own(F.gelu(self.shared(x)))) + x

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.blocks):
            with torch.autocast("cpu", torch.bfloat16, enabled=not self.enters):
                for own in self.own[number :: self.blocks]:
                    x = checkpoint(self.block, x.float(), own, use_reentrant=False)
        return self.last(x.float())


ALL_PROVED = "forward 1 of 1 graph, gradients 1 of 1"
NO_MEMORY = f"{ALL_PROVED[:-6]}0 of 1; not more, since the budget leaves no memory to compute them in eager mode"


@pytest.mark.filterwarnings("error:Code of")
@pytest.mark.parametrize(("budget", "proved"), [("100%", {ALL_PROVED}), ("1 KiB", {ALL_PROVED, NO_MEMORY})])
@pytest.mark.parametrize("options", [{}, {"blocks": 2}, {"enters": True}, {"without_gradients": True}], ids=str)
def test_a_weight_of_several_checkpoints_is_exact(options, budget, proved):
    """Gradients are added up in half precision in a block of autocast, across the calls of checkpoint in it.

    At the least memory some can't be computed as written beside the step; the plan says so.
    """
    plan = train_both(lambda: SharedInCheckpoints(**options), simple_loop(rows), budget, time_limit_s=2)
    assert plan.proved in proved


class Inverting(nn.Module):
    """Fails within its own block of autocast on batches of zeros; a token orders the check that fails."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.ends = ends
        if ends:  # a weight of two graphs is cast twice
            self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            if self.ends:
                torch._dynamo.graph_break()
            root = torch.linalg.cholesky((x.detach().float().square().mean() - 0.1) * torch.eye(WIDTH))
            return self.second(x).float() @ root


@pytest.mark.parametrize("ends", [False, True])
def test_autocast_ends_where_an_error_leaves_its_block(ends):
    def loop(module: nn.Module) -> Log:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        log: Log = []
        for index in range(6):
            optimizer.zero_grad()
            try:
                square_error(module(rows(index) * (index % 2))).backward()
            except torch.linalg.LinAlgError:
                log.append(torch.tensor(index))
            assert not torch.is_autocast_enabled("cpu")
            optimizer.step()
            log += [p.detach().clone() for p in module.parameters()]
        assert len(log) == 6 * len(list(module.parameters())) + 3
        return log

    train_both(lambda: Inverting(ends), loop, "100%")


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return square_error(self.layers(batch[0].to(self.layers[0].weight.dtype)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_a_precision_of_the_trainer_is_exact(precision):
    weights = []
    for callbacks in ([], [HiRemateCallback("80%", verbose=False, on_infeasible="warn")]):
        torch.manual_seed(3)
        module = Learner()
        data = DataLoader(TensorDataset(torch.cat([rows(index) for index in range(5)])), batch_size=ROWS)
        with quiet():
            quiet_trainer(*callbacks, precision=precision).fit(module, data)
        weights.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert callbacks[0].plan is not None


STRIDED = {
    "transposed": lambda index: torch.randn(WIDTH, ROWS, generator=torch.Generator().manual_seed(index)).t(),
    "every other": lambda index: rows(index).repeat_interleave(2, 0)[::2],
    "expanded": lambda index: rows(index)[:1].expand(ROWS, WIDTH),
    "of a larger one": lambda index: torch.cat([rows(index), rows(index)], 1)[:, 3 : WIDTH + 3],
}
FORMATS = torch.contiguous_format, torch.channels_last
MODELS = {
    "autocast inside": (autocast_inside, rows),
    **{
        f"weights of {dtype}": (
            lambda dtype=dtype: layers().to(dtype),
            lambda index, dtype=dtype: rows(index).to(dtype),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    },
    **{
        f"weights {weights}, batch {batch}": (
            lambda weights=weights: pictures_net().to(memory_format=weights),
            lambda index, batch=batch: pictures(index).to(memory_format=batch),
        )
        for weights, batch in product(FORMATS, FORMATS)
    },
    **{f"batch {name}": (layers, make_batch) for name, make_batch in STRIDED.items()},
    **{
        f"{blocks} blocks of autocast, cache {remembers}": (partial(SharedInside, blocks, remembers), rows)
        for blocks, remembers in ((1, True), (1, False), (2, True))
    },
}


@pytest.mark.parametrize(("make", "make_batch"), MODELS.values(), ids=MODELS)
def test_types_and_layouts_are_exact(make, make_batch):
    train_both(make, simple_loop(make_batch))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, affine=True)])
def test_statistics_of_half_precision_norms_count_in_their_type(norm):
    model = nn.Sequential(*(nn.Sequential(nn.Conv1d(32, 32, 1), norm(32), nn.ReLU()) for _ in range(4)))
    hiremate(model, "60%", verbose=False, on_infeasible="warn")
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(torch.randn(64, 32, 16))
        output.float().square().mean().backward()
        model.zero_grad()
    plan = get_plan(model)
    assert plan.measured.peak_bytes == plan.planned_peak_bytes


@network(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
def dithered(self, x: Tensor) -> Tensor:
    """Makes tensors whose type is PyTorch's default one."""
    noise, ramp = torch.rand(WIDTH), torch.linspace(0, 1, WIDTH)
    return torch.sin(self.linear(x) * noise) * torch.cos(x + ramp)


def gradients_of(module: nn.Module, is_backward_inside: bool) -> list[Tensor | None]:
    for index in range(3):
        module.zero_grad()
        loss = module(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))).square().mean()
        with torch.autocast("cpu", enabled=is_backward_inside):
            loss.backward()
    return [p.grad for p in module.parameters()]


def test_a_backward_within_autocast_keeps_the_forward_s_types():
    """PyTorch advises against it, and casts products of such a backward alone: no gradient could be computed again."""
    torch.manual_seed(0)
    module = nn.Sequential(*(dithered() for _ in range(4)))
    torch.manual_seed(1)
    expected = gradients_of(module, is_backward_inside=False)
    torch.manual_seed(1)
    hiremate(module, "50%", verbose=False)
    with pytest.warns(HiRemateWarning, match="Settings of PyTorch \\(autocast"):
        gradients = gradients_of(module, is_backward_inside=True)
    assert not differing(gradients, expected)


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recomputed_tensors_keep_the_forward_s_default_dtype(dtype, default_dtype):
    """Lightning's "bf16-true" and "64-true" set the default dtype around the forward alone."""

    def before_the_forward(index: int) -> Tensor:
        default_dtype(dtype)
        return torch.randn(ROWS, WIDTH)

    def after_the_forward(output: Tensor) -> Tensor:
        default_dtype(torch.float32)
        return square_error(output)

    def make() -> nn.Module:
        return nn.Sequential(*(dithered() for _ in range(4))).to(dtype)

    plan = train_both(make, simple_loop(before_the_forward, loss_of=after_the_forward), "50%")
    assert plan.schedule.recomputed(plan.graph)
