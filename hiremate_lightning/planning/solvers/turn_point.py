"""The turn-point model: which values are kept through the turn, and which nodes run once more.

It is a small mixed-integer program, rows (1) to (3) of `docs/formulation.md`, which ignores when values are made and
freed. So its solutions are only starts for replay and repair. Its relaxation, with the bytes of one instant of the
backward in (3), is a lower bound on the time of every schedule with this order of the backward. Related: the knapsack
of PyTorch's activation_memory_budget, which has (1) to (3) only; Checkmate, which models every instant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .base import Status
from .choices import Policy, spread
from .mip_backend import UNIT, LinearProgram, solve
from .model import StepModel
from .search import Search

LIMITS = (1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.5, 0.4, 0.3)  # of the bytes that the budget leaves at the turn
BOUND_INSTANTS = 10
BOUND_SHARE = 0.2  # of the time left, for the bound
SAVED_SHARES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0)  # limits of options: shares of a part's bytes
MS_PER_BYTE = 1e-15  # price of a kept byte: of two options of equal time, the one that keeps fewer bytes wins


def lower_bound(model: StepModel, limit_bytes: int, deadline: float) -> float | None:
    """Return a lower bound on the recompute time of every schedule within a limit, in ms; None if no schedule fits.

    At a backward position, each value that the backward reads later is in memory or will be recomputed, and the inputs
    of the node are in memory. The relaxation of this condition bounds the time for the given order of the backward. The
    best bound of several positions counts; fewer positions, within the deadline of work, prove a weaker bound.
    """
    best, chosen = 0.0, model.neediest(BOUND_INSTANTS)
    # The neediest position of the first part of the backward, of the whole backward, and of each part.
    for position in dict.fromkeys([*chosen[:1], *model.neediest(1), *chosen]):
        left = model.work.left_s(deadline)
        if left <= 0:
            break
        program, _ = _program(model, limit_bytes, instant=position)
        result = solve(program.relaxed(), model.problem.options, left, work=model.work)
        if result.status is Status.INFEASIBLE:
            return None
        if result.status is Status.OPTIMAL:
            best = max(best, result.objective)
    return best


def _program(model: StepModel, limit_bytes: int, instant: int | None = None) -> tuple[LinearProgram, dict[int, int]]:
    """Build (1) to (3) at the turn, or at an instant of the backward; return also the variable of each choice."""
    first = 0 if instant is None else instant
    used = [s for s in model.choices if s in model.uses and model.uses[s][-1] >= first]
    needed = spread(set(), used, model.sources)
    chosen = [s for s in model.choices if s in needed]
    if instant is None:
        return keeping_program(model, chosen, used, limit_bytes)
    return keeping_program(model, chosen, used, limit_bytes - model.gradients[instant], model.reads[instant])


def keeping_program(
    model: StepModel,
    chosen: Sequence[int],
    used: Sequence[int],
    limit_bytes: float,
    operands: Sequence[int] = (),
    ms_per_byte: float = 0.0,
) -> tuple[LinearProgram, dict[int, int]]:
    """Build (1) to (3) for the `chosen` choices, of which the backward reads `used`; return also their variables.

    Other values that recomputation reads count as in memory. `operands` are always kept. The objective has
    `ms_per_byte` for each byte that is kept.
    """
    program = LinearProgram()
    keep = {s: program.variable(ms_per_byte * model.sizes[s], lower=float(s in operands)) for s in chosen}
    nodes = dict.fromkeys(model.producer[s] for s in chosen if s in model.producer)
    run = {node: program.variable(model.cost_ms[node]) for node in nodes}

    def there(storage: int) -> list[tuple[int, float]]:
        terms = [(keep[storage], 1.0)]
        return [*terms, (run[model.producer[storage]], 1.0)] if storage in model.producer else terms

    for storage in used:
        program.row(f"1_{storage}", there(storage), lower=1.0)
    for node in nodes:
        for storage in model.needs[node]:
            if storage in keep:
                program.row(f"2_{node}_{storage}", [*there(storage), (run[node], -1.0)], lower=0.0)
    program.row("3", [(keep[s], model.sizes[s] / UNIT) for s in chosen if model.sizes[s]], upper=limit_bytes / UNIT)
    return program, keep


def options_of(
    model: StepModel, inside: Sequence[int], used: Sequence[int], kept: Sequence[int], limit_s: float
) -> list[frozenset[int]]:
    """Solve the program of a part of the step under several limits; return the distinct sets of values to keep.

    The part has the choices `inside`; the backward reads `used`, and `kept` are always kept.
    """
    options = dict[frozenset[int], None]()
    stays = sum(model.sizes[s] for s in kept)
    free = sum(model.sizes[s] for s in {*used, *kept}) - stays
    for share in SAVED_SHARES:
        program, keep = keeping_program(model, inside, used, stays + share * free, kept, MS_PER_BYTE)
        result = solve(program, model.problem.options, limit_s, work=model.work)
        if result.status is Status.INFEASIBLE:
            break
        if result.values:
            options[frozenset(s for s, v in keep.items() if result.values[v] >= 0.5)] = None
    return list(options)


def roundings(search: Search, deadline: float) -> Iterator[Policy]:
    """Round the relaxations for several limits of the bytes at the turn."""
    model = search.model
    at_turn = model.gradients[0] if model.gradients else 0
    for share in LIMITS:
        left = model.work.left_s(deadline)
        if left <= 0:
            return
        program, keep = _program(model, int(share * max(0, search.limit - at_turn)))
        result = solve(program.relaxed(), search.problem.options, left, work=model.work)
        if result.values:
            yield Policy(frozenset(s for s, v in keep.items() if result.values[v] >= 0.5))


def prove(search: Search) -> bool:
    """Store the bound of the relaxation in the search; return whether a schedule may exist."""
    bound_ms = lower_bound(search.model, search.limit, search.within(BOUND_SHARE))
    search.is_infeasible = bound_ms is None
    search.raise_bound(bound_ms or 0.0)
    return bound_ms is not None
