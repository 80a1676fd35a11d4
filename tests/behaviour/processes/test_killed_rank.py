"""A process that is killed, or that has too small a budget, does not keep the others waiting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.killed_rank import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 5  # that a rank waits for another one to plan with

pytestmark = pytest.mark.slow


def run(*commands: list[str]) -> tuple[list[subprocess.Popen[str]], list[str]]:
    """Run modules of the tests in two processes; return the processes, ended, and what they wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        return processes, [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize(
    ("killed", "step"), [(1, 1), (0, 3)], ids=["before its rank plans", "the first one, in a planned step"]
)
def test_a_killed_rank_ends_the_other_with_an_error(killed: int, step: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    processes, said = run(*(["tests.killed_rank", str(rank), str(killed), str(step), store] for rank in range(2)))

    assert processes[killed].returncode == -9
    assert processes[1 - killed].returncode == 3, said
    in_step, after_s = re.findall(r"in step (\d+) after ([0-9.]+) s", said[1 - killed])[0]
    assert int(in_step) == step
    assert float(after_s) < LIMIT_S + PATIENCE_S + 5


def test_one_infeasible_stage_ends_all_of_the_pipeline(tmp_path: Path) -> None:
    """The last stage names the budget and ends; the first one's next message fails, long before the group's limit."""
    processes, said = run(*(["tests.pipelines", str(rank), str(tmp_path / "store")] for rank in range(2)))

    assert [process.returncode for process in processes] == [1, 1]
    assert "InfeasibleBudgetError: The budget 100 KiB (102,400 bytes) is too small for ModuleList" in said[1]
    assert "[Stage 1] failed to run forward" in said[1]
    assert "Connection closed by peer" in said[0]
    first_s, last_s = (float(re.findall(r"^ended at (\S+) s$", text, re.MULTILINE)[0]) for text in said)
    assert first_s - last_s < 20
