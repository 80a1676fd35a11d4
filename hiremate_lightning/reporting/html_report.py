"""One plan as one HTML page that opens from disk, without a network: pictures, tables, and the numbers as JSON.

The pictures come from `svg_report`; a short script names the operation under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from platform import python_version
from typing import Any

from ..planning.comparing import Curve, curve
from ..planning.plan import Plan, plan_title, proof_words
from ..planning.solutions import package_version
from ..planning.solvers.base import Problem, SolveOptions
from ..planning.solvers.worker import apart
from ..units import format_bytes, format_ratio, format_time
from .plan_summary import ModuleRow, all_numbers, module_rows, node_words, summary_rows, total_row, use_cells, verdict
from .svg_report import FRONTIER_HEIGHT, LEFT, PANEL, RIGHT, TimelineDrawing, frontier_of, panel_svg, plan_file
from .timeline import COLOURS, Band, resident_bands, short_source

MAX_MODULE_ROWS = 40
MAX_BLOCKS = 12  # most blocks to list of those live at the peak
CURVE_LIMIT_S = 10.0
WIDTH, NARROW = 1120, 360  # width in pixels of a picture, and of its version for phones
NONE = "\u2013"
BETWEEN = " \u00b7 "  # separates facts in a line
ROUNDED_WORDS = (
    "Captured code ran beside eager PyTorch on the same inputs. These values were not the same bits, but no further "
    "apart than rounding takes them; the code runs as planned."
)


def write_html(plan: Plan, path: str | Path, *, curve_limit_s: float = CURVE_LIMIT_S) -> Path:
    """Write the report of a plan.

    Args:
        plan: A plan; its measurements are shown beside its predictions.
        path: File to write, some hundred kilobytes. Its folder must exist.
        curve_limit_s: Seconds to solve other budgets; 0 leaves the curve out.

    Returns:
        The path.

    Raises:
        ConfigurationError: If its folder doesn't exist, or there is no plan.

    Example:
        >>> write_html(get_plan(model), "plan.html")
    """
    path = plan_file(plan, path)
    frontier = None
    if curve_limit_s > 0:
        options = SolveOptions(time_limit_s=curve_limit_s)
        problem = Problem(plan.graph, plan.profile, plan.planned.peak_bytes, options)
        frontier = curve(problem, solve=apart("portfolio"))  # a solver that crashes must not end training
    path.write_text(_Page(plan, frontier).text(), encoding="utf-8")
    return path


class _Page:
    def __init__(self, plan: Plan, frontier: Curve | None) -> None:
        self.plan, self.frontier = plan, frontier
        self.timeline, self.numbers = TimelineDrawing(plan, WIDTH), all_numbers(plan)

    def text(self) -> str:
        title, plan = escape(plan_title(self.plan)), self.plan
        sections = [
            _section("Memory over the step", self._timeline(), " ".join(self.numbers["advice"])),
            self._comparison(),
            self._modules(),
            self._peak(),
        ]
        if plan.rounded:
            rows = [(escape(words),) for words in plan.rounded]
            sections.append(_table("Differences by rounding", ("value",), rows, words=ROUNDED_WORDS, numbers=()))
        if self.frontier is not None:
            panel, title = frontier_of(plan, self.frontier), "Extra time against budget"
            draw = partial(panel_svg, panel, title, height=FRONTIER_HEIGHT)
            figure = f'<div class="wide" id="frontier">{_for_screens(draw)}</div>'
            words = f"This plan: {format_ratio(plan.predicted_overhead)}, {proof_words(plan.to_dict())}."
            words = "Nothing is recomputed: no plan is faster." if plan.solution.keeps_all else words
            sections.append(_section("Budget against time", figure, words))
        made_by = escape(f"Made by hiremate-lightning {package_version()}. Costs: {self._device}.")
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>{_part('page.css')}</style>\n</head>\n<body>\n<main>\n"
            f"<header><h1>{title}</h1>{self._summary()}</header>\n" + "\n".join(sections) + "\n"
            f"<footer>{made_by} {_UNITS}</footer>\n</main>\n"
            f"{_json('plan', json.dumps(self.numbers, indent=2))}{_json('steps', json.dumps(self._steps()))}"
            f"<script>{_part('page.js')}</script>\n</body>\n</html>\n"
        )

    def _timeline(self) -> str:
        def draw(width: int) -> str:
            return TimelineDrawing(self.plan, width).text().replace("<svg ", '<svg tabindex="0" ', 1)

        note = f'<pre id="note" aria-live="polite">{_HINT}</pre>'
        return f'<div class="wide" id="timeline">{_for_screens(draw)}</div>{note}'

    def _steps(self) -> dict[str, Any]:
        """Return the data for the script: operations of both runs, and their places in the picture."""
        timeline, graph = self.timeline, self.plan.graph
        nodes = [
            [node_words(node), node.direction.value, node.module, short_source(node.source), format_time(time_ms)]
            for node, time_ms in zip(graph.nodes, self.plan.profile.time_ms, strict=True)
        ]
        place = {"left": LEFT, "right": RIGHT, "height": PANEL, "end": timeline.end_ms}
        runs = []
        for run, top in zip(timeline.runs, timeline.tops, strict=True):
            starts = [round(start, 4) for start in run.starts_ms]
            steps = [
                [moment.node, int(run.is_again(at)), moment.peak_bytes, *(sizes[at] for sizes in run.bands.values())]
                for at, moment in enumerate(run.simulation.timeline)
            ]
            bands = [band.value for band in run.bands]
            runs.append({"top": top, "starts": starts, "bands": bands, "steps": steps})
        return {**place, "resident": self.plan.resident_bytes, "nodes": nodes, "runs": runs}

    def _summary(self) -> str:
        """Write one sentence about the plan, then batch, device, versions and date, then its numbers."""
        words = verdict(self.numbers)
        batch = f"batch {self.numbers['batch']}" if self.numbers["batch"] else ""
        made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        facts = (batch, self._device, f"hiremate-lightning {package_version()}", f"Python {python_version()}", made)
        parts = [f'<p id="verdict"{_over("MORE than its budget" in words)}>{escape(words)}</p>']
        parts.append(f'<p id="facts">{escape(BETWEEN.join(filter(None, facts)))}</p>')
        for name, value in summary_rows(self.plan.to_dict())[1:]:
            if name != "rounding":
                body, look = escape(value).replace("-&gt;", "\u2192"), _over(name == "peak" and "OVER" in value)
                parts.append(f'<div class="card"><span>{name}</span><p{look}>{body}</p></div>')
        return "".join(parts)

    @property
    def _device(self) -> str:
        device = self.plan.profile.device
        return "estimated from operation counts" if device == "estimate" else device

    def _comparison(self) -> str:
        plan, measured = self.plan, self.plan.measured
        compared: tuple[tuple[str, Callable[[float], str], float, float | None], ...] = (
            ("Peak memory", format_bytes, plan.compared_peak_bytes, measured.peak_bytes),
            ("Extra time", format_ratio, plan.predicted_overhead, measured.overhead),
            ("Time of the captured step", format_time, plan.planned.time_ms, measured.step_ms),
            ("of which recomputing", format_time, plan.planned.recompute_ms, measured.recompute_ms),
        )
        rows = [
            (name, write(predicted), "not yet" if value is None else write(value))
            for name, write, predicted, value in compared
        ]
        return _table("Predicted and measured", ("", "predicted", "measured"), rows)

    def _modules(self) -> str:
        rows = module_rows(self.plan, MAX_MODULE_ROWS)
        words = "Bytes that live from forward to backward. Equal blocks share a row"
        if any(row.shares for row in rows):
            words += "; where they are planned differently, each has its own bar"
        header = ("module", "kept", "not kept", "recomputed", "extra time", "share kept")
        cells, total = [_module_cells(row) for row in rows], _module_cells(total_row(rows))
        return _table("What each module keeps", header, cells, total, f"{words}.")

    def _peak(self) -> str:
        _, run = self.timeline.runs
        node = run.simulation.peak_moment.node
        live = sorted(run.live_at_peak, key=lambda life: -life.size_bytes)
        rows = [(_swatch(colour, name), format_bytes(size)) for name, colour, size in resident_bands(self.plan)]
        cells: list[tuple[str, ...]] = [(*row, "", "", "") for row in rows]
        if workspace := self.plan.profile.workspace_bytes[node]:
            what = _swatch(COLOURS[Band.WORKSPACE], "workspace" if workspace > 0 else "result in the memory of a value")
            cells.append((what, format_bytes(workspace), escape(node_words(self.plan.graph.nodes[node])), "", ""))
        for life in live[:MAX_BLOCKS]:
            made = ("the loss's own backward", "", "")
            if life.node is not None:
                maker = self.plan.graph.nodes[life.node]
                made = (escape(node_words(maker)), escape(maker.module), escape(short_source(maker.source)))
            cells.append((_swatch(COLOURS[life.band], life.band.value), format_bytes(life.size_bytes), *made))
        if rest := live[MAX_BLOCKS:]:
            rest_bytes = sum(life.size_bytes for life in rest)
            cells.append((f"{len(rest)} smaller ones", format_bytes(rest_bytes), "", "", ""))
        total = ("all", format_bytes(self.plan.planned_peak_bytes), "", "", "")
        header = ("what", "bytes", "made by", "module", "source")
        words = f"Peak of the planned step: {self.numbers['at']}."
        return _table("What fills the peak", header, cells, total, words, numbers=(1,))


def _part(name: str) -> str:
    """Read the style or the script of the page from its file."""
    return files(__package__).joinpath(name).read_text("utf-8")


def _json(name: str, text: str) -> str:
    """Put JSON into a script element, escaped so that it can't end the element."""
    safe = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>\n'


