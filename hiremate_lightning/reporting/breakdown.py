"""What a plan does to each module of a model, without torch and without rich.

`uses_by_module` accounts a plan to modules: a storage belongs to the module whose operation allocates it. `module_rows`
rolls these up to a dozen rows, equal blocks in one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..planning.plan import Plan
from ..records.costs import as_plain
from ..records.graph import OUTSIDE, Graph, Node
from ..records.schedule import Schedule, eager_decisions, lower
from ..records.simulation import simulate
from ..records.step import STALE_GRADIENTS
from ..units import format_bytes, format_time

MAX_ROWS = 12  # of modules, so that plan and prompt fit one screen
WORTH_SAYING = 0.02  # share of the peak that an advice must save
MOSTLY = 0.7  # share of the budget beyond which what is resident is the memory
_SMALL = 0.01  # share of bytes and time below which modules are summed up as "others"
_WORTH_OPENING = 0.05  # share below which a module is not broken up into its children


# ---------------------------------------------------------------- what a plan does to each module


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What a plan does to some modules."""

    kept_bytes: int = 0  # from forward to backward
    dropped_bytes: int = 0  # that plain training keeps there, and the plan does not
    recomputed: int = 0  # of the forward operations; views don't count
    operations: int = 0
    extra_ms: float = 0.0  # of all recomputation

    @property
    def kept_share(self) -> float | None:
        """Bytes kept over those and the bytes not kept, None where there are neither."""
        both = self.kept_bytes + self.dropped_bytes
        return self.kept_bytes / both if both else None


def add_uses(uses: Iterable[ModuleUse]) -> ModuleUse:
    """Add up what a plan does to several modules."""
    uses = tuple(uses)
    return ModuleUse(
        sum(u.kept_bytes for u in uses),
        sum(u.dropped_bytes for u in uses),
        sum(u.recomputed for u in uses),
        sum(u.operations for u in uses),
        math.fsum(u.extra_ms for u in uses),
    )


def uses_by_module(plan: Plan) -> dict[str, ModuleUse]:
    """Account a feasible plan to the modules whose operations allocate bytes and are recomputed.

    They come by their paths, in order of execution; "" is the planned module itself, `graph.OUTSIDE` what runs outside.
    """
    graph = plan.graph
    kept = _kept_storages(graph, plan.schedule)
    plain, _ = as_plain(graph, plan.profile)
    kept_plainly = _kept_storages(plain, lower(plain, eager_decisions(plain)))
    again = plan.schedule.recomputed(graph)
    repeated = {node if graph.nodes[node].replays is None else graph.nodes[node].replays for node in again}
    uses: dict[str, ModuleUse] = {}
    counted: set[int] = set()
    for index in graph.forward:
        storages = [s for s in graph.allocates[index] if s not in counted]
        counted.update(storages)
        works = graph.has_work(index) and graph.nodes[index].op != OUTSIDE
        use = ModuleUse(
            sum(graph.sizes[s] for s in storages if s in kept),
            sum(plain.sizes[s] - graph.sizes[s] * (s in kept) for s in storages if s in kept_plainly),
            int(works and index in repeated),
            int(works),
        )
        path = _path(graph, index)
        uses[path] = add_uses((uses.get(path, ModuleUse()), use))
    for index in again:
        path = _path(graph, index)
        uses[path] = add_uses((uses[path], ModuleUse(extra_ms=plan.profile.time_ms[index])))
    return uses


def _kept_storages(graph: Graph, schedule: Schedule) -> set[int | None]:
    """Find the storages that live on the device at the turn."""
    return {graph.tensors[t].storage for t in (*schedule.saved_on_device(graph), *graph.held)}


def _path(graph: Graph, index: int) -> str:
    node = graph.nodes[index]
    return OUTSIDE if node.op == OUTSIDE else node.module


