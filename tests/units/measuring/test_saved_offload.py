"""Memory of temporary files."""

from __future__ import annotations

import os

import pytest
import torch

from hiremate_lightning.measuring.saved_offload import LEAST_FILE, Files


def test_memory_is_used_again_when_nobody_holds_it():
    files = Files()
    values = [files.take(10_000) for _ in range(3)]
    first = values[0].data_ptr()
    del values
    assert files.take(20_000).data_ptr() == first
    assert files.size_bytes == LEAST_FILE


def test_memory_that_a_view_holds_is_not_used_again():
    files = Files()
    view = files.take(10_000).fill_(3)[::2]
    for _ in range(300):
        files.take(10_000).fill_(1)
    assert torch.equal(view, torch.full((5_000,), 3, dtype=torch.uint8))
    assert files.size_bytes == 2 * LEAST_FILE, "the second file is used again and again"


def test_values_are_storages_apart_that_share_nothing():
    files = Files()
    values = [files.take(size).fill_(index) for index, size in enumerate((5, 3 * LEAST_FILE, 4096, 20_000))]
    assert [value.untyped_storage().nbytes() for value in values] == [5, 3 * LEAST_FILE, 4096, 20_000]
    assert all(bool((value == index).all()) for index, value in enumerate(values))
    assert all(value.data_ptr() % 64 == 0 for value in values), "as PyTorch's own"


def test_a_file_outlives_what_it_was_taken_from():
    value = Files().take(10_000).fill_(7)
    assert bool((value == 7).all())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_processes_that_fork_write_to_files_of_their_own():
    files = Files()
    files.take(10_000)  # and nobody holds it
    waits, goes_on = os.pipe()
    child = os.fork()
    if not child:
        os.read(waits, 1)
        files.take(10_000).fill_(1)
        os._exit(0)
    value = files.take(10_000).fill_(2)
    os.write(goes_on, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert bool((value == 2).all())
