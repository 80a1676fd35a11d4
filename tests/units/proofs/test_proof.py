"""The state of a proof, and the memory that it needs: counted as the device's allocator hands it out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from hiremate_lightning.proofs.proof import Proof, ProofMemory, proof_memory
from hiremate_lightning.records.schedule import keep_all, lower
from tests.tiny import chain

ASKED_BYTES, TAKEN_BYTES = 23 * 2**19, 24 * 2**19  # a GPU takes 12 MiB for 11.5


def memory_of(device: str) -> ProofMemory:
    graph, profile = chain(4)
    graph = replace(graph, storages=tuple(replace(s, size_bytes=ASKED_BYTES) for s in graph.storages))
    profile = replace(profile, workspace_bytes=(0,) * len(graph.nodes))
    captured = SimpleNamespace(graph=graph, device=torch.device(device), mutated=range(len(graph.tensors)))
    program = SimpleNamespace(schedule=lower(graph, keep_all(graph)))
    return proof_memory(captured, profile, program, lambda step, device: step.eager_bytes)


def test_a_proof_on_a_gpu_counts_the_rest_of_large_blocks():
    """The plan of the same graph counts it too: a proof that did not would run where it does not fit."""
    on_cpu, on_gpu = memory_of("cpu"), memory_of("cuda")
    for name in ("eager_bytes", "beside_bytes", "forward_bytes", "own_bytes", "own_forward_bytes", "changed_bytes"):
        asked, taken = getattr(on_cpu, name), getattr(on_gpu, name)
        assert asked > 0, name
        assert taken * ASKED_BYTES == asked * TAKEN_BYTES, name
    assert on_gpu.free_bytes == on_gpu.eager_bytes


def test_asking_what_to_prove_next_changes_nothing():
    """Gradients of which no output is known can't be proved: they count as tried once a proof begins."""
    unknown = frozenset({0})
    captured: Any = SimpleNamespace(tangents=[SimpleNamespace(meta={})])
    part: Any = SimpleNamespace(captured=captured, ran_without={unknown})
    proof = Proof(torch.fx.symbolic_trace(torch.nn.Identity()), torch.nn.Identity(), part, prove=lambda *_: None)
    assert proof.next_without() is None
    assert not proof.tried_without
    proof.begin()
    assert proof.tried_without == {unknown}
