"""What was found for the papers' networks, as tables beside the papers' own numbers, and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import page_tables

from hiremate_lightning.reporting.svg_report import Panel, lay_out, methods_panel, open_svg

PERCENTS = (70, 50, 30)
BOUND, SMALLEST = "bound", "smallest"  # a row that is no method, and a row whose budget was searched for
ORDER = ("portfolio", "hilp", "rockmate", "rotor", "min_memory", "twremat", "checkmate", "checkmate_lp", "chen", "dtr")
NETWORKS = ("gpt2", "roberta", "transformer", "resnet101", "regnet", "unet", "mixer", "fno", "uno", "densenet")  # first
HONG = ("vgg19", "alexnet")  # networks of Hong et al., not of HiRemate
OTHERS = ("vgg19", "alexnet", "densenet")  # networks that HiRemate's tables don't have
RIVALS = ("chen", "min_memory", "rockmate")  # other methods on chains, beside which Rotor is set
NO_CHAIN = "made for chains"  # in the note of a method where a step is none
TIE = 0.002  # of the step's time, or of the plain peak: no difference
PANEL_WIDTH, PANEL_HEIGHT, PANEL_COLUMNS = 420, 320, 3
NOTHING = "-"
HOW = """\
# Every method on the papers' own networks

`python benchmarks/papers.py capture FOLDER`, `solve FOLDER ROWS`, `page ROWS TABLES PICTURE`. In words, with what
each method is good for: [Methods compared](../../docs/methods_compared.md).

