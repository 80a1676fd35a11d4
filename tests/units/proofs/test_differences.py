"""Outcomes of two runs: what differs, by how much, and that billions of values are looked at piece by piece, once."""

from __future__ import annotations

import pytest
import torch

from hiremate_lightning.proofs import differences as module
from hiremate_lightning.proofs.differences import differences
from hiremate_lightning.proofs.trials import TrialOutcome


def gradients(count: int, factor: float = 1.0) -> TrialOutcome:
    drawn = torch.Generator().manual_seed(0)
    return TrialOutcome({}, {f"gradient {i}": factor * torch.randn(100, generator=drawn) for i in range(count)})


def test_gradients_that_all_differ_are_compared_a_few_times(monkeypatch):
    """Kernels of GPUs that add up in any order give other bits for nearly all gradients of a step."""
    looked_at = []
    pieces = module._pieces
    monkeypatch.setattr(module, "_pieces", lambda *given: looked_at.append(given) or pieces(*given))
    _, found = differences(gradients(50), gradients(50, 1 + 1e-6))
    assert len(found) == 50
    assert all(difference.is_rounding for difference in found)
    assert len(looked_at) <= 3 * 50


def rounded(expected: TrialOutcome, factor: float) -> TrialOutcome:
    return TrialOutcome({}, {name: factor * value for name, value in expected.gradients.items()})


def test_values_may_be_as_far_apart_as_two_eager_runs():
    """Kernels that add in any order differ more than by single roundings where a network is deep."""
    expected = gradients(3)
    found, again = rounded(expected, 1.0003), rounded(expected, 0.9999)
    assert not any(d.is_rounding for d in differences(expected, found)[1])
    _, allowed = differences(expected, found, again=again)
    assert all(d.is_rounding and "two runs of eager PyTorch differ by" in d.words for d in allowed)
    assert not any(d.is_rounding for d in differences(expected, rounded(expected, 1.01), again=again)[1])


def test_a_wrong_value_is_seen_beside_unwritten_memory():
    """What two eager runs round otherwise is compared; what depends on memory that nobody has written to is not."""
    expected = gradients(1)
    found, refilled = rounded(expected, 1 + 1e-6), rounded(expected, 1 - 1e-6)
    refilled.gradients["gradient 0"][7] = 0.0
    found.gradients["gradient 0"][7] = 5.0
    assert all(d.is_rounding for d in differences(expected, found, refilled=refilled)[1])
    found.gradients["gradient 0"][8] = 5.0
    assert not any(d.is_rounding for d in differences(expected, found, refilled=refilled)[1])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 11])
def test_pieces_find_the_largest_difference_wherever_it_is(change_thresholds, size):
    change_thresholds(compared_values=size)
    expected = torch.zeros(3, 4)
    for place in range(12):
        found = expected.clone()
        found.view(-1)[place] = 2.0
        found.view(-1)[(place + 5) % 12] = -1.0
        (difference,), _ = differences(TrialOutcome({"output 0": expected}, {}), TrialOutcome({"output 0": found}, {}))
        assert difference.words == "output 0 has 2 where eager PyTorch has 0, 2 of 12 values differ"
        assert not difference.is_rounding


APART = {  # and whether that is rounding; None where it is the same
    "NaN of both": (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), None),
    "NaN of other bits": (
        *(torch.tensor([0x7FC00000 + i], dtype=torch.int32).view(torch.float32) for i in (0, 1)),
        None,
    ),
    "nothing": (torch.zeros(0), torch.zeros(0), None),
    "strides": (torch.ones(2, 3), torch.ones(3, 2).t(), None),
    "flags": (torch.tensor([True, False]), torch.tensor([True, False]), None),
    "complex": (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), None),
    "a sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0]), True),
    "NaN": (torch.tensor([1.0]), torch.tensor([float("nan")]), False),
    "an infinity": (torch.tensor([1.0]), torch.tensor([float("inf")]), False),
    "a flag": (torch.tensor([True]), torch.tensor([False]), False),
    "a number": (torch.tensor([3]), torch.tensor([4]), False),
    "an imaginary part": (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
    "a last place": (torch.tensor([1.0]), torch.tensor([1.0000001]), True),
}


@pytest.mark.parametrize("name", APART)
def test_differences_are_known_from_rounding_and_equality(name):
    one, other, is_rounding = APART[name]
    found, roundings = differences(TrialOutcome({"x": one}, {}), TrialOutcome({"x": other}, {}))
    assert [difference.is_rounding for difference in found] == ([] if is_rounding is None else [is_rounding])
    assert not roundings
