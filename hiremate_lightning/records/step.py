"""One graph for the whole training step: its captured calls, and the uncaptured code between them.

A step may run several captured graphs (graph breaks, several planned modules) or one captured graph several times, and
uncaptured code between them, for example the loss. `merge` puts all of it into one `Graph`, so that solvers and the
simulator see one problem under one budget. Uncaptured code between two calls becomes one node: its output has the bytes
that the code holds until the step ends, its workspace is the rest of the code's peak, both measured. `split` divides
decisions of the step among its calls. CONTRIBUTING.md draws each word for memory on the time line of a step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..housekeeping import Latest
from .costs import Profile, in_eager
from .graph import OUTSIDE, Direction, Graph, Node, Storage, StorageKind, Tensor, taken_bytes
from .schedule import eager_decisions, lower
from .simulation import Allocations, allocations

LEFT_OUTPUTS = "left_outputs"  # tensor that stands for the previous step's outputs, freed as the last forward returns
STALE_GRADIENTS = "stale_gradients"  # tensor that stands for the gradients that `zero_grad` frees after the forward

Decisions = tuple[tuple[int, ...], ...]
Output = tuple[int, int]  # index of a call, and the tensor of its graph that is an output
Replays = Latest[Decisions | None, Allocations]  # allocations and frees by decisions; None stands for eager PyTorch


@dataclass(frozen=True, slots=True)
class Gap:
    """Memory of uncaptured code between two captured calls, in bytes above those live when the code starts."""

    # Bytes that the code still holds when the next call starts. They stay to the end of the step unless a later gap
    # frees them; a negative value frees bytes that earlier gaps hold.
    held_bytes: int = 0
    peak_bytes: int = 0  # most bytes live at once
    has_others: bool = False  # whether backwards of earlier steps' forwards run here; their memory is left out

    def holding(self, size_bytes: int) -> Gap:
        """Return a copy that holds more bytes, or fewer if `size_bytes` is below 0."""
        return replace(self, held_bytes=self.held_bytes + size_bytes, peak_bytes=self.peak_bytes + size_bytes)

    def taking(self, size_bytes: int) -> Gap:
        """Return a copy whose peak is at least the bytes that backwards of earlier steps' forwards take here."""
        return replace(self, peak_bytes=max(self.peak_bytes, size_bytes)) if self.has_others else self

    def grown(self, growth: float) -> Gap:
        """Return a copy with its bytes times a factor; a negative `held_bytes` does not grow."""
        held_bytes = max(self.held_bytes, math.ceil(growth * self.held_bytes))
        return replace(self, held_bytes=held_bytes, peak_bytes=math.ceil(growth * self.peak_bytes))


@dataclass(frozen=True, slots=True)
class OutsideStage:
    """A stage of the uncaptured code after a forward: the code up to the free of an output, or to the backward's call.

    Its peak counts above the bytes that live at the end of the forward, without the outputs that were freed since then.
    """

    peak_bytes: int = 0  # most bytes live at once
    held: tuple[Output, ...] = ()  # outputs, of this and earlier calls, that are in memory during the stage


HELD_TO_THE_END = sys.maxsize  # in `Call.held_until`: to the end of the step


