"""Memory while values are recomputed before one node of the backward: rows (9) and (10) of the phased model.

Phase t holds one position, i: it starts as the node at i - 1 runs and ends with the node at i. While k is recomputed in
it, memory holds what k reads and makes, and what was there before and is needed after:

    (9)     H[d] >= S[t+1, d] - R[t, p(d)]                d is held through the phase
            sum_(d in in(k) or made by k) m_d R[t, k] + sum_(other d) m_d H[d] + w_k R[t, k] + L[i] <= B

    (10)    M[k, d] >= S[t+1, d],  M[k, d] >= R[t, j]      d read by j, where p(d) runs before k, and j is k or after it
            M[k, d] >= R[t, j] - R[t, p(d)]               where p(d) runs after k, and for S[t+1, d] likewise
            M[k, d] >= R[t, k]                            d made by k
            sum_d m_d M[k, d] + w_k R[t, k] + L[i] <= B

w_k are bytes that only k needs while it runs, L[i] what no decision changes just before i. (9) holds for any order of
what is recomputed, so a program with it is a relaxation still. (10) takes the order of the forward: its solutions fit,
but schedules with another order may be faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .mip_backend import LinearProgram
from .model import StepModel

UNIT = 2**20  # bytes are scaled to MiB: coefficients near 1 keep the solver exact


class RowMemory:
    """The memory of a phase that holds one backward position, while values are recomputed in it.

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
