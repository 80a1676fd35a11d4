"""The content of all reports of a plan, without torch and rich: its modules as rows, and its numbers in words.

`uses_by_module` splits a plan by module: a storage belongs to the module whose operation allocates it. `module_rows`
sums modules up in a dozen rows, equal blocks in one row. `all_numbers` returns everything for JSON, in a file or a
page; `read_summary` reads it back, and `summary_rows` puts it into words.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..planning.plan import Numbers, Plan, budget_words, offload_words, peak_words, planning_words, solver_words
from ..records.graph import OUTSIDE, Graph, Node, StorageKind
from ..records.schedule import Schedule
from ..records.simulation import simulate
from ..records.step import STALE_GRADIENTS
from ..units import format_bytes, format_ratio, format_time
from .timeline import eager_run

MAX_ROWS = 12  # most rows of modules, so that the plan fits one screen
WORTH_SAYING = 0.02  # least share of the peak that an advice must save
MOSTLY = 0.7  # an advice about resident bytes is shown above this share of the budget
PREFIX = "hiremate/"  # of the names of metrics in experiment trackers
METRICS = (
    "budget_bytes",
    "resident_bytes",
    "unplanned_peak_bytes",
    "planned_peak_bytes",
    "measured_peak_bytes",
    "predicted_overhead",
    "measured_overhead",
    "gap",
)
_SMALL = 0.01  # share of bytes and time below which modules are summed up as "others"
_WORTH_OPENING = 0.05  # share below which a module is not split into its children
_MOST_INPUTS = 3  # most inputs of a step to describe
_IN_PAGE = re.compile(r'<script type="application/json" id="plan">(.*?)</script>', re.DOTALL)


# ---------------------------------------------------------------- what a plan does to each module


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What a plan does to some modules."""

    kept_bytes: int = 0  # kept from forward to backward
    dropped_bytes: int = 0  # kept in eager training, and not by the plan
    recomputed: int = 0  # forward operations that run again, without views
    operations: int = 0
    extra_ms: float = 0.0  # time of recomputation

    @property
    def kept_share(self) -> float | None:
        """Bytes kept / bytes that eager training keeps; None if it keeps none."""
        both = self.kept_bytes + self.dropped_bytes
        return self.kept_bytes / both if both else None


def add_uses(uses: Iterable[ModuleUse]) -> ModuleUse:
    """Add up what a plan does to several modules."""
    return ModuleUse(*map(sum, zip(*map(astuple, uses), strict=True)))


def uses_by_module(plan: Plan) -> dict[str, ModuleUse]:
    """Return what a feasible plan does to each module, by the module whose operation allocates or is recomputed.

    Keys are module paths in order of execution; "" is the planned module itself, `graph.OUTSIDE` is outside code.
    """
    graph = plan.graph
    kept = _kept_storages(graph, plan.schedule)
    eager = eager_run(plan)
    kept_in_eager = _kept_storages(eager.graph, eager.schedule)
    again = plan.schedule.recomputed(graph)
    repeated = {node if graph.nodes[node].replays is None else graph.nodes[node].replays for node in again}
    parts = defaultdict[str, list[ModuleUse]](list)
    counted = set[int]()
    for index in graph.forward:
        storages = [s for s in graph.allocates[index] if s not in counted]
        counted.update(storages)
        works = graph.has_work(index) and graph.nodes[index].op != OUTSIDE
        kept_bytes = sum(graph.sizes[s] for s in storages if s in kept)
        dropped_bytes = sum(eager.graph.sizes[s] - graph.sizes[s] * (s in kept) for s in storages if s in kept_in_eager)
        use = ModuleUse(kept_bytes, dropped_bytes, int(works and index in repeated), int(works))
        parts[_path(graph.nodes[index])].append(use)
    for index in again:
        parts[_path(graph.nodes[index])].append(ModuleUse(extra_ms=plan.profile.time_ms[index]))
    return {path: add_uses(uses) for path, uses in parts.items()}


def _kept_storages(graph: Graph, schedule: Schedule) -> set[int | None]:
    """Return the storages that live on the device at the turn."""
    return {graph.tensors[t].storage for t in (*schedule.saved_on_device(graph), *graph.held)}


def _path(node: Node) -> str:
    return OUTSIDE if node.op == OUTSIDE else node.module


