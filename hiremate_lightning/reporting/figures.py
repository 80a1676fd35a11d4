"""The figures of a report as plain data: plotly's dictionaries, made without plotly, rich or torch.

`timeline_figure` stacks what occupies memory while the plain and the planned step run. `frontier_figure` draws time
against budget: schedules that were found, the bound below which none exists, and where the plan lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from ..planning.plan import Plan
from ..planning.solvers.curve import Curve
from ..records.costs import as_plain, step_time_ms
from ..records.graph import Graph, Phase
from ..records.schedule import Schedule, keep_all, lower
from ..records.simulation import Simulation
from ..units import format_bytes, format_ratio, format_time
from .breakdown import node_words
from .lifetimes import Band, Lifetime, band_bytes, lifetimes

Figure = dict[str, Any]

RESIDENT = "resident before the step"
OTHER = "other, resident"
# Told apart also without red and green; resident bytes are grey.
COLOURS = {
    Band.SAVED: "#4477aa",
    Band.PASSING: "#a6c8e4",
    Band.RECOMPUTED: "#ee7733",
    Band.OUTSIDE: "#aa6fb0",
    Band.GRADIENT: "#3f9b62",
    Band.WORKSPACE: "#e3c53d",
}
GREYS = ("#7d828b", "#959aa2", "#abafb6", "#c0c4ca", "#d3d6db", "#e2e4e8")
INK, FAINT, BUDGET = "#22262d", "#6b7280", "#c2185b"
_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": INK}


@dataclass(frozen=True)
class Run:
    """One of the two steps that are drawn.

    Attributes:
        plan: The plan.
        graph: Its graph, or that of plain PyTorch.
        name: "plain" or "planned".
        schedule: What runs.
        simulation: Its timeline.
        workspace_bytes: By node.
    """

    plan: Plan
    graph: Graph
    name: str
    schedule: Schedule
    simulation: Simulation
    workspace_bytes: tuple[int, ...]

    @cached_property
    def lives(self) -> tuple[Lifetime, ...]:
        """Blocks that it allocates."""
        return lifetimes(self.graph, self.schedule)

    @cached_property
    def bands(self) -> dict[Band, list[int]]:
        """Bytes by band and operation, workspace included."""
        nodes = [moment.node for moment in self.simulation.timeline]
        needed = [self.workspace_bytes[node] for node in nodes]
        found, workspace = band_bytes(self.lives, len(nodes)), [max(0, size) for size in needed]
        if Band.GRADIENT in found:  # one that takes the memory of what it is made of is there once
            found[Band.GRADIENT] = [g + min(0, size) for g, size in zip(found[Band.GRADIENT], needed, strict=True)]
        return {**found, Band.WORKSPACE: workspace} if any(workspace) else found

    @cached_property
    def starts_ms(self) -> list[float]:
        """When each operation starts, and when the last one ends."""
        clock, found = 0.0, [0.0]
        for moment in self.simulation.timeline:
            clock += self.plan.profile.time_ms[moment.node]
            found.append(clock)
        return found

    def is_again(self, position: int) -> bool:
        """Whether the operation at a position recomputes something."""
        node = self.plan.graph.nodes[self.simulation.timeline[position].node]
        return position >= self.simulation.turn and node.phase is Phase.FORWARD


def plain_run(plan: Plan) -> Run:
    """Give the step with everything kept."""
    graph, profile = as_plain(plan.graph, plan.profile)
    return Run(plan, graph, "plain", lower(graph, keep_all(graph)), plan.unplanned, profile.workspace_bytes)


def planned_run(plan: Plan) -> Run:
    """Give the step under the plan."""
    return Run(plan, plan.graph, "planned", plan.schedule, plan.planned, plan.profile.workspace_bytes)


def resident_bands(plan: Plan) -> tuple[tuple[str, str, int], ...]:
    """Name and colour the resident bytes, as far as they were counted apart; the parts add up to all of them."""
    known = [(f"{name}, resident", size_bytes) for name, size_bytes in plan.resident_parts if size_bytes]
    rest = plan.resident_bytes - sum(size_bytes for _, size_bytes in known)
    if rest < 0 or not known:
        known, rest = [], plan.resident_bytes
    parts = [*known, *([(OTHER if known else RESIDENT, rest)] if rest else [])]
    return tuple((name, GREYS[min(i, len(GREYS) - 1)], size_bytes) for i, (name, size_bytes) in enumerate(parts))


# ---------------------------------------------------------------- memory over the step


def timeline_figure(plan: Plan) -> Figure:
    """Draw what occupies memory over time, the plain step above the planned one, with equal axes.

    Args:
        plan: A plan.

    Returns:
        A figure with one stack of bands for each step, the budget as a line, and an operation's name, module and source
        line where a pointer is.
    """
    runs = (plain_run(plan), planned_run(plan))
    peak_bytes = max(plan.unplanned_peak_bytes, plan.planned_peak_bytes)
    scale, unit = binary_unit(max(peak_bytes, 1))
    traces: list[Figure] = []
    shapes: list[Figure] = []
    notes: list[Figure] = []
    for row, run in enumerate(runs, start=1):
        known = {trace["name"] for trace in traces}
        traces += [{**trace, "showlegend": trace["name"] not in known} for trace in _stack(run, row, scale)]
        traces += [_total(run, row, scale), _peak_mark(run, row, scale)]
        shapes.append(_turn_line(run, row))
        notes += [_heading(run, row), *_phases(run, row)]
    shows_budget = plan.budget_bytes <= 1.15 * peak_bytes
    if shows_budget:
        traces += [
            _budget_line(plan, row, max(run.starts_ms[-1] for run in runs), scale) for row in range(1, len(runs) + 1)
        ]
    top = max(peak_bytes, plan.budget_bytes if shows_budget else 0) / scale
    axis = {"range": [0, 1.08 * top], "title": {"text": unit}, "gridcolor": "#eceef1", "zeroline": False}
    time_axis = {"title": {"text": "milliseconds"}, "showgrid": False, "zeroline": False, "rangemode": "tozero"}
    layout = {
        **_layout(),
        "height": 720,
        "xaxis": {**time_axis, "anchor": "y", "matches": "x2", "showticklabels": False, "title": {"text": ""}},
        "xaxis2": {**time_axis, "anchor": "y2"},
        "yaxis": {**axis, "domain": [0.54, 1.0]},
        "yaxis2": {**axis, "domain": [0.0, 0.46], "matches": "y"},
        "shapes": shapes,
        "annotations": notes,
        "hovermode": "x",
    }
    return {"data": traces, "layout": layout}


def binary_unit(size_bytes: int) -> tuple[int, str]:
    """Choose the binary unit in which a size is a handy number."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((size, name) for size, name in units if size_bytes >= 2 * size), (1, "B"))


