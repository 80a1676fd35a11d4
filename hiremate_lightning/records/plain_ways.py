"""Ways to run a step as the user wrote it within less memory: what of it is called twice, or put aside.

A module whose call is in `torch.utils.checkpoint` keeps only what it was given, and runs once more in the backward.
What that saves in bytes and costs in time is known from a captured step. The modules are chosen one by one, those first
that save most bytes for their time: an activation function of many small operations before a linear layer, and whole
blocks last, in the place of what was chosen inside of them.

Where that is not enough, or not known yet, all that autograd saves is put aside until the backward reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .costs import Profile
from .graph import Graph

COUNT = 12  # ways, evenly spaced by the bytes that they save
CALL_MS = 0.15  # that one call of `torch.utils.checkpoint` takes for itself
MOST_SHARE = 0.5  # of all saved bytes in one module: a larger one brings them all back at once
ASIDE_BYTES_PER_MS = 5e5  # that are put aside and brought back: with a CPU, whose files cost page faults
Calls = Mapping[str, Sequence[Sequence[int]]]  # by path of a module, the forward nodes of each of its calls


@dataclass(frozen=True, slots=True)
class PlainWay:
    """A way to run a step.

    Attributes:
        paths: The modules that are called twice.
        extra_ms: What it takes beyond a plain step.
        puts_aside: Whether all that autograd saves is put aside until the backward reads it.
    """

    paths: frozenset[str] = frozenset()
    extra_ms: float = 0.0
    puts_aside: bool = False

    @property
    def saves_memory(self) -> bool:
        """Whether a step takes less memory so, and more time."""
        return bool(self.paths) or self.puts_aside


@dataclass(frozen=True, slots=True)
class _Gain:
    size_bytes: float = 0.0
    time_ms: float = 0.0

    def __add__(self, other: _Gain) -> _Gain:
        return _Gain(self.size_bytes + other.size_bytes, self.time_ms + other.time_ms)

    def __sub__(self, other: _Gain) -> _Gain:
        return _Gain(self.size_bytes - other.size_bytes, self.time_ms - other.time_ms)

    @property
    def density(self) -> float:
        return self.size_bytes / max(self.time_ms, 1e-3)


def ways_of(graph: Graph, profile: Profile, calls: Calls, aside: frozenset[int] = frozenset()) -> tuple[PlainWay, ...]:
    """List ways to run a step: from nothing called twice to the most bytes saved, and what is saved put aside.

    Args:
        graph: The step as plain PyTorch runs it.
        profile: Its costs.
        calls: What may be called twice.
        aside: The storages that may be put aside.
    """
    picks = list(_picks(_gains(graph, profile, calls)))
    ways, spaced_bytes = [PlainWay()], picks[-1][1].size_bytes / COUNT if picks else 0.0
    for paths, total in picks:
        if total.size_bytes >= spaced_bytes * len(ways):
            ways.append(PlainWay(paths, total.time_ms))
    aside_bytes = sum(graph.sizes[storage] for storage in aside)
    return (*ways, PlainWay(extra_ms=aside_bytes / ASIDE_BYTES_PER_MS, puts_aside=True)) if aside else tuple(ways)


def may_lie_aside(graph: Graph, storages: int) -> frozenset[int]:
    """Find what autograd saves of a step and nobody else holds until the backward.

    Args:
        graph: The step.
        storages: The number of its first storages that captured code holds.
    """
    stay = {graph.tensors[t].storage for t in (*graph.outputs, *graph.held, *graph.retained, *graph.gradients)}
    made = {storage for index in graph.forward for storage in graph.allocates[index]}
    needed = {s for t in graph.needed if (s := graph.tensors[t].storage) is not None and s < storages}
    return frozenset(needed & made - stay)


def _picks(gains: Mapping[str, _Gain]) -> Iterator[tuple[frozenset[str], _Gain]]:
    """Choose modules one by one, the densest first; yield all that are chosen so far, and what these gain."""
    chosen, inside, total = set[str](), dict.fromkeys(gains, _Gain()), _Gain()
    left = dict(gains)
    while left:
        path = max(left, key=lambda path: (left[path] - inside[path]).density)
        more = left.pop(path) - inside[path]
        if more.size_bytes <= 0:
            continue
        total += more
        for outer in _outer(path):
            if outer in inside:
                inside[outer] += more
        chosen = {other for other in chosen if not other.startswith(f"{path}.")} | {path}
        left = {other: gain for other, gain in left.items() if not other.startswith(f"{path}.")}
        yield frozenset(chosen), total


def _outer(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _gains(graph: Graph, profile: Profile, calls: Calls) -> dict[str, _Gain]:
    """Find what each module would save and cost if it alone were called twice."""
    storage_of, nodes = [tensor.storage for tensor in graph.tensors], graph.nodes
    wanted = {storage_of[t] for t in graph.needed}
    stay = {storage_of[t] for t in (*graph.outputs, *graph.held)}
    readers = dict[int | None, set[int]]()
    for index in graph.forward:
        for tensor in nodes[index].inputs:
            readers.setdefault(storage_of[tensor], set()).add(index)
    saved_bytes = sum(graph.sizes[s] for s in wanted if s is not None)
    found = {}
    for path, each in calls.items():
        gain = sum((_gain(graph, profile, call, wanted, stay, readers) for call in each), _Gain())
        if 0 < gain.size_bytes <= MOST_SHARE * saved_bytes:
            found[path] = gain
    return found


def _gain(
    graph: Graph,
    profile: Profile,
    call: Sequence[int],
    wanted: set[int | None],
    stay: set[int | None],
    readers: Mapping[int | None, set[int]],
) -> _Gain:
    members, nodes = set(call), graph.nodes
    made = {s for index in call for s in graph.allocates[index]}
    read = {graph.tensors[t].storage for index in call for t in nodes[index].inputs}
    dropped = {s for s in made & wanted - stay if readers.get(s, members) <= members}
    size_bytes = sum(graph.sizes[s] for s in dropped if s is not None)
    kept_bytes = sum(graph.sizes[s] for s in read - made - wanted if s is not None)
    return _Gain(size_bytes - kept_bytes, CALL_MS + sum(profile.time_ms[index] for index in call))
