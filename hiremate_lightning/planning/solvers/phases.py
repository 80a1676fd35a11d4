"""The phased model: a whole step as a mixed-integer program whose memory is checked at a few instants of the backward.

`docs/formulation.md` has the program: its variables, and the rows by the numbers in their names. The instants i_1 < ...
< i_q cut the backward into phases 0 to q; phase t ends with the node at instant i_(t+1). Variables, all 0 or 1:

    S[t, d]     value d is in memory when phase t starts: at the turn for t = 0, else while the node at instant i_t runs
    R[t, k]     node k is recomputed during phase t, which takes c_k milliseconds

m_d are bytes of value d made by node p(d), w_k bytes that only k needs while it runs, G and F bytes that no decision
changes. With every position an instant this is Checkmate in its reduced form (Jain et al., MLSys 2020, arXiv
1910.02653) less the rows between two instants. With few instants it is a relaxation, so its optimum bounds the time of
every schedule with this order of the backward from below; and its solution is a schedule. So instants are added only
where the replay of that solution passes the budget, until it no longer does: a handful settles graphs of thousands of
nodes. Values so small that all of them together are a two-thousandth of the budget are kept, and counted as nothing in
the bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter

from .choices import Policy, Rows
from .mip_backend import UNIT, LinearProgram
from .model import Replay, StepModel

SMALL_SHARE = 0.0005  # of the budget: values that together stay below it are kept without being modelled
EARLY_PARTS = 10  # of the backward: an instant to begin with is in the first of them
PARTS, MOST_ADDED = 8, 2  # positions checked from one round on: so many, and so far apart

LinearTerms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Checks:
    """Where memory is checked.

    Attributes:
        instants: Backward positions, ascending.
        forward: Forward positions.
        rows: Pairs of a position and a node that is recomputed before it; it and the one before are instants.
        in_order: Such pairs for which the order of the forward is taken. With any, the program is no relaxation any
            more, and its bound says nothing.
    """

    instants: tuple[int, ...]
    forward: tuple[int, ...] = ()
    rows: frozenset[tuple[int, int]] = frozenset()
    in_order: frozenset[tuple[int, int]] = frozenset()


class PhasedProgram:
    """The program for given checks.

    Attributes:
        program: Its variables and rows.
        held: Variable of S[t, d], by phase and choice.
        run: Variable of R[t, k], by phase and node.
    """

    def __init__(
        self,
        model: StepModel,
        limit_bytes: int,
        checks: Checks,
        small_share: float = SMALL_SHARE,
    ) -> None:
        self.model, self.limit, self.checks = model, limit_bytes, checks
        self.program = LinearProgram()
        self.held: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        by_size = sorted(model.choices, key=lambda s: (model.sizes[s], s))
        totals = zip(by_size, accumulate(model.sizes[s] for s in by_size), strict=True)
        self.small = frozenset(s for s, total in totals if total <= small_share * limit_bytes)
        self._starts = (-1, *checks.instants)
        self._collect_needs()
        for phase in range(self.phases):
            self._add_variables(phase)
        for phase in range(self.phases):
            self._add_presence(phase)
            if phase > 0:
                self._add_memory(phase)
        self._add_forward_memory()
        self._add_row_memory()

    @property
    def phases(self) -> int:
        """Number of phases."""
        return len(self.checks.instants) + 1

    def _collect_needs(self) -> None:
        """Find the choices that each phase reads, and those that it, later phases or recomputation may read."""
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
        seen = set(self.small)
        for phase in reversed(range(len(ends))):
            model.add_sources(seen, self._read[phase])
            self._needed[phase] = [s for s in model.choices if s in seen and s not in self.small]

    def _add_variables(self, phase: int) -> None:
        model = self.model
        read_at_instant = model.reads[self.checks.instants[phase - 1]] if phase > 0 else ()
        operands = [s for s in read_at_instant if s not in self.small]
        forced = set(operands)
        for storage in dict.fromkeys([*self._needed[phase], *operands]):
            self.held[phase, storage] = self.program.variable(0.0, lower=float(storage in forced))
        for node in dict.fromkeys(model.producer[s] for s in self._needed[phase] if s in model.producer):
            self.run[phase, node] = self.program.variable(model.cost_ms[node])

    def _there(self, phase: int, storage: int) -> LinearTerms:
        """Return S[t, d] + R[t, p(d)]."""
        terms = [(self.held[phase, storage], 1.0)] if (phase, storage) in self.held else []
        node = self.model.producer.get(storage, -1)
        return [*terms, (self.run[phase, node], 1.0)] if (phase, node) in self.run else terms

    def _add_presence(self, phase: int) -> None:
        """(1), (2) and (3): what is read in a phase, what a recomputed node reads, and what stays is there.

        (1) S[t, d] + R[t, p(d)] >= 1;  (2) ... >= R[t, k] for d in in(k);  (3) ... >= S[t+1, d].
        """
        for storage in self._read[phase]:
            self.program.row(f"1_{phase}_{storage}", self._there(phase, storage), lower=1.0)
        makers = dict.fromkeys(self.model.producer.get(s, -1) for s in self._needed[phase])
        for node in makers:
            inputs = self.model.needs[node] if (phase, node) in self.run else ()
            for storage in (s for s in inputs if s not in self.small):
                terms = [*self._there(phase, storage), (self.run[phase, node], -1.0)]
                self.program.row(f"2_{phase}_{node}_{storage}", terms, lower=0.0)
        for storage in self.model.choices:
            if (phase + 1, storage) in self.held:
                terms = [*self._there(phase, storage), (self.held[phase + 1, storage], -1.0)]
                self.program.row(f"3_{phase}_{storage}", terms, lower=0.0)

    def _add_memory(self, phase: int) -> None:
        """(4) sum_d m_d S[t, d] + G[i_t] <= B."""
        sizes = self.model.sizes
        terms = [
            (self.held[phase, s], sizes[s] / UNIT) for s in self.model.choices if (phase, s) in self.held and sizes[s]
        ]
        instant = self.checks.instants[phase - 1]
        self.program.row(f"4_{phase}", terms, upper=(self.limit - self.model.gradients[instant]) / UNIT)

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

    def _add_row_memory(self) -> None:
        """(9) and (10)."""
        self._maxima: dict[int, tuple[frozenset[int], int | None]] = {}
        for position, pairs in groupby(sorted(self.checks.rows | self.checks.in_order), key=itemgetter(0)):
            phase = bisect_left(self.checks.instants, position)
            run = {node: variable for (t, node), variable in self.run.items() if t == phase}
            held = {storage: variable for (t, storage), variable in self.held.items() if t == phase + 1}
            memory = RowMemory(self.model, self.program, position, run, held)
            values = [s for s in self.model.choices if s not in self.small]
            for pair in pairs:
                if pair[1] in run:
                    memory.add(pair[1], values, self.limit, pair in self.checks.in_order)
            self._maxima.update(memory.maxima)

    # ---------------------------------------------------------------- from and to policies

    def policy(self, values: Sequence[float], threshold: float = 0.5) -> Policy:
        """Read a solution: the values kept, those dropped after an instant, those made for a later phase."""
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
        """Return the values of a schedule's variables, to start the solver from."""
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
        for variable, (above, less) in self._maxima.items():
            values[variable] = max(0.0, max(values[v] for v in above) - (0.0 if less is None else values[less]))
        return values