# ---------------------------------------------------------------- modules rolled up into rows


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One row of the table: a module, or several equal blocks."""

    label: str  # module path, with the numbers of equal blocks as a range
    count: int  # number of blocks
    depth: int  # 0; 1 for a part of the blocks of the latest row of depth 0
    use: ModuleUse  # of all blocks together
    shares: tuple[float | None, ...] = ()  # kept share of each block, if these differ


def module_rows(plan: Plan, limit: int = MAX_ROWS) -> tuple[ModuleRow, ...]:
    """Sum modules up in few rows: equal blocks in one row, the largest split first, the small ones in one row.

    There are at most `limit` rows (2 or more), and one more for outside code, in order of execution. Rows of depth 1
    are parts of the latest row of depth 0; rows of depth 0 add up to the whole.
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
    """Equal modules of one row, with the row's label and depth."""

    label: str
    uses: tuple[ModuleUse, ...]  # one for each of the equal modules
    roots: tuple[str, ...] = ()  # their paths; empty if the block can't be split
    count: int = 1  # number of them in each parent
    depth: int = 0

    @property
    def is_group(self) -> bool:
        """Whether the row stays as a heading when the block is split."""
        return self.count > 1

    def row(self) -> ModuleRow:
        decided_alike = len({(u.kept_bytes, u.dropped_bytes, u.recomputed) for u in self.uses}) == 1
        shares = () if decided_alike else tuple(u.kept_share for u in self.uses)
        return ModuleRow(self.label, self.count, self.depth, add_uses(self.uses), shares)


class _Modules:
    """The module tree of a graph, and what a plan does to it."""

    def __init__(self, graph: Graph, uses: dict[str, ModuleUse]) -> None:
        self.uses = uses
        self.total = add_uses(uses.values())
        self.below = defaultdict[str, list[str]](list)  # path -> itself and the paths below it that run operations
        for path in uses:
            parts = path.split(".") if path else []
            for depth in range(len(parts) + 1):
                self.below[".".join(parts[:depth])].append(path)
        self.keys = defaultdict[str, list[str]](list)  # path -> structural keys of its operations
        for node in (graph.nodes[index] for index in graph.forward):
            self.keys[_path(node)].append(node.key or node.op)

    def rows(self, limit: int) -> tuple[ModuleRow, ...]:
        shown = self._fold(self._children(_Block("", (), ("",))), limit)
        return tuple(block.row() for block in self._opened(shown, limit))

    def _children(self, block: _Block) -> list[_Block]:
        """Split a block into its child modules, equal ones together, and its own operations."""
        depth = block.depth + block.is_group
        above = "" if block.is_group else block.label
        children = []
        for names in self._equal_names(block.roots[0]):
            roots = tuple(_join(root, name) for root in block.roots for name in names)
            uses = tuple(add_uses(self.uses[path] for path in self.below[root]) for root in roots)
            children.append(_Block(_join(above, _range_label(names)), uses, roots, len(names), depth))
        if block.roots[0] in self.uses:
            label = f"{above} (itself)".strip()
            children.append(_Block(label, tuple(self.uses[root] for root in block.roots), depth=depth))
        return children

    def _equal_names(self, path: str) -> list[list[str]]:
        """Group the child modules of a path: equal ones do the same work under names that differ in a number."""
        start = len(path) + 1 if path else 0
        names = dict.fromkeys(p[start:].split(".")[0] for p in self.below[path] if p != path)
        clusters = defaultdict[tuple[object, ...], list[str]](list)
        for name in names:
            stem, inside = name.rstrip("0123456789"), _join(path, name)
            work = tuple((p[len(inside) :], tuple(self.keys[p])) for p in self.below[inside])
            clusters[(name,) if stem == name else (stem, work)].append(name)
        return list(clusters.values())

    def _opened(self, shown: list[_Block], limit: int) -> list[_Block]:
        """Split the largest block that can be split within the limit of rows, and again, until there is none."""
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
                return self._opened([*shown[: at + block.is_group], *children, *shown[at + 1 :]], limit)
        return shown

    def _fold(self, blocks: list[_Block], limit: int) -> list[_Block]:
        """Sum up in one row the small blocks and those beyond the limit of rows."""
        ranked = sorted(blocks, key=self._weight, reverse=True)
        shown = [b for b in ranked if self._weight(b) >= _SMALL]
        if len(blocks) <= limit and len(blocks) - len(shown) < 2:
            return blocks
        shown = shown[: limit - 1]
        rest = [b for b in blocks if b not in shown]
        use = add_uses(use for b in rest for use in b.uses)
        others = _Block(f"{sum(b.count for b in rest)} others", (use,), depth=rest[0].depth)
        return [*(b for b in blocks if b in shown), others]

    def _weight(self, block: _Block) -> float:
        """Return a block's share of all bytes or of all extra time, whichever is larger."""
        use, total = add_uses(block.uses), self.total
        size = (use.kept_bytes + use.dropped_bytes) / max(1, total.kept_bytes + total.dropped_bytes)
        return max(size, use.extra_ms / total.extra_ms if total.extra_ms else 0.0)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _range_label(names: Sequence[str]) -> str:
    """Write equal names as one: "0-9" if all numbers are there, "0..10" if some are missing."""
    if len(names) == 1:
        return names[0]
    stem = names[0].rstrip("0123456789")
    numbers = sorted(int(name[len(stem) :]) for name in names)
    has_all = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{stem}{numbers[0]}{'-' if has_all else '..'}{numbers[-1]}"