# ---------------------------------------------------------------- modules rolled up into rows


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One row of the table, which may stand for several equal blocks."""

    label: str  # module path, with the numbers of equal blocks as a range
    count: int  # of these blocks
    depth: int  # 0, or 1 for a part of the blocks in the row above
    use: ModuleUse  # of all of them
    shares: tuple[float | None, ...] = ()  # kept in each, where they were planned differently; None: nothing to keep


def module_rows(plan: Plan, limit: int = MAX_ROWS) -> tuple[ModuleRow, ...]:
    """Roll modules up into few rows: equal blocks together, the largest opened first, the small ones summed up.

    There are at most as many rows as the limit, which is 2 or more, and one for what runs outside the plan. They are in
    order of execution. Those of depth 1 are part of the last row of depth 0; those of depth 0 add up to the whole.
    """
    uses = uses_by_module(plan)
    outside = uses.pop(OUTSIDE, ModuleUse())
    rows = _Modules(plan.graph, uses).rows(limit)
    if outside.kept_bytes:
        rows = (*rows, ModuleRow("outside the plan", 1, 0, outside))
    return rows


def total_row(rows: Iterable[ModuleRow]) -> ModuleRow:
    """Add up rows."""
    return ModuleRow("all", 1, 0, add_uses(row.use for row in rows if not row.depth))


@dataclass(frozen=True, slots=True)
class _Block:
    """Modules that go into one row, whose label and depth it has."""

    label: str
    members: tuple[tuple[str, ...], ...]  # for each of the equal modules, the paths in it that run something
    roots: tuple[str, ...] = ()  # of the equal modules, empty for what can't be opened
    count: int = 1  # of them in each parent
    depth: int = 0

    @property
    def is_group(self) -> bool:
        """Whether its row stays, as a heading, when it is opened."""
        return self.count > 1


class _Modules:
    """The module tree of a graph, and what a plan does to it."""

    def __init__(self, graph: Graph, uses: dict[str, ModuleUse]) -> None:
        self.uses = uses
        self.total = add_uses(uses.values())
        self.below: dict[str, list[str]] = {}  # path -> itself and the paths in it that run something
        for path in uses:
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                self.below.setdefault(".".join(parts[:depth]), []).append(path)
        self.keys: dict[str, list[str]] = {path: [] for path in uses}
        for index in graph.forward:
            if graph.nodes[index].op != OUTSIDE:
                self.keys[graph.nodes[index].module].append(graph.nodes[index].key or graph.nodes[index].op)

    def rows(self, limit: int) -> tuple[ModuleRow, ...]:
        if not self.uses:
            return ()
        shown = self._fold(self._children(_Block("", (), ("",))), limit)
        while (opened := self._open_one(shown, limit)) is not None:
            shown = opened
        return tuple(self._row(block) for block in shown)

    def _children(self, block: _Block) -> list[_Block]:
        """Break a block up into the modules in it, equal ones together, and its own operations."""
        depth = block.depth + block.is_group
        above = "" if block.is_group else block.label
        children = []
        for names in self._equal_names(block.roots[0]):
            roots = tuple(_join(root, name) for root in block.roots for name in names)
            members = tuple(tuple(self.below[root]) for root in roots)
            children.append(_Block(_join(above, _range_label(names)), members, roots, len(names), depth))
        if block.roots[0] in self.uses:
            label = f"{above} (itself)".strip()
            children.append(_Block(label, tuple((root,) for root in block.roots), depth=depth))
        return children

    def _equal_names(self, path: str) -> list[list[str]]:
        """Cluster the modules in one: equal are those that do the same work under names that differ in their number."""
        start = len(path) + 1 if path else 0
        names = dict.fromkeys(p[start:].split(".")[0] for p in self.below[path] if p != path)
        clusters: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            stem = name.rstrip("0123456789")
            alike = (name,) if stem == name else (stem, self._work(_join(path, name)))
            clusters.setdefault(alike, []).append(name)
        return list(clusters.values())

    def _work(self, path: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((p[len(path) :], tuple(self.keys[p])) for p in self.below[path])

    def _open_one(self, shown: list[_Block], limit: int) -> list[_Block] | None:
        """Open the largest block that can be opened and has room; None if there is none."""
        for block in sorted(shown, key=self._weight, reverse=True):
            at = shown.index(block)
            is_open = any(later.depth > block.depth for later in shown[at + 1 : at + 2])
            is_nested = block.is_group and block.depth
            has_parts = block.roots and self.below[block.roots[0]] != [block.roots[0]]
            if is_open or is_nested or not has_parts or self._weight(block) < _WORTH_OPENING:
                continue
            room = limit - len(shown) + (not block.is_group)
            children = self._fold(self._children(block), room)
            if len(children) > block.is_group and room > 1:
                return [*shown[: at + block.is_group], *children, *shown[at + 1 :]]
        return None

    def _fold(self, blocks: list[_Block], limit: int) -> list[_Block]:
        """Sum up the small blocks, and those for which the limit leaves no room, in one row."""
        ranked = sorted(blocks, key=self._weight, reverse=True)
        shown = [b for b in ranked if self._weight(b) >= _SMALL]
        if len(blocks) <= limit and len(blocks) - len(shown) < 2:
            return blocks
        shown = shown[: limit - 1]
        rest = [b for b in blocks if b not in shown]
        paths = tuple(path for b in rest for member in b.members for path in member)
        others = _Block(f"{sum(b.count for b in rest)} others", (paths,), depth=rest[0].depth)
        return [*(b for b in blocks if b in shown), others]

    def _weight(self, block: _Block) -> float:
        """Share of the bytes, or of the extra time, of the whole: the larger of the two."""
        use, total = add_uses(self._member_uses(block)), self.total
        size = (use.kept_bytes + use.dropped_bytes) / max(1, total.kept_bytes + total.dropped_bytes)
        return max(size, use.extra_ms / total.extra_ms if total.extra_ms else 0.0)

    def _member_uses(self, block: _Block) -> list[ModuleUse]:
        return [add_uses(self.uses[path] for path in member) for member in block.members]

    def _row(self, block: _Block) -> ModuleRow:
        members = self._member_uses(block)
        decided_alike = len({(u.kept_bytes, u.dropped_bytes, u.recomputed) for u in members}) == 1
        shares = () if decided_alike else tuple(u.kept_share for u in members)
        return ModuleRow(block.label, block.count, block.depth, add_uses(members), shares)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _range_label(names: Sequence[str]) -> str:
    """Write equal names as one: "0-9" where all numbers are there, "0..10" where some are not."""
    if len(names) == 1:
        return names[0]
    stem = names[0].rstrip("0123456789")
    numbers = sorted(int(name[len(stem) :]) for name in names)
    has_all = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{stem}{numbers[0]}{'-' if has_all else '..'}{numbers[-1]}"


# ---------------------------------------------------------------- words


def advice_lines(plan: Plan) -> list[str]:
    """Return what the user can do for less memory than any plan reaches, a sentence for each."""
    lines = []
    if (saved := _saved_without_stale_gradients(plan)) > WORTH_SAYING * plan.planned_peak_bytes:
        lines.append(
            f"Gradients of the step before live through the forward. {format_bytes(saved)} less are needed where a "
            "zero_grad() before the forward frees them; in Lightning, self.zero_grad() in on_train_batch_start does, "
            "unless gradients are accumulated."
        )
    if plan.resident_bytes > MOSTLY * plan.budget_bytes:
        lines.append(
            f"{format_bytes(plan.resident_bytes)} of the budget exist before the step (weights, optimizer state, "
            "batch): a plan can't make them smaller, an optimizer with less state can."
        )
    return lines


def _saved_without_stale_gradients(plan: Plan) -> int:
    """Compute by how much the peak falls where gradients of the step before are freed before the step."""
    graph = plan.graph
    stale = {tensor.storage for tensor in graph.tensors if tensor.name == STALE_GRADIENTS}
    if not stale:
        return 0
    storages = tuple(replace(s, size_bytes=0) if i in stale else s for i, s in enumerate(graph.storages))
    freed = simulate(replace(graph, storages=storages), plan.profile, plan.schedule)
    return plan.planned.peak_bytes - freed.peak_bytes


def place_words(plan: Plan) -> str:
    """Describe where in the step the planned peak is."""
    node = plan.graph.nodes[plan.planned.peak_moment.node]
    if node.op == OUTSIDE:
        return f"{node_words(node)}, {node.direction.value}"
    return f"{node.module or 'the module itself'}, {node.direction.value}, {node_words(node)}"


def node_words(node: Node) -> str:
    """Name an operation."""
    return "code outside the plan" if node.op == OUTSIDE else node.op.removesuffix(".default")


def use_cells(use: ModuleUse) -> tuple[str, ...]:
    """Write bytes kept and not kept, operations recomputed, and extra time as cells of a table; "" for zero."""
    return (
        format_bytes(use.kept_bytes) if use.kept_bytes else "",
        format_bytes(use.dropped_bytes) if use.dropped_bytes else "",
        f"{use.recomputed}/{use.operations}" if use.recomputed else "",
        f"+{format_time(use.extra_ms)}" if use.extra_ms else "",
    )