class RowMemory:
    """The memory of a phase that holds one backward position, i, while values are recomputed in it: rows (9) and (10).

    While k is recomputed, memory holds what k reads and makes, and what was there before and is needed after. L[i] are
    bytes that no decision changes just before i.

        (9)     H[d] >= S[t+1, d] - R[t, p(d)]                d is held through the phase
                sum_(d in in(k) or made by k) m_d R[t, k] + sum_(other d) m_d H[d] + w_k R[t, k] + L[i] <= B

        (10)    M[k, d] >= S[t+1, d],  M[k, d] >= R[t, j]     d read by j, p(d) runs before k, and j not before k
                M[k, d] >= R[t, j] - R[t, p(d)]               where p(d) runs after k, and for S[t+1, d] likewise
                M[k, d] >= R[t, k]                            d made by k
                sum_d m_d M[k, d] + w_k R[t, k] + L[i] <= B

    (9) holds for any order of what is recomputed, so a program with it is a relaxation still. (10) takes the order of
    the forward: its solutions fit, but schedules with another order may be faster.

    Attributes:
        maxima: For each added variable the variables that it is at least, and the one that is subtracted: from these
            follow values to start from.
    """

    def __init__(
        self, model: StepModel, program: LinearProgram, position: int, run: Mapping[int, int], held: Mapping[int, int]
    ) -> None:
        """Number the nodes that may be recomputed.

        Args:
            model: The step.
            program: Takes variables and rows.
            position: The backward position.
            run: Variable of R[t, k], by node.
            held: Variable of S[t+1, d], by storage.
        """
        self._model, self._program, self._position = model, program, position
        self._run, self._held = run, held
        self.maxima: dict[int, tuple[frozenset[int], int | None]] = {}
        self._known: dict[tuple[frozenset[int], int | None], int] = {}
        self._order = sorted(run, key=model.order.__getitem__)
        self._number = {node: number for number, node in enumerate(self._order)}
        self._readers: dict[int, list[int]] = {}  # numbers of the nodes that read a value
        for number, node in enumerate(self._order):
            for storage in model.needs[node]:
                self._readers.setdefault(storage, []).append(number)

    def add(self, node: int, values: Iterable[int], limit_bytes: int, in_order: bool) -> None:
        """Add the rows for a node: (10) where the order is that of the forward, else (9).

        Args:
            node: The node.
            values: The values that count.
            limit_bytes: Most bytes at any moment.
            in_order: Whether the order is that of the forward.
        """
        model, terms = self._model, {self._run[node]: self._model.transient[node] / UNIT}
        for storage in values:
            if in_order:
                variable = self._in_order(storage, node)
            elif storage in model.needs[node] or storage in model.makes[node]:
                variable = self._run[node]  # R[t, k]
            else:
                variable = self._maximum(self._after(storage), self._maker(storage))  # H[d]
            if variable is not None:
                terms[variable] = terms.get(variable, 0.0) + model.sizes[storage] / UNIT
        limit = (limit_bytes - model.live_gradients[self._position]) / UNIT
        self._program.row(f"{10 if in_order else 9}_{self._position}_{node}", list(terms.items()), upper=limit)

    def _in_order(self, storage: int, node: int) -> int | None:
        """Return M[k, d]."""
        here = self._number[node]
        made = self._number.get(self._model.producer.get(storage, -1), -1)
        readers = [self._order[n] for n in self._readers.get(storage, ()) if n >= here]
        needed = [*self._after(storage), *(self._run[k] for k in readers)]
        if made == here:
            needed.append(self._run[node])
        return self._maximum(needed, self._maker(storage) if made > here else None)

    def _after(self, storage: int) -> list[int]:
        return [self._held[storage]] if storage in self._held else []

    def _maker(self, storage: int) -> int | None:
        return self._run.get(self._model.producer.get(storage, -1))

    def _maximum(self, above: list[int], less: int | None) -> int | None:
        """Return a variable that is at least each of some others, less one; None where there are no others."""
        key = (frozenset(above), less)
        if not above:
            return None
        if less is None and len(key[0]) == 1:
            return above[0]
        if key not in self._known:
            variable = self._known[key] = self._program.variable(0.0, integer=False)
            self.maxima[variable] = key
            for other in sorted(key[0]):
                terms = [(variable, 1.0), (other, -1.0), *([] if less is None else [(less, 1.0)])]
                self._program.row(f"m_{variable}_{other}", terms, lower=0.0)
        return self._known[key]


