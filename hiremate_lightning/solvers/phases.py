"""The phased model: a whole step as a mixed-integer program whose memory is checked at a few instants of the backward.

The instants i_1 < ... < i_q cut the backward into phases 0 to q; phase t ends with the node at instant i_(t+1).
Variables, all 0 or 1:

    S[t, d]     value d is in memory when phase t starts: at the turn for t = 0, else while the node at instant i_t runs
    R[t, k]     node k is recomputed during phase t

    minimise    sum_t,k c_k R[t, k]                                                      time recomputed, in ms
    (1)         S[t, d] + R[t, p(d)] >= 1          d read in phase t                     what is read is there
    (2)         S[t, d] + R[t, p(d)] >= R[t, k]    d in in(k)                            a recomputed node has its
    inputs
    (3)         S[t, d] + R[t, p(d)] >= S[t+1, d]                                        what stays was there or was
    made
    (4)         sum_d m_d S[t, d] + G[i_t] <= B    t >= 1                                bytes while the node at i_t
    runs
    (5)         sum_d m_d S[0, d] + F[f] <= B      d unused after f, for some f          bytes at position f of the
    forward
    (6)         Z[t, k] <= 1; sum_(u >= t) R[u, k] >= Z[t, k]; S[t, d] + Z[t, p(d)] >= 1 for d read from phase t on;
                S[t, d] + sum_(u >= t) R[u, p(d)] >= Z[t, k] for d in in(k)              a fraction of R can't serve
                twice

m_d are bytes of value d made by node p(d), c_k milliseconds of node k, G and F bytes that no decision changes. A value
that the node at an instant reads has S = 1 there; one that can't be recomputed has no R. With every position an
instant this is Checkmate in its reduced form (Jain et al., MLSys 2020, arXiv 1910.02653) less the rows between two
instants. With few instants it is a relaxation, so its optimum bounds the time of every schedule with this order of the
backward from below; and its solution is a schedule. So instants are added only where the replay of that solution
passes the budget, until it no longer does: a handful settles graphs of thousands of nodes. (6) follows from the others
for whole numbers and tightens the relaxation.

Values so small that all of them together are a two-thousandth of the budget are kept, and counted as nothing in the
bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .mip_backend import Program
from .model import Model, Policy, Replay, Rows

SMALL_SHARE = 0.0005  # of the budget: values that together stay below it are kept without being modelled
UNIT = 2**20  # bytes are scaled to MiB: coefficients near 1 keep the solver exact

Terms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Checks:
    """Where memory is checked.

    Attributes:
        instants: Backward positions, ascending.
        forward: Forward positions.
        reserves: Pairs of an instant and bytes to leave free there, for what happens between it and the one before.
            With any, the program is no relaxation any more, and its bound says nothing.
    """

    instants: tuple[int, ...]
    forward: tuple[int, ...] = ()
    reserves: tuple[tuple[int, int], ...] = ()


class PhasedProgram:
    """The program for given checks.

    Attributes:
        program: Its variables and rows.
        held: Variable of S[t, d], by phase and choice.
        run: Variable of R[t, k], by phase and node.
    """

    def __init__(self, model: Model, limit_bytes: int, checks: Checks, linked: bool = False) -> None:
        self.model, self.limit, self.checks = model, limit_bytes, checks
        self.program = Program()
        self.held: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        self._z: dict[tuple[int, int], int] = {}
        self.small = _small(model, limit_bytes)
        self._starts = (-1, *checks.instants)
        self._collect_needs()
        for phase in range(self.phases):
            self._add_variables(phase)
        for phase in range(self.phases):
            self._add_uses(phase)
            self._add_inputs(phase)
            self._add_stays(phase)
            self._add_memory(phase)
        self._add_forward_memory()
        if linked:
            for phase in range(self.phases):
                self._add_links(phase)

    @property
    def phases(self) -> int:
        """Number of phases."""
        return len(self.checks.instants) + 1

    def _collect_needs(self) -> None:
        """Find, for each phase, what it reads, what is read from it on, and what recomputing that may read."""
        model, ends = self.model, [*self.checks.instants, len(self.model.reads)]
        self._read: list[list[int]] = [[] for _ in ends]
        phase_of = [0] * (len(model.reads) + 1)
        for phase, (start, end) in enumerate(zip(self._starts, ends, strict=True)):
            phase_of[start + 1 : end + 1] = [phase] * (end - start)
        for storage in model.choices:
            if storage not in self.small:
                for phase in sorted({phase_of[use] for use in model.uses.get(storage, ())}):
                    self._read[phase].append(storage)
        self._needed: list[list[int]] = [[] for _ in ends]
        seen: set[int] = set()
        for phase in reversed(range(len(ends))):
            self._close(seen, [s for s in self._read[phase] if s not in seen])
            self._needed[phase] = [s for s in model.choices if s in seen]

    def _close(self, seen: set[int], stack: list[int]) -> None:
        seen.update(stack)
        while stack:
            node = self.model.producer.get(stack.pop())
            for storage in self.model.needs[node] if node is not None else ():
                if storage not in seen and storage not in self.small:
                    seen.add(storage)
                    stack.append(storage)

    def _operands(self, phase: int) -> list[int]:
        if phase == 0:
            return []
        return [s for s in self.model.reads[self.checks.instants[phase - 1]] if s not in self.small]

    def _add_variables(self, phase: int) -> None:
        model, operands = self.model, self._operands(phase)
        forced = set(operands)
        for storage in dict.fromkeys([*self._needed[phase], *operands]):
            self.held[phase, storage] = self.program.variable(0.0, lower=float(storage in forced))
        for node in dict.fromkeys(model.producer[s] for s in self._needed[phase] if s in model.producer):
            self.run[phase, node] = self.program.variable(model.cost_ms[node])

    def _there(self, phase: int, storage: int) -> Terms:
        """Give S[t, d] + R[t, p(d)]."""
        terms = [(self.held[phase, storage], 1.0)] if (phase, storage) in self.held else []
        node = self.model.producer.get(storage, -1)
        return [*terms, (self.run[phase, node], 1.0)] if (phase, node) in self.run else terms

    def _inputs(self, node: int) -> list[int]:
        return [s for s in self.model.needs[node] if s not in self.small]

    def _nodes(self, phase: int) -> list[int]:
        nodes = dict.fromkeys(self.model.producer.get(s, -1) for s in self._needed[phase])
        return [node for node in nodes if (phase, node) in self.run]

    def _add_uses(self, phase: int) -> None:
        """(1) S[t, d] + R[t, p(d)] >= 1, d read in phase t."""
        for storage in self._read[phase]:
            self.program.row(f"1_{phase}_{storage}", self._there(phase, storage), lower=1.0)

    def _add_inputs(self, phase: int) -> None:
        """(2) S[t, d] + R[t, p(d)] >= R[t, k], d in in(k)."""
        for node in self._nodes(phase):
            for storage in self._inputs(node):
                terms = [*self._there(phase, storage), (self.run[phase, node], -1.0)]
                self.program.row(f"2_{phase}_{node}_{storage}", terms, lower=0.0)

    def _add_stays(self, phase: int) -> None:
        """(3) S[t, d] + R[t, p(d)] >= S[t+1, d]."""
        for storage in self.model.choices:
            if (phase + 1, storage) in self.held:
                terms = [*self._there(phase, storage), (self.held[phase + 1, storage], -1.0)]
                self.program.row(f"3_{phase}_{storage}", terms, lower=0.0)

    def _add_memory(self, phase: int) -> None:
        """(4) sum_d m_d S[t, d] + G[i_t] <= B."""
        if phase == 0:
            return
        sizes = self.model.sizes
        terms = [
            (self.held[phase, s], sizes[s] / UNIT) for s in self.model.choices if (phase, s) in self.held and sizes[s]
        ]
        instant = self.checks.instants[phase - 1]
        rest = self.model.gradients[instant] + dict(self.checks.reserves).get(instant, 0)
        self.program.row(f"4_{phase}", terms, upper=(self.limit - rest) / UNIT)

    def _add_forward_memory(self) -> None:
        """(5) sum_d m_d S[0, d] + F[f] <= B, d made before f and unused from f on."""
        model = self.model
        for position in self.checks.forward:
            made = [s for s in model.choices if model.made_at[s] <= position]
            alive = sum(model.sizes[s] for s in made if model.last_forward_use(s) >= position)
            dead = [s for s in made if model.last_forward_use(s) < position]
            terms = [(self.held[0, s], model.sizes[s] / UNIT) for s in dead if (0, s) in self.held]
            rest = model.forward_rest[position] + alive
            self.program.row(f"5_{position}", terms, upper=(self.limit - rest) / UNIT)

    def _add_links(self, phase: int) -> None:
        """(6) Tie what later phases recompute together: Z[t, k] is whether k runs from phase t on."""
        nodes = self._nodes(phase)
        runs = {k: [(self.run[t, k], 1.0) for t in range(phase, self.phases) if (t, k) in self.run] for k in nodes}
        again = {k: self.program.variable(0.0, integer=False) for k in nodes}
        self._z.update(((phase, k), variable) for k, variable in again.items())
        for node in nodes:
            self.program.row(f"6a_{phase}_{node}", [*runs[node], (again[node], -1.0)], lower=0.0)
            for storage in self._inputs(node):
                terms = [(self.held[phase, storage], 1.0), *runs.get(self.model.producer.get(storage, -1), [])]
                self.program.row(f"6b_{phase}_{node}_{storage}", [*terms, (again[node], -1.0)], lower=0.0)
        for storage in dict.fromkeys(s for later in self._read[phase:] for s in later):
            node = self.model.producer.get(storage, -1)
            if node in again:
                terms = [(self.held[phase, storage], 1.0), (again[node], 1.0)]
                self.program.row(f"6c_{phase}_{storage}", terms, lower=1.0)

    # ---------------------------------------------------------------- from and to policies

    def policy(self, values: Sequence[float], threshold: float = 0.5) -> Policy:
        """Read a solution: what is kept, what is dropped after an instant, what is made for a later phase."""
        model, last = self.model, self.phases - 1
        is_held = {key: values[variable] >= threshold for key, variable in self.held.items()}
        kept = {s for s in model.choices if s in model.fixed or s in self.small or is_held.get((0, s))}
        drops, early = set[tuple[int, int]](), set[tuple[int, int]]()
        for phase, instant in enumerate(self.checks.instants, start=1):
            for storage in self._needed[phase]:
                if not is_held[phase, storage]:
                    drops.add((storage, instant))
                elif storage in model.producer and not is_held.get((phase - 1, storage)) and phase <= last:
                    early.add((storage, instant))
        return Policy(frozenset(kept), frozenset(drops), frozenset(early))

    def start(self, rows: Rows) -> list[float]:
        """Give the values of a schedule's variables, to start the solver from."""
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
        for (phase, node), variable in self._z.items():
            later = (values[self.run[t, node]] for t in range(phase, self.phases) if (t, node) in self.run)
            values[variable] = float(any(later))
        return values