@dataclass(frozen=True)
class Call:
    """One run of a captured graph within a step, forward and backward."""

    graph: Graph  # the captured graph
    profile: Profile  # costs of the graph's nodes
    # For each input on the storage of an earlier call's output: that output.
    links: dict[int, Output] = field(default_factory=dict)
    died: tuple[int, ...] = ()  # outputs that are freed in the uncaptured code after the forward
    # For outputs that are in memory for longer: the number of the step's forwards and backwards that have run when
    # uncaptured code frees them, or `HELD_TO_THE_END`. Up to the first backward, saved outputs count as held too.
    held_until: dict[int, int] = field(default_factory=dict)
    # Gradients that uncaptured code or another call consumes; the call's other gradients stay to the end of the step.
    passed_on: tuple[int, ...] = ()
    released_bytes: int = 0  # bytes of inputs that uncaptured code made in the step and that the backward frees
    outlasting: tuple[int, ...] = ()  # gradients of outputs that live until uncaptured code runs after the backward
    is_retained: bool = False  # whether the backward frees no saved values, because it will run again
    # The uncaptured code after the forward, up to the last free of an output (of this or an earlier call) and up to the
    # call of the backward.
    stages: tuple[OutsideStage, ...] = ()
    # Number of stages that run before the call of the backward, where stale bytes end; None if not measured.
    called_at: int | None = None
    before_forward: Gap = Gap()  # uncaptured code before the first forward; empty for later calls
    # Uncaptured code after this forward and its stages, up to the next call. Its peak counts above the bytes that live
    # without the outputs that died.
    after_forward: Gap = Gap()
    # Uncaptured code between the previous backward and this one; empty for the first backward. `held_bytes` may be
    # negative.
    before_backward: Gap = Gap()
    after_backward: Gap = Gap()  # uncaptured code after the last backward; empty for earlier ones

    @property
    def outside_bytes(self) -> int:
        """The sum of the peaks of the uncaptured code around this call."""
        gaps = (self.before_forward, self.after_forward, self.before_backward, self.after_backward)
        return sum(gap.peak_bytes for gap in gaps) + sum(stage.peak_bytes for stage in self.stages)

    def with_gaps(self, change: Callable[[Gap], Gap]) -> Call:
        """Return a copy with each of its gaps changed."""
        return replace(
            self,
            before_forward=change(self.before_forward),
            after_forward=change(self.after_forward),
            before_backward=change(self.before_backward),
            after_backward=change(self.after_backward),
        )

    def at_size(self, graph: Graph, profile: Profile) -> Call | None:
        """Predict this call at another size, from the graph captured there; None if that graph is other code.

        The memory of uncaptured code is assumed to grow like the input or output that grows most, and never to shrink.
        """
        if self.graph.code != graph.code:
            return None
        counts = [[math.prod(g.tensors[t].shape) for t in (*g.inputs, *g.outputs)] for g in (self.graph, graph)]
        growth = max([1.0, *(new / max(1, old) for old, new in zip(*counts, strict=True))])
        grown = self.with_gaps(lambda gap: gap.grown(growth))
        stages = tuple(replace(stage, peak_bytes=math.ceil(growth * stage.peak_bytes)) for stage in self.stages)
        return replace(grown, graph=replace(graph, held=self.graph.held).like(graph), profile=profile, stages=stages)

    def without_gradients(self, tensors: Collection[int]) -> Call:
        """Return a copy in which some gradients are freed after their last read."""
        stay = tuple(t for t in self.graph.gradients if t not in tensors)
        return replace(self, graph=replace(self.graph, gradients=stay))