def first_checks(model: StepModel) -> Checks:
    """Choose the instants to begin with: the largest need of the early backward, and the largest of all."""
    return Checks(tuple(sorted({*model.neediest(EARLY_PARTS)[:1], *model.neediest(1)})))


def add_checks(checks: Checks, model: StepModel, replay: Replay, limit_bytes: int) -> Checks:
    """Add checks where a replay passes the limit: at the worst position, and at another one far from it.

    Returns:
        More checks: such that the program stays a relaxation, as long as there are any; the same where all is checked.
    """
    if replay.forward_peak > limit_bytes:
        checks = replace(checks, forward=tuple(sorted({*checks.forward, replay.forward_position})))
    peaks = replay.peaks.tolist()
    over = sorted((p for p, peak in enumerate(peaks) if peak > limit_bytes), key=lambda p: (-peaks[p], p))
    apart, added = max(1, len(model.reads) // PARTS), list[int]()
    for position in over:
        if len(added) < MOST_ADDED and all(abs(position - other) >= apart for other in added):
            more = _check_at(position, checks, model, replay, limit_bytes)
            added.extend([position] if more != checks else [])
            checks = more
    if not added and over:
        rows = model.in_order(replay.rows, over[0])
        checks = replace(checks, in_order=checks.in_order | _over(model, rows, over[0], limit_bytes))
    return checks


def _check_at(position: int, checks: Checks, model: StepModel, replay: Replay, limit_bytes: int) -> Checks:
    """Check the node at a position; where recomputing before it exceeds the limit, the positions around, then that."""
    if replay.timeline.row_peaks[position] <= limit_bytes:
        return replace(checks, instants=tuple(sorted({*checks.instants, position})))
    for instant in (min(position, len(model.reads) - 1), max(0, position - 1)):
        if instant not in checks.instants:
            return replace(checks, instants=tuple(sorted({*checks.instants, instant})))
    return replace(checks, rows=checks.rows | _over(model, replay.rows, position, limit_bytes))


def _over(model: StepModel, rows: Rows, position: int, limit_bytes: int) -> frozenset[tuple[int, int]]:
    """Return the pairs of a position and a node recomputed before it that take more than the limit."""
    pairs = zip(rows[position], model.row_bytes(rows, position), strict=True)
    return frozenset((position, node) for node, size_bytes in pairs if size_bytes > limit_bytes)
