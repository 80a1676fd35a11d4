"""The phased model: a mixed-integer program of the whole step that checks memory at a few instants of the backward.

The instants i_1 < ... < i_q cut the backward into phases 0 to q; phase t ends with the node at instant i_(t+1). All
variables are 0 or 1: S[t, d], value d is in memory as phase t starts, and R[t, k], node k is recomputed in phase t.
`docs/formulation.md` has the program, with the row numbers used here, and why it is a relaxation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .choices import Policy, Rows, spread
from .mip_backend import UNIT, LinearProgram
from .model import Replay, StepModel

EARLY_PARTS = 10  # equal parts of the backward; the first check has an instant in the first part
PARTS, MOST_ADDED = 8, 2  # new checks are at least 1/8 of the backward apart; at most 2 per round

LinearTerms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Checks:
    """Where memory is checked: at backward positions (instants, ascending), forward positions, and rows.

    A row is a backward position and a node recomputed before it; the position and the one before it are instants.
    """

    instants: tuple[int, ...]
    forward: tuple[int, ...] = ()
    rows: frozenset[tuple[int, int]] = frozenset()


class PhasedProgram:
    """The program for some checks; `held` has the variables of S[t, d], `run` those of R[t, k]."""

    def __init__(self, model: StepModel, limit_bytes: int, checks: Checks) -> None:
        self.model, self.limit, self.checks = model, limit_bytes, checks
        self.program = LinearProgram()
        self.held: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        self._through: dict[tuple[int, int], int] = {}  # variable of H[d], by the variables S[t+1, d] and R[t, p(d)]
        self._starts = (-1, *checks.instants)
        self._collect_needs()
        for phase in range(self.phases):
            operands = model.reads[checks.instants[phase - 1]] if phase > 0 else ()
            for storage in dict.fromkeys([*self._needed[phase], *operands]):
                self.held[phase, storage] = self.program.variable(0.0, lower=float(storage in operands))
            for node in dict.fromkeys(model.producer[s] for s in self._needed[phase] if s in model.producer):
                self.run[phase, node] = self.program.variable(model.cost_ms[node])
        for phase in range(self.phases):
            self._add_presence(phase)
        self._add_memory()
        self._add_row_memory()

    @property
    def phases(self) -> int:
        """Number of phases."""
        return len(self.checks.instants) + 1

    def _collect_needs(self) -> None:
        """List the choices that each phase reads, and those that it or later phases read, recomputation included."""
        model, ends = self.model, [*self.checks.instants, len(self.model.reads)]
        self._read: list[list[int]] = [[] for _ in ends]
        phase_of = [0] * (len(model.reads) + 1)
        for phase, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            phase_of[start + 1 : end + 1] = [phase] * (end - start)
        for storage in model.choices:
            for phase in sorted({phase_of[use] for use in model.uses.get(storage, ())}):
                self._read[phase].append(storage)
        self._needed: list[list[int]] = [[] for _ in ends]
        seen = set[int]()
        for phase in reversed(range(len(ends))):
            spread(seen, self._read[phase], model.sources)
            self._needed[phase] = [s for s in model.choices if s in seen]

    def _there(self, phase: int, storage: int) -> LinearTerms:
        """Return S[t, d] + R[t, p(d)]."""
        terms = [(self.held[phase, storage], 1.0)] if (phase, storage) in self.held else []
        node = self.model.producer.get(storage, -1)
        return [*terms, (self.run[phase, node], 1.0)] if (phase, node) in self.run else terms

    def _add_presence(self, phase: int) -> None:
        """(1), (2) and (3): what a phase reads, what a recomputed node reads, and what stays held is in memory.

        (1) S[t, d] + R[t, p(d)] >= 1;  (2) ... >= R[t, k] for d in in(k);  (3) ... >= S[t+1, d].
        """
        for storage in self._read[phase]:
            self.program.row(f"1_{phase}_{storage}", self._there(phase, storage), lower=1.0)
        makers = dict.fromkeys(self.model.producer.get(s, -1) for s in self._needed[phase])
        for node in makers:
            inputs = self.model.needs[node] if (phase, node) in self.run else ()
            for storage in inputs:
                terms = [*self._there(phase, storage), (self.run[phase, node], -1.0)]
                self.program.row(f"2_{phase}_{node}_{storage}", terms, lower=0.0)
        for storage in self.model.choices:
            if (phase + 1, storage) in self.held:
                terms = [*self._there(phase, storage), (self.held[phase + 1, storage], -1.0)]
                self.program.row(f"3_{phase}_{storage}", terms, lower=0.0)

    def _add_memory(self) -> None:
        """(4) sum_d m_d S[t, d] + G[i_t] <= B;  (5) sum_d m_d S[0, d] + F[f] <= B, d dead before f."""
        model, sizes = self.model, self.model.sizes
        for phase, instant in enumerate(self.checks.instants, start=1):
            held = [s for s in model.choices if (phase, s) in self.held and sizes[s]]
            terms = [(self.held[phase, s], sizes[s] / UNIT) for s in held]
            self.program.row(f"4_{phase}", terms, upper=(self.limit - model.gradients[instant]) / UNIT)
        for position in self.checks.forward:
            made = [s for s in model.choices if model.made_at[s] <= position]
            alive = sum(sizes[s] for s in made if model.last_forward_use(s) >= position)
            dead = [s for s in made if model.last_forward_use(s) < position]
            terms = [(self.held[0, s], sizes[s] / UNIT) for s in dead if (0, s) in self.held]
            self.program.row(f"5_{position}", terms, upper=(self.limit - model.forward_rest[position] - alive) / UNIT)

    def _add_row_memory(self) -> None:
        """(9): memory in phase t, whose only position is i, while node k is recomputed.

        In memory are the inputs and outputs of k, and the values held through the phase (H[d]), for any order of
        recomputation. L[i] is the bytes that no decision changes just before i.

            H[d] >= S[t+1, d] - R[t, p(d)]
            sum_(d in in(k) or made by k) m_d R[t, k] + sum_(other d) m_d H[d] + w_k R[t, k] + L[i] <= B
        """
        model = self.model
        for position, node in sorted(self.checks.rows):
            phase = bisect_left(self.checks.instants, position)
            if (phase, node) not in self.run:
                continue
            operands, run = {*model.needs[node], *model.makes[node]}, self.run[phase, node]
            terms = defaultdict[int, float](float, {run: model.transient[node] / UNIT})
            for storage in model.choices:
                variable = run if storage in operands else self._held_through(phase, storage)
                if variable is not None:
                    terms[variable] += model.sizes[storage] / UNIT
            limit = (self.limit - model.live_gradients[position]) / UNIT
            self.program.row(f"9_{position}_{node}", list(terms.items()), upper=limit)

    def _held_through(self, phase: int, storage: int) -> int | None:
        """Return H[d]: the variable S[t+1, d] if the phase can't recompute d; None if d is not needed after it."""
        held, run = self.held.get((phase + 1, storage)), self.run.get((phase, self.model.producer.get(storage, -1)))
        if held is None or run is None:
            return held
        if (held, run) not in self._through:
            variable = self._through[held, run] = self.program.variable(0.0, integer=False)
            self.program.row(f"h_{variable}", [(variable, 1.0), (held, -1.0), (run, 1.0)], lower=0.0)
        return self._through[held, run]

    # ---------------------------------------------------------------- from and to policies

    def policy(self, values: Sequence[float], threshold: float = 0.5) -> Policy:
        """Return the policy of a solution: values kept, dropped after an instant, or recomputed early."""
        model, last = self.model, self.phases - 1
        is_held = {key: values[variable] >= threshold for key, variable in self.held.items()}
        kept = {s for s in model.choices if s in model.fixed or is_held.get((0, s))}
        drops, early = set[tuple[int, int]](), set[tuple[int, int]]()
        for phase, instant in enumerate(self.checks.instants, start=1):
            for storage in self._needed[phase]:
                if not is_held[phase, storage]:
                    drops.add((storage, instant))
                elif storage in model.producer and not is_held.get((phase - 1, storage)) and phase <= last:
                    early.add((storage, instant))
        return Policy(frozenset(kept), frozenset(drops), frozenset(early))

    def start(self, rows: Rows) -> list[float]:
        """Return the values of all variables for a schedule, as a start for the solver."""
        turn, at = self.model.live_at(rows, self.checks.instants)
        live = [turn, *(at[instant] for instant in self.checks.instants)]
        values = [0.0] * len(self.program.costs)
        for (phase, storage), variable in self.held.items():
            values[variable] = float(storage in live[phase])
        ends = [*self.checks.instants, len(self.model.reads)]
        for phase, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            for node in {k for row in rows[start + 1 : end + 1] for k in row}:
                if (phase, node) in self.run:
                    values[self.run[phase, node]] = 1.0
        for (held, run), variable in self._through.items():
            values[variable] = max(0.0, values[held] - values[run])
        return values


