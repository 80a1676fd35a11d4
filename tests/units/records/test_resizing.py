"""Bounds of bytes at other sizes hold, storage by storage, against steps that were captured at these sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiremate_lightning.records.costs import Profile, in_eager
from hiremate_lightning.records.graph import Direction, Graph, Node, Storage, StorageKind
from hiremate_lightning.records.graph import Tensor as Value
from hiremate_lightning.records.resizing import Resizing, Sample
from tests.exact import captured_by, network


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(50, 24), nn.MultiheadAttention(24, 4, 0.1, batch_first=True)
        self.positions = nn.Parameter(torch.randn(64, 24))
        self.rest = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 72), nn.GELU(), nn.Dropout(0.1), nn.Linear(72, 50))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words) + self.positions[: words.shape[1]]
        x = self.rest(x + self.attention(x, x, x)[0])
        return F.cross_entropy(x[:, 1:].flatten(0, 1), words[:, :-1].flatten())


class Convolving(nn.Module):
    """Halves images twice, and brings them back to their size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        y = F.avg_pool2d(F.silu(self.down(x)), 2)
        y = self.up(F.interpolate(y, scale_factor=2.0))
        return torch.cat([x, y], 1).square().mean()


class Resized(nn.Module):
    """Brings pictures to one size, and takes their borders off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = (
            nn.Conv2d(3, 8, 7),
            nn.Sequential(nn.Conv2d(11, 8, 5, stride=2), nn.GELU(), nn.AvgPool2d(3)),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        x = torch.cat([F.interpolate(x, (24, 24)), F.interpolate(images, (24, 24), mode="bilinear")], 1)
        return self.rest(x).square().mean() + F.relu(self.first(images)).mean()


@network(lambda: {"message": nn.Linear(24, 24), "update": nn.Linear(24, 12)})
def passing(self, nodes: Tensor, edges: Tensor) -> Tensor:
    """Sends messages along the edges of a graph."""
    messages = torch.tanh(self.message(torch.cat([nodes[edges[0]], nodes[edges[1]]], 1)))
    received = torch.zeros(len(nodes), 24).index_add(0, edges[1], messages)
    return self.update(received).square().mean()


def words(rows: int, length: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (rows, length)),)


def images(height: int, width: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, height, width),)


def graph(nodes: int, edges: int) -> tuple[Tensor, ...]:
    return torch.randn(nodes, 12), torch.randint(0, nodes, (2, edges))


CASES: dict[str, tuple[type[nn.Module], Callable[..., Any], list[tuple[int, int]]]] = {
    "lengths": (Attending, words, [(4, 37), (4, 20), (4, 61)]),
    "crops": (Convolving, images, [(32, 48), (48, 32), (64, 64)]),
    "pictures made alike": (Resized, images, [(48, 36), (32, 64), (20, 28)]),
    "graphs": (passing, graph, [(40, 100), (55, 90), (31, 160)]),
    "lengths that are widths": (Attending, words, [(4, 24), (4, 12), (4, 36)]),
    "lengths that divide widths": (Attending, words, [(4, 36), (4, 18), (4, 12)]),
    "crops that are channels": (Convolving, images, [(16, 32), (32, 16), (64, 16)]),
}


@functools.cache
def samples_of(name: str) -> list[Sample]:
    """Capture the steps of a case."""
    make, batch, sizes = CASES[name]
    samples = []
    for own in sizes:
        inputs = batch(*own)
        captured = captured_by(make(), *inputs).graph
        profile = Profile((0.0,) * len(captured.nodes), (0,) * len(captured.nodes), "")
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        samples.append(Sample(shapes, captured, profile, len(captured.storages)))
    return samples


@pytest.mark.parametrize("name", CASES)
def test_bounds_hold_at_sizes_that_were_captured(name):
    samples = samples_of(name)
    for count in (1, 2, 3):
        for known in permutations(samples, count):
            resizing = Resizing(known)
            for sample in samples:
                found, actual = resizing.at(sample.sizes), np.array(in_eager(sample.graph, sample.profile)[0].sizes)
                assert (found.low <= actual + 1).all(), (known[0].sizes, sample.sizes)
                assert (found.high >= actual - 1).all(), (known[0].sizes, sample.sizes)
    *known, sample = samples[:3]
    most = (2.0 if name == "pictures made alike" else 1.25) * sum(sample.graph.sizes)
    found = Resizing(known).at(sample.sizes).high[: known[0].storages]
    assert found.sum() <= most, "they are close where two sizes were captured"


def step(*values: tuple[int, ...], weight: tuple[int, ...] = (64, 256), sizes: tuple[int, ...]) -> Sample:
    """A step that makes tensors of some shapes, each in a storage of its own."""
    shapes = (weight, *values)
    tensors = tuple(Value(f"t{i}", i, shape, "float32", 0 if i else None) for i, shape in enumerate(shapes))
    kinds = (StorageKind.PARAMETER, *[StorageKind.ACTIVATION] * len(values))
    storages = tuple(Storage(4 * int(np.prod(shape)), kind) for shape, kind in zip(shapes, kinds, strict=True))
    made = tuple(range(1, len(shapes)))
    node = Node("n", "op", Direction.FORWARD, (0,), made)
    graph = Graph((node,), tensors, storages, (0,), (), (0,), (), (), ())
    return Sample((sizes,), graph, Profile((0.0,), (1000,), ""), len(storages))


def rows_of(length: int) -> Sample:
    """A step of four rows, whose weight has four times as many rows as the first length."""
    return step((4, length, 256), weight=(688, 256), sizes=(4, length))


MULTIPLE, HALVES = step((4 * 172, 256), sizes=(4, 172)), step((48, 80), sizes=(96, 160))
PRODUCTS = [step((rows * length,), sizes=(rows, length)) for rows, length in ((64, 200), (96, 150))]
EXACT: dict[str, tuple[list[Sample], tuple[int, ...], int]] = {  # samples, other sizes, and bytes there
    "half of a multiple": ([MULTIPLE], (4, 86), 4 * 4 * 86 * 256),
    "a dimension that a weight may have does not shrink": ([rows_of(172)], (4, 86), 4 * 4 * 172 * 256),
    "unless two captures show it": ([rows_of(172), rows_of(100)], (4, 86), 4 * 4 * 86 * 256),
    "of an input without rows, as a picture without boxes has": ([step((4, 100), sizes=(0, 100))], (0, 50), 4 * 4 * 50),
    "half sizes do not shrink": ([HALVES], (48, 160), 4 * 48 * 80),
    "until two captures show them": ([HALVES, step((32, 100), sizes=(64, 200))], (192, 80), 4 * 96 * 40),
}
AT_LEAST: dict[str, tuple[list[Sample], tuple[int, ...], int]] = {
    "twice a multiple": ([MULTIPLE], (4, 344), 4 * 4 * 344 * 256),
    "a square": ([step((172 * 172,), sizes=(172,))], (344,), 4 * 344**2),
    # More rows than one take as many times more, whatever dimension they are in.
    "rows after one": ([step((1, 172, 256), sizes=(1, 172))], (4, 172), 4 * 4 * 172 * 256),
    "rows after one that is no dimension": ([step((172, 256), sizes=(1, 172))], (4, 172), 4 * 4 * 172 * 256),
    "half sizes that grow": ([HALVES], (192, 160), 4 * 96 * 80),
    "a product with one size": (PRODUCTS, (96, 200), 4 * 96 * 200),
    "a product with both sizes": (PRODUCTS, (200, 300), 4 * 200 * 300),
}


@pytest.mark.parametrize("name", [*EXACT, *AT_LEAST])
def test_bytes_at_other_sizes_follow_from_the_samples(name):
    samples, sizes, size_bytes = {**EXACT, **AT_LEAST}[name]
    high_bytes = float(Resizing(samples).at(sizes).high[1])
    assert high_bytes == size_bytes if name in EXACT else high_bytes >= size_bytes


def test_measured_bytes_never_shrink_and_grow_with_the_square():
    resizing = Resizing([step((4, 100), sizes=(4, 100))])
    assert resizing.at((4, 50)).high_workspaces[0] == 1000
    assert resizing.at((4, 200)).high_workspaces[0] == 4000
    assert resizing.at((4, 50)).low_workspaces[0] == 250
