"""Max pools note places within their windows, and no number changes by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning import hiremate
from hiremate_lightning.memory.metering import measure_peak
from hiremate_lightning.rewriting import pooling
from hiremate_lightning.testing import changed_thresholds
from tests.exact import added_peaks, captured_by, drawn, network, simple_loop, take_steps, train_both

BATCH, CHANNELS, SIZE = 5, 12, 21
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
batch = drawn(4, 3, 32, 32)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make numbers of which many are equal, some are infinite, and some are none."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(5)).mul(3).round()
    flat = found.flatten()
    flat[::97], flat[5::101], flat[7::103] = torch.nan, torch.inf, -torch.inf
    if len(shape) > 3:
        found[0, 0] = -torch.inf
    return found.to(dtype)


# ---------------------------------------------------------------- kernels

WINDOWS = {
    "2": {"kernel_size": 2},
    "3, overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "5, one after the other": {"kernel_size": 5, "stride": 1, "padding": 2},
    "wide": {"kernel_size": (2, 7), "stride": (2, 3), "padding": (1, 3)},
    "dilated": {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": (2, 3)},
    "rounded up": {"kernel_size": 2, "stride": 2, "ceil_mode": True},
    "gaps": {"kernel_size": 2, "stride": 5},
    "all": {"kernel_size": SIZE},
}


def both_ways(source: Tensor, **options) -> tuple[list[Tensor], list[Tensor], torch.dtype]:
    """Give maxima and gradient by PyTorch and by parts, and the dtype of the places."""
    dims = source.dim() - 2
    pool = F.max_pool2d if dims == 2 else F.max_pool3d
    read = source.clone(memory_format=torch.preserve_format).requires_grad_()
    expected = pool(read, **options)
    arriving = torch.randn(expected.shape, dtype=torch.float64).to(source.dtype)
    (gradient,) = torch.autograd.grad(expected, read, arriving)

    def each(value) -> list[int]:
        return [value] * dims if isinstance(value, int) else list(value)

    kernel = each(options["kernel_size"])
    steps = (options.get("stride", kernel), options.get("padding", 0), options.get("dilation", 1))
    windows = (kernel, *map(each, steps), options.get("ceil_mode", False))
    dtype = pooling._dtype_of_places(source.shape[2:], windows)
    form = pooling.memory_format_of(source)
    values, places = pooling.max_pool(source, windows, list(expected.shape), form, dtype)
    found = pooling.max_pool_gradient(arriving, places, windows, list(source.shape), form)
    assert values.stride() == expected.stride()
    assert found.stride() == gradient.stride()
    return [expected.detach(), gradient], [values, found], places.dtype


def are_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(77), b.nan_to_num(77)) for a, b in zip(found, expected, strict=True))


@pytest.fixture(params=[1, 2**20], ids=["one by one", "together"])
def part_bytes(request, change_thresholds):
    change_thresholds(part_bytes=request.param)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [3, CHANNELS])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
def test_pictures_are_pooled_as_by_pytorch(options, last, channels, dtype):
    source = numbers(BATCH, channels, SIZE, SIZE + 4, dtype=dtype)
    source = source.contiguous(memory_format=LAST[4]) if last else source
    expected, found, _ = both_ways(source, **options)
    assert are_same(found, expected)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("options", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}], ids=str)
def test_volumes_are_pooled_as_by_pytorch(options, last, dtype):
    source = numbers(BATCH, CHANNELS, 6, 9, 7, dtype=dtype)
    source = source.contiguous(memory_format=LAST[5]) if last else source
    kind = (pooling.memory_format_of(source), source.device, dtype)
    if pooling._gives_the_same(3, *kind):
        expected, found, _ = both_ways(source, **options)
        assert are_same(found, expected)
    else:
        assert last  # PyTorch names places outside of windows


@pytest.mark.parametrize(
    ("width", "kernel", "dtype"),
    [
        (254, 2, torch.uint8),
        (255, 2, torch.int16),  # from the first of a window to its last are 256 elements
        (32766, 2, torch.int16),
        (32767, 2, torch.int32),
    ],
)
def test_places_are_as_narrow_as_their_windows_allow(width, kernel, dtype):
    source = torch.randn(2, 2, 3, width + 1)[..., :width].contiguous()
    source[..., -1, -1] = 99  # the last place of the last window, where that ends with the row
    expected, found, places = both_ways(source, kernel_size=kernel, stride=1)
    assert places is dtype
    assert are_same(found, expected)


def test_beside_the_results_only_parts_are_allocated(change_thresholds):
    change_thresholds(part_bytes=1)
    source, windows = torch.randn(64, 8, 32, 32), ([2, 2], [2, 2], [0, 0], [1, 1], False)
    shape, form, values = [64, 8, 16, 16], torch.contiguous_format, 64 * 8 * 16 * 16
    part = 4 * 8 * 16 * 16  # of them
    peak = measure_peak(lambda: pooling.max_pool(source, windows, shape, form, torch.uint8))
    assert 5 * values + 8 * part <= peak <= 5 * values + 60 * part
    _, places = pooling.max_pool(source, windows, shape, form, torch.uint8)
    gradient = torch.randn(shape)
    peak = measure_peak(lambda: pooling.max_pool_gradient(gradient, places, windows, list(source.shape), form))
    assert 4 * source.numel() + 8 * part <= peak <= 4 * source.numel() + 18 * part


# ---------------------------------------------------------------- choice


@network(
    lambda pool: {
        "before": nn.Conv2d(3, 16, 3, padding=1),
        "norm": nn.BatchNorm2d(16),
        "pool": pool,
        "after": nn.Conv2d(16, 64, 3, padding=1),
    }
)
def pooled(self, x: Tensor) -> Tensor:
    """Convolutions with a pool between."""
    return self.after(self.pool(self.norm(self.before(x)))).mean()


def activated(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, 2, 1)


def then_activated(x: Tensor) -> Tensor:
    return F.relu(F.max_pool2d(x, 2), inplace=True)


def several(x: Tensor) -> Tensor:
    return torch.stack([F.max_pool2d(x, k, 1, k // 2) for k in (3, 5, 9)]).sum(0)


def places_are_read(x: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return values * (places % 3)


CHOICES = {  # pools, and how many of them are joined with what they note
    "activated": (activated, 1),
    "then activated": (then_activated, 1),
    "channels last": (lambda x: activated(x.contiguous(memory_format=LAST[4])), 1),
    "twice": (lambda x: F.max_pool2d(F.max_pool2d(x, 3, 1).sin(), 2), 2),
    "several": (several, 3),
    "signals": (lambda x: F.max_pool1d(x.flatten(2), 4, 2).unflatten(2, (1, -1)), 1),
    "volumes": (lambda x: F.max_pool3d(x.unflatten(1, (4, 4)), 2).flatten(1, 2).repeat(1, 2, 1, 1), 1),
    "in half": (lambda x: F.max_pool2d(x.bfloat16(), 2).float(), 1),
    "of a view": (lambda x: F.max_pool2d(x[:, :, 1:-1], 2), 0),
    "no batch": (lambda x: torch.stack([F.max_pool2d(picture, 2) for picture in x]), 0),
    "unpooled": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), 0),
    "places are read": (places_are_read, 0),
    "adaptive": (lambda x: F.adaptive_max_pool2d(x, 8), 0),
    "small": (lambda x: F.max_pool2d(x, 32), 0),
}


@pytest.mark.usefixtures("_kernels_uncompiled")
def test_pools_are_joined_beside_fused_kernels_too():
    graph = captured_by(pooled(activated), batch(0), compile="inductor").graph
    assert {"hiremate.max_pool", "hiremate.max_pool_gradient"} <= {node.op for node in graph.nodes}


# ---------------------------------------------------------------- training


@pytest.mark.parametrize(("pool", "count"), CHOICES.values(), ids=CHOICES)
def test_training_is_exact_with_the_expected_joined_pools(pool, count):
    plan = train_both(lambda: pooled(pool), simple_loop(batch), "70%")
    ops = [node.op for node in plan.graph.nodes]
    assert ops.count("hiremate.max_pool") == ops.count("hiremate.max_pool_gradient") == count


@network(lambda: {"layer": nn.Conv2d(3, 16, 3, padding=1)})
def forces(self, x: Tensor) -> Tensor:
    """Trained on the gradient of a pool."""
    x = x.requires_grad_()
    energy = F.max_pool2d(torch.tanh(self.layer(x)), 2).square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def test_a_gradient_of_a_gradient_is_exact():
    train_both(forces, simple_loop(batch), "100%")


@pytest.mark.parametrize("pool", [activated, then_activated, several], ids=lambda pool: pool.__name__)
def test_the_peak_is_below_that_of_eager_and_both_are_foreseen(change_thresholds, pool):
    change_thresholds(part_bytes=1)
    torch.manual_seed(1)
    plainly, planned = added_peaks(pooled(pool), batch(0))
    with changed_thresholds(pooled_bytes=2**40):
        _, before = added_peaks(pooled(pool), batch(0))
    places = pool(torch.zeros(4, 16, 32, 32)).numel() * (3 if pool is several else 1)
    assert planned <= before - 6 * places
    module = pooled(pool)
    module(batch(0)).backward()
    hiremate(module, "100%", verbose=False)
    plan = take_steps(module, lambda _: batch(0), 3, loss_of=lambda loss: loss, clears="never")
    assert plan.unplanned_peak_bytes - plan.resident_bytes == pytest.approx(plainly, rel=0.01)