def _axes(row: int) -> dict[str, str]:
    return {"xaxis": "x", "yaxis": "y"} if row == 1 else {"xaxis": f"x{row}", "yaxis": f"y{row}"}


def _stack(run: Run, row: int, scale: int) -> list[Figure]:
    """Draw the bands of one step, resident bytes lowest."""
    count = len(run.simulation.timeline)
    layers = [(name, colour, [size] * count) for name, colour, size in resident_bands(run.plan)]
    layers += [(band.value, COLOURS[band], sizes) for band, sizes in run.bands.items()]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "legendgroup": name,
            "legendrank": rank,
            "stackgroup": run.name,
            "x": _rounded(run.starts_ms),
            "y": _rounded([size / scale for size in (*sizes, *sizes[-1:])]),
            "line": {"width": 0, "shape": "hv", "color": colour},
            "fillcolor": colour,
            "hoverinfo": "skip",
            **_axes(row),
        }
        for rank, (name, colour, sizes) in enumerate(layers, start=1)
    ]


def _total(run: Run, row: int, scale: int) -> Figure:
    """Draw the outline, which also says what runs under the pointer."""
    totals = [(run.plan.resident_bytes + moment.peak_bytes) / scale for moment in run.simulation.timeline]
    texts = [_hover(run, position) for position in range(len(totals))]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{run.name} step",
        "showlegend": False,
        "x": _rounded(run.starts_ms),
        "y": _rounded([*totals, *totals[-1:]]),
        "line": {"width": 1, "shape": "hv", "color": INK},
        "text": [*texts, *texts[-1:]],
        "hovertemplate": "%{text}<extra></extra>",
        **_axes(row),
    }


