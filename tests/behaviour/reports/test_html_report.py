"""The HTML report: its tables and its numbers, and in a real browser the figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hiremate_lightning.errors import ConfigurationError
from hiremate_lightning.records.graph import StorageKind
from hiremate_lightning.reporting.html_report import write_html
from hiremate_lightning.reporting.plan_summary import batch_words
from tests.tiny import Builder, blocks_plan, mixed_plan, plan_keeping

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
NEEDS_BROWSER = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")


class _Reader(HTMLParser):
    """Collects the cells of tables, row by row, the addresses that tags name, and the JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.title = ""
        self.numbers = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [value for name in ("src", "href") if (value := found.get(name))]
        self.ids += [value] if (value := found.get("id")) else []
        is_text = tag in ("td", "th", "title", "script")
        self._inside = "plan" if found.get("id") == "plan" else tag if is_text else self._inside
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "title", "script"):
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside == "plan":
            self.numbers += data
        elif self._inside == "title" and not self.rows:
            self.title = self.title or data


def read(path: Path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = mixed_plan(4).with_measured(peak_bytes=4_600_000, step_ms=60.0, recompute_ms=4.0)
    return write_html(plan, tmp_path_factory.mktemp("page") / "plan.html", curve_limit_s=2.0)


def test_what_was_predicted_stands_beside_what_was_measured(page: Path, tmp_path: Path):
    """Equal blocks share a row, those planned differently have a bar each, and the last row is the sum."""
    rows, text = read(page).rows, page.read_text(encoding="utf-8")
    assert rows[:3] == [
        ["", "predicted", "measured"],
        ["Peak memory", "4.67 MiB", "4.39 MiB"],
        ["Extra time", "+12.3%", "+7.1%"],
    ]
    assert ["net.blocks.0-3 \u00d74", "1.77 MiB", "1.46 MiB", "10/32", "+6.4 ms", ""] in rows
    assert ["all", "1.80 MiB", "1.59 MiB", "12/35", "+6.6 ms", ""] in rows
    row = text[text.index("net.blocks.0-3") :]
    row = row[: row.index("</tr>")]
    assert re.findall(r'title="(\d+)% kept"', row) == ["100", "100", "9", "9"]

    unmeasured = read(write_html(mixed_plan(2), tmp_path / "other.html", curve_limit_s=0))
    assert [row[2] for row in unmeasured.rows[1:5]] == ["not yet"] * 4
    assert "frontier" not in unmeasured.ids, "other budgets are left out"


def test_what_fills_the_peak_adds_up_to_it(tmp_path: Path):
    b = Builder()
    saved = [b.op(f"a{i}", (), 1_024_000 * (i + 1)) for i in range(3)]
    b.op("g", tuple(saved), 1_024_000, backward=True, workspace=512_000)
    graph, profile = b.graph()
    plan = plan_keeping(graph, profile, ["a0", "a1", "a2"], resident_bytes=2_048_000)
    rows = read(write_html(plan, tmp_path / "plan.html", curve_limit_s=0)).rows
    start = rows.index(["what", "bytes", "made by", "module", "source"])
    assert [row[:3] for row in rows[start + 1 :]] == [
        ["resident before the step", "1.95 MiB", ""],
        ["workspace", "500 KiB", "tiny.g"],
        ["saved activations", "2.93 MiB", "tiny.a2"],
        ["saved activations", "1.95 MiB", "tiny.a1"],
        ["saved activations", "1000 KiB", "tiny.a0"],
        ["gradients", "1000 KiB", "tiny.g"],
        ["all", "9.28 MiB", ""],
    ]


def test_the_page_holds_the_numbers_of_the_plan(tmp_path: Path):
    """Names can't be markup; estimates are called that."""
    plan = mixed_plan(2)
    plan = replace(plan, target="</script><b>", profile=replace(plan.profile, device="estimate"))
    page = write_html(plan, tmp_path / "plan.html", curve_limit_s=0)
    found = read(page)
    assert json.loads(found.numbers).items() >= plan.to_dict().items()
    assert found.title == "HiRemate plan of </script><b>"
    assert "estimated from operation counts" in page.read_text("utf-8")

    b = Builder(module="<script>alert(1)</script>")
    b.op("g", (b.op("a", (), 10),), 1, backward=True, op="<b>")
    path = write_html(plan_keeping(*b.graph(), ["a"]), tmp_path / "plan.html", curve_limit_s=0)
    assert "<script>alert" not in path.read_text("utf-8")


def above(page: Path) -> list[str]:
    """Give the verdict, and the line below it, as text."""
    text = page.read_text(encoding="utf-8")
    return [re.search(rf'id="{name}"[^>]*>(.*?)</p>', text)[1] for name in ("verdict", "facts")]


def test_a_verdict_in_one_sentence_stands_above_all(page: Path):
    """Below it is with what the page was made, and when."""
    verdict, facts = above(page)
    assert verdict == (
        "GPT trains in 4.39 MiB (measured) instead of 5.48 MiB, within its budget of 4.76 MiB, "
        "for +7.1% time measured, +12.3% predicted."
    )
    package, python, time = facts.split(" \u00b7 ")[-3:]
    assert package.startswith("hiremate-lightning ")
    assert python.startswith("Python 3.")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", time)


def test_a_plan_over_its_budget_says_so(tmp_path: Path):
    """In the verdict, and in the line of the plan."""
    plan = blocks_plan(2)
    over = replace(plan, budget_bytes=plan.planned_peak_bytes - 2**20)
    page = write_html(over, tmp_path / "p.html", curve_limit_s=0)
    assert "1.00 MiB MORE than its budget" in above(page)[0]
    assert '<p id="verdict" class=over>' in page.read_text(encoding="utf-8")
    assert "(1.00 MiB OVER the budget)" in page.read_text(encoding="utf-8")


def test_what_a_step_is_given_is_named():
    b = Builder()
    b.op("g", (b.op("a", (b.input("x", 64, StorageKind.INPUT),), 10),), 1, backward=True)
    graph, profile = b.graph()
    given = replace(graph.tensors[graph.inputs[0]], shape=(8, 64), dtype="int64")
    graph = replace(graph, tensors=tuple(given if t.name == given.name else t for t in graph.tensors))
    assert batch_words(plan_keeping(graph, profile, ["a"])) == "8 x 64 int64"


def test_a_missing_folder_or_plan_raises_before_solving(tmp_path: Path):
    unsolvable = replace(mixed_plan(2), graph=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"There is no folder '.*nowhere' to write plan.html to"):
        write_html(unsolvable, tmp_path / "nowhere" / "plan.html")
    no_plan = r"Expected a plan to write, found NoneType. get_plan\(model\) returns"
    with pytest.raises(ConfigurationError, match=no_plan):
        write_html(None, tmp_path / "plan.html")  # type: ignore[arg-type]


def test_the_page_is_small_and_dark_where_the_screen_is(page: Path):
    """Each table and picture scrolls by itself; tables and their columns are named, for readers who hear the page."""
    text = page.read_text(encoding="utf-8")
    assert len(text) < 200_000
    assert text.count("@media (prefers-color-scheme: dark)") == 5  # the page, and its two pictures for each screen
    assert text.count("<table") + text.count("<svg") / 2 == text.count('<div class="wide"') == 5
    assert text.count("<caption>") == text.count("<table")
    assert "<th>" not in text
    assert text.count("<th ") == text.count('<th scope="col"')
    assert read(page).addresses == []


def test_a_phone_gets_pictures_that_are_no_wider(page: Path):
    """Letters are 12 pixels there too, and recomputing is not out of sight to the right."""
    text = page.read_text(encoding="utf-8")
    narrow = re.findall(r'<div class="narrow"><svg [^>]*width="(\d+)"', text)
    assert narrow == ["360", "360"]
    drawn = text.split('<div class="narrow">')[1].partition("</svg>")[0]
    ends = [float(x) + 6.6 * len(words) for x, words in re.findall(r'<text x="([\d.]+)"[^m]*?>([^<]+)</text>', drawn)]
    assert ends
    assert max(ends) <= 360
    assert "Touch the picture" in text


def test_each_operation_of_both_runs_is_there_for_the_pointer(page: Path):
    found = re.search(r'id="steps">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    steps, plan = json.loads(found[1]), mixed_plan(4)
    for run, simulation in zip(steps["runs"], (plan.unplanned, plan.planned), strict=True):
        assert [step[2] for step in run["steps"]] == [moment.peak_bytes for moment in simulation.timeline]
        assert all(step[2] == sum(step[3:]) for step in run["steps"])
    assert sum(step[1] for step in steps["runs"][1]["steps"]) == len(plan.schedule.recomputed(plan.graph))
    assert steps["nodes"][1] == ["tiny.qkv0", "forward", "net.blocks.0.attn", "", "1 ms"]


# ---------------------------------------------------------------- in a browser


def browse(text: str, folder: Path, width: int = 1200) -> list[str]:
    """Open a page from disk; give what its scripts wrote to the console."""
    assert BROWSER is not None
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    quiet = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage", "extensions")
    command = [BROWSER, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile"]
    command += ["--virtual-time-budget=20000"]
    command += [f"--window-size={width},900"]
    command += ["--enable-logging=stderr", "--v=0", "--dump-dom", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@NEEDS_BROWSER
@pytest.mark.slow
def test_the_page_says_what_runs_under_the_pointer(page: Path, tmp_path: Path):
    """The arrow keys walk from the first operation of the planned step, the pointer chooses any of the plain one."""
    text = page.read_text(encoding="utf-8")
    walk = "picture.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'})); console.log(note.textContent);"
    point = (
        "const box = picture.getBoundingClientRect();"
        "const event = {clientX: box.left + box.width / 2, clientY: box.top + 60};"
        "picture.dispatchEvent(new PointerEvent('pointermove', event)); console.log(note.textContent);"
    )
    walked, pointed = browse(text.replace("</body>", f"<script>{walk}{point}</script></body>"), tmp_path)
    assert "tiny.qkv0, forward, 1 ms" in walked
    assert ", backward, " in pointed


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
def test_the_page_is_no_wider_than_the_screen(page: Path, tmp_path: Path, width: int):
    """Figures and tables shrink, or scroll within themselves; nothing is empty under the figure."""
    text = page.read_text(encoding="utf-8")
    look = "console.log([document.documentElement.scrollWidth <= innerWidth, note.offsetHeight < 80].join());"
    console = browse(text.replace("</body>", f"<script>{look}</script></body>"), tmp_path, width)
    assert '"true,true"' in console[0]


@NEEDS_BROWSER
@pytest.mark.slow
def test_an_error_on_a_page_would_be_seen(tmp_path: Path):
    console = browse("<!doctype html><script>nowhere.to.be.found()</script>", tmp_path)
    assert "nowhere is not defined" in "".join(console)
