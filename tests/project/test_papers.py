"""The papers' networks: rows are solved once, and the page sets what was found beside what papers claim."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where scripts find their neighbours

import papers_page as page
from papers import Rows, solve_budget, solve_smallest
from papers_page import BOUND, SMALLEST, Network, Row, Table

from hiremate_lightning.planning.solvers.base import Problem, SolveOptions, replay
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.costs import step_time_ms
from hiremate_lightning.records.schedule import keep_all
from tests.tiny import transformer

NETWORK = Network("vgg19", "VGG-19", "torchvision", (3, 5), 100.0, 10, 1000, 400)


def row(method: str, percent: int | str, overhead: float, peak: int, fits: bool = True, **more: object) -> Row:
    budget = peak if percent == SMALLEST else 10 * int(percent)
    values = {"bound": 0.0, "solve_s": 1.0, "ended": "feasible: time limit", "commit": "abc", **more}
    return Row("vgg19", percent, method, budget, fits, overhead, peak, **values)


ROWS = [
    row(BOUND, 50, 0.02, 0, bound=0.02),
    row("portfolio", 50, 0.03, 495, bound=0.025),
    row("rotor", 50, 0.05, 490, own_overhead=0.08, own_bytes=480),
    row("chen", 50, 0.05, 500, own_overhead=0.2, own_bytes=600),
    row("hilp", 30, 0.0, 0, fits=False),
    row("rotor", SMALLEST, 0.4, 250, own_bytes=240),
]


@pytest.fixture
def table() -> Table:
    return Table({"vgg19": NETWORK, "gpt2": replace(NETWORK, name="gpt2")}, ROWS)


def test_a_row_shows_methods_in_order_bound_and_fastest(table: Table):
    """The bound is the best that anything proved; a schedule of its own counts where it fits."""
    assert table.methods == ["portfolio", "hilp", "rotor", "chen"]
    assert table.bound("vgg19", 50) == 0.025
    assert "| vgg19 | +2.5 | **+3.0** | - | +5.0 | +5.0 |" in page.budget_table(table, 50)
    assert table.own("vgg19", 50, "rotor") == 0.08
    assert table.own("vgg19", 50, "chen") is None
    assert table.own_smallest("vgg19", "rotor") == 0.24
    impossible = Table(table.networks, [row(BOUND, 30, 0.0, 0, fits=False)])
    assert impossible.bound("vgg19", 30) is None
    assert "| vgg19 | impossible |" in page.budget_table(impossible, 30)


def test_rotor_stands_beside_other_methods_on_chains(table: Table):
    assert "| chen | 1 | 0 | 0 | 0 | 1 | 0 |" in page.rotor_table(table)
    note = "Rotor is made for chains, and this step is none."
    other = Table(table.networks, [*ROWS, row("rotor", 70, 0.1, 600, note=note)])
    assert page.chains(other) == ["gpt2"]
    assert "| chen | 0 | 0 | 0 | 0 | 0 | 0 |" in page.rotor_table(other)


def test_the_smallest_peaks_are_named_of_all_budgets(table: Table):
    text = page.least_peak_table(table)
    assert "| rotor | **24.0** | **25.0** |" in text
    assert "| chen | 60.0 | 50.0 |" in text
    assert "**25.0 (+40)**" in page.smallest_table(table)


@pytest.mark.parametrize(
    ("half", "third", "words"),
    [
        (0.05, 0.12, "as good or better at both"),
        (0.05, 0.3, "**the paper's is better** at 70 % less |"),
        (0.05, None, "**the paper's is better** at 70 % less, where none was found"),
        (0.2, 0.3, "**the paper's is better** already at 50 % less"),
        (None, None, "**the paper's is better**: no plan at 50 % less"),
    ],
)
def test_the_headline_says_where_the_paper_is_better(half: float | None, third: float | None, words: str):
    found = {50: half, 30: third}
    rows = [
        replace(row("portfolio", percent, extra or 0.0, 1, fits=extra is not None), network="gpt2")
        for percent, extra in found.items()
    ]
    (line,) = page.headline_table(Table({"gpt2": NETWORK}, rows)).splitlines()[2:]
    assert words in line


def test_claims_are_set_beside_counts_of_what_was_solved():
    names = {name: replace(NETWORK, name=name) for name in ("gpt2", "unet", "vgg19")}
    rows = [replace(row("hilp", percent, 0.12, 1), network="gpt2") for percent in (50, 30)]
    rows += [
        replace(row(method, 50, extra, 1), network="unet") for method, extra in (("hilp", 0.1), ("checkmate", 0.12))
    ]
    text = page.claims_table(Table(names, rows))
    assert "`hilp`: at most 15 % more on 1 of 1 networks at 50 % less, on 1 at 70 % less" in text
    assert "no plan of one at 70 %, -2.0 points at 50 %, no plan of one at 30 %" in text
    assert "`hilp` above the proven bound: no plan of one at 70 %, +12.0 points at 50 %" in text


def test_the_page_and_the_picture_hold_every_network(table: Table):
    text = page.tables(table.networks, ROWS, "one core")
    assert "commits abc" in text
    assert text.count("| vgg19 |") >= 5
    picture = ElementTree.fromstring(page.picture(table.networks, ROWS))
    words = ["".join(element.itertext()) for element in picture.iterfind("{*}text")]
    assert {"vgg19", "gpt2", "rotor", "plain training"} <= set(words)


# ---------------------------------------------------------------- solving


@pytest.fixture(scope="module")
def step() -> tuple[Network, Problem]:
    graph, profile = transformer(3)
    problem = Problem(graph, profile, 0, SolveOptions(2.0))
    plain = replay(problem, keep_all(graph)).peak_bytes
    least = solve_least_memory(problem).peak_bytes
    network = Network("tiny", "Tiny", "tests", (1, 1), step_time_ms(graph, profile), 0, plain, least)
    return network, replace(problem, budget_bytes=plain)


def test_what_a_file_holds_is_not_solved_again(step: tuple[Network, Problem], tmp_path: Path):
    """A second solve would add rows."""
    network, problem = step
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        rows = Rows(path)
        rows.add_network(network)
        solve_budget(network, problem, 80, ["segments"], rows)
    assert [(r.method, r.percent) for r in Rows(path).rows] == [(BOUND, 80), ("segments", 80)]
    assert Rows(path).networks == {"tiny": network}


def test_the_smallest_budget_is_one_that_the_method_meets(step: tuple[Network, Problem], tmp_path: Path):
    network, problem = step
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add_network(network)
    solve_smallest(network, problem, "segments", rows)
    (found,) = rows.rows
    assert found.fits
    assert found.percent == SMALLEST
    assert found.peak_bytes == found.budget_bytes < network.plain_bytes