def _peak_mark(run: Run, row: int, scale: int) -> Figure:
    """Mark the peak, which may be at an operation that takes no time."""
    timeline = run.simulation.timeline
    at = timeline.index(run.simulation.peak_moment)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "peak",
        "legendgroup": "peak",
        "showlegend": row == 1,
        "x": _rounded([run.starts_ms[at]]),
        "y": _rounded([(run.plan.resident_bytes + run.simulation.peak_bytes) / scale]),
        "text": [f"<b>peak</b><br>{_hover(run, at)}"],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "circle-open", "size": 10, "color": INK, "line": {"width": 2}},
        **_axes(row),
    }


def _hover(run: Run, position: int) -> str:
    plan, moment = run.plan, run.simulation.timeline[position]
    node = plan.graph.nodes[moment.node]
    phase = "recomputed" if run.is_again(position) else node.phase.value
    lines = [f"<b>{escape(node_words(node))}</b>, {phase}, {format_time(plan.profile.time_ms[moment.node])}"]
    lines += [escape(text) for text in (node.module, short_source(node.source)) if text]
    lines.append(f"{format_bytes(plan.resident_bytes + moment.peak_bytes)} in all")
    held = [(RESIDENT, plan.resident_bytes)] if plan.resident_bytes else []
    held += [(band.value, sizes[position]) for band, sizes in run.bands.items() if sizes[position]]
    return "<br>".join([*lines, *(f"{format_bytes(size)} {name}" for name, size in held)])


def short_source(source: str, parts: int = 3) -> str:
    """Shorten a source line's path to its last parts."""
    return "/".join(source.replace("\\", "/").split("/")[-parts:])


def _budget_line(plan: Plan, row: int, end_ms: float, scale: int) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"budget, {format_bytes(plan.budget_bytes)}",
        "legendgroup": "budget",
        "showlegend": row == 1,
        "x": [0, round(end_ms, 4)],
        "y": [plan.budget_bytes / scale] * 2,
        "line": {"width": 2, "dash": "dash", "color": BUDGET},
        "hoverinfo": "skip",
        **_axes(row),
    }


def _turn_line(run: Run, row: int) -> Figure:
    """Mark where the forward ends."""
    at = run.starts_ms[run.simulation.turn]
    y_axis = f"{_axes(row)['yaxis']} domain"
    line = {"width": 1, "dash": "dot", "color": FAINT}
    return {
        "type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "xref": _axes(row)["xaxis"], "yref": y_axis, "line": line
    }  # fmt: skip


def _heading(run: Run, row: int) -> Figure:
    peak = format_bytes(run.plan.resident_bytes + run.simulation.peak_bytes)
    text = f"<b>{run.name.capitalize()} step</b>: peak {peak}, {format_time(run.simulation.time_ms)}"
    y_axis = f"{_axes(row)['yaxis']} domain"
    return {
        "text": text, "showarrow": False, "align": "left", "xref": "paper", "x": 0, "xanchor": "left",
        "yref": y_axis, "y": 1.0, "yanchor": "bottom",
    }  # fmt: skip


def _phases(run: Run, row: int) -> list[Figure]:
    """Name the two sides of the turn."""
    at = run.starts_ms[run.simulation.turn]
    place = {"xref": _axes(row)["xaxis"], "x": at, "yref": f"{_axes(row)['yaxis']} domain", "y": 1.0, "yanchor": "top"}
    looks = {"showarrow": False, "font": {"color": FAINT, "size": 12}}
    return [
        {"text": "forward", "xanchor": "right", "xshift": -4, **place, **looks},
        {"text": "backward", "xanchor": "left", "xshift": 4, **place, **looks},
    ]