def _small(model: Model, limit_bytes: int) -> frozenset[int]:
    """Give the values that are too small to matter, the smallest first."""
    total, found = 0, set()
    for storage in sorted(model.choices, key=lambda s: (model.sizes[s], s)):
        total += model.sizes[storage]
        if total > SMALL_SHARE * limit_bytes:
            break
        found.add(storage)
    return frozenset(found)


def first_checks(model: Model) -> Checks:
    """Choose the instants to begin with: the largest need of the early backward, and the largest of all."""
    need = [model.gradients[p] + sum(model.sizes[s] for s in reads) for p, reads in enumerate(model.reads)]
    count = len(need)
    if not count:
        return Checks(())
    early = max(range(max(1, count // 10)), key=lambda p: need[p])
    return Checks(tuple(sorted({early, max(range(count), key=lambda p: need[p])})))


def add_checks(checks: Checks, replay: Replay, limit_bytes: int, apart: int, most: int = 2) -> Checks:
    """Add checks where a replay passes the limit: the worst position, and others that are far from it."""
    forward = set(checks.forward)
    if replay.forward_peak > limit_bytes:
        forward.add(replay.forward_position)
    instants = _worst(checks.instants, replay, limit_bytes, apart, most)
    return Checks(instants, tuple(sorted(forward)), checks.reserves)


def add_reserves(checks: Checks, replay: Replay, limit_bytes: int) -> Checks:
    """Leave room at the instants around each position where values recomputed one after the other pass the limit."""
    reserves = dict(checks.reserves)
    for position, peak in enumerate(replay.row_peaks):
        if peak > limit_bytes:
            for instant in (position - 1, position):
                if instant in checks.instants:
                    reserves[instant] = reserves.get(instant, 0) + peak - limit_bytes
    return Checks(checks.instants, checks.forward, tuple(sorted(reserves.items())))


def _worst(instants: Iterable[int], replay: Replay, limit_bytes: int, apart: int, most: int) -> tuple[int, ...]:
    chosen, added = set(instants), list[int]()
    last = len(replay.node_peaks) - 2
    peaks = [max(a, b) for a, b in zip(replay.node_peaks, replay.row_peaks, strict=True)]
    for position in sorted((p for p, peak in enumerate(peaks) if peak > limit_bytes), key=lambda p: (-peaks[p], p)):
        if len(added) >= most:
            break
        if any(abs(position - other) < apart for other in added):
            continue
        near = (min(position, last), max(0, position - 1)) if replay.row_peaks[position] > limit_bytes else (position,)
        fresh = next((p for p in near if p not in chosen), None)
        if fresh is not None:
            chosen.add(fresh)
            added.append(position)
    return tuple(sorted(chosen))