def first_checks(model: StepModel) -> Checks:
    """Choose the first instants: the largest need of the early backward, and the largest need of all."""
    return Checks(tuple(sorted({*model.neediest(EARLY_PARTS)[:1], *model.neediest(1)})))


def add_checks(checks: Checks, model: StepModel, replay: Replay, limit_bytes: int) -> Checks:
    """Add checks where a replay exceeds the limit: at the worst position, and at another one far from it.

    The program stays a relaxation. The checks are returned unchanged if no further check would keep it a relaxation.
    """
    forward = replay.timeline.forward_bytes
    if forward.max(initial=-1) > limit_bytes:
        checks = replace(checks, forward=tuple(sorted({*checks.forward, int(forward.argmax())})))
    peaks = replay.peaks.tolist()
    over = sorted((p for p, peak in enumerate(peaks) if peak > limit_bytes), key=lambda p: (-peaks[p], p))
    apart, added = max(1, len(model.reads) // PARTS), list[int]()
    for position in over:
        if len(added) < MOST_ADDED and all(abs(position - other) >= apart for other in added):
            more = _check_at(position, checks, model, replay, limit_bytes)
            added.extend([position] if more != checks else [])
            checks = more
    return checks


def _check_at(position: int, checks: Checks, model: StepModel, replay: Replay, limit_bytes: int) -> Checks:
    """Add one check at a position; a row above the limit needs both instants around it before its nodes."""
    if replay.timeline.row_peaks[position] <= limit_bytes:
        return replace(checks, instants=tuple(sorted({*checks.instants, position})))
    for instant in (min(position, len(model.reads) - 1), max(0, position - 1)):
        if instant not in checks.instants:
            return replace(checks, instants=tuple(sorted({*checks.instants, instant})))
    row = zip(replay.rows[position], replay.timeline.row_bytes(model, position), strict=True)
    too_large = ((position, node) for node, size_bytes in row if size_bytes > limit_bytes)
    return replace(checks, rows=checks.rows.union(too_large))
