"""Tests of garbage collected in known spans."""

from __future__ import annotations

import weakref
from contextlib import suppress

from hiremate_lightning.garbage import collecting_what_it_leaves


class Held:
    """What can be referred to weakly."""


def fail(held: Held) -> None:
    """Raise an error that a frame holds, which holds it: such a cycle is Dynamo's after what it can't capture."""
    try:
        raise ValueError
    except ValueError as error:
        kept = error
    raise kept


def held_by_an_error() -> weakref.ref[Held]:
    held = Held()
    with suppress(ValueError), collecting_what_it_leaves():
        fail(held)
    return weakref.ref(held)


def test_what_an_error_holds_on_its_way_is_collected_by_the_next_span():
    seen = held_by_an_error()
    assert seen() is not None
    with collecting_what_it_leaves():
        pass
    assert seen() is None