# ---------------------------------------------------------------- numbers


def all_numbers(plan: Plan) -> dict[str, Any]:
    """Return the numbers of a plan, with peak, batch and advice in words, and the rows of modules."""
    rows = module_rows(plan)
    return {
        **plan.to_dict(),
        "at": place_words(plan),
        "batch": batch_words(plan),
        "advice": advice_lines(plan),
        "modules": [asdict(row) for row in (*rows, total_row(rows))],
    }


def plan_metrics(plan: Plan, plans: int = 1) -> dict[str, float]:
    """Return bytes, ratios and seconds of one of `plans` plans, by name; leave out what is not measured yet."""
    numbers = plan.to_dict()
    metrics = {name: numbers[name] for name in METRICS}
    metrics |= {"planning_s": sum(numbers["planning"].values()), "plans": plans}
    return {f"{PREFIX}{name}": float(value) for name, value in metrics.items() if value is not None}


def rows_of(numbers: Numbers) -> list[ModuleRow]:
    """Read the rows of modules back from numbers, without the total; files of earlier versions have no rows."""
    return [
        ModuleRow(**{**row, "use": ModuleUse(**row["use"]), "shares": tuple(row["shares"])})
        for row in numbers.get("modules", ())[:-1]
    ]


def read_summary(path: Path) -> dict[str, Any]:
    """Read the numbers of a plan from a file of `Plan.to_json`, `write_html` or `hiremate plan --json`."""
    expected = "Expected what `hiremate plan --json FILE`, Plan.to_json() or write_html() wrote."
    try:
        text = path.read_text(encoding="utf-8")
        in_page = _IN_PAGE.search(text)
        data = json.loads(in_page[1] if in_page else text)
    except OSError as error:
        raise ConfigurationError(f"Can't read {str(path)!r}: {error.strerror}. {expected}") from error
    except ValueError:  # neither text nor JSON
        data = None
    if isinstance(data, dict) and "planned_step_ms" in data:
        return data
    raise ConfigurationError(f"{str(path)!r} is no plan. {expected}")


# ---------------------------------------------------------------- words


def advice_lines(plan: Plan) -> list[str]:
    """Return advice by which the user can save memory that no plan can save, a sentence each."""
    lines, graph = [], plan.graph
    if stale := {tensor.storage for tensor in graph.tensors if tensor.name == STALE_GRADIENTS}:
        storages = tuple(replace(s, size_bytes=0) if i in stale else s for i, s in enumerate(graph.storages))
        freed = simulate(replace(graph, storages=storages), plan.profile, plan.schedule)
        saved_bytes = plan.planned.peak_bytes - freed.peak_bytes
        if saved_bytes > WORTH_SAYING * plan.planned_peak_bytes:
            lines.append(
                f"Gradients of the step before live through the forward. {format_bytes(saved_bytes)} less are needed "
                "where a zero_grad() before the forward frees them; in Lightning, self.zero_grad() in "
                "on_train_batch_start does, unless gradients are accumulated."
            )
    if plan.resident_bytes > MOSTLY * plan.budget_bytes:
        lines.append(
            f"{format_bytes(plan.resident_bytes)} of the budget exist before the step (weights, optimizer state, "
            "batch): a plan can't make them smaller, an optimizer with less state can."
        )
    return lines


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
    """Write kept bytes, dropped bytes, recomputed operations and extra time as cells of a table; "" for zero."""
    return (
        format_bytes(use.kept_bytes) if use.kept_bytes else "",
        format_bytes(use.dropped_bytes) if use.dropped_bytes else "",
        f"{use.recomputed}/{use.operations}" if use.recomputed else "",
        f"+{format_time(use.extra_ms)}" if use.extra_ms else "",
    )


