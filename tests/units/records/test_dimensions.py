"""From which sizes dimensions follow, against steps that were captured at other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hiremate_lightning.records.costs import as_plain
from hiremate_lightning.records.dimensions import Origins, VaryingSizes, origins_of
from hiremate_lightning.records.graph import StorageKind
from hiremate_lightning.records.resizing import Resizing, Sample
from tests.tiny import Builder
from tests.units.records.test_resizing import CASES, samples_of

BY_CHANCE = ["lengths that divide widths", "crops that are channels"]


def follows(sample: Sample, other: Sample, dim: int, now: int, origin: tuple[int, ...]) -> bool:
    """Whether a dimension became what its sizes say: their multiple, or a fraction after borders were taken off."""
    ends = [float(dim), float(dim)]
    for size in origin:
        became = {b for a, b in zip(sample.sizes, other.sizes, strict=True) if a == size}
        if len(became) > 1:
            return True  # two sizes were the same by chance
        resized, taken = became.pop(), 0 if dim % size == 0 else abs(size - dim * round(size / dim))
        ends = [ends[0] * resized / size, ends[1] * (resized - taken) / (size - taken)]
    return min(ends) - 1 <= now <= max(ends) + 1


def origins(sample: Sample) -> list[Origins]:
    return origins_of(sample.graph, frozenset(sample.shapes))


@pytest.mark.parametrize("name", CASES)
def test_dimensions_follow_from_the_sizes_that_operations_show(name):
    for sample in samples_of(name):
        for other in samples_of(name):
            triples = zip(sample.graph.tensors, other.graph.tensors, origins(sample), strict=True)
            for tensor, resized, found in triples:
                for dim, now, origin in zip(tensor.shape, resized.shape, found, strict=True):
                    assert origin is None or follows(sample, other, dim, now, origin), (tensor, resized, found)


@pytest.mark.parametrize("name", BY_CHANCE)
def test_one_captured_step_tells_sizes_from_widths_that_are_the_same(name):
    for known in samples_of(name):
        for sample in samples_of(name):
            largest, actual = (sum(as_plain(s.graph, s.profile)[0].sizes) for s in (known, sample))
            assert actual > largest or Resizing([known]).at(sample.sizes).high.sum() <= 1.8 * actual


def test_vectors_that_code_outside_has_looked_up_are_as_many_as_the_words():
    """A frozen embedding is not captured; the length of 12 is a quarter of the 48 channels of a weight."""
    b = Builder()
    weight, looked_up, others = b.input("w", 4), b.input("x", 4, StorageKind.INPUT), b.input("y", 4, StorageKind.INPUT)
    for index, shape in ((weight, (48, 16)), (looked_up, (4, 12, 16)), (others, (12, 4, 16))):
        b.tensors[index] = replace(b.tensors[index], shape=shape)
    b.op("double", (looked_up,), 4, op="aten.mul.Tensor")
    b.tensors[-1] = replace(b.tensors[-1], shape=(4, 12, 16))
    graph, _ = b.graph()
    found = origins_of(graph, {(4, 12)})
    assert found[looked_up] == found[-1] == ((4,), (12,), ())
    assert found[others] == (None, None, None)


def test_sizes_vary_that_differ_once_three_calls_have_differed():
    varying = VaryingSizes(lambda: [(96, 3)])
    found = []
    for height, width in ((64, 80), (48, 112), (112, 80), (96, 80), (64, 4)):
        varying.called("net", [(4, 3, height, width)])
        found.append(set(varying))
    assert found == [set(), set(), {112, 80}, {80}, {64}], "96 is a width of the model too, and 4 the number of rows"


def test_sizes_of_calls_of_another_form_are_not_compared():
    varying = VaryingSizes(list)
    for length in (5, 6, 7):
        varying.called("net", [(2, length)])
        varying.called("net", [(2, 9), (length,)])
    assert set(varying) == {7}
