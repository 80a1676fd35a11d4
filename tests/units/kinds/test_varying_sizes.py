"""Sizes vary that differ from call to call."""

from __future__ import annotations

from hiremate_lightning.kinds.varying_sizes import VaryingSizes


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