def _rounded(numbers: list[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


def _layout() -> Figure:
    return {
        "font": _FONT,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 64, "r": 16, "t": 64, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": -0.12, "yanchor": "top", "traceorder": "normal"},
        "hoverlabel": {"align": "left", "bgcolor": "white", "bordercolor": FAINT, "font": {"color": INK}},
    }


# ---------------------------------------------------------------- budget against time


def frontier_figure(plan: Plan, curve: Curve) -> Figure:
    """Draw the extra time of a step against its budget.

    Args:
        plan: A plan.
        curve: What is known of its step under other budgets.

    Returns:
        A figure with the schedules found, the proven bound, and the plan as predicted and as measured.
    """
    known = curve.with_solution(plan.planned.peak_bytes, plan.solution)  # its bound was proven for at least that much
    scale, unit = binary_unit(max(plan.unplanned_peak_bytes, 1))
    step_ms = step_time_ms(plan.graph, plan.profile) or 1.0

    def place(peak_bytes: int, recompute_ms: float) -> tuple[float, float]:
        return (plan.resident_bytes + peak_bytes) / scale, 100 * recompute_ms / step_ms

    most = max([plan.unplanned.peak_bytes, *(point.peak_bytes for point in known.points)])
    found = [place(point.peak_bytes, point.recompute_ms) for point in known.points]
    found.append((max(found[-1][0], place(most, 0)[0]), found[-1][1]) if found else place(most, 0))
    bound = [place(budget, bound_ms) for budget, bound_ms in _falling(known.bounds) if budget <= most]
    traces = [
        _steps("fastest schedule found", found, "hv", COLOURS[Band.SAVED], "lines+markers"),
        _steps("proven: nothing is faster", bound, "vh", FAINT, "lines"),
        _mark("plain training", (plan.unplanned_peak_bytes / scale, 0.0), "circle-open", INK),
        _mark("this plan, predicted", place(plan.planned.peak_bytes, plan.planned.recompute_ms), "star", BUDGET),
    ]
    measured = plan.measured
    if measured.peak_bytes is not None and measured.overhead is not None:
        traces.append(
            _mark("this plan, measured", (measured.peak_bytes / scale, 100 * measured.overhead), "x", "#222222")
        )
    for trace in traces:
        trace["hovertemplate"] = f"{trace['name']}<br>%{{x:.4g}} {unit}, %{{y:+.1f}} %<extra></extra>"
    line = {"width": 2, "dash": "dash", "color": BUDGET}
    at = plan.budget_bytes / scale
    layout = {
        **_layout(),
        "height": 440,
        "xaxis": {"title": {"text": f"budget, {unit}"}, "gridcolor": "#eceef1", "zeroline": False},
        "yaxis": {"title": {"text": "extra time, %"}, "gridcolor": "#eceef1", "rangemode": "tozero"},
        "shapes": [{"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "y domain", "line": line}],
        "annotations": [
            {"text": "budget", "x": at, "y": 1, "yref": "y domain", "yanchor": "bottom", "showarrow": False,
             "font": {"color": BUDGET}}
        ],
    }  # fmt: skip
    layout["legend"] = {**layout["legend"], "y": -0.2}
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


def _falling(bounds: tuple[tuple[int, float], ...]) -> list[tuple[int, float]]:
    """A bound holds for every smaller budget too: give each budget the best one that is known."""
    found: list[tuple[int, float]] = []
    best = 0.0
    for budget, bound_ms in reversed(bounds):
        best = max(best, bound_ms)
        found.append((budget, best))
    return found[::-1]


def _steps(name: str, points: list[tuple[float, float]], shape: str, colour: str, mode: str) -> Figure:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": _rounded([x for x, _ in points]),
        "y": _rounded([y for _, y in points]),
        "line": {"shape": shape, "color": colour, "width": 2},
        "marker": {"size": 6},
    }


def _mark(name: str, place: tuple[float, float], symbol: str, colour: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": _rounded([place[0]]),
        "y": _rounded([place[1]]),
        "marker": {"symbol": symbol, "size": 13, "color": colour, "line": {"width": 2, "color": colour}},
    }


def frontier_words(plan: Plan) -> str:
    """Say how good the plan is proven to be."""
    if not plan.solution.recompute_ms:
        return "Nothing is recomputed: no plan is faster."
    found, bound = format_ratio(plan.predicted_overhead), format_ratio(plan.bound_overhead)
    return f"This plan: {found}; proven: no plan within the budget is below {bound}."
