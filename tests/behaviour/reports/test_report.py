"""Who sees what of a plan: terminals, pipes, logs, and ranks."""

from __future__ import annotations

import io
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

from hiremate_lightning.planning.plan import PlanningTime, measured_line, planned_lines
from hiremate_lightning.reporting.report import Reporter, calls_for, is_rank_zero
from tests.tiny import blocks_plan, mixed_plan

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, _no_terminal: None, shared_console: Callable[..., None]) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    shared_console()


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The package's logger, as if nobody had set up logging: pytest's own handlers are out of its sight."""
    logger = logging.getLogger("hiremate_lightning")
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.propagate = False
    logger.handlers.clear()
    yield logger
    logger.level, logger.propagate, logger.handlers[:] = before
    logger.setLevel(before[0])


def terminal() -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def assert_is_table(lines: list[str]) -> None:
    """See that lines are the table of a plan of GPT, in ASCII."""
    assert lines[0].startswith("+- HiRemate plan of GPT -")
    assert any(line.startswith("| net.blocks.0-3 x4 ") for line in lines)
    assert len({len(line) for line in lines}) == 1
    assert "".join(lines).isascii()


def show_all(reporter: Reporter) -> None:
    plan = mixed_plan().with_measured(peak_bytes=4_000_000)
    with reporter.stage("tracing"):
        reporter.progress("operations", 1, 2)
    reporter.planned(plan)
    reporter.measured(plan)
    reporter.report("a note")


def test_three_lines_by_default():
    console = terminal()
    reporter = Reporter(console=console)
    for plan in (blocks_plan(4), blocks_plan(2)):
        reporter.planned(plan)
        reporter.measured(plan.with_measured(peak_bytes=4_000_000))
    large, small = blocks_plan(4), blocks_plan(2)
    assert written(console).splitlines() == [
        planned_lines(large)[0],
        measured_line(large.with_measured(peak_bytes=4_000_000)),
        'HiRemate plan of GPT, more: verbose="full" shows a table; '
        'from hiremate_lightning import get_plan, write_html; write_html(get_plan(model), "plan.html") writes a page',
        planned_lines(small)[0],
        measured_line(small.with_measured(peak_bytes=4_000_000)),
    ]


def test_the_page_is_written_to_the_folder_of_the_run(tmp_path: Path):
    """A folder that can't be written costs the page only."""
    plan = blocks_plan(2).with_measured(peak_bytes=4_000_000)
    (tmp_path / "file").write_text("")
    for folder, more in ((tmp_path / "version_0", None), (tmp_path / "file" / "version_0", 'more: verbose="full"')):
        console = terminal()
        reporter = Reporter(console=console)
        reporter.folder = folder
        reporter.planned(plan)
        assert not folder.exists()
        reporter.measured(plan)
        page = folder / "hiremate_plan.html"
        assert (more or f"more: {page}") in written(console).replace("\n", "")
        assert page.is_file() == (more is None)


def test_the_report_advises_what_would_save_memory():
    console, plan = terminal(), blocks_plan(2)
    Reporter(console=console).planned(replace(plan, budget_bytes=plan.resident_bytes + 1))
    assert "of the budget exist before the step (weights, optimizer state, batch)" in written(console)


