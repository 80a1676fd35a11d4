"""Values offloaded to the host in two processes, each with a simulated GPU: the same bits, the predicted peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hiremate_lightning.rewriting.nodes import is_collective
from tests.behaviour.budget.test_simulated_gpu import pytestmark as needs_the_simulated_gpu
from tests.behaviour.processes.test_sharding import assert_equal
from tests.processes import run_beside

pytestmark = [pytest.mark.slow, *needs_the_simulated_gpu]
NAMES = ("whole parameters sharded", "parts of blocks, collectives inside of graphs", "data parallel")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run all cases in two processes, once; return what each of them left."""
    folder = tmp_path_factory.mktemp("ranks")
    ends = run_beside(*(("tests.simulated_ranks", str(folder), str(rank)) for rank in (0, 1)), timeout=600)
    assert [code for code, _ in ends] == [0, 0], ends
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_offloaded_values_leave_the_bits_of_each_rank(ranks, name):
    """Values are offloaded beside collectives; what these read or make stays."""
    for rank in ranks:
        plain, planned = rank[name]
        assert_equal(planned, plain)
        plan = planned.plans[0]
        assert plan.solution.offloads
        assert planned.peak_bytes <= plan.budget_bytes
        graph, offloaded = plan.graph, {offload.storage for offload in plan.solution.offloads}
        nodes = [node for node in graph.nodes if is_collective(node.op)]
        assert bool(nodes) == ("inside of graphs" in name)
        used = {graph.tensors[t].storage for node in nodes for t in (*node.inputs, *node.outputs)}
        assert not used & offloaded
