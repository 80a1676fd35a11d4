"""Values offloaded to the host in two processes, each with a simulated GPU: the same bits, the predicted peak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hiremate_lightning.rewriting.joint import is_collective
from tests.behaviour.budget.test_simulated_gpu import pytestmark as needs_the_simulated_gpu
from tests.behaviour.processes.test_sharding import assert_equal

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.slow, *needs_the_simulated_gpu]
NAMES = ("whole parameters sharded", "parts of blocks, collectives inside of graphs", "data parallel")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases in two processes, once; return what each of them left."""
    folder = tmp_path_factory.mktemp("ranks")
    command, environment = [sys.executable, "-m", "tests.simulated_ranks", str(folder)], os.environ
    started = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, stderr=-1)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=600)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], "".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_values_leave_the_bits_of_each_rank(ranks, name):
    for rank in ranks:
        plain, planned = rank[name]
        assert_equal(planned, plain)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_offloaded_beside_collectives(ranks, name):
    for rank in ranks:
        plan = rank[name][1].plans[0]
        assert plan.solution.offloads
        assert rank[name][1].peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_collectives_read_or_make_stays(ranks, name):
    for rank in ranks:
        plan = rank[name][1].plans[0]
        graph, offloaded = plan.graph, {offload.storage for offload in plan.solution.offloads}
        nodes = [node for node in graph.nodes if is_collective(node.op)]
        assert bool(nodes) == ("inside of graphs" in name)
        used = {graph.tensors[t].storage for node in nodes for t in (*node.inputs, *node.outputs)}
        assert not used & offloaded
