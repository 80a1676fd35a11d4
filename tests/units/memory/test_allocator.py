"""The bytes that a device takes for a request, and those that it could still hand out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hiremate_lightning.memory.allocator import allocated_bytes, block_bytes, free_bytes, free_host_bytes, in_blocks
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


def test_expandable_segments_lose_nothing():
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings") and not torch.backends.cuda.is_built():
        pytest.skip("torch 2.11 without CUDA has no allocator whose settings could be read")
    graph, before = large(chain(2)[0]), runtime.has_expandable_segments()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        assert in_blocks(graph, CUDA) == graph
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        assert {s.size_bytes for s in in_blocks(graph, CUDA).storages} == {12 * MIB}
        assert in_blocks(graph, CPU) == graph
    finally:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{before}")


def test_free_host_bytes_are_plausible():
    assert free_host_bytes() > 2**20


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells what its cache of files would give")
def test_what_the_cache_of_files_takes_is_free():
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: 1024 * int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    assert free_host_bytes() == pytest.approx(sizes["MemAvailable"], rel=0.1)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 70 + 8), (0.5, 50 - 12)])
def test_free_bytes_of_a_gpu_heed_the_fraction_of_the_process(answer_for_gpu, fraction, expected):
    """Of 100 bytes 70 are free, 20 are reserved by this process, 12 of which are allocated."""
    answer_for_gpu(
        memory_allocated=lambda _: 12,
        memory_reserved=lambda _: 20,
        mem_get_info=lambda _: (70, 100),
        get_per_process_memory_fraction=lambda _: fraction,
    )
    assert free_bytes(torch.device("cuda")) == expected


@pytest.mark.parametrize(("limit", "expected"), [("1000", 1000 - 400 + 150), ("300", 50), ("max", None)])
def test_free_host_bytes_are_within_the_limit_of_a_container(tmp_path, limit, expected):
    """Of 400 bytes in use, 150 are of files and could be given up."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 150\n")

    found = free_host_bytes(tmp_path)

    assert found == expected if expected is not None else found > 2**20
