"""Programs of sizes that were never traced compute what those of their own traces do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hiremate_lightning.capturing.absent import find_absent
from hiremate_lightning.capturing.backend import planning_backend
from hiremate_lightning.capturing.capture import Captured
from hiremate_lightning.capturing.code_at_sizes import CodeAtSizes
from hiremate_lightning.planning.solvers.base import UNLIMITED, Problem
from hiremate_lightning.planning.solvers.least_memory import solve_least_memory
from hiremate_lightning.records.costs import estimate
from hiremate_lightning.records.schedule import keep_all, lower
from hiremate_lightning.records.step import Decisions
from hiremate_lightning.running.program import Changes, Program, build
from hiremate_lightning.running.program_at_sizes import ProgramAtSizes, SizesDifferError
from tests.exact import network
from tests.faults import change_absences, overwriting_nothing

NOTHING: frozenset[int] = frozenset()
WIDTH = 16


@network(lambda: {"project": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)})
def attending(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a dropout, and a block behind it; it returns more than its loss needs."""
    batch, length, _ = x.shape
    q, k, v = self.project(self.norm(x)).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    y = (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)
    y = torch.relu(self.out(F.gelu(y)))
    return y.square().mean(), y


def captured_at(module: nn.Module, *shape: int) -> Captured:
    captured: list[Captured] = []

    def stop(found: Captured) -> Any:
        captured.append(found)
        raise InterruptedError

    torch._dynamo.reset()
    with pytest.raises(Exception, match="InterruptedError"):
        torch.compile(module, backend=planning_backend(stop), dynamic=False)(torch.zeros(shape))
    return captured[0]


def least_memory(captured: Captured) -> Decisions:
    return solve_least_memory(Problem(captured.graph, estimate(captured.graph), UNLIMITED)).recompute


def inputs_of(captured: Captured, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shown = [node.meta["val"] for node in (*captured.placeholders, *captured.tangents)]
    return [torch.randn(tuple(v.shape), generator=generator, dtype=v.dtype) for v in shown]


def results(
    captured: Captured, program: Program, missing: frozenset[int] = NOTHING, added: frozenset[int] = NOTHING
) -> list[Any]:
    """Run forward and backward; return what both give, and the gradients that the backward adds to."""
    count, outputs = len(captured.placeholders), len(captured.forward_outputs)
    values = inputs_of(captured)
    totals = [torch.ones_like(values[position]) for position in sorted(added)]
    with torch.no_grad():
        forward = list(program.forward(values[:count]))
        tangents = [None if i in missing else value for i, value in enumerate(values[count:])]
        program = program.variant(Changes(missing, added)) if missing or added else program
        return [*forward[:outputs], *program.backward([*forward[outputs:], *tangents, *totals]), *totals]


def equal(some: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(some) == len(other) and all(
        torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, torch.Tensor) else a is b
        for a, b in zip(some, other, strict=True)
    )


@pytest.fixture(scope="module")
def lengths() -> dict[int, Captured]:
    module = attending()
    return {length: captured_at(module, 2, length, WIDTH) for length in (5, 8, 11, 19)}


def programs_of(samples: dict[int, Captured], decisions: Decisions) -> ProgramAtSizes:
    sizes = [(size,) for size in samples]
    CodeAtSizes([(captured, estimate(captured.graph)) for captured in samples.values()], sizes)
    return ProgramAtSizes(list(samples.values()), sizes, decisions)


@pytest.mark.parametrize("decide", [lambda captured: keep_all(captured.graph), least_memory])
@pytest.mark.parametrize(("missing", "adds"), [(NOTHING, False), (frozenset({1}), False), (NOTHING, True)])
def test_a_size_that_was_never_traced_runs(
    lengths: dict[int, Captured], decide: Any, missing: frozenset[int], adds: bool
):
    """With all gradients, without that of a result, and with gradients that exist, to which the backward adds."""
    traced = {size: lengths[size] for size in (5, 8, 11)}
    new = lengths[19]
    decisions = decide(lengths[11])
    program = programs_of(traced, decisions).at((19,))
    expected = build(new, lower(new.graph, decisions))
    added = frozenset(new.trained[:2]) if adds else NOTHING
    assert program.schedule == expected.schedule
    assert equal(results(new, program, missing, added), results(new, expected, missing, added))


def test_backwards_that_overwrite_otherwise_overwrite_nothing(
    lengths: dict[int, Captured], monkeypatch: pytest.MonkeyPatch
):
    """Samples differ in what dies as a gradient does not arrive, which nobody could know before."""
    programs = programs_of({size: lengths[size] for size in (5, 8, 11)}, keep_all(lengths[5].graph))
    change_absences(monkeypatch, overwriting_nothing(lambda captured: captured is lengths[8]))
    new, missing = lengths[19], frozenset({1})
    expected = build(new, lower(new.graph, keep_all(new.graph)))
    assert find_absent(new, missing).overwrites
    assert equal(results(new, programs.at((19,)), missing), results(new, expected, missing))


def test_programs_serve_traced_sizes_too(lengths: dict[int, Captured]):
    traced = {size: lengths[size] for size in (5, 8, 11)}
    programs = programs_of(traced, keep_all(lengths[5].graph))
    for size, captured in traced.items():
        expected = results(captured, build(captured, lower(captured.graph, keep_all(captured.graph))))
        assert equal(results(captured, programs.at((size,))), expected)


def test_two_sizes_are_too_few(lengths: dict[int, Captured]):
    traced = {size: lengths[size] for size in (5, 8)}
    with pytest.raises(SizesDifferError, match="3 sizes or more"):
        programs_of(traced, keep_all(lengths[5].graph))


def test_small_values_and_large_ones_have_one_program():
    """What finishes a value computes into its memory only where that is large."""
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    samples = {size: captured_at(module, size, 64) for size in (100, 611, 1201, 907)}
    new = samples.pop(907)
    decisions = keep_all(new.graph)
    program = programs_of(samples, decisions).at((907,))
    assert equal(results(new, program), results(new, build(new, lower(new.graph, decisions))))
