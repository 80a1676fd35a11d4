"""The tests for a GPU on a simulated one, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .simulated_gpu import build

CHECKED = ("2.13",)  # versions of torch whose interfaces the simulated device implements

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA's own kernels"),
    pytest.mark.skipif(not torch.__version__.startswith(CHECKED), reason=f"checked with torch {', '.join(CHECKED)}"),
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler, or no headers of Python"),
    pytest.mark.skipif(sys.platform != "linux", reason="the library is built for Linux"),
]
FILES = ("test_gpu", "test_loops", "test_strategy")
PARTS = {
    "training": "training_under_a_plan and tight",
    "loops": "script",
    # a search for the largest batch takes minutes of a CPU
    "rest": "not training_under_a_plan and not script and not largest_batch",
}


@pytest.mark.parametrize("part", PARTS)
def test_the_tests_for_a_gpu_pass_on_a_simulated_one(part):
    command = [sys.executable, "-m", "tests.simulated_gpu", "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [*command, "-k", PARTS[part], *(f"tests/{name}.py" for name in FILES)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert " passed" in run.stdout