def batch_words(plan: Plan) -> str:
    """Describe the inputs of a step by sizes and type; "" if the graph has none."""
    graph = plan.graph
    inputs = (graph.tensors[tensor] for tensor in graph.inputs)
    described = [
        f"{' x '.join(map(str, tensor.shape))} {tensor.dtype}"
        for tensor in inputs
        if tensor.storage is not None and tensor.shape and graph.storages[tensor.storage].kind is StorageKind.INPUT
    ]
    return ", ".join(dict.fromkeys(described[:_MOST_INPUTS])) + (", ..." if len(described) > _MOST_INPUTS else "")


def verdict(numbers: Numbers) -> str:
    """Describe in one sentence whether a plan keeps its budget, what it saves, and what it costs."""
    name, budget = numbers["target"] or "The model", budget_words(numbers)
    measured_bytes, measured_time = numbers["measured_peak_bytes"], numbers["measured_overhead"]
    peak_bytes = numbers["planned_peak_bytes"] if measured_bytes is None else measured_bytes
    peak = f"{format_bytes(peak_bytes)} ({'predicted' if measured_bytes is None else 'measured'})"
    plain = format_bytes(numbers["unplanned_peak_bytes"])
    if peak_bytes > numbers["budget_bytes"]:
        over = format_bytes(peak_bytes - numbers["budget_bytes"])
        return f"{name} takes {peak}, {over} MORE than its budget of {budget}."
    if not numbers["predicted_overhead"]:
        return f"{name} takes {peak} and needs no plan: that is within its budget of {budget}, at no extra time."
    time = f"{format_ratio(numbers['predicted_overhead'])} time predicted"
    if measured_time is not None:
        time = f"{format_ratio(measured_time)} time measured, {format_ratio(numbers['predicted_overhead'])} predicted"
    return f"{name} trains in {peak} instead of {plain}, within its budget of {budget}, for {time}."


def summary_rows(numbers: Numbers, most_rounded: int | None = None) -> list[tuple[str, str]]:
    """Return the numbers of a plan as (name, words), with at most `most_rounded` differences by rounding, or all."""
    resident, rounded = format_bytes(numbers["resident_bytes"]), numbers["rounded"]
    hidden = len(rounded[most_rounded:]) if most_rounded is not None else 0
    peak = f"{format_bytes(numbers['unplanned_peak_bytes'])} -> {peak_words(numbers, 'planned_peak_bytes', ' planned')}"
    if numbers["measured_peak_bytes"] is not None:
        peak += f", {peak_words(numbers, 'measured_peak_bytes', ' measured')}"
    time = f"{format_time(numbers['step_ms'])} -> {format_time(numbers['planned_step_ms'])}, "
    time += f"{format_ratio(numbers['predicted_overhead'])} planned"
    if numbers["measured_overhead"] is not None:
        time += f", {format_ratio(numbers['measured_overhead'])} measured"
    if numbers["costs"] == "estimate":
        time += "; times are estimates"
    rows = [
        ("model", numbers["target"] or "the root module"),
        ("peak", peak),
        ("at", numbers.get("at", "")),
        ("budget", f"{budget_words(numbers)}, {resident} of it resident before the step"),
        ("time", time),
        ("offloaded", offload_words(numbers)),
        ("solver", solver_words(numbers)),
        ("planning", planning_words(numbers)),
        ("proved", numbers["proved"]),
        *(("rounding", words) for words in rounded[:most_rounded]),
        ("", f"and {hidden} more, which the page lists" if hidden else ""),
        ("kept compiled", ", ".join(numbers["kept_compiled"])),
        *(("advice", line) for line in numbers.get("advice", ())),
        *(("note", note) for note in numbers.get("notes", ())),
    ]
    return [row for row in rows if row[1]]