A training step of each network (forward, loss, backward; random weights, single precision, AdamW's state there) is
captured without memory, as `hiremate plan --device cuda` captures it. Times of operations are estimates by the data
sheet of the GPU that HiRemate's authors used, the Quadro RTX 8000 (16.3 TFLOP/s, 672 GB/s), workspaces count as 0,
and nothing ran: peaks and times are the simulator's. Budgets are per cent of what the plain step adds at its peak,
gradients of parameters included. *Proven least* is the best bound of all methods, *impossible* is proven too, *-* is
a method that found no schedule that fits. The fastest of a row, to within 0.1 points, is bold.

Each solve was limited to 15 seconds, each try for the smallest budget to 7.5 seconds, at most five tries. That was on
two cores that other work shared, so seconds are too many, and methods that use all of their time found less than on a
machine of their own: `hilp`, `checkmate`, `checkmate_lp`, `portfolio`.
"""


@dataclass(frozen=True)
class Network:
    """A captured step.

    Attributes:
        name: Its name in `PAPERS`.
        about: What it is, in words.
        package: Where the implementation comes from.
        nodes: Operations of forward and backward.
        step_ms: Estimated time of a plain step.
        resident_bytes: Bytes that exist before it.
        plain_bytes: What a plain step adds at its peak.
        least_bytes: The least that the planner's heuristic finds instead.
    """

    name: str
    about: str
    package: str
    nodes: tuple[int, int]
    step_ms: float
    resident_bytes: int
    plain_bytes: int
    least_bytes: int


@dataclass(frozen=True)
class Row:
    """What one method found for one network; bytes are above what is resident.

    Attributes:
        network: Name of the network.
        percent: The budget, per cent of the plain peak; "smallest" where it was searched for.
        method: Name of the method, "bound" for what is proven of all schedules.
        budget_bytes: The budget.
        fits: Whether the method met it; for "bound" whether it is not proven that nothing does.
        overhead: Extra time, a ratio; for "bound" the least that any schedule takes.
        peak_bytes: Simulated peak.
        bound: Extra time below which the method has proved that there is nothing.
        solve_s: Wall-clock seconds.
        ended: Status, and why solving ended.
        commit: Of the code that solved it.
        own_overhead: Extra time of the method's own schedule, before it was repaired or filled up.
        own_bytes: The peak of that schedule, 0 where it has none.
        note: What the method could not serve, and what it took instead.
    """

    network: str
    percent: int | str
    method: str
    budget_bytes: int
    fits: bool
    overhead: float
    peak_bytes: int
    bound: float
    solve_s: float
    ended: str
    commit: str
    own_overhead: float = 0.0
    own_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class Table:
    """All rows, looked up by network, budget and method.

    Attributes:
        networks: The networks, by name.
        rows: The rows.
    """

    networks: Mapping[str, Network]
    rows: Sequence[Row]

    @property
    def methods(self) -> list[str]:
        """The methods that have rows: those of papers in the order of `ORDER`, then others."""
        found = {row.method for row in self.rows} - {BOUND}
        return [*(name for name in ORDER if name in found), *sorted(found - {*ORDER})]

    def row(self, network: str, percent: int | str, method: str) -> Row | None:
        """Return a row, the latest where there are several."""
        wanted = (network, percent, method)
        return next((r for r in reversed(self.rows) if (r.network, r.percent, r.method) == wanted), None)

    def extra(self, network: str, percent: int | str, method: str) -> float | None:
        """Return the extra time, None where the method does not fit or was not run."""
        row = self.row(network, percent, method)
        return row.overhead if row is not None and row.fits else None

    def bound(self, network: str, percent: int) -> float | None:
        """Return the best proven bound on the extra time of all schedules, None where it is proven that none fits."""
        rows = [r for r in self.rows if (r.network, r.percent) == (network, percent)]
        if any(r.method == BOUND and not r.fits for r in rows) or any(r.ended.startswith("infeasible") for r in rows):
            return None
        return max((r.bound for r in rows), default=0.0)

    def best(self, network: str, percent: int) -> float | None:
        """Return the least extra time of all methods."""
        found = (self.extra(network, percent, method) for method in self.methods)
        return min((extra for extra in found if extra is not None), default=None)

    def own(self, network: str, percent: int, method: str) -> float | None:
        """Return the extra time of a method's own schedule, None where that does not fit the budget."""
        row = self.row(network, percent, method)
        if row is None or not row.own_bytes or row.own_bytes > row.budget_bytes:
            return None
        return row.own_overhead

    def own_smallest(self, network: str, method: str) -> float | None:
        """Return the smallest peak of a method's own schedules, a share of the plain peak."""
        rows = [r for r in self.rows if (r.network, r.method) == (network, method) and r.own_bytes]
        return min((r.own_bytes / self.networks[network].plain_bytes for r in rows), default=None)

    def smallest(self, network: str, method: str) -> float | None:
        """Return the smallest peak that a method has reached, a share of the plain peak."""
        rows = [r for r in self.rows if (r.network, r.method) == (network, method) and r.fits and r.method != BOUND]
        return min((r.peak_bytes / self.networks[network].plain_bytes for r in rows), default=None)


def in_order(networks: Mapping[str, Network], rows: Sequence[Row]) -> Table:
    """Put networks in the order of `NETWORKS`, then others."""
    names = [*(name for name in NETWORKS if name in networks), *(name for name in networks if name not in NETWORKS)]
    return Table({name: networks[name] for name in names}, rows)


# -------------------------------------------------------------------- tables


def _percent(ratio: float | None, sign: str = "+") -> str:
    return NOTHING if ratio is None else f"{100 * ratio:{sign}.1f}"


def networks_table(table: Table) -> str:
    """List the networks."""
    rows = [
        (n.name, n.about, n.package, f"{n.nodes[0]} + {n.nodes[1]}", f"{n.step_ms:.0f}", f"{n.plain_bytes / 2**30:.2f}")
        for n in table.networks.values()
    ]
    return page_tables.table(("network", "what", "from", "operations", "step, ms", "step adds, GiB"), rows)


def budget_table(table: Table, percent: int) -> str:
    """Write the extra time of each method under one budget; the least of a row is bold."""
    rows = []
    for name in table.networks:
        best = table.best(name, percent)
        bound = table.bound(name, percent)
        cells = []
        for method in table.methods:
            extra = table.extra(name, percent, method)
            is_best = extra is not None and best is not None and extra <= best + TIE / 2
            cells.append(f"**{_percent(extra)}**" if is_best else _percent(extra))
        rows.append((name, "impossible" if bound is None else _percent(bound), *cells))
    return page_tables.table(("network", "proven least", *table.methods), rows)


def smallest_table(table: Table) -> str:
    """Write the smallest peak that each method has reached, and the extra time there."""
    rows = []
    for name in table.networks:
        least = min((s for m in table.methods if (s := table.smallest(name, m)) is not None), default=None)
        cells = []
        for method in table.methods:
            share, row = table.smallest(name, method), table.row(name, SMALLEST, method)
            extra = f" ({100 * row.overhead:+.0f})" if row is not None else ""
            text = f"{_percent(share, '')}{extra}"
            cells.append(f"**{text}**" if share is not None and least is not None and share <= least + TIE else text)
        rows.append((name, *cells))
    return page_tables.table(("network", *table.methods), rows)


def seconds_table(table: Table) -> str:
    """Write for each method how long it solved, how often it fits, and how often nothing is faster."""
    rows = []
    for method in table.methods:
        solved = [r for r in table.rows if r.method == method and r.percent in PERCENTS]
        feasible = [r for r in solved if table.best(r.network, int(r.percent)) is not None]
        fitting = [r for r in feasible if r.fits]
        lost = [r.overhead - (table.best(r.network, int(r.percent)) or 0.0) for r in fitting]
        rows.append(
            (
                method,
                f"{len(fitting)} of {len(feasible)}",
                _own_fits(table, method, feasible),
                str(sum(extra <= TIE for extra in lost)),
                _percent(median(lost)) if lost else NOTHING,
                _percent(max(lost)) if lost else NOTHING,
                f"{median(r.solve_s for r in solved):.1f}" if solved else NOTHING,
                f"{max(r.solve_s for r in solved):.1f}" if solved else NOTHING,
            )
        )
    headers = ("method", "fits", "by itself", "fastest", "above the fastest, median", "most", "seconds, median", "most")
    return page_tables.table(headers, rows)


def _own_fits(table: Table, method: str, feasible: Sequence[Row]) -> str:
    """Count the budgets that a method's own schedule meets; those that have none are whole searches."""
    if not any(r.own_bytes for r in feasible):
        return NOTHING
    return str(sum(table.own(r.network, int(r.percent), method) is not None for r in feasible))


# -------------------------------------------------------------------- the papers' claims


def hiremate_networks(table: Table) -> list[str]:
    """List the networks of HiRemate's Table 4."""
    return [name for name in table.networks if name not in OTHERS]


def claims_table(table: Table) -> str:
    """Set what each paper reports beside what was found here."""
    rows = (
        (
            "HiRemate 2025",
            "50 to 70 % less memory for 10 to 15 % more time",
            _within(table, ("hilp", "portfolio"), 0.15),
        ),
        ("Rockmate 2023", "2 to 5 times less memory for 10 to 20 % more time", _within(table, ("rockmate",), 0.2)),
        ("HiRemate 2025", "GPT-2 of 5 layers: more than 3 % above Checkmate's optimum", _above_bound(table, "gpt2")),
        ("H-Rockmate", "UNet: within 1 % of Checkmate at all budgets", _beside_checkmate(table, "unet")),
        (
            "H-Rockmate",
            "Transformer of 4 layers: solved in 12 minutes, by Rockmate in 15 hours",
            _longest(table, "transformer", ("hilp", "rockmate")),
        ),
        (
            "HiRemate 2025",
            "Transformer of 2,500 nodes: solved in about 2.5 hours",
            _longest(table, "densenet", ("hilp", "portfolio")),
        ),
    )
    return page_tables.table(("paper", "what it reports", "here"), rows)


def _within(table: Table, methods: Sequence[str], limit: float) -> str:
    """Count the networks on which methods take at most so much extra time at half of the memory, and at 30 %."""
    parts = []
    for method in methods:
        names = [name for name in hiremate_networks(table) if table.row(name, 30, method) is not None]
        found = [[table.extra(name, percent, method) for name in names] for percent in (50, 30)]
        half, third = (sum(extra is not None and extra <= limit for extra in extras) for extras in found)
        counts = f"on {half} of {len(names)} networks at 50 % less, on {third} at 70 % less"
        parts.append(f"`{method}`: at most {100 * limit:g} % more {counts}")
    return "; ".join(parts)


def _above_bound(table: Table, name: str) -> str:
    """Describe how far H-ILP is above the best proven bound."""
    found = {p: (table.extra(name, p, "hilp"), table.bound(name, p)) for p in PERCENTS if name in table.networks}
    return f"GPT-2 of 12 layers, `hilp` above the proven bound: {_differences(found)}"


def _beside_checkmate(table: Table, name: str) -> str:
    found = {p: (table.extra(name, p, "hilp"), table.extra(name, p, "checkmate")) for p in PERCENTS}
    return f"`hilp` beside `checkmate`, each in its time limit: {_differences(found)}"


def _differences(found: Mapping[int, tuple[float | None, float | None]]) -> str:
    """Write for each budget how much the first of two extra times is above the second, in points."""
    parts = []
    for percent, (first, second) in found.items():
        words = f"{_percent(first - second)} points" if first is not None and second is not None else "no plan of one"
        parts.append(f"{words} at {percent} %")
    return ", ".join(parts)


def _longest(table: Table, name: str, methods: Sequence[str]) -> str:
    """Name the most seconds that methods took for one budget of a network."""
    if name not in table.networks:
        return NOTHING
    parts = []
    for method in methods:
        seconds = [r.solve_s for r in table.rows if (r.network, r.method) == (name, method) and r.percent in PERCENTS]
        parts.append(f"`{method}` {max(seconds):.0f} s" if seconds else f"`{method}` -")
    network = table.networks[name]
    what, nodes = network.about.rpartition(", ")[0], sum(network.nodes)
    return f"{what}, {nodes:,} operations, the slowest of three budgets: {', '.join(parts)}"


def headline_table(table: Table) -> str:
    """Set HiRemate's headline, 50 to 70 % less memory for 10 to 15 % more time, beside what was found."""
    rows = []
    for name in hiremate_networks(table):
        half, third = (table.extra(name, percent, "portfolio") for percent in (50, 30))
        own, own_third = (table.extra(name, percent, "hilp") for percent in (50, 30))
        can_be = table.bound(name, 30) is not None
        rows.append((name, *map(_percent, (half, own, third, own_third)), _headline(half, third, can_be)))
    headers = ("network", "50 % less: portfolio", "hilp", "70 % less: portfolio", "hilp", "beside +10 to +15 %")
    return page_tables.table(headers, rows)


def _headline(half: float | None, third: float | None, can_be: bool) -> str:
    """Compare the results at 50 % and at 30 % of the memory with those that the paper reports."""
    if half is None:
        return "**the paper's is better**: no plan at 50 % less"
    if half > 0.15:
        return "**the paper's is better** already at 50 % less"
    if third is not None and third <= 0.15:
        return "as good or better at both"
    at_third = "" if third is not None else ", where none was found" if can_be else ", proven impossible here"
    return f"as good or better at 50 % less, **the paper's is better** at 70 % less{at_third}"


def rotor_table(table: Table) -> str:
    """Count how often Rotor is faster, equal and slower than others on networks that are chains, at equal budgets.

    Once with each method's own schedules, of which one that does not fit is slower, and once as they were carried out
    here: evicted from where they don't fit, and filled up.
    """
    headers = ("Rotor beside", "own schedules: faster", "equal", "slower", "as carried out: faster", "equal", "slower")
    return page_tables.table(
        headers, [(m, *_beside(table, m, table.own), *_beside(table, m, table.extra)) for m in RIVALS]
    )


def chains(table: Table) -> list[str]:
    """List the networks that are chains: those of which Rotor says nothing else."""
    others = {row.network for row in table.rows if row.method == "rotor" and NO_CHAIN in row.note}
    return [name for name in table.networks if name not in others]


def _beside(table: Table, method: str, time: Callable[[str, int, str], float | None]) -> tuple[str, ...]:
    """Count the budgets at which Rotor is faster than another method, as fast, and slower."""
    gains = []
    for network in chains(table):
        for percent in PERCENTS:
            ours, theirs = time(network, percent, "rotor"), time(network, percent, method)
            if ours is not None or theirs is not None:
                gains.append((math.inf if theirs is None else theirs) - (math.inf if ours is None else ours))
    faster, slower = sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains)
    return str(faster), str(len(gains) - faster - slower), str(slower)