@dataclass(frozen=True)
class MergedStep:
    """A merged step."""

    graph: Graph  # all calls and the uncaptured code
    profile: Profile  # costs of the graph's nodes
    # For each node, its call and its index in the call's graph; None for uncaptured code.
    owners: tuple[tuple[int, int] | None, ...]
    # For each call, the position of its first backward node in `graph.backward`, and the number of its backward nodes.
    spans: tuple[tuple[int, int], ...]
    storages_at: tuple[int, ...] = ()  # for each call, its first storage
    # Allocations and frees of decisions. Steps of the same code share them: they run the same operations on the same
    # storages, so decisions are replayed once, and their peak at another size is a sum of the bytes there.
    replays: Replays = field(default_factory=lambda: Latest(64), compare=False, repr=False)

    def sharing(self, codes: Iterable[Hashable], replays: Latest[Hashable, Replays]) -> MergedStep:
        """Return a copy that shares the replays of steps of the same code.

        `codes` has a key for each call, equal at all sizes of the call's code; None if the code is not known. Steps
        share replays only if their orders, and the inputs and outputs of uncaptured code, are the same too.
        """
        codes, graph = tuple(codes), self.graph
        if None in codes:
            return self
        outside = [node for node, owner in zip(graph.nodes, self.owners, strict=True) if owner is None]
        made = (tuple(graph.tensors[t].storage for t in node.outputs) for node in outside)
        handed = tuple((node.inputs, node.outputs, storages) for node, storages in zip(outside, made, strict=True))
        stay = graph.inputs, graph.tangents, graph.outputs, graph.gradients, graph.held, graph.retained
        key = codes, len(graph.storages), graph.forward, graph.backward, *stay, handed
        return replace(self, replays=replays.get_or(key, lambda: self.replays))

    def peak_bytes(self, decisions: Decisions) -> int:
        """Return the peak of decisions, in bytes above resident ones, as the simulator counts it."""
        replayed = self.replays.get_or(decisions, lambda: allocations(self.graph, lower(self.graph, decisions)))
        return replayed.peak_bytes(self.graph.sizes, self.profile.workspace_bytes)

    def again_ms(self, decisions: Decisions) -> float:
        """Return the milliseconds of recomputation."""
        return sum(self.profile.time_ms[node] for before in decisions for node in before)

    @cached_property
    def eager_bytes(self) -> int:
        """The peak of eager PyTorch, in bytes above resident ones."""
        graph, profile = in_eager(self.graph, self.profile)
        eager = self.replays.get_or(None, lambda: allocations(graph, lower(graph, eager_decisions(graph))))
        return eager.peak_bytes(graph.sizes, profile.workspace_bytes)

    def split(self, recompute: Decisions) -> tuple[Decisions, ...]:
        """Divide decisions of the step among its calls."""
        rows: list[list[list[int]]] = [[[] for _ in range(count + 1)] for _, count in self.spans]
        for position, before in enumerate(recompute):
            for node in before:
                owner = self.owners[node]
                assert owner is not None, "outside code is never recomputed"
                call, index = owner
                first, count = self.spans[call]
                assert position <= first + count or position == len(self.graph.backward), "recomputed too late"
                rows[call][min(max(0, position - first), count)].append(index)
        return tuple(tuple(tuple(row) for row in call) for call in rows)

    def join(self, decisions: Sequence[Decisions]) -> Decisions:
        """Join the decisions of each call to decisions of the step: the inverse of `split`."""
        number = {owner: node for node, owner in enumerate(self.owners) if owner is not None}
        rows: list[list[int]] = [[] for _ in range(len(self.graph.backward) + 1)]
        for call, ((first, _), call_rows) in enumerate(zip(self.spans, decisions, strict=True)):
            for position, before in enumerate(call_rows, start=first):
                rows[position].extend(number[call, index] for index in before)
        return tuple(tuple(row) for row in rows)


def merge(
    calls: Sequence[Call], backward_order: Sequence[int], stale_bytes: int = 0, left_bytes: int = 0
) -> MergedStep:
    """Merge the calls of a step into one graph.

    Args:
        calls: The calls in the order of their forwards.
        backward_order: Indices of the calls in the order of their backwards.
        stale_bytes: Bytes that exist when the step begins and are freed between forward and backward, such as the
            previous step's gradients if `zero_grad` comes after the forward.
        left_bytes: Bytes of the previous step's outputs, freed as the last forward returns.
    """
    return _Merger(tuple(calls), tuple(backward_order), stale_bytes, left_bytes).merge()


def holding(calls: Sequence[Call], size_bytes: int) -> list[Call]:
    """Return the calls of a step with more bytes held by uncaptured code, or fewer if `size_bytes` is below 0.

    Additional bytes are held from the beginning. Fewer bytes are taken from the last gaps that hold any.
    """
    changed = list(calls)
    if size_bytes > 0:
        changed[0] = replace(changed[0], before_forward=changed[0].before_forward.holding(size_bytes))
    for index in reversed(range(len(changed) if size_bytes < 0 else 0)):
        gap = changed[index].after_forward
        less_bytes = min(-size_bytes, max(0, gap.held_bytes))
        changed[index] = replace(changed[index], after_forward=gap.holding(-less_bytes))
        size_bytes += less_bytes
    return changed


