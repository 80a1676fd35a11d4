"""What a device could still hand out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hiremate_lightning.memory import free_memory
from hiremate_lightning.memory.free_memory import free_bytes, free_host_bytes


def test_free_host_bytes_are_plausible():
    assert free_host_bytes() > 2**20


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells what its cache of files would give")
def test_what_the_cache_of_files_takes_is_free():
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {name: 1024 * int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    assert free_host_bytes() == pytest.approx(sizes["MemAvailable"], rel=0.1)


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 70 + 8), (0.5, 50 - 12)])
def test_what_a_gpu_could_still_hand_out_is_within_the_share_of_the_process(monkeypatch, fraction, expected):
    """Of 100 bytes 70 are free, 20 are reserved by this process, 12 of which are allocated."""
    answers = {
        "memory_allocated": 12,
        "memory_reserved": 20,
        "mem_get_info": (70, 100),
        "get_per_process_memory_fraction": fraction,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    assert free_bytes(torch.device("cuda")) == expected


@pytest.mark.parametrize(("limit", "expected"), [("1000", 1000 - 400 + 150), ("300", 50), ("max", None)])
def test_the_limit_of_a_container_is_heeded(monkeypatch, tmp_path, limit, expected):
    """Of 400 bytes in use, 150 are of files and could be given up."""
    monkeypatch.setattr(free_memory, "CONTAINER", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 150\n")

    found = free_host_bytes()

    assert found == expected if expected is not None else found > 2**20