def least_peak_table(table: Table) -> str:
    """Write the smallest peaks on the networks of Hong et al., of each method's own schedules and as carried out."""
    names = [name for name in HONG if name in table.networks]
    columns: list[list[float | None]] = [
        [find(name, method) for method in table.methods]
        for name in names
        for find in (table.own_smallest, table.smallest)
    ]
    cells = [_with_least(column) for column in columns]
    headers = ["method", *(f"{name}: {what}" for name in names for what in ("own", "as carried out"))]
    return page_tables.table(
        headers, [(method, *row) for method, row in zip(table.methods, zip(*cells, strict=True), strict=True)]
    )


def _with_least(shares: Sequence[float | None]) -> list[str]:
    """Write shares in per cent, the least of them bold."""
    least = min((share for share in shares if share is not None), default=0.0)
    texts = [_percent(share, "") for share in shares]
    bold = [share is not None and share <= least + TIE for share in shares]
    return [f"**{text}**" if is_bold else text for text, is_bold in zip(texts, bold, strict=True)]


def notes_of(table: Table) -> str:
    """Count the solves by the notes of each method on what it could not serve; numbers in notes become n."""
    found: dict[tuple[str, str], int] = {}
    for row in (row for row in table.rows if row.note and row.percent in PERCENTS):
        words = re.sub(r"\d[\d,.]*(?: [KMG]iB)?", "n", row.note)
        found[row.method, words] = found.get((row.method, words), 0) + 1
    lines = (f"- {method}, {count} of its solves: {words}\n" for (method, words), count in sorted(found.items()))
    return "".join(lines)