class _Merger:
    """Builds one graph: first the records of all calls, one call behind the other, then the nodes of uncaptured code.

    So no index of a call's records depends on uncaptured code.
    """

    def __init__(
        self, calls: tuple[Call, ...], backward_order: tuple[int, ...], stale_bytes: int, left_bytes: int
    ) -> None:
        self.calls, self.backward_order = calls, backward_order
        self.stale_bytes, self.left_bytes = stale_bytes, left_bytes
        self.nodes: list[Node] = []
        self.costs: list[tuple[float, int]] = []  # time and workspace of each node
        self.owners: list[tuple[int, int] | None] = []  # for each node, see `MergedStep.owners`
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.held: list[int] = []
        self.node_at: list[int] = []  # the first node of each call
        self.tensor_at: list[int] = []  # the first tensor of each call
        self.storage_at: list[int] = []  # the first storage of each call
        self.stale_until: int | None = None  # the outside node after which no stale bytes live
        self.left_until: int | None = None  # the outside node after which no left bytes live
        self.after_forward: list[int] = []  # the outside node after each forward
        self.after_backwards: list[int] = []  # the outside node after each backward, in their order
        self.spans: dict[int, tuple[int, int]] = {}
        self.held_by: dict[int, int] = {}  # outside node -> the storage of its `held_bytes`
        for index, call in enumerate(calls):
            self._append_call(index, call)

    def _append_call(self, index: int, call: Call) -> None:
        graph, nodes, tensors, storages = call.graph, len(self.nodes), len(self.tensors), len(self.storages)
        self.node_at.append(nodes)
        self.tensor_at.append(tensors)
        self.storage_at.append(storages)
        self.storages.extend(graph.storages)
        linked = {
            graph.tensors[t].storage: self.tensors[self.tensor_at[maker] + output].storage
            for t, (maker, output) in call.links.items()
        }
        for tensor in graph.tensors:
            storage = tensor.storage
            if storage is not None:
                storage = linked[storage] if storage in linked else storage + storages
            producer = None if tensor.producer is None else tensor.producer + nodes
            self.tensors.append(replace(tensor, storage=storage, producer=producer) if index else tensor)
        self.nodes.extend(node.behind(nodes, tensors) if index else node for node in graph.nodes)
        self.costs.extend(zip(call.profile.time_ms, call.profile.workspace_bytes, strict=True))
        self.owners.extend((index, position) for position in range(len(graph.nodes)))
        stay = (output for output, until in call.held_until.items() if until == HELD_TO_THE_END)
        self.held.extend(t + tensors for t in (*stay, *graph.held))

    def _numbers(self, outputs: Iterable[Output]) -> list[int]:
        """Return the indices in the step of tensors of calls."""
        return [self.tensor_at[call] + tensor for call, tensor in outputs]

    def _add_forward(self, index: int) -> None:
        """Append a forward and the uncaptured code after it, which hands earlier calls' outputs to the next call."""
        call = self.calls[index]
        self.forward.extend(self.node_at[index] + n for n in call.graph.forward)
        is_last = index + 1 == len(self.calls)
        if is_last and self.left_bytes:
            self.left_until = self._add_outside(Gap(), self._numbers((index, t) for t in call.graph.outputs))
        for count, stage in enumerate(call.stages, start=1):
            place = self._add_outside(Gap(peak_bytes=stage.peak_bytes), self._numbers(stage.held))
            if count == call.called_at:
                self.stale_until = place
        own = ((index, t) for t in call.graph.outputs if t not in call.died)
        # `_hold_into_backwards` appends the bytes of outputs that code holds from the last forward into a backward.
        held = (
            (earlier, output)
            for earlier in range(index)
            for output, until in self.calls[earlier].held_until.items()
            if until > index and (not is_last or until in (len(self.calls), HELD_TO_THE_END))
        )
        links = {} if is_last else self.calls[index + 1].links
        read = self._numbers((*own, *held, *links.values()))
        handed = self._numbers((index + 1, t) for t in links)
        self.after_forward.append(self._add_outside(call.after_forward, read, handed))
        if call.called_at is None:
            self.stale_until = self.after_forward[-1]

    def _add_backward(self, index: int, following: int | None) -> None:
        """Append a backward, and the uncaptured code after it, which turns its gradients into the next one's tangents.

        The code reads the gradients that the backward has passed on, and those that outlast the backward.
        """
        call = self.calls[index]
        self.spans[index] = (len(self.backward), len(call.graph.backward))
        self.backward.extend(self.node_at[index] + n for n in call.graph.backward)
        read = self._numbers((index, t) for t in (*call.passed_on, *call.outlasting))
        gap, handed = call.after_backward, list[int]()
        if following is not None:
            gap = self.calls[following].before_backward
            handed = self._numbers((following, t) for t in self.calls[following].graph.tangents)
        self.after_backwards.append(self._add_outside(gap, read, handed, Direction.BACKWARD))

    def merge(self) -> MergedStep:
        """Append forwards and backwards in their order, then the bytes that live from one outside node to another."""
        order = self.backward_order
        for index in range(len(self.calls)):
            self._add_forward(index)
        for index, following in zip(order, (*order[1:], None), strict=True):
            self._add_backward(index, following)
        beginning = self._add_beginning()
        self._free_between_forwards(beginning)
        for index, freer in zip(order, self.after_backwards, strict=True):  # inputs that this backward has released
            self._free(self.calls[index].released_bytes, (*reversed(self.after_forward[:index]), beginning), freer)
        self._hold_into_backwards()
        self._free_between_backwards(beginning)
        graph = self._graph()
        spans = tuple(self.spans[call] for call in range(len(self.calls)))
        return MergedStep(graph, self._profile(graph), tuple(self.owners), spans, tuple(self.storage_at))

    def _graph(self) -> Graph:
        """Return the graph of all records; its inputs, outputs and gradients are those of the calls, without links."""
        first, last, calls = self.backward_order[0], self.backward_order[-1], list(enumerate(self.calls))
        end, returning = calls[-1]
        inputs = ((i, t) for i, call in calls for t in call.graph.inputs if t not in call.links)
        gradients = ((i, t) for i, call in calls for t in call.graph.gradients if t not in call.passed_on or i == last)
        retained = ((i, t) for i, call in calls if call.is_retained for t in range(len(call.graph.tensors)))
        return Graph(
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors),
            storages=tuple(self.storages),
            forward=tuple(self.forward),
            backward=tuple(self.backward),
            inputs=tuple(self._numbers(inputs)),
            tangents=tuple(self._numbers((first, t) for t in self.calls[first].graph.tangents)),
            outputs=tuple(self._numbers((end, t) for t in returning.graph.outputs if t not in returning.died)),
            gradients=tuple(dict.fromkeys(self._numbers(gradients))),
            held=tuple(dict.fromkeys(self.held)),
            retained=tuple(self._numbers(retained)),
        )

    def _profile(self, graph: Graph) -> Profile:
        """Return the costs of all nodes; a result that takes the memory of a dying value needs less workspace."""
        taken = taken_bytes(graph)
        times, workspaces = zip(*self.costs, strict=True)
        workspaces = tuple(size - taken.get(node, 0) for node, size in enumerate(workspaces))
        return replace(self.calls[0].profile, time_ms=times, workspace_bytes=workspaces)

    def _add_beginning(self) -> int:
        """Insert the outside node before the first forward; stale and left bytes live from it on. Return the node."""
        node = self._add_outside(self.calls[0].before_forward, [])
        self.forward.insert(0, self.forward.pop())
        assert self.stale_until is not None, "the backward is called after one of the stages"
        self._hold_between(STALE_GRADIENTS, self.stale_bytes, node, self.stale_until)
        if self.left_until is not None:
            self._hold_between(LEFT_OUTPUTS, self.left_bytes, node, self.left_until)
        return node

    def _hold_into_backwards(self) -> None:
        """Append the bytes of outputs that code holds into the backward, from the last forward to their free."""
        forwards = len(self.calls)
        for call in self.calls:
            held = ((t, until) for t, until in call.held_until.items() if forwards < until < HELD_TO_THE_END)
            storages = {call.graph.tensors[t].storage: until for t, until in held}
            for storage, until in storages.items():
                if storage is not None:
                    freer = self.after_backwards[until - forwards - 1]
                    self._hold_between("lingering", call.graph.sizes[storage], self.after_forward[-1], freer)

    def _free_between_forwards(self, beginning: int) -> None:
        """Let the gap after a forward free its negative `held_bytes`, which earlier gaps hold.

        The first of these bytes are the stale ones, which have a storage of their own. If the call of the backward was
        measured, negative `held_bytes` do not include stale bytes.
        """
        stale_bytes = 0 if any(call.called_at is not None for call in self.calls) else self.stale_bytes
        for index, (call, freer) in enumerate(zip(self.calls, self.after_forward, strict=True)):
            freed_bytes = max(0, -call.after_forward.held_bytes)
            stale_bytes, freed_bytes = max(0, stale_bytes - freed_bytes), max(0, freed_bytes - stale_bytes)
            self._free(freed_bytes, (*reversed(self.after_forward[:index]), beginning), freer)

    def _free_between_backwards(self, beginning: int) -> None:
        """Let the gap before a backward free its negative `held_bytes`, which earlier gaps hold.

        The gap after the same call's forward comes first: a loss in the middle of a model holds bytes there. Then come
        the latest gaps: FSDP2 gathers a unit's parameters before the backward of the unit, and frees them before the
        backward of the next unit.
        """
        earlier = [beginning, *self.after_forward]
        for index, freer in zip(self.backward_order[1:], self.after_backwards, strict=False):
            freed_bytes = -self.calls[index].before_backward.held_bytes
            self._free(freed_bytes, (self.after_forward[index], *reversed(earlier)), freer)
            earlier.append(freer)

    def _free(self, size_bytes: int, holders: Sequence[int], freer: int) -> None:
        """Let an outside node free up to `size_bytes` that other outside nodes hold, the first holders first."""
        for holder in holders:
            storage = self.storages[self.held_by[holder]]
            freed_bytes = min(storage.size_bytes, max(0, size_bytes))
            if freed_bytes:
                self.storages[self.held_by[holder]] = replace(storage, size_bytes=storage.size_bytes - freed_bytes)
                self._hold_between("given_back", freed_bytes, holder, freer)
                size_bytes -= freed_bytes

    def _hold_between(self, name: str, size_bytes: int, producer: int, reader: int) -> None:
        """Append a tensor whose bytes live from one outside node to another."""
        tensor = len(self.tensors)
        self.tensors.append(Tensor(name, len(self.storages), (size_bytes,), "uint8", producer))
        self.storages.append(Storage(size_bytes, StorageKind.ACTIVATION))
        self.nodes[producer] = replace(self.nodes[producer], outputs=(*self.nodes[producer].outputs, tensor))
        self.nodes[reader] = replace(self.nodes[reader], inputs=(*self.nodes[reader].inputs, tensor))

    def _add_outside(
        self, gap: Gap, read: list[int], handed: Sequence[int] = (), direction: Direction = Direction.FORWARD
    ) -> int:
        """Append uncaptured code to the forward or backward; return its node."""
        node, tensor, held_bytes = len(self.nodes), len(self.tensors), max(0, gap.held_bytes)
        kind = StorageKind.ACTIVATION if direction is Direction.FORWARD else StorageKind.GRADIENT
        self.tensors.append(Tensor("outside_held", len(self.storages), (held_bytes,), "uint8", node))
        self.held_by[node] = len(self.storages)
        self.storages.append(Storage(held_bytes, kind))
        made = {self.tensors[t].storage for t in handed} if direction is Direction.BACKWARD else ()
        known_bytes = held_bytes + sum(self.storages[storage].size_bytes for storage in made if storage is not None)
        outputs = (*handed, tensor)
        inputs = tuple(dict.fromkeys(read))
        self.nodes.append(Node(OUTSIDE, OUTSIDE, direction, inputs, outputs, OUTSIDE, is_random=True))
        self.owners.append(None)
        self.held.append(tensor)
        reused_bytes = 0  # bytes of gradients that die in this code; the bytes that it holds may take their memory
        if direction is Direction.BACKWARD and gap.held_bytes > 0:
            dying = {self.tensors[t].storage for t in read} - {self.tensors[t].storage for t in self.held}
            reused_bytes = sum(self.storages[s].size_bytes for s in dying if s is not None)
        self.costs.append((0.0, max(gap.peak_bytes - known_bytes, -reused_bytes)))
        (self.forward if direction is Direction.FORWARD else self.backward).append(node)
        return node
