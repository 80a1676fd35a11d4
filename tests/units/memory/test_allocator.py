"""Requests take what CUDA's caching allocator gives for them: blocks, and what is too little to be split off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hiremate_lightning.memory.allocator import allocated_bytes, block_bytes, in_blocks
from hiremate_lightning.records.graph import Graph
from hiremate_lightning.torch_private import runtime
from tests.tiny import chain

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


def large(graph: Graph) -> Graph:
    """Make each storage of a graph 11.5 MiB."""
    return replace(graph, storages=tuple(replace(s, size_bytes=int(11.5 * MIB)) for s in graph.storages))


def test_cuda_rounds_up_to_512_bytes():
    assert allocated_bytes(513, CUDA) == 1024
    assert allocated_bytes(513, CPU) == 513


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (512, 512),
        (9.5 * MIB, 9.5 * MIB),  # shares its memory with others
        (10 * MIB, 10 * MIB),
        (10.5 * MIB, 10.5 * MIB),  # 1.5 MiB of 12 are split off
        (11 * MIB, 12 * MIB),  # just 1 MiB is not
        (11.5 * MIB, 12 * MIB),
        (100 * MIB + 512, 100 * MIB + 512),
    ],
)
def test_a_small_rest_of_a_segment_is_kept(asked, taken):
    assert block_bytes(int(asked)) == int(taken)


def test_expandable_segments_lose_nothing(monkeypatch):
    graph = large(chain(2)[0])
    monkeypatch.setattr(runtime, "has_expandable_segments", lambda: True)
    assert in_blocks(graph, CUDA) == graph
    monkeypatch.setattr(runtime, "has_expandable_segments", lambda: False)
    assert {s.size_bytes for s in in_blocks(graph, CUDA).storages} == {12 * MIB}
    assert in_blocks(graph, CPU) == graph


def test_torch_says_whether_segments_are_expandable():
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings") and not torch.backends.cuda.is_built():
        pytest.skip("torch 2.11 without CUDA has no allocator whose settings could be read")
    before = runtime.has_expandable_segments()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        assert runtime.has_expandable_segments()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        assert not runtime.has_expandable_segments()
    finally:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{before}")
