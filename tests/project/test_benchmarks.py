"""The comparison with rivals: who beats whom, and how it is written."""

from __future__ import annotations

import ast
import sys
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where scripts find their neighbours

import graph_files
import graphs
import growth
import rival_plot
import rival_tables as tables
import torch
from rival_tables import Point, Row, Spread, Timing
from torch import nn

from hiremate_lightning.records.costs import Link
from tests.tiny import chain

CLOCK = "cpu_s"
SCRIPTS = Path(__file__).parents[2] / "benchmarks"
OTHER_PACKAGES = """
hiremate_lightning tests torch numpy pytest rich psutil sympy torchvision timm transformers diffusers monai neuralop
tensorly peft torch_geometric x_transformers bitsandbytes torchao segmentation_models_pytorch
"""


def point(method: str, peak: float, time: float, width: float = 0.0) -> Point:
    return Point(method, peak, Spread(time - width, time, time + width))


def row(method: str, peak_bytes: int, *seconds: float, **more: object) -> Row:
    times = tuple(Timing(2 * s, s, s) for s in seconds)
    eager = tuple(Timing(2.0, 1.0, 1.0) for _ in seconds)
    return Row("gpt", method, peak_bytes=peak_bytes, times=times, eager_times=eager, **more)


ROWS = [
    row("eager", 2**20, 1.0, 1.0, 1.0),
    row("checkpoint", 2**18, 1.3, 1.4, 1.5),
    row("budget-0.5", 2**19, 1.02, 1.01, 1.03),
    row("ours-50", 2**19, 1.05, 1.04, 1.06, predicted_bytes=2**19, planning_s=2.5, bound_overhead=0.035),
    row("ours-at-checkpoint", 2**18, 1.2, 1.1, 1.1, predicted_bytes=2**18, difference=0.01),
    Row("gpt", "ours-30", tables.INFEASIBLE, "smallest budget found 7 bytes"),
]


def test_a_spread_holds_median_and_quartiles():
    """A time is the median of ratios to the eager beside it."""
    assert tables.spread([5, 1, 3, 2, 4]) == Spread(2, 3, 4)
    assert tables.spread([7.0]) == Spread(7.0, 7.0, 7.0)
    own = (Timing(0, 2.0, 0), Timing(0, 9.0, 0), Timing(0, 4.0, 0))
    eager = (Timing(0, 1.0, 0), Timing(0, 3.0, 0), Timing(0, 1.0, 0))
    measured = Row("m", "x", times=own, eager_times=eager)
    assert measured.ratio(CLOCK).median == 3.0
    assert measured.fastest_ratio(CLOCK) == 2.0


def test_to_dominate_takes_no_more_of_either_and_less_of_one():
    """It is clear where quartiles are apart."""
    others = {
        (0.4, 1.2): True,
        (0.5, 1.1): True,
        (0.4, 1.1): True,
        (0.5, 1.2): False,
        (0.4, 1.3): False,
        (0.6, 1): False,
    }
    found = {other: tables.dominates(point("checkpoint", *other), point("ours-50", 0.5, 1.2)) for other in others}
    assert found == others
    ours = point("ours-50", 0.5, 1.2, width=0.05)
    assert tables.is_clear(ours, point("checkpoint", 0.4, 1.1, width=0.04))
    assert not tables.is_clear(ours, point("checkpoint", 0.4, 1.1, width=0.06))


def test_only_rivals_dominate_and_only_ours_are_dominated():
    best = {"eager": 1.0, "ours-70": 1.0, "strategy-hilp": 1.0, "budget-0.5": 1.0}
    points = [point(name, 0.1, time) for name, time in best.items()]
    points += [point("ours-50", 0.5, 1.2), point("checkpoint", 0.6, 1.3), point("strategy-hilp", 0.5, 1.2)]
    assert [(ours.method, rival.method) for ours, rival in tables.dominated(points)] == [("ours-50", "budget-0.5")]
    assert tables.dominated_text({"gpt": [ROWS[0], ROWS[1], ROWS[4]]}, CLOCK) == "None.\n"


def test_the_frontier_leaves_out_what_is_dominated():
    """What was not measured has no point."""
    points = [point("c", 0.9, 1.0), point("a", 0.3, 1.3), point("b", 0.5, 1.4)]
    assert [p.method for p in tables.frontier(points)] == ["a", "c"]
    assert [p.method for p in tables.points_of(ROWS, CLOCK)] == [r.method for r in ROWS[:-1]]
    assert tables.points_of(ROWS[1:], CLOCK) == []


def test_a_match_names_the_fastest_and_the_smallest_that_match():
    ours = {"ours-40": (0.4, 1.1), "ours-30": (0.3, 1.2), "ours-20": (0.2, 1.5), "ours-50": (0.5, 1.0)}
    (match,) = tables.matches([point("checkpoint", 0.4, 1.3), *(point(name, *at) for name, at in ours.items())])
    assert (match.fastest.method, match.smallest.method) == ("ours-40", "ours-30")
    (match,) = tables.matches([point("checkpoint", 0.2, 1.01), point("ours-50", 0.5, 1.1)])
    assert (match.fastest, match.smallest) == (None, None)


