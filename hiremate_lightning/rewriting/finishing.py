"""Operations of the forward that finish what another one made: they compute into its memory, as `relu_` does.

Where one elementwise operation is all that reads a value, nothing can tell whether its result lies in new memory. Eager
PyTorch holds both there, or the user has written the operation in place, which a functional trace takes back. Here the
operation that makes the value and those that finish it are one node of the graph: it allocates once, and touches that
memory while it is in the caches. No plan is lost: to keep the value takes as much memory as to keep the result, which
is at least as useful. The kernels are those of eager, told where to write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import thresholds
from ..torch_private import aot, tensor_state
from .joint import COPIES_STORAGE, SHAPES, is_part, is_view, operation_of, values_of
from .operations import operation_named
from .overwriting import candidates_of, overwriting, traced_strides


@dataclass(frozen=True, slots=True)
class Finish:
    """What finishes one result of an operation.

    Attributes:
        value: The result as the operation makes it.
        steps: Operations over it, and views of it, in order; the last one gives what others read.
        at_all_sizes: Whether small values are treated as large ones, in a program for all sizes.
    """

    value: fx.Node
    steps: tuple[fx.Node, ...]
    at_all_sizes: bool = False

    @property
    def result(self) -> fx.Node:
        """What others read in place of the value."""
        return self.steps[-1]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """What the steps read beside the value."""
        inside = {self.value, *self.steps}
        return tuple(dict.fromkeys(a for step in self.steps for a in step.all_input_nodes if a not in inside))

    def calls(self) -> Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]:
        """Return for each step what runs it, and its arguments, in which FX nodes stand for values.

        The steps are the same for small values and for large ones, so that a graph is the same for all batch sizes.
        """
        value = self.value
        size_bytes = value.meta["val"].untyped_storage().nbytes()
        is_small = not self.at_all_sizes and size_bytes < thresholds.current.finished_bytes
        for step in self.steps:
            if is_small or _only_looks(step):
                yield step, step.target, step.args
            else:
                dying = step.args.index(value)
                yield step, overwriting(step.target, dying), (traced_strides(step, dying), *step.args)
            value = step


def find_finishes(
    operations: Sequence[fx.Node], outputs: Collection[Any], overwritten: Collection[fx.Node]
) -> dict[fx.Node, Finish]:
    """Find the operations of a forward whose results others finish.

    Args:
        operations: The forward, in order.
        outputs: What it returns.
        overwritten: Values on memory that the step writes to.

    Returns:
        By operation, what finishes one of its results, at once: all else that the steps read is there before it runs.
    """
    return _FinishSearch(operations, outputs, overwritten).run()


class _FinishSearch:
    """Goes through the forward once; what finishes one operation is none that another could finish."""

    def __init__(
        self, operations: Sequence[fx.Node], outputs: Collection[Any], overwritten: Collection[fx.Node]
    ) -> None:
        self.operations, self.outputs, self.overwritten = operations, set(outputs), set(overwritten)
        self.position = {node: at for at, node in enumerate(operations)}

    def run(self) -> dict[fx.Node, Finish]:
        finishes_by_node: dict[fx.Node, Finish] = {}
        taken = set[fx.Node]()
        for node in self.operations:
            if node in taken or not _allocates(node):
                continue
            finishes = (Finish(value, self._steps(node, value)) for value in values_of(node) if _is_fresh(value))
            finish = next((f for f in finishes if f.steps), None)
            if finish is not None:
                finishes_by_node[node] = finish
                taken.update(finish.steps)
        return finishes_by_node

    def _steps(self, first: fx.Node, value: fx.Node) -> tuple[fx.Node, ...]:
        steps: list[fx.Node] = []
        count = 0  # views behind the last operation belong to what reads them
        while len(value.users) == 1:
            (reader,) = value.users
            if reader not in self.position or is_part(reader):
                break
            if _only_looks(reader) and reader.all_input_nodes == [value] and reader not in self.outputs:
                steps.append(reader)
            elif self._finishes(reader, value, first, steps):
                steps.append(reader)
                count = len(steps)
            else:
                break
            value = reader
        return tuple(steps[:count])

    def _finishes(self, reader: fx.Node, value: fx.Node, first: fx.Node, before: Sequence[fx.Node]) -> bool:
        if [a for _, a in candidates_of(reader)].count(value) != 1:
            return False
        if reader in self.outputs and any(_only_looks(step) for step in before):
            return False  # the caller would get a view, which may not be changed in place as freely
        others = [a for a in reader.all_input_nodes if a is not value]
        makers = (maker for maker in map(operation_of, others) if maker.op not in ("placeholder", "get_attr"))
        return self.overwritten.isdisjoint(others) and all(self.position[m] < self.position[first] for m in makers)


def _only_looks(node: fx.Node) -> bool:
    """Whether a node shows what it reads, on the same memory."""
    return is_view(node.target) or node.target in SHAPES


def _allocates(node: fx.Node) -> bool:
    """Whether an operator is PyTorch's own, or stands for one, and makes new memory, of the size that a trace says."""
    target: Any = node.target
    if operation_named(target).is_fresh:
        return True
    if not isinstance(target, aot.OpOverload) or target.namespace != "aten":
        return False
    return not (target.is_view or target._schema.is_mutable or target in COPIES_STORAGE)


def _is_fresh(value: fx.Node) -> bool:
    """Whether a value lies on memory of its own."""
    shown = value.meta.get("val")
    if not tensor_state.is_dense(shown) or tensor_state.is_symbolic(shown):
        return False
    maker = operation_of(value)
    beside = [v for v in values_of(maker) if v is not value]
    around = (v.meta.get("val") for v in (*maker.all_input_nodes, *beside))
    return tensor_state.storage_id(shown) not in tensor_state.storages_among(around)
