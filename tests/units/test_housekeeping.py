"""A store that keeps what was used last, texts shown once, and garbage collected in known spans."""

from __future__ import annotations

import weakref
from contextlib import suppress

from hiremate_lightning.housekeeping import Latest, Once, collecting_what_it_leaves


def test_one_too_many_drops_the_oldest():
    """What was set again, or asked for, is not the oldest."""
    store = Latest[str, int](2)
    store["a"], store["b"], store["a"] = 1, 2, 3
    store["c"] = 4
    assert store == {"a": 3, "c": 4}
    assert store.get_or("a", lambda: 0) == 3
    store["d"] = 5
    assert list(store.items()) == [("a", 3), ("d", 5)]


def test_a_value_is_made_once():
    """Also one that is None."""
    store, made = Latest[str, None](1), list[str]()
    for key in "aaba":
        store.get_or(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "a"]


def test_a_text_of_a_topic_is_shown_once():
    shown = []
    once = Once(lambda *words: shown.append(words))
    assert [once("one", topic="a"), once("two", topic="a"), once("three", 3), once("three", 4)] == [1, 0, 1, 0]
    assert shown == [("one",), ("three", 3)]
    assert "a" in once
    assert "one" not in once


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


def test_what_an_error_holds_is_collected_by_the_next_span():
    seen = held_by_an_error()
    assert seen() is not None
    with collecting_what_it_leaves():
        pass
    assert seen() is None
