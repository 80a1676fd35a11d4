"""Draw the picture of concepts.md from a real plan: which results are in memory when, without a plan and with one.

    python docs/pictures.py [--budget 55%] [--to docs/pictures/lifetimes.svg]

A chain of small layers is trained a few steps within a budget. Each row is one result of the forward, each bar a stay
in memory; below the rows are the bytes of the step. Times are of this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch
from torch import nn

from hiremate_lightning import Plan, get_plan, hiremate
from hiremate_lightning.records.graph import Direction
from hiremate_lightning.reporting.timeline import (
    BUDGET,
    COLOURS,
    FAINT,
    INK,
    Band,
    DrawnStep,
    Lifetime,
    eager_run,
    planned_run,
)
from hiremate_lightning.units import format_bytes, format_ratio, format_time

LAYERS, WIDTH, BATCH = 8, 128, 8192
STEPS = 4  # capture, plan, peak, time
LEFT, RIGHT, TOP = 74, 12, 30  # pixels around a panel
PIXELS, ROW, CURVE, GAP = 750, 9, 96, 46  # width of a panel, height of a row and of the curve, space between panels
SHOWN = (Band.SAVED, Band.PASSING, Band.RECOMPUTED)


def train(budget: str) -> Plan:
    """Train a chain of layers until its plan is measured."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model, batch = nn.Sequential(*layers), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hiremate(model, budget, optimizer=optimizer, verbose=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    plan = get_plan(model)
    assert plan is not None, "there is a plan from the second step on"
    return plan


def rows_of(run: DrawnStep) -> dict[int, list[Lifetime]]:
    """Give the stays in memory of each result of the forward, in the order in which results are first computed."""
    least = max(life.size_bytes for life in run.lives) // 2  # scalars and weights' gradients would hide the rest
    rows: dict[int, list[Lifetime]] = {}
    for life in run.lives:
        if life.band in SHOWN and life.size_bytes >= least:
            rows.setdefault(life.storage, []).append(life)
    return rows


def draw(plan: Plan) -> str:
    """Draw the plain step above the planned one, with one scale of time and of bytes.

    Args:
        plan: A plan.

    Returns:
        The text of an SVG file.
    """
    runs = eager_run(plan), planned_run(plan)
    panel = ROW * len(rows_of(runs[0])) + CURVE
    height = TOP + 2 * (panel + GAP) + 8
    width = LEFT + PIXELS + RIGHT
    parts = [part for i, run in enumerate(runs) for part in _panel(run, runs, TOP + i * (panel + GAP))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
            "<title>Results in memory during a training step, plain and planned</title>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            *_legend(height - 12),
            "</svg>\n",
        ]
    )


def _panel(run: DrawnStep, runs: tuple[DrawnStep, ...], top: int) -> Iterator[str]:
    scale = PIXELS / max(one.starts_ms[-1] for one in runs)
    peak = format_bytes(run.plan.resident_bytes + run.simulation.peak_bytes)
    extra = f" ({format_ratio(run.plan.predicted_overhead)})" if run.name == "planned" else ""
    words = f"peak {peak}, {format_time(run.simulation.time_ms)}{extra}"
    title = f'<tspan font-weight="600">{run.name.capitalize()} step</tspan>'
    yield f'<text x="{LEFT}" y="{top - 9}">{title}: {words}</text>'
    rows = rows_of(run)
    for number, lives in enumerate(rows.values()):
        y = top + ROW * number
        for life in lives:
            start, end = (LEFT + scale * run.starts_ms[at] for at in (life.first, life.last + 1))
            box = f'x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="{ROW - 2}"'
            yield f'<rect {box} fill="{COLOURS[life.band]}"><title>{escape(_name(run, life))}</title></rect>'
    yield f'<text x="{LEFT - 6}" y="{top + ROW}" text-anchor="end" fill="{FAINT}">first layer</text>'
    yield f'<text x="{LEFT - 6}" y="{top + ROW * len(rows)}" text-anchor="end" fill="{FAINT}">last layer</text>'
    yield from _curve(run, runs, top + ROW * len(rows) + 8, scale)
    turn = LEFT + scale * run.starts_ms[run.simulation.turn]
    bottom = top + ROW * len(rows) + CURVE
    yield f'<path d="M{turn:.1f} {top - 4}V{bottom}" stroke="{FAINT}" stroke-dasharray="1 3"/>'
    yield f'<text x="{turn - 4:.1f}" y="{bottom + 14}" text-anchor="end" fill="{FAINT}">forward</text>'
    yield f'<text x="{turn + 4:.1f}" y="{bottom + 14}" fill="{FAINT}">backward</text>'


def _curve(run: DrawnStep, runs: tuple[DrawnStep, ...], top: int, scale: float) -> Iterator[str]:
    """Draw the bytes that the step adds to what is resident, and what of the budget is left for them."""
    most = max(one.simulation.peak_bytes for one in runs)
    bottom = top + CURVE - 8
    per_byte = (CURVE - 12) / most
    line = f"M{LEFT} {bottom}"
    for start, end, moment in zip(run.starts_ms, run.starts_ms[1:], run.simulation.timeline, strict=False):
        line += f"V{bottom - per_byte * moment.peak_bytes:.1f}H{LEFT + scale * end:.1f}" if end > start else ""
    yield f'<path d="{line}V{bottom}Z" fill="#d3d6db"/>'
    y = bottom - per_byte * (run.plan.budget_bytes - run.plan.resident_bytes)
    yield f'<path d="M{LEFT} {y:.1f}h{PIXELS}" stroke="{BUDGET}" stroke-width="2" stroke-dasharray="6 4"/>'
    yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{BUDGET}">budget</text>'
    yield f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end" fill="{FAINT}">bytes</text>'


def _name(run: DrawnStep, life: Lifetime) -> str:
    assert life.node is not None, "results of the forward are computed"
    node = run.plan.graph.nodes[life.node]
    again = "recomputed" if run.simulation.turn <= life.first and node.direction is Direction.FORWARD else "computed"
    return f"{node.op} of {node.module or 'the root'}, {again}, {format_bytes(life.size_bytes)}"


def _legend(y: int) -> Iterator[str]:
    x = LEFT
    for band in SHOWN:
        yield f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{COLOURS[band]}"/>'
        yield f'<text x="{x + 17}" y="{y}">{band.value}</text>'
        x += 190


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="55%", help="as everywhere (default: %(default)s)")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "pictures" / "lifetimes.svg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = train(arguments.budget)
    arguments.to.write_text(draw(plan), encoding="utf-8")
    print(plan.summary())


if __name__ == "__main__":
    main()
