"""Modules are called twice in the order of the bytes that they save for their time."""

from __future__ import annotations

from hiremate_lightning.records.plain_ways import (
    ASIDE_BYTES_PER_MS,
    CALL_MS,
    COUNT,
    Calls,
    PlainWay,
    may_lie_aside,
    ways_of,
)
from tests.tiny import Builder

BLOCKS = 6


def blocks(act_bytes: int = 500, linear_ms: float = 10.0):
    """Blocks of a slow linear layer and a quick activation function that saves two values, and a loss.

    Returns:
        The graph, its costs, and the calls of blocks and of what is in them.
    """
    b, calls = Builder(), dict[str, list[list[int]]]()
    weight, x = b.input("w", 8), b.input("x", 100)
    saved = []
    for block in range(BLOCKS):
        given, first = x, len(b.nodes)
        hidden = b.op(f"linear{block}", (given, weight), 100, time=linear_ms)
        inner = b.op(f"square{block}", (hidden,), act_bytes, time=0.1)
        x = b.op(f"sum{block}", (inner, hidden), 100, time=0.1)
        calls |= {f"b.{block}": [[first, first + 1, first + 2]], f"b.{block}.act": [[first + 1, first + 2]]}
        saved.append((given, hidden, inner))
    gradient = b.tangent("t", 100)
    for block in reversed(range(BLOCKS)):
        gradient = b.op(f"grad{block}", (gradient, *saved[block]), 100, backward=True)
    return *b.graph(outputs=(x,), gradients=(gradient,)), calls


def test_the_first_way_calls_nothing_twice_and_later_ones_more():
    graph, profile, calls = blocks()
    ways = ways_of(graph, profile, calls)
    assert not ways[0].paths
    times = [way.extra_ms for way in ways]
    assert times == sorted(times)
    assert len(ways) <= COUNT + 1


def test_quick_parts_come_before_whole_blocks():
    ways = ways_of(*blocks())
    acts = frozenset(f"b.{block}.act" for block in range(BLOCKS))
    assert acts in {way.paths for way in ways}
    first = next(way for way in ways if way.paths)
    assert first.paths <= acts
    assert ways[-1].paths == frozenset(f"b.{block}" for block in range(BLOCKS)), "in the place of their parts"


def test_the_time_is_that_of_what_runs_again():
    last = ways_of(*blocks())[-1]
    assert round(last.extra_ms, 6) == round(BLOCKS * (CALL_MS + 10.2), 6)


def test_a_module_that_saves_nothing_is_not_called_twice():
    graph, profile, calls = blocks()
    calls["b.0.first"] = [[0]]  # a linear layer: what it returns is read by the next one, and stays
    assert all("b.0.first" not in way.paths for way in ways_of(graph, profile, calls))


def test_a_module_that_holds_most_of_the_model_is_not_called_twice():
    graph, profile, calls = blocks()
    everything: Calls = {**calls, "b": [list(graph.forward)]}
    assert all("b" not in way.paths for way in ways_of(graph, profile, everything))


def test_without_modules_there_is_one_way():
    graph, profile, _ = blocks()
    assert len(ways_of(graph, profile, {})) == 1


def test_what_is_saved_is_put_aside_last():
    graph, profile, calls = blocks()
    aside = may_lie_aside(graph, len(graph.storages))
    ways = ways_of(graph, profile, calls, aside)
    assert ways[:-1] == ways_of(graph, profile, calls)
    assert ways[-1] == PlainWay(extra_ms=(BLOCKS * 700 - 100) / ASIDE_BYTES_PER_MS, puts_aside=True)


def test_nothing_lies_aside_that_others_hold():
    graph, _, _ = blocks()
    found = may_lie_aside(graph, len(graph.storages))
    names = {tensor.name for tensor in graph.tensors if tensor.storage in found}
    assert names == {f"{name}{block}" for block in range(BLOCKS) for name in ("linear", "square", "sum")} - {"sum5"}
    assert "x" not in names, "it was there before"
    assert max(may_lie_aside(graph, 5)) < 5, "the later storages stand for code outside"