class FakeFile(io.StringIO):
    """A stream that says what it is."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def screen(text: str) -> list[str]:
    """What a terminal shows of a text: a carriage return writes over the line."""
    lines = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_message_under_a_bar_of_tqdm_is_a_line_of_its_own(is_terminal: bool):
    stream = FakeFile(is_terminal)
    console = Console(file=stream, width=200, force_terminal=is_terminal, color_system=None)
    with tqdm(total=2, file=stream, ncols=60, desc="epoch", mininterval=0) as bar:
        bar.update()
        Reporter(console=console).report("a message")
        bar.update()
    lines = screen(stream.getvalue())
    assert "a message" in lines
    assert "" not in lines[:-1]
    assert any(line.startswith("epoch: 100%") for line in lines)


def test_a_bar_that_is_still_being_made_is_left_alone():
    """Stages write from a thread of their own, while training may make a bar."""
    unfinished = tqdm.__new__(tqdm)
    console = Console(file=io.StringIO(), width=80)
    Reporter(console=console).report("a message")
    del unfinished
    assert written(console).splitlines() == ["a message"]


def test_stages_run_where_the_bar_was_and_the_bar_comes_back():
    stream = FakeFile(True)
    console = Console(file=stream, width=80, force_terminal=True, color_system=None)
    with tqdm(total=2, file=stream, ncols=60, desc="epoch", mininterval=0) as bar:
        bar.update()
        with Reporter(console=console).stage("tracing"):
            pass
        shown = stream.getvalue()
    before, _, after = shown.partition("HiRemate: tracing")
    last = screen(re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", before))[-1]
    assert not re.search(r"\w", last), last
    assert "epoch:  50%" in after


def test_a_long_stage_is_named_without_a_progress_bar(change_thresholds: Callable[..., None]):
    """So is an inner one instead of the outer one."""
    for long_stage_s, names, shown in (
        (0.01, ["solving"], ["still solving, after 0.01 s", "still solving, after 0.02 s"]),
        (0.5, ["tracing", "proving"], ["still proving, after 0.5 s"]),
    ):
        change_thresholds(long_stage_s=long_stage_s)
        console = Console(file=io.StringIO(), width=80)
        reporter = Reporter(console=console)
        with ExitStack() as stages:
            for name in names:
                stages.enter_context(reporter.stage(name))
            time.sleep(0.2 + long_stage_s)
        lines = written(console).splitlines()[: len(shown)]
        assert lines == [f"HiRemate: {words} of planning" for words in shown]


def test_many_short_stages_are_a_long_wait(change_thresholds: Callable[..., None]):
    """None of them takes long enough to be named by itself; a plan ends the count."""
    change_thresholds(long_stage_s=1.0)
    console = Console(file=io.StringIO(), width=80)
    reporter = Reporter(console=console)
    for name in ("tracing", "measuring", "solving"):
        with reporter.stage(name):
            time.sleep(0.4)
    assert re.match(r"HiRemate: still \w+, after 1 s of planning\n", written(console))
    reporter.planned(blocks_plan(2))
    before = written(console)
    with reporter.stage("tracing"):
        time.sleep(0.05)
    assert written(console) == before


def test_a_long_wait_is_announced_and_explained_afterwards(change_thresholds: Callable[..., None]):
    change_thresholds(long_stage_s=5.0)
    console = terminal()
    reporter = Reporter(console=console)
    reporter.expect("GPT", 4.0)
    assert written(console) == ""
    reporter.expect("GPT", 37.0)
    long = replace(blocks_plan(2), planning=PlanningTime(capture_s=30.0, prove_s=3.0, solve_s=4.0))
    for _ in range(2):
        reporter.planned(long)
    lines = written(console).splitlines()
    assert lines[0].startswith("HiRemate: the first two steps of GPT take about 35 s longer than later ones")
    assert lines[2] == "  planned in 37 s: tracing 30 s, proving 3 s, solving 4 s"
    assert len(lines) == 4


def test_a_terminal_gets_progress_then_the_table_then_lines():
    console = terminal()
    show_all(Reporter("full", console=console))
    text = written(console)
    shown = ("HiRemate: tracing", "╭─ HiRemate plan of GPT", "HiRemate plan of GPT, measured: peak 3.81 MiB", "a note")
    places = [text.index(words) for words in shown]
    assert places == sorted(places)
    assert text.endswith("a note\n")


def test_plans_of_smaller_steps_than_one_shown_get_a_line():
    console = terminal()
    reporter = Reporter("full", console=console)
    small, large = blocks_plan(2), blocks_plan(4)
    assert small.unplanned_peak_bytes < large.unplanned_peak_bytes
    for plan in (small, large, small, large):
        reporter.planned(plan)
    assert written(console).count("╭─") == 3
    assert written(console).count(planned_lines(small)[0]) == 1


def test_a_console_without_terminal_gets_ascii_and_no_progress():
    console = Console(file=io.StringIO(), width=40)
    show_all(Reporter("full", console=console))
    plan = mixed_plan().with_measured(peak_bytes=4_000_000)
    more = f"HiRemate plan of GPT, more: {calls_for()}"
    *table, measured, page, note = written(console).splitlines()
    assert_is_table(table)
    assert [measured, page, note] == [measured_line(plan), more, "a note"]


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}, {"LOCAL_RANK": "3"}], ids=str)
def test_silence_on_request_and_on_other_ranks(
    logger: logging.Logger,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
):
    """On the console, in the log and on standard error."""
    console = terminal()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for where in ({"console": console}, {}):
        show_all(Reporter(verbose=bool(variables), **where))
    assert written(console) == ""
    assert capsys.readouterr() == ("", "")


def test_without_terminal_and_logging_lines_go_to_standard_error(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    Reporter("full").planned(blocks_plan(4))
    out, err = capsys.readouterr()
    assert out == ""
    assert_is_table(err.splitlines())


def test_without_terminal_lines_go_to_a_log_that_takes_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    with caplog.at_level(logging.INFO, "hiremate_lightning"):
        Reporter("full").planned(blocks_plan(4))
    assert_is_table(caplog.messages)
    assert capsys.readouterr() == ("", "")


def test_a_log_never_asked_for_such_lines_swallows_none(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    assert logging.getLogger("hiremate_lightning").level == logging.NOTSET  # and the root's is WARNING
    Reporter().report("seen")
    assert capsys.readouterr().err == "seen\n"
    assert caplog.messages == []


def test_a_logger_set_to_warnings_silences_the_lines(logger: logging.Logger, capsys: pytest.CaptureFixture[str]):
    logger.setLevel(logging.WARNING)
    Reporter().report("unseen")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_drawn_on_through_the_console_of_rich(shared_console: Callable[..., None]):
    screen = io.StringIO()
    shared_console(file=screen, width=80, force_terminal=True, color_system=None)
    Reporter().report("shared")
    assert screen.getvalue() == "shared\n"


def test_stages_nest_and_vanish_also_when_they_fail():
    console = terminal()
    reporter = Reporter(console=console)
    with pytest.raises(KeyError), reporter.stage("profiling"), reporter.stage("solving"):
        raise KeyError
    with reporter.stage("again"):
        pass
    text = written(console)
    assert "HiRemate: solving" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor came back both times


def test_stages_nest_with_a_progress_bar_that_is_already_there():
    from rich.progress import Progress

    console = terminal()
    with Progress(console=console) as bar:
        bar.add_task("epoch 0")
        with Reporter(console=console).stage("tracing"):
            pass
    assert "epoch 0" in written(console)


@pytest.mark.parametrize(("total", "shown"), [(20, "3/20 operations"), (None, "operations")])
def test_progress_counts_within_its_stage(total: int | None, shown: str):
    """Outside of a stage it is nothing."""
    console = terminal()
    reporter = Reporter(console=console)
    reporter.progress("operations", 1, 2)
    assert written(console) == ""
    with reporter.stage("profiling"):
        reporter.progress("operations", 3, total)
    last = written(console).rpartition("HiRemate: profiling")[2]
    assert f" {shown}" in last
    assert ("/" in last) is (total is not None)


@pytest.mark.parametrize(
    ("best_ms", "bound_ms", "shown"),
    [
        (math.inf, 4.0, "none found, at least +4.0%"),
        (10.0, 4.5, "extra time +10.0%, within 5.0% of the best possible"),
        (4.0, 4.0, "extra time +4.0%, the best possible"),
    ],
)
def test_a_solve_shows_its_best_plan_and_its_proven_quality(best_ms: float, bound_ms: float, shown: str):
    console = terminal()
    reporter, plan = Reporter(console=console), mixed_plan()
    zeros = [0.0] * (len(plan.graph.nodes) - 1)
    with reporter.stage("solving"):  # a step without time has no progress to show
        reporter.solving(plan.graph, replace(plan.profile, time_ms=(0.0, *zeros)))(1.0, 0.0)
        reporter.solving(plan.graph, replace(plan.profile, time_ms=(100.0, *zeros)))(best_ms, bound_ms)
    assert shown in written(console)


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        *(({name: rank}, rank == "0") for name in RANK_VARIABLES for rank in "01"),
        ({"RANK": "4", "LOCAL_RANK": "0"}, False),
    ],
    ids=str,
)
def test_the_launcher_says_which_rank_this_is(
    variables: dict[str, str], is_first: bool, monkeypatch: pytest.MonkeyPatch
):
    """The global rank counts before the local one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() is is_first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_running_process_group_counts_before_the_environment(rank: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", str(1 - rank))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        assert is_rank_zero() is (rank == 0)
    finally:
        torch.distributed.destroy_process_group()
