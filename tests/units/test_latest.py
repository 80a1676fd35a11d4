"""The store that keeps what was used last."""

from __future__ import annotations

from hiremate_lightning.latest import Latest


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