def test_the_page_has_each_number_once_measured():
    page = tables.write_markdown("Rivals", "How.", ROWS, CLOCK, "x.svg")

    lines = page.splitlines()
    assert "| ours-50 | 50 % / +5.0 % / +4.0 % |" in lines
    assert "| ours-30 | infeasible |" in lines
    assert (
        "| gpt | checkpoint | 25.0 % | +40.0 % | +10.0 % | ours-at-checkpoint | 25.0 % | ours-at-checkpoint |" in lines
    )
    assert "| gpt | ours-50 | budget-0.5 | 50.0 % / +5.0 % | 50.0 % / +2.0 % | yes |" in lines
    assert any("ours-30 | infeasible: smallest budget found 7 bytes" in line for line in lines)
    assert any(line.startswith("| ours-50 | 0.5 | 50.0 % | 0.5 | +5.0 % [+4.5 %, +5.5 %] | +4.0 % |") for line in lines)
    assert "differ by 1e-02" in page
    assert "Gradients or buffers that differ from eager's: gpt ours-at-checkpoint." in page
    assert "](x.svg)" in page


def test_the_rounds_of_processes_are_told_apart():
    both = row("ours-50", 2**19, 1.0, 1.1, 1.2).together(row("ours-50", 2**19, 1.3, 1.5, 1.4))
    assert both.each_process(CLOCK) == [1.1, 1.4]
    assert both.ratio(CLOCK).median == 1.25
    text = tables.model_table([ROWS[0], both], CLOCK)
    assert text.splitlines()[0].endswith("| median of each process |")
    assert text.splitlines()[-1].endswith("| +10.0 %, +40.0 % |")
    assert tables.row_from_dict(asdict(both)) == both
    assert [tables.row_from_dict(asdict(r)) for r in ROWS] == ROWS


def test_all_lines_of_a_table_have_as_many_cells():
    on_device = [row(r.method, r.peak_bytes, 1.0, reserved_bytes=2**21) if r.times else r for r in ROWS]
    for rows in (ROWS, on_device):
        text = tables.model_table(rows, CLOCK)
        assert len({line.count("|") for line in text.splitlines()}) == 1
    assert "reserved MiB" in text
    assert "| 2.0 |" in text


def test_promises_show_the_largest_error():
    rows = [
        row("ours-50", 103, 1.0, predicted_bytes=100, resident_bytes=200),
        row("ours-70", 99, 1.0, predicted_bytes=100),
    ]
    assert "of 2 plans differ from the predicted ones by at most 1.00 %" in tables.promises({"gpt": rows})
    assert tables.promises({"gpt": ROWS[:3]}) == ""


def test_the_plot_shows_each_point_of_each_model():
    points = tables.points_of(ROWS, CLOCK)
    root = ElementTree.fromstring(rival_plot.draw({"a<b": points, "c": points}))
    titles = [e.text for e in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 2 * len(points)
    assert "checkpoint: peak 25.0 %, time 1.400" in titles
    assert rival_plot.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert rival_plot.ticks(0.97, 1.43) == pytest.approx([1, 1.1, 1.2, 1.3, 1.4])


class Tiny(nn.Module):
    """Eight layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.GELU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_the_step_of_a_benchmark_model_is_captured(monkeypatch):
    monkeypatch.setitem(graphs.MODELS, "tiny", lambda: (Tiny(), (torch.randn(64, 8),)))
    (captured,) = graphs.capture_step("tiny")
    assert [n.op for n in captured.graph.nodes].count("aten.gelu.default") == 8


def test_growth_is_measured_and_drawn():
    def make(depth: int, width: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
        return Tiny(), (torch.randn(512 * width, 8),)

    sizes = [growth.measure(depth=1, width=width, rounds=2, make=make) for width in (1, 2)]
    assert all(size.peak < 0.6 for size in sizes)
    assert sizes[0].row.count("|") == len(growth.COLUMNS) + 1
    picture = ElementTree.fromstring(growth.draw(sizes, sizes))
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 8


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_scripts_import_only_what_there_is(path: Path):
    """Imports within functions too, of neighbours as of the package; those of other packages may be missing."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            inside = ".".join(path.relative_to(SCRIPTS).parts[: -node.level]) if node.level else ""
            names = [".".join(filter(None, (inside, node.module)))]
        missing += [name for name in names if not _is_there(name)]
    assert missing == []


def _is_there(name: str) -> bool:
    first = name.partition(".")[0]
    place = SCRIPTS / name.replace(".", "/")
    is_neighbour = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
    return is_neighbour or first in sys.stdlib_module_names or first in OTHER_PACKAGES.split()


# ---------------------------------------------------------------- captured steps in files


def test_a_step_is_read_as_it_was_written(tmp_path):
    graph, profile = chain(3)
    for costs in (profile, replace(profile, link=Link(1.0, 2.0, 3.0))):
        graph_files.write_step(tmp_path, "chain", graph, costs)
        assert graph_files.read_step(tmp_path, "chain") == (graph, costs)


def test_a_step_in_another_format_is_refused(tmp_path):
    graph_files.write_step(tmp_path, "chain", *chain(1))
    path = tmp_path / "chain.graph.json"
    path.write_text(path.read_text().replace('"format":2', '"format":3'))
    with pytest.raises(ValueError, match=r"^Not a graph of format 2: write it again with this version$"):
        graph_files.read_step(tmp_path, "chain")