# -------------------------------------------------------------------- the page and the picture


def tables(networks: Mapping[str, Network], rows: Sequence[Row], where: str) -> str:
    """Write all tables.

    Args:
        networks: The networks, by name.
        rows: What was found.
        where: On what it was solved.
    """
    table = in_order(networks, rows)
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    parts = [
        f"{HOW}\n{where}; solvers of commits {commits}.\n\n## Networks\n\n{networks_table(table)}",
        *(f"## {percent} % of the plain peak: extra time, %\n\n{budget_table(table, percent)}" for percent in PERCENTS),
        f"## Smallest peak, % of the plain one (extra time there, %)\n\n{smallest_table(table)}",
        f"## Methods\n\n{seconds_table(table)}",
        f"## What the papers report\n\n{claims_table(table)}",
        f"## HiRemate's headline\n\n{headline_table(table)}",
        f"## Rotor's claim, on {', '.join(chains(table))}\n\n{rotor_table(table)}",
        f"## The least peaks on the networks of Hong et al.\n\n{least_peak_table(table)}",
        f"## What methods could not serve\n\n{notes_of(table)}",
    ]
    return "\n".join(parts)


def picture(networks: Mapping[str, Network], rows: Sequence[Row]) -> str:
    """Draw extra time over budget, a panel for each network and a line for each method."""
    table = in_order(networks, rows)
    columns = min(PANEL_COLUMNS, len(networks))
    width = columns * PANEL_WIDTH
    panels = [_panel(table, network) for network in table.networks.values()]
    names, top = lay_out(panels[0].keys, 0, width)
    height = top + math.ceil(len(networks) / columns) * PANEL_HEIGHT
    parts = []
    for index, panel in enumerate(panels):
        left, above = index % columns * PANEL_WIDTH, top + index // columns * PANEL_HEIGHT
        parts += panel.draw(left, above, PANEL_WIDTH, PANEL_HEIGHT)
    return "\n".join([*open_svg(width, int(height), "Extra time over budget"), *names, *parts, "</svg>\n"])


def _panel(table: Table, network: Network) -> Panel:
    def points(bytes_of: Callable[[Row], int], method: str) -> tuple[tuple[float, float], ...]:
        mine = [r for r in table.rows if (r.network, r.method) == (network.name, method) and r.fits]
        return tuple(sorted((bytes_of(r), r.overhead) for r in mine))

    bounds = [(network.plain_bytes * p // 100, table.bound(network.name, p)) for p in sorted(PERCENTS)]
    plain = (float(network.plain_bytes), 0.0)
    return methods_panel(
        network.name,
        {method: points(lambda r: r.budget_bytes, method) for method in table.methods},
        (*((float(budget), extra) for budget, extra in bounds if extra is not None), plain),
        plain,
    )
