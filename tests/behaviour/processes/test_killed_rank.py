"""A process that is killed, or that has too small a budget, does not keep the others waiting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.killed_rank import LIMIT_S
from tests.processes import run_beside

PATIENCE_S = 5  # that a rank waits for another one to plan with

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("killed", "step"), [(1, 1), (0, 3)], ids=["before its rank plans", "the first one, in a planned step"]
)
def test_a_killed_rank_ends_the_other_with_an_error(killed: int, step: int, tmp_path: Path) -> None:
    given = str(killed), str(step), str(tmp_path / "store")
    ends = run_beside(*(("tests.killed_rank", str(rank), *given) for rank in range(2)), timeout=200)

    assert ends[killed][0] == -9
    code, texts = ends[1 - killed]
    assert code == 3, texts
    in_step, after_s = re.findall(r"in step (\d+) after ([0-9.]+) s", texts)[0]
    assert int(in_step) == step
    assert float(after_s) < LIMIT_S + PATIENCE_S + 5


def test_one_infeasible_stage_ends_all_of_the_pipeline(tmp_path: Path) -> None:
    """The last stage names the budget and ends; the first one's next message fails, long before the group's limit."""
    ends = run_beside(*(("tests.pipelines", str(rank), str(tmp_path / "store")) for rank in range(2)), timeout=200)

    codes, texts = zip(*ends, strict=True)
    assert codes == (1, 1)
    assert "InfeasibleBudgetError: The budget 100 KiB (102,400 bytes) is too small for ModuleList" in texts[1]
    assert "[Stage 1] failed to run forward" in texts[1]
    assert "Connection closed by peer" in texts[0]
    first_s, last_s = (float(re.findall(r"^ended at (\S+) s$", text, re.MULTILINE)[0]) for text in texts)
    assert first_s - last_s < 20
