"""A process that is killed does not keep the others waiting beyond the limit of their process group."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .killed_rank import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 5  # that a rank waits for another one to plan with

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("killed", "step"), [(1, 1), (0, 3)], ids=["before its rank plans", "the first one, in a planned step"]
)
def test_the_other_rank_ends_with_an_error(killed: int, step: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.killed_rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(killed), str(step), str(tmp_path / "store")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()

    assert processes[killed].returncode == -9
    assert processes[1 - killed].returncode == 3, said
    in_step, after_s = re.findall(r"in step (\d+) after ([0-9.]+) s", said[1 - killed][0])[0]
    assert int(in_step) == step
    assert float(after_s) < LIMIT_S + PATIENCE_S + 5
