"""From which sizes dimensions follow, against steps that were captured at other sizes."""

from __future__ import annotations

import numpy as np
import pytest

from hiremate_lightning.records.costs import as_plain
from hiremate_lightning.records.dimensions import Origins, origins_of
from hiremate_lightning.records.resizing import Resizing, Sample

from .test_resizing import CASES, samples_of

BY_CHANCE = {"lengths that divide widths": 2.4, "crops that are channels": 1.1}  # and how loose bounds may be


def follows(sample: Sample, other: Sample, dim: int, now: int, origin: tuple[int, ...]) -> bool:
    """Whether a dimension became what its sizes say, rounded where it is a fraction of them."""
    expected = float(dim)
    for size in origin:
        became = {b for a, b in zip(sample.sizes, other.sizes, strict=True) if a == size}
        if len(became) > 1:
            return True  # two sizes were the same by chance
        expected *= became.pop() / size
    return abs(now - expected) <= (1e-6 if dim % max(1, np.prod(origin)) == 0 else 2)


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


@pytest.mark.parametrize(("name", "looseness"), BY_CHANCE.items())
def test_one_captured_step_tells_sizes_from_widths_that_are_the_same(name, looseness):
    for known in samples_of(name):
        for sample in samples_of(name):
            actual = sum(as_plain(sample.graph, sample.profile)[0].sizes)
            assert Resizing([known]).at(sample.sizes).high.sum() <= looseness * actual
