"""Measure how planning and the step grow with depth and with width: GPT-2 of transformers, at half of its memory.

    python benchmarks/growth.py [--depths 6,12,24,48,96] [--widths 64,128,256,512] [--rounds 5]
                                [--write benchmarks/results/DATE-growth]

Depth is varied at width 256, width at 6 layers. Each network is trained plainly and planned, in turn, one step each for
so many rounds, in one process and one thread; times are process time on the CPU, compared between neighbours. Prints a
Markdown table; with --write, a page with it and an SVG picture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import page_tables
import torch
from provenance import provenance
from rival_plot import Axis, text, ticks
from torch import nn
from zoo.models import gpt2_of

from hiremate_lightning import get_plan, hiremate

DEPTH, WIDTH = 6, 256
COLUMNS = (
    *("layers", "width", "operations", "profile s", "solve s", "proven gap", "predicted overhead"),
    *("time over plain [quartiles]", "peak, of plain"),
)
PANEL = (420, 260)  # width and height of one panel, in pixels


@dataclass(frozen=True)
class Size:
    """One network, measured.

    Attributes:
        depth: Layers.
        width: Width of the residual stream.
        nodes: Operations of forward and backward.
        seconds: Of profiling and solving.
        gap: Proven gap, a ratio.
        predicted: Predicted time over no recomputation, a ratio less 1.
        ratios: Time of a planned step over that of the plain step beside it.
        peak: Planned peak over the unplanned one, resident bytes left out.
    """

    depth: int
    width: int
    nodes: int
    seconds: tuple[float, float]
    gap: float
    predicted: float
    ratios: tuple[float, ...]
    peak: float

    @property
    def row(self) -> str:
        """Return its row of the table."""
        low, middle, high = quantiles(self.ratios, n=4)
        times = (f"{s:.1f}" for s in self.seconds)
        spread = f"{middle - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]"
        shares = f"{self.gap:.2%}", f"{self.predicted:+.1%}", spread, f"{self.peak:.1%}"
        return page_tables.row(self.depth, self.width, f"{self.nodes:,}", *times, *shares)


def step_s(module: nn.Module, batch: Sequence[torch.Tensor]) -> float:
    """Run a step; return its process time."""
    module.zero_grad(set_to_none=True)
    start = time.process_time()
    module(*batch).backward()
    return time.process_time() - start


def measure(depth: int, width: int, rounds: int, make: Callable[..., Any] = gpt2_of) -> Size:
    """Train one network plainly and planned."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, batch = make(depth, width=width)
    planned, _ = make(depth, width=width)
    hiremate(planned, "50%", verbose=False)
    seconds = [0.0, 0.0]
    for _ in range(4):  # capture; plan; measure the peak; measure the time
        step_s(planned, batch)
        plan = get_plan(planned)
        if plan is not None:
            found = plan.planning.profile_s, plan.planning.solve_s
            seconds = [max(pair) for pair in zip(seconds, found, strict=True)]
    plan = get_plan(planned)
    assert plan is not None
    for _ in range(2):
        step_s(plain, batch)
    ratios = []
    for index in range(rounds):
        turns = (plain, planned) if index % 2 else (planned, plain)
        times = {id(module): step_s(module, batch) for module in turns}
        ratios.append(times[id(planned)] / times[id(plain)])
    nodes = len(plan.graph.forward) + len(plan.graph.backward)
    peak = plan.planned.peak_bytes / plan.unplanned.peak_bytes
    return Size(depth, width, nodes, (*seconds,), plan.gap, plan.predicted_overhead, tuple(ratios), peak)


def panel(title: str, lines: dict[str, list[tuple[float, float]]], unit: str, left: float, top: float) -> str:
    """Draw lines over sizes."""
    colours = ("#0b6e4f", "#c1440e", "#3157a4")
    points = [point for line in lines.values() for point in line]
    across = Axis(0.0, 1.05 * max(x for x, _ in points), left + 50, left + PANEL[0] - 16)
    up = Axis(0.0, 1.1 * max(max(y for _, y in points), 0.01), top + PANEL[1] - 30, top + 30)
    parts = [text(left + 50, top + 18, title, font_size="13", font_weight="bold")]
    for x in ticks(across.low, across.high):
        parts.append(text(across.place(x), up.start + 14, f"{x:g}", text_anchor="middle"))
    for y in ticks(up.low, up.high):
        label = f"{y:.0%}" if unit == "%" else f"{y:g} {unit}"
        line = f'<line x1="{across.start:.1f}" x2="{across.end:.1f}" y1="{up.place(y):.1f}" y2="{up.place(y):.1f}"'
        parts += [f'{line} stroke="#e4e4e4"/>', text(across.start - 5, up.place(y) + 3, label, text_anchor="end")]
    for index, (name, line) in enumerate(lines.items()):
        places = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colours[index]}"/>')
        parts.append(text(across.start + 8 + 130 * index, up.end - 2, name, fill=colours[index]))
    return "".join(parts)


def draw(by_depth: Sequence[Size], by_width: Sequence[Size]) -> str:
    """Draw planning seconds and overhead against depth, and against width."""
    parts = []
    for row, (name, sizes) in enumerate((("layers", by_depth), ("width", by_width))):
        at = [float(getattr(s, "depth" if name == "layers" else "width")) for s in sizes]
        stages = ("profile", "solve")
        seconds = {stage: [(x, s.seconds[i]) for x, s in zip(at, sizes, strict=True)] for i, stage in enumerate(stages)}
        overhead = {
            "measured": [(x, median(s.ratios) - 1) for x, s in zip(at, sizes, strict=True)],
            "predicted": [(x, s.predicted) for x, s in zip(at, sizes, strict=True)],
        }
        parts.append(panel(f"Planning, by {name}", seconds, "s", 0, row * PANEL[1]))
        parts.append(panel(f"Time over plain training, by {name}", overhead, "%", PANEL[0], row * PANEL[1]))
    width, height = 2 * PANEL[0], 2 * PANEL[1]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10" fill="#333333"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="6,12,24,48,96")
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="where to write the page and the picture, without suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(page_tables.head(*COLUMNS))
    sizes = []
    for depth, width in [
        *((int(d), WIDTH) for d in options.depths.split(",")),
        *((DEPTH, int(w)) for w in options.widths.split(",")),
    ]:
        sizes.append(measure(depth, width, options.rounds))
        sys.stdout.write(sizes[-1].row)
        sys.stdout.flush()
    if options.write:
        count = len(options.depths.split(","))
        page = [
            f"# Growth with depth and width, {time.strftime('%Y-%m-%d')}",
            "",
            f"`{' '.join(['python', 'benchmarks/growth.py', *sys.argv[1:]])}`; {provenance('transformers')}; 1 thread.",
            "",
            page_tables.head(*COLUMNS) + "".join(size.row for size in sizes),
            f"![Planning seconds and overhead by depth and width]({options.write.name}.svg)",
        ]
        options.write.with_suffix(".md").write_text("\n".join(page) + "\n")
        options.write.with_suffix(".svg").write_text(draw(sizes[:count], sizes[count:]))


if __name__ == "__main__":
    main()