def _module_cells(row: ModuleRow) -> tuple[str, ...]:
    count = f' <span class="faint">\u00d7{row.count}</span>' if row.count > 1 else ""
    label = f'<span class="depth{row.depth}">{escape(row.label)}{count}</span>'
    bars = "".join(map(_bar, row.shares or (row.use.kept_share,)))
    return label, *(cell or NONE for cell in use_cells(row.use)), bars


def _bar(share: float | None) -> str:
    """Draw a share as a bar; "" for None (nothing to keep)."""
    if share is None:
        return ""
    return f'<span class="bar" title="{100 * share:.0f}% kept"><i style="width:{100 * share:.0f}%"></i></span>'


def _over(is_over: bool) -> str:
    return " class=over" if is_over else ""


def _swatch(colour: str, words: str) -> str:
    return f'<i class="swatch" style="background:{colour}"></i>{escape(words)}'


def _for_screens(draw: Callable[[int], str]) -> str:
    """Draw a picture for wide screens and for phones, with letters of one size; the style shows one of them."""
    return f'<div class="broad">{draw(WIDTH)}</div><div class="narrow">{draw(NARROW)}</div>'


def _section(title: str, body: str, words: str = "") -> str:
    said = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{title}</h2>{said}{body}</section>"


def _table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] = (),
    words: str = "",
    numbers: Sequence[int] = (1, 2, 3, 4),
) -> str:
    """Lay out cells of HTML as a table in a section, with columns of numbers aligned to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        styles = (' class="number"' if i in numbers else "" for i in range(len(cells)))
        scope = ' scope="col"' if tag == "th" else ""
        return "<tr>" + "".join(f"<{tag}{scope}{s}>{c}</{tag}>" for s, c in zip(styles, cells, strict=True)) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    foot = f"<tfoot>{line(total, 'td')}</tfoot>" if total else ""
    # The caption is for screen readers.
    head = f"<caption>{title}</caption><thead>{line(header, 'th')}</thead>"
    return _section(title, f'<div class="wide"><table>{head}<tbody>{body}</tbody>{foot}</table></div>', words)


_UNITS = "1 GiB is 2<sup>30</sup> bytes. The numbers are in this file as JSON, in the element with id plan."
_HINT = (
    '<span class="pointer">Point at the picture, or press the arrow keys in it,</span><span class="touch">Touch the '
    "picture</span> to see what runs, its source line, what is there."
)
